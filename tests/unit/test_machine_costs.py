"""Measured costs of a machine: exact on small numbers."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from statistics import fmean

import pytest
from tiny_models import TEXT

from tiermoe.cluster.jobs.bench.random_model import MoeShape, save_random_model
from tiermoe.cluster.jobs.local_worker import run_config
from tiermoe.cluster.jobs.measure_machine import (
    SMALL,
    Probe,
    _lateness,
    _line,
    _policy_costs,
    _typical,
    probe,
)
from tiermoe.cluster.topology import machine_costs as machines
from tiermoe.cluster.topology.machine_costs import MachineCosts, PolicyCosts, known_costs, machine_name, write_costs

COSTS = MachineCosts(
    machine="here", tiermoe="1", threads=1, copy_us=0, copy_gbps=1e-3, wait_us=3, dense_layer_us=10, dense_gbps=1e-3,
    expert_us=5, expert_gbps=1e-3,
    policies={
        "p": PolicyCosts(step_us=1000, layer_us=100, miss_us=20, load_us=7),
        "on-demand": PolicyCosts(step_us=500, layer_us=50, miss_us=0, load_us=0),
    },
)  # fmt: skip


def test_two_points_give_calls_and_bandwidth() -> None:
    us, gbps = _line((4, 1e6, 4 * 20e-6 + 1e6 / 5e9), (2, 9e6, 2 * 20e-6 + 9e6 / 5e9))
    assert (us, gbps) == (pytest.approx(20), pytest.approx(5))
    assert _line((4, 1e6, 1e-6), (2, 9e6, 9e-3)) == (0.0, pytest.approx(1.0))  # noise: calls cannot take less than 0
    us, _ = _line((4, 1e6, 8e-3), (2, 9e6, 2e-3))
    assert us == pytest.approx(1000)


def _probe(pass_us: float, missing: tuple[int, ...], loads: float, **more: float) -> Probe:
    times = {"step_s": 1e-3, "dense_s": 2e-3, "kernel_s": 80e-6, "waited_s": 0.0, "copy_s": 0.0} | more
    return Probe(pass_s=pass_us * 1e-6, missing=missing, loads=loads, dense_bytes=1, **times)


def test_a_presets_costs_explain_its_runs() -> None:
    """50 us a layer, 30 more where it misses, 10 a load; the dense part's more is the layers', too."""
    resident, full = _probe(85, (0,) * 4, 0), _probe(80 + 50, (0,) * 4, 0)
    parts = [
        _probe(80 + 50 + 30 * 1.0 + 10 * 3 - 5, (3,) * 4, 3, dense_s=2e-3 + SMALL.layers * 5e-6),
        _probe(80 + 50 + 30 * 0.5 + 10 * 1, (2, 0, 2, 0), 1),
    ]
    costs = _policy_costs(resident, full, parts)
    assert (costs.step_us, costs.layer_us) == (pytest.approx(1000), pytest.approx(50))
    assert (costs.miss_us, costs.load_us) == (pytest.approx(30), pytest.approx(10))
    alone = _policy_costs(resident, full, [replace(part, pass_s=full.pass_s + 9e-6 * part.loads) for part in parts[1:]])
    assert alone.miss_us + alone.load_us > 0  # one point: either explains it, none is negative
    assert _policy_costs(resident, full, []).load_us == 0


def test_a_run_is_typical_by_its_misses() -> None:
    assert _typical([1, 1, 9, 5, 5, 5, 50], [0, 0, 0, 1, 1, 1, 1]) == pytest.approx((3 * 1 + 4 * 5) / 7)


def test_misses_of_a_run_are_those_of_its_passes(tmp_path: Path) -> None:
    """Native calls count for themselves until the forward's last layer: each pass has its own all the same."""
    shape = MoeShape(layers=3, experts=8, top_k=2, hidden=64, intermediate=32, vocabulary=512)
    model, settings = str(save_random_model(shape, tmp_path / "model")), {"policy": "on-demand", "budget": "0.25"}
    found = probe(run_config(model, None, store=str(tmp_path / "store"), **settings), rounds=1, tokens=12)
    by_layer = [found.missing[layer :: shape.layers] for layer in range(shape.layers)]
    assert all(any(count > 0 for count in missing) for missing in by_layer)
    assert fmean(found.missing) == pytest.approx(found.loads, abs=0.3)  # of all but the last step


def test_waits_beyond_those_of_a_prompt_host_are_late() -> None:
    """Two residents run for 20 us; copies arrive at 50 and 100 us, so the waits are of 30 and 40 us; each 6 more."""
    waiting = _probe(0, (2, 0), 1, waited_s=(30 + 40 + 2 * 6) / 2 * 1e-6, copy_s=50e-6)
    assert SMALL.top_k == 4
    assert _lateness(waiting, 10e-6) == pytest.approx(6e-6)
    assert _lateness(_probe(0, (0, 0), 0), 10e-6) == 0


def test_costs_are_kept_for_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))  # as for stores
    assert machines.cache_file() == tmp_path / "cache" / "tiermoe" / "machine.json"
    mine = COSTS.model_copy(update={"machine": machine_name()})
    for written, found in ((None, None), (COSTS, None), (mine, mine)):
        if written is not None:
            write_costs(written, machines.cache_file())
        assert known_costs() == found
    machines.cache_file().write_text("{}")
    assert known_costs() is None  # a damaged file is none


@pytest.mark.slow
def test_the_benchmark_measures_its_inputs_and_its_cells(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tiermoe.benchmarks.cases import Validation
    from tiermoe.cluster.jobs import measure_machine as machine
    from tiermoe.cluster.jobs.bench.cases import measure

    monkeypatch.setenv("HOME", str(tmp_path))
    small, large = (replace(shape, experts=8, vocabulary=512) for shape in (machine.SMALL, machine.LARGE))
    monkeypatch.setattr(machine, "SMALL", replace(small, layers=2))
    monkeypatch.setattr(machine, "LARGE", replace(large, hidden=512))
    model = Path(shutil.copytree(checkpoint, tmp_path / "model"))
    (model / "heldout").mkdir()
    (model / "heldout" / "text.jsonl").write_text("\n".join(json.dumps({"text": TEXT[i : i + 60]}) for i in range(6)))
    few = {"preset": ("next-gate",), "budget": ("0.5",), "link_gbps": (16.0,), "repeats": 1, "max_tokens": 6}
    report = measure(Validation(model=str(model), **few))  # type: ignore[arg-type]
    (row,) = report.rows
    assert row["policy"] == "next-gate"
    assert min(row["measured_ms"], row["simulated_ms"]) > 0
    assert row["ratio"] == pytest.approx(row["simulated_ms"] / row["measured_ms"])
    costs = report.figures["costs"]["policies"]["next-gate"]
    assert costs["step_us"] > 0
    assert min(costs["layer_us"], costs["miss_us"], costs["load_us"]) >= 0  # a fit on a tiny model may find none
    (stepped,) = report.figures["stepped"]
    assert stepped["hits_off"] == pytest.approx(0.0)
    assert [bar.limit for bar in report.bars] == [0.15, 0.01, 1.0, 0.5, 0.01]
