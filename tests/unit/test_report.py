"""Tables, timeline, failures and the doctor's arithmetic."""

from __future__ import annotations

import io
import json
from pathlib import Path

import numpy as np
import pytest
import ray.exceptions as rex
from fakes import FAKE_FACTS, FakeWorker, fake_plan
from rich.console import Console
from safetensors.numpy import save_file

from tiermoe.actors.settings import EngineSettings, LinkSettings
from tiermoe.cluster.config import engine_settings, load_policy, load_run_config
from tiermoe.cluster.jobs.doctor import routed_expert_elements
from tiermoe.cluster.ray_session import as_failure
from tiermoe.cluster.report.files import check_writable, write_timeline
from tiermoe.cluster.report.runtime import placed_tables, plan_table
from tiermoe.cluster.report.status import summary_table
from tiermoe.cluster.report.tables import seconds, size
from tiermoe.cluster.topology.estimate import make_plan
from tiermoe.cluster.topology.spec import NodeInfo
from tiermoe.errors import BudgetError, CheckpointError, ConfigError, RuntimeFailure, StoreError

_SETTINGS = EngineSettings(policy=load_policy("next-gate"), budget=0.25, link=LinkSettings(gbps=16, latency_us=10))


def _text(table: object) -> str:
    out = io.StringIO()
    Console(file=out, width=200).print(table)
    return out.getvalue()


def test_plan_says_what_is_where() -> None:
    text = _text(plan_table(fake_plan(_SETTINGS, "[red]store")))
    link = "16 GB/s, 10 us before each copy (emulated)"
    for part in ("4 of 16 slots (25%)", link, "[red]store", "lossless", "a fake"):
        assert part in text


def test_plan_on_real_hardware_promises_no_emulated_link() -> None:
    text = _text(plan_table(fake_plan(_SETTINGS, "s") | {"executor": "real", "device": "cuda:0", "pinned": True}))
    assert "the hardware's own" in text
    assert "emulated" not in text
    assert ", pinned" in text


def test_summary_says_which_executor_measured() -> None:
    stats = FakeWorker(_SETTINGS, {}).stats().as_dict()
    request = {
        "prompt_tokens": 3, "generated_tokens": 1, "finish": "length", "ttft_s": 0.5, "tpot_s": None, "startup_s": 2.0,
        "lossless": False,
    }  # fmt: skip
    text = _text(summary_table(stats | request))
    for part in ("75.0% (6 hits, 2 misses)", "500.0 ms", "none (fewer than two tokens)", "emulated", "0 substitutions"):
        assert part in text


def test_units() -> None:
    assert [size(n) for n in (0, 1023, 1536, 3 * 2**30)] == ["0 B", "1023 B", "1.50 KiB", "3.00 GiB"]
    assert [seconds(s) for s in (None, 2e-6, 0.25, 90.0)] == ["none", "2 us", "250.0 ms", "90.00 s"]


def test_timeline(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    check_writable(path)
    write_timeline(path, [{"ph": "X", "ts": 1.0}])
    assert json.loads(path.read_text())["traceEvents"] == [{"ph": "X", "ts": 1.0}]
    for bad in (tmp_path, tmp_path / "none" / "trace.json"):
        with pytest.raises(ConfigError, match="trace path"):
            check_writable(bad)


def test_failures_keep_the_actor_s_own_error() -> None:
    refusal = BudgetError("too small", "raise it")
    assert as_failure(rex.RayTaskError("f", "traceback", refusal), "start") is refusal


def test_a_constructor_s_error_is_read_from_ray_s_report() -> None:
    report = "died because of an error raised in its creation task\n  File x\ntiermoe.errors.StoreError: a; b; c"
    error = as_failure(rex.RayActorError(error_msg=report, actor_init_failed=True), "start")
    assert isinstance(error, StoreError)
    assert str(error) == "a; b; c"
    other = as_failure(rex.RayActorError(error_msg="trace\nKeyError: 'x'", actor_init_failed=True), "start")
    assert isinstance(other, RuntimeFailure)
    assert "KeyError: 'x'" in str(other)


def test_a_death_is_one_short_line() -> None:
    message = "died.\n\tpid: 1\nWorker exit detail: killed by signal 9. Some common causes include: (1) ..."
    assert as_failure(rex.RayActorError(error_msg=message), "worker").what == (
        "worker: its process ended (killed by signal 9)"
    )


def test_a_passed_deadline_names_the_setting_only_where_there_is_one() -> None:
    """Guards a call whose deadline is fixed: its remedy was to raise the start-up deadline."""
    late = rex.GetTimeoutError("x")
    assert "raise ray.startup_deadline_s" in as_failure(late, "no start", 3.0, "ray.startup_deadline_s").remedy
    fixed = as_failure(late, "no answer", 3.0)
    assert fixed.what == "no answer within 3 s"
    assert "raise" not in fixed.remedy


def test_doctor_counts_routed_experts_only(tmp_path: Path) -> None:
    names = {"m.layers.0.mlp.experts.0.up": 6, "m.layers.0.mlp.experts.gate_up": 10, "m.mlp.shared_experts.up": 100}
    tensors = {name: np.zeros(n, np.float32) for name, n in names.items()}
    save_file(tensors, tmp_path / "a.safetensors", metadata={"format": "pt"})
    assert routed_expert_elements(tmp_path) == 16
    for wrong in (b"[]", b"{", b'{"m.experts.0": 3}', b'{"m.experts.0": {"shape": "3"}}', b"\xff"):
        (tmp_path / "a.safetensors").write_bytes(len(wrong).to_bytes(8, "little") + wrong)
        with pytest.raises(CheckpointError, match="is not a safetensors file"):
            routed_expert_elements(tmp_path)
    (tmp_path / "a.safetensors").write_bytes(b"\xff" * 20)
    with pytest.raises(CheckpointError, match="is not a safetensors file: header of"):
        routed_expert_elements(tmp_path)


def test_the_placed_topology_says_where_and_that_the_speed_is_predicted() -> None:
    config = load_run_config(None, {"policy": "context-ndp-full", "device": "cpu", "threads": 1})
    node = NodeInfo("n", "10.0.0.7", True, {"CPU": 4, "ndp": 1})
    planned = make_plan(config, engine_settings(config), FAKE_FACTS, [node], "the Ray at h:1", ["[a note]"])
    text = "".join(_text(table) for table in placed_tables(planned.as_dict()))
    for part in ("Topology on the Ray at h:1", "lead", "store-0", "10.0.0.7", "1 CPU, 1 ndp", "Predicted", "[a note]"):
        assert part in text
    assert json.loads(json.dumps(planned.as_dict()))["topology"]["groups"][0]["strategy"] == "STRICT_PACK"
