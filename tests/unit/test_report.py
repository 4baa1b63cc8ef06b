"""What people see: plan, summary, status, heat map, progress, one-line failures, and no notices of Ray's."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import ray.exceptions as rex
from commands import Command
from fakes import FAKE_FACTS, FakeWorker, fake_plan
from rich.console import Console

from tiermoe.actors.budget import Budget
from tiermoe.actors.engine.stats import EngineStats, LayerStats
from tiermoe.actors.policies.drafts import DraftStats
from tiermoe.actors.settings import EngineSettings, LinkSettings
from tiermoe.cluster.attach import actor_records
from tiermoe.cluster.config import engine_settings, load_policy, load_run_config
from tiermoe.cluster.deployed_actors import new_id, split_name
from tiermoe.cluster.jobs.options import refuse_runtime_options
from tiermoe.cluster.jobs.status_command import _plain
from tiermoe.cluster.ray_session import as_failure
from tiermoe.cluster.report.runtime import placed_tables, plan_table
from tiermoe.cluster.report.status_tables import (
    brief_table,
    planner_rows,
    residency_map,
    status_tables,
    summary_table,
)
from tiermoe.cluster.report.tables import facts, grid, show
from tiermoe.cluster.topology.estimate import make_plan
from tiermoe.cluster.topology.spec import NodeInfo
from tiermoe.errors import BudgetError, RequestError, RuntimeFailure, StoreError

_SETTINGS = EngineSettings(
    policy=load_policy("next-gate"), budget=Budget(share=0.25), link=LinkSettings(gbps=16, latency_us=10)
)


def _text(*tables: object, width: int = 200) -> str:
    out = io.StringIO()
    for table in tables:
        Console(file=out, width=width).print(table)
    return out.getvalue()


def _shows(text: str, *parts: str) -> None:
    assert not [part for part in parts if part not in text], text


def test_plan_says_what_is_where() -> None:
    link = "16 GB/s, 10 us before each copy (emulated)"
    text = _text(plan_table(fake_plan(_SETTINGS, "[red]store")))
    _shows(text, "4 of 16 slots (25%)", link, "[red]store", "lossless", "a fake")
    real = _text(plan_table(fake_plan(_SETTINGS, "s") | {"executor": "real", "device": "cuda:0", "pinned": True}))
    _shows(real, "the hardware's own", ", pinned")
    assert "emulated" not in real


def test_summary_says_which_executor_measured() -> None:
    stats = FakeWorker(_SETTINGS, {}).stats().as_dict()
    request = {
        "prompt_tokens": 3, "generated_tokens": 1, "finish": "length", "ttft_s": 0.5, "tpot_s": None, "startup_s": 2.0,
        "lossless": False,
    }  # fmt: skip
    text = _text(summary_table(stats | request))
    _shows(text, "75.0% (6 hits, 2 misses)", "500.0 ms", "none (fewer than two tokens)", "emulated", "0 substitutions")


def test_a_run_is_reported_in_four_lines() -> None:
    """Issue 30: 50 lines stood around 3 of text. The plan and all counters are for -v."""
    stats = FakeWorker(_SETTINGS, {}).stats().as_dict()
    plan = fake_plan(_SETTINGS, "store")
    request = {"policy": "next-gate", "lossless": True, "ttft_s": 0.5, "tpot_s": 0.002, "plan": plan}
    lines = [line.rstrip() for line in _text(brief_table(stats | request)).splitlines() if line.strip()]
    assert [line.split()[0] for line in lines] == ["ran", "speed", "experts", "numbers"]
    _shows(lines[0], f"{plan['model']} with next-gate (lossless); 4 of 16 experts, ")
    _shows(lines[1], "2.0 ms a token (500.0 tokens/s), the first after 500.0 ms")
    _shows(lines[2], "75.0% hits, ", " lost to copies")
    assert " ".join(lines[3].split()) == "numbers are emulated: the CPU stands in for a GPU"
    # before, hits were a share of what ran here, and near data one of what did not hit: they did not add up
    near = {"hits": 10, "misses": 4, "late_prefetches": 1, "ndp_experts": 6}
    for more in (near, near | {"planner": {"error": 0.0}}):
        line = " ".join(_text(brief_table(stats | request | more)).splitlines()[2].split())
        _shows(line, "50.0% hits, 15.0% loaded on demand, 30.0% computed near data, 5.0% waited for; ")
    lossy = _text(brief_table(stats | request | {"lossless": False, "tpot_s": None, "attached_to": "d"}))
    _shows(lossy, "LOSSY: 0 substitutions, 0 dropped", "no rate", "of all its requests")


@pytest.mark.parametrize(
    "args",
    [
        ("record", "{prompts}", "{out}"),
        ("trace", "make", "{out}", "--family", "no-such", "--shape", "no-such"),
        ("trace", "import", "{prompts}", "{out}"),
        ("jobs", "merge-traces", "{out}", "{out}"),
        ("prepare", "no-such-model", "{out}"),
        ("bench", "gpu", "--out", "{out}"),
        ("report", "no-such.json", "--out", "{out}"),
    ],
    ids=lambda args: args[0],
)
def test_where_a_command_cannot_write_is_said_first(args: tuple[str, ...], tmp_path: Path, command: Command) -> None:
    """`record` found out after it had recorded for 13 seconds."""
    full, file = tmp_path / "full", tmp_path / "file"
    full.mkdir()
    for path in (full / "x", file):
        path.write_text("a b c\n" * 3)
    for out in (file, file / "below", full):
        if out == full and args[0] in ("bench", "report"):
            continue  # what is in it stays
        line = command.refusal(*(arg.format(out=out, prompts=file) for arg in args))
        assert str(out) in line
        assert re.search(r"is a file|is not empty|is not an expert store", line)


def test_a_slow_policy_is_named_as_the_cause() -> None:
    """A policy that sleeps was only a slow run."""
    stats = FakeWorker(_SETTINGS, {}).stats().as_dict()
    times = {"ttft_s": 0.5, "tpot_s": 0.1, "generated_tokens": 6}
    times |= {"prompt_tokens": 1, "finish": "length", "startup_s": 1}
    request = {"policy": "own", "lossless": True, "plan": fake_plan(_SETTINGS, "store")} | times
    slow = stats | request | {"policy_s": {"mine.slow:Sleepy": 0.6}}
    for text in (_text(brief_table(slow)), _text(summary_table(slow))):
        _shows(text, "the code of mine.slow:Sleepy took 600.0 ms, 60.0% of the request's time")
    quick = stats | request | {"policy_s": {"mine.slow:Sleepy": 0.01}}
    assert "Sleepy" not in _text(brief_table(quick))


_PATH = "/a/folder/whose-name-has-hyphens/and/is/longer/than/a/narrow/terminal/on-demand.yaml"
_ROWS = [("on-demand", "31.1%", _PATH), ("context-ndp-prefix-split", "35.4%", "-")]


def _on_terminal(width: int, *shown: Any) -> list[str]:
    out = io.StringIO()
    show(Console(file=out, width=width, force_terminal=True, color_system=None), *shown)
    return [line.rstrip() for line in out.getvalue().splitlines()]


@pytest.mark.parametrize("width", [20, 40, 80, 120, 200])
def test_no_name_and_no_path_is_broken_at_any_width(width: int) -> None:
    """Issue 30: `on-dem / and` at 80 columns."""
    table = grid(f"of {_PATH}", ("policy", "hit rate", "trace"), _ROWS)
    lines = _on_terminal(width, table, facts("", [("from", f"words before {_PATH} and after it [bold]")]))
    for whole in ("on-demand", "context-ndp-prefix-split", "hit rate", "31.1%"):
        assert any(whole in map(str.strip, line.split("  ")) for line in lines), (whole, lines)
    assert sum(_PATH in line for line in lines) == 3  # title, cell, value
    assert any("[bold]" in line for line in lines)
    rows_beside = any(line.startswith("on-demand") and "31.1%" in line for line in lines)
    assert rows_beside == (width >= 120)  # else each row is names and values
    long = [line for line in lines if len(line) > width and _PATH not in line and width >= 40]
    assert not long


def test_failures_are_the_actor_s_own_error_or_one_short_line() -> None:
    refusal = BudgetError("too small", "raise it")
    assert as_failure(rex.RayTaskError("f", "traceback", refusal), "start") is refusal
    report = "died because of an error raised in its creation task\n  File x\ntiermoe.errors.StoreError: a; b; c"
    error = as_failure(rex.RayActorError(error_msg=report, actor_init_failed=True), "start")
    assert (type(error), str(error)) == (StoreError, "a; b; c")
    other = as_failure(rex.RayActorError(error_msg="trace\nKeyError: 'x'", actor_init_failed=True), "start")
    assert isinstance(other, RuntimeFailure)
    assert "KeyError: 'x'" in str(other)
    message = "died.\n\tpid: 1\nWorker exit detail: killed by signal 9. Some common causes include: (1) ..."
    death = as_failure(rex.RayActorError(error_msg=message), "worker")
    assert death.what == "worker: its process ended (killed by signal 9)"


def test_a_passed_deadline_names_the_setting_only_where_there_is_one() -> None:
    """Guards a call whose deadline is fixed: its remedy was to raise the start-up deadline."""
    late = rex.GetTimeoutError("x")
    assert "raise ray.startup_deadline_s" in as_failure(late, "no start", 3.0, "ray.startup_deadline_s").remedy
    fixed = as_failure(late, "no answer", 3.0)
    assert fixed.what == "no answer within 3 s"
    assert "raise" not in fixed.remedy


def test_the_placed_topology_says_where_and_that_the_speed_is_predicted() -> None:
    config = load_run_config(None, {"policy": "context-ndp-full", "device": "cpu", "threads": 1})
    node = NodeInfo("n", "10.0.0.7", True, {"CPU": 4, "ndp": 1})
    planned = make_plan(config, engine_settings(config), FAKE_FACTS, [node], "the Ray at h:1", ["[a note]"])
    text = _text(*placed_tables(planned.as_dict()))
    _shows(text, "Topology on the Ray at h:1", "lead", "store-0", "10.0.0.7", "1 CPU, 1 ndp", "Predicted", "[a note]")
    assert json.loads(json.dumps(planned.as_dict()))["topology"]["groups"][0]["strategy"] == "STRICT_PACK"


def test_one_cell_an_expert_where_they_fit() -> None:
    lines = residency_map([((2, 0, 1, 2), (9, 5, 0, 1)), ((0, 0, 0, 0), (0, 0, 0, 0))], width=40)
    assert [line.plain for line in lines] == ["L0 █·~█ 2/4", "L1 ···· 0/4"]
    hot, cold = (lines[0].spans[i].style for i in (0, 3))
    assert (hot, cold) == ("red", "blue")
    (shared,) = residency_map([((2, 0, 0, 0, 2, 2, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0), (0,) * 16)], width=13)
    assert shared.plain == "L0 ▂▄·~ 3/16"


def test_the_tables_of_a_deployment() -> None:
    worker = FakeWorker(_SETTINGS, {"path": "store"})
    common = {"host": "10.0.0.5", "node": "n", "restarts": 0, "pid": 77}
    record = {
        "id": "d3f1aa", "address": "10.0.0.5:6379", "plan": fake_plan(_SETTINGS, "store"),
        "residency": _plain(worker.residency()), "counters": _plain(worker.stats()),
        "actors": [
            {"role": "lead", "kind": "GpuWorker", "state": "ALIVE",
             "health": {"state": "serving", "running": 3}} | common,
            {"role": "store", "kind": "ExpertStore", "state": "ALIVE",
             "health": {"layers": 2, "nbytes": 2048, "problem": "layer 1 changed"}} | common,
            {"role": "ndp/0", "kind": "NdpWorker", "state": "RESTARTING", "health": {}} | common | {"restarts": 2},
        ],
    }  # fmt: skip
    _shows(
        _text(*status_tables(record, 120), width=120),
        "Deployment d3f1aa at 10.0.0.5:6379", "serving, 3 requests running", "NOT HEALTHY: layer 1 changed",
        "restarting, restarted 2 times", "L0 ██~····· 2/8", "75.0% (6 hits, 2 misses)", "next-gate: lossless",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("near", "other", "shares", "said"),
    [
        (0, 0, (0.75, 0.125, 0.125, 0, 0), "75.0% (6 hits, 2 misses)"),
        (8, 0, (0.375, 0.0625, 0.0625, 0.5, 0), "37.5% (6 hits, 2 misses, 8 near data)"),
        (8, 4, (0.3, 0.05, 0.05, 0.4, 0.2), "30.0% (6 hits, 2 misses, 8 near data, 4 on other GPUs)"),
    ],
)
def test_the_hit_rate_is_a_share_of_all_needed_experts(
    near: int, other: int, shares: tuple[float, ...], said: str
) -> None:
    """Experts near data were left out: 100% with nothing on the device, 43.1% in text and 0.709 in JSON."""
    layers = [LayerStats(hits=6, misses=1), LayerStats(misses=1, late_prefetches=1)]
    layers[1].ndp_experts, layers[1].shard_experts = near, other
    stats = EngineStats(
        layers=layers, decode_hits=2, decode_misses=1, decode_ndp_experts=near, decode_shard_experts=other // 2
    )
    record = json.loads(json.dumps(stats.as_dict()))
    assert tuple(record["needed_shares"].values()) == pytest.approx(shares)
    assert sum(record["needed_shares"].values()) == pytest.approx(1.0)
    assert record["hit_rate"] == stats.hit_rate == shares[0]
    assert stats.decode_hit_rate == 2 / (3 + near + other // 2)
    assert stats.prefill_hit_rate == 4 / (5 + other - other // 2)
    of_all = {"ttft_s": 0.5, "tpot_s": None, "startup_s": 2.0, "lossless": True, "prompt_tokens": 3}
    request = of_all | {"generated_tokens": 1, "finish": "length", "policy": "auto", "plan": fake_plan(_SETTINGS, "s")}
    summary, brief = (" ".join(_text(table(record | request)).split()) for table in (summary_table, brief_table))
    _shows(summary, f"expert hit rate {said}")
    _shows(brief, f"experts {shares[0]:.1%} hits")


def test_the_summary_says_what_drafts_gave() -> None:
    plan = fake_plan(_SETTINGS, "store") | {"drafts": {"kind": "auto", "tokens": 7}}
    request = {"ttft_s": 0.5, "tpot_s": None, "startup_s": 2.0, "lossless": True, "prompt_tokens": 3, "plan": plan}
    request |= {"generated_tokens": 1, "finish": "length", "policy": "auto"}
    for drafts, said in [
        (DraftStats(4, 20, 14, 48.0, 0.25), "drafts 3.5 of 5.0 tokens accepted a step, in 4 steps; 12 experts more"),
        (DraftStats(4, 20, 0, 48.0, -0.25), "a step; 250.0 ms lost"),
    ]:
        record = json.loads(json.dumps(EngineStats(layers=[LayerStats()], drafts=drafts).as_dict()))
        _shows(" ".join(_text(summary_table(record | request)).split()), said)
    unused = EngineStats(layers=[LayerStats()], drafts=DraftStats()).as_dict()
    assert "drafts" not in _text(summary_table(unused | request))
    _shows(" ".join(_text(plan_table(plan)).split()), "drafts up to 7 tokens from the request's own text")


def test_before_the_first_request_nothing_is_a_hit() -> None:
    """`tiermoe status` said 100.0%."""
    stats = EngineStats(layers=[LayerStats()])
    record = json.loads(json.dumps(stats.as_dict()))
    assert record["hit_rate"] is record["needed_shares"] is None
    assert stats.decode_hit_rate is stats.prefill_hit_rate is None
    common = {"id": "d", "address": "h:1", "actors": [], "residency": None}
    plan = fake_plan(_SETTINGS, "store")
    counters = FakeWorker(_SETTINGS, {}).stats().as_dict() | {"hits": 0, "misses": 0, "hit_rate": None}
    gpu = counters | {"shard": "shard/0", "state": "serving"}
    text = _text(*status_tables(common | {"plan": plan, "counters": counters, "gpus": [gpu, gpu]}, 160), width=160)
    assert text.count("none: nothing ran yet") == 3  # of all, and of each GPU
    assert "100.0%" not in text


def test_the_table_of_gpus_names_the_lost_one() -> None:
    counters = {
        "hits": 3, "misses": 1, "slots": 4, "bytes_loaded": 2048, "total_io_s": 0.5, "blocked_io_s": 0.25,
        "expert_bytes_peak": 1024, "expert_budget_bytes": 4096,
    }  # fmt: skip
    gpus = [
        {"shard": "shard/0", "state": "serving", "residency": [{"states": (2, 1, 2), "uses": (1, 1, 1)}]} | counters,
        {"shard": "shard/1", "state": "lost", "residency": None},
    ]
    record = {"id": "d3f1aa", "address": "h:1", "actors": [], "residency": None, "counters": None, "gpus": gpus}
    lines = [" ".join(line.split()) for line in _text(*status_tables(record, 120), width=120).splitlines()]
    assert "shard/0 serving 2 in 4 slots 75.0% of 4 2.00 KiB 500.0 ms 250.0 ms 1.00 KiB of 4.00 KiB" in lines
    assert "shard/1 lost" in lines


def test_the_tables_of_rates() -> None:
    """What a process does in a second, and what goes between two; who counts nothing or was asked once has no row."""
    there = {"rows_sent": 8, "rows_received": 8, "bytes_sent": 2048, "bytes_received": 1024, "waited_s": 0.25}
    store = {"bytes_sent": 0, "bytes_received": 4096, "waited_s": 0.0}
    counters = {"hits": 3, "misses": 1, "total_io_s": 0.5, "blocked_io_s": 0.125}
    near = {"rows": 8.0, "busy_s": 0.2}

    def sample(name: str, own: Mapping[str, float] | None, **peers: Mapping[str, float]) -> dict[str, Any]:
        rates = None if own is None else {"over_s": 1.25, "cpu": 0.5, "counters": own, "peers": peers}
        totals = {peer: {key: 100 * value for key, value in now.items()} for peer, now in peers.items()}
        return {"name": name, "host": "10.0.0.5", "peers": totals, "rates": rates}

    found = [
        sample("endpoints", {}), sample("ndp/1", None), sample("lead", counters, **{"ndp/0": there, "store/1": store}),
        sample("ndp/0", near),
    ]  # fmt: skip
    record = {"id": "d3f1aa", "address": "h:1", "actors": [], "residency": None, "counters": None}
    text = _text(*status_tables(record | {"samples": found}, 160), width=160)
    lines = [" ".join(line.split()) for line in text.splitlines()]
    assert "A second, over the last 1.2 s" in lines
    assert "lead 10.0.0.5 4: 75.0% hits, 25.0% loaded on demand 50% 12%" in lines
    assert "ndp/0 10.0.0.5 20% 8" in lines
    assert "lead to ndp/0 8 of 800 8 of 800 2.00 KiB of 200.00 KiB 1.00 KiB of 100.00 KiB 25% of 25.00 s" in lines
    assert "lead to store/1 0 B of 0 B 4.00 KiB of 400.00 KiB 0% of 0 us" in lines
    assert not any(line.startswith(("endpoints", "ndp/1")) for line in lines)
    assert "A second" not in _text(*status_tables(record | {"samples": found[1:2]}, 160), width=160)


def _entry(name: str, state: str = "ALIVE", **more: Any) -> dict[str, Any]:
    return {"Name": name, "ActorClassName": "X", "State": state, "Address": {"IPAddress": "h", "NodeID": "n"}} | more


def test_only_living_deployments_count_and_their_dead_actors_show() -> None:
    table = [
        _entry("aaaaaa/store", Pid=5), _entry("aaaaaa/lead", "DEAD"), _entry("bbbbbb/lead", "DEAD"),
        _entry("somebody else's"), _entry(""), _entry("aaaaaa/ndp/0", "PENDING_CREATION", Address={}, Pid=0),
    ]  # fmt: skip
    found = [(r.deployment, r.role, r.state, r.host, r.pid) for r in actor_records(table)]
    assert found == [
        ("aaaaaa", "lead", "DEAD", "h", None),
        ("aaaaaa", "ndp/0", "PENDING_CREATION", None, None),
        ("aaaaaa", "store", "ALIVE", "h", 5),
    ]
    name = new_id()
    assert split_name(f"{name}/ndp/0") == (name, "ndp/0")
    assert split_name("endpoints-12") is None
    assert new_id() != name


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"budget": "1"}, "--budget"),
        ({"link": {"gbps": 2.0}}, "--link-gbps"),
        ({"ndp": {"pace": True}}, "--ndp-pace"),
        ({"cluster": {"shards": 2}}, "--shards"),
    ],
)
def test_an_attached_driver_may_not_change_the_runtime(given: dict[str, Any], named: str) -> None:
    refuse_runtime_options({"model": "checkpoint", "config": None})
    with pytest.raises(RequestError, match=f"{named} belongs to the runtime"):
        refuse_runtime_options(given)


def test_what_auto_chose_is_said_in_words() -> None:
    planner = {"error": 0.25, "copy_s": 1e-4, "near_s": 5e-5, "near_busy_s": 6e-5, "message_s": 2e-4}
    planner |= {"planned": 5, "local": 27, "planned_s": 0.011, "local_s": 0.005}
    counters: dict[str, Any] = {"planner": planner, "misses": 50, "late_prefetches": 10, "ndp_experts": 50, "hits": 100}
    counters["prefetch_sources"] = {"background": {"queued": 7, "hits": 3}, "streamed": {"queued": 5, "hits": 4}}
    rows = dict(planner_rows(counters))
    assert rows["needed experts"] == (
        "50.0% hits, 20.0% loaded on demand, 25.0% computed near data, 5.0% waited for; "
        "7 copied in the background, 3 of them used; 5 streamed ahead in prompts, 4 of them used"
    )
    assert rows["forwards"] == (
        "5 planned, 27 in native code, which loads every miss; a token takes 11.0 ms planned and 5.0 ms so"
    )
    assert rows["planned by"].endswith("off by 25%")
    assert "follows" not in rows
    planner |= {"follows": "fill", "token_s": {"seen": 0.002, "on-demand": 0.003, "fill": 0.001, "split": 0.004}}
    assert dict(planner_rows(counters))["follows"] == (
        "fill: a token's experts took 2.0 ms of late; on-demand 3.0 ms, fill 1.0 ms, split 4.0 ms"
    )
    alone = counters | {"planner": planner | {"planned": 0, "planned_s": None}}
    assert dict(planner_rows(alone))["forwards"] == "0 planned, 27 in native code, which loads every miss"
    assert dict(planner_rows(counters | {"planner": planner | {"local": 0}}))["forwards"] == "all 5 planned"
    assert planner_rows({"planner": None}) == []
    fresh = dict(planner_rows({"planner": planner | {"planned": 0, "local": 0, "error": 0.0}}))  # "all 0", "off by 0%"
    assert fresh["forwards"] == fresh["needed experts"] == "none: nothing ran yet"
    assert "off by" not in fresh["planned by"]
