"""What `tiermoe status` shows: the heat map, the tables, the actors in Ray's table; and progress without a terminal."""

from __future__ import annotations

import io
from typing import Any

import pytest
from fakes import FakeWorker, fake_plan
from rich.console import Console

from tiermoe.actors.settings import EngineSettings, LinkSettings
from tiermoe.cluster.attach import actor_records
from tiermoe.cluster.config import load_policy
from tiermoe.cluster.jobs.options import refuse_runtime_options
from tiermoe.cluster.jobs.status import _plain, merged_residency
from tiermoe.cluster.placement import new_id, split_name
from tiermoe.cluster.report.status import residency_map, status_tables
from tiermoe.cluster.report.tables import LineProgress
from tiermoe.errors import RequestError

_SETTINGS = EngineSettings(policy=load_policy("next-gate"), budget=0.25, link=LinkSettings(gbps=16, latency_us=10))


def test_one_cell_an_expert_where_they_fit() -> None:
    lines = residency_map([((2, 0, 1, 2), (9, 5, 0, 1)), ((0, 0, 0, 0), (0, 0, 0, 0))], width=40)
    assert [line.plain for line in lines] == ["L0 █·~█ 2/4", "L1 ···· 0/4"]
    hot, cold = (lines[0].spans[i].style for i in (0, 3))
    assert (hot, cold) == ("red", "blue")


@pytest.mark.parametrize("width", [1, 12, 30, 79])
@pytest.mark.parametrize("experts", [1, 7, 64, 512])
def test_neighbours_share_cells_where_they_do_not(width: int, experts: int) -> None:
    (line,) = residency_map([((2,) * experts, (0,) * experts)], width)
    cells = line.plain.split()[1]
    assert set(cells) == {"█"}
    room = width - len(f"L0  {experts}/{experts}")
    assert len(cells) <= max(1, room)


def test_a_shared_cell_shows_its_share() -> None:
    (line,) = residency_map([((2, 0, 0, 0, 2, 2, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0), (0,) * 16)], width=13)
    assert line.plain == "L0 ▂▄·~ 3/16"


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
    out = io.StringIO()
    console = Console(file=out, width=120)
    for table in status_tables(record, console.width):
        console.print(table)
    text = out.getvalue()
    for part in (
        "Deployment d3f1aa at 10.0.0.5:6379", "serving, 3 requests running", "NOT HEALTHY: layer 1 changed",
        "restarting, restarted 2 times", "L0 ██~····· 2/8", "75.0% (6 hits, 2 misses)", "next-gate: lossless",
    ):  # fmt: skip
        assert part in text, part


def test_residency_of_all_gpus_is_one_map() -> None:
    lead = [{"states": (2, 0, 0, 0), "uses": (5, 0, 0, 0)}, {"states": (0, 0, 1, 0), "uses": (0, 0, 1, 0)}]
    shard = [{"states": (0, 2, 0, 1), "uses": (0, 3, 0, 1)}, {"states": (0, 0, 0, 2), "uses": (0, 0, 0, 9)}]
    both = [{"states": [2, 2, 0, 1], "uses": [5, 3, 0, 1]}, {"states": [0, 0, 1, 2], "uses": [0, 0, 1, 9]}]
    assert merged_residency([lead, shard]) == both
    assert merged_residency([lead, None]) == [{name: list(layer[name]) for name in layer} for layer in lead]
    assert merged_residency([None]) is None


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
    out = io.StringIO()
    console = Console(file=out, width=120)
    for table in status_tables(record, console.width):
        console.print(table)
    lines = [" ".join(line.split()) for line in out.getvalue().splitlines()]
    assert "shard/0 serving 2 in 4 slots 75.0% of 4 2.00 KiB 500.0 ms 250.0 ms 1.00 KiB of 4.00 KiB" in lines
    assert "shard/1 lost" in lines


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


def test_names() -> None:
    name = new_id()
    assert split_name(f"{name}/ndp/0") == (name, "ndp/0")
    assert split_name("endpoints-12") is None
    assert new_id() != name


@pytest.mark.parametrize(
    ("given", "named"),
    [({"budget": "1"}, "--budget"), ({"link": {"gbps": 2.0}}, "--link-gbps"), ({"ndp": {"pace": True}}, "--ndp-pace"),
     ({"cluster": {"shards": 2}}, "--shards")],
)
def test_an_attached_driver_may_not_change_the_runtime(given: dict[str, Any], named: str) -> None:
    refuse_runtime_options({"model": "checkpoint", "config": None})
    with pytest.raises(RequestError, match=f"{named} is a matter of the runtime"):
        refuse_runtime_options(given)


def test_progress_without_a_terminal_is_lines() -> None:
    out = io.StringIO()
    with LineProgress(Console(file=out, width=80), every_s=1e9) as progress:
        task = progress.add_task("measuring", total=3)
        progress.advance(task)
        progress.advance(task)
        progress.advance(task)
        assert list(progress.track([1, 2], description="reading")) == [1, 2]
    assert out.getvalue().splitlines()[-2:] == ["measuring: 3/3", "reading: 2/2"]
    assert "measuring: 2/3" not in out.getvalue()
