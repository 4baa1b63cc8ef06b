"""The scale benchmark: what it starts, what it measures, and that its bars can fail."""

from __future__ import annotations

import pytest

from tiermoe.cluster.jobs.bench import scale
from tiermoe.cluster.jobs.bench.metrics import Spread
from tiermoe.cluster.jobs.bench.scale import BATCHES, VARIANTS, Variant, Workload
from tiermoe.errors import BudgetError, ConfigError

_TWO = Variant(2, "per-GPU")


def test_budgets_are_equal_in_total_or_each() -> None:
    budgets = {(v.gpus, v.equal): v.config(None, Workload(budget="0.125", ownership="expert")) for v in VARIANTS}
    assert {k: float(c.budget) for k, c in budgets.items()} == {
        (1, "total"): 0.125,
        (2, "total"): 0.0625, (4, "total"): 0.03125,
        (2, "per-GPU"): 0.125, (4, "per-GPU"): 0.125,
    }  # fmt: skip
    assert all(c.cluster.shards == k[0] and c.cluster.ownership == "expert" for k, c in budgets.items())


def test_rounds_are_as_many_as_asked_for_and_as_the_prompts_need() -> None:
    work = Workload(prompts=20)
    assert [work.rounds(batch, 4) for batch in BATCHES] == [20, 5, 4, 4]


def _found(waits_s: list[float], *loaded: list[float]) -> dict[str, Spread]:
    measures = {"io_path_s": waits_s, "link_path_s": waits_s}
    measures |= {f"{what}_{gpu}": values for what in ("bytes_loaded", "needed") for gpu, values in enumerate(loaded)}
    return {name: Spread.of(values) for name, values in measures.items()}


def test_bars_fail_where_a_gpu_loads_more_or_nothing_is_gained() -> None:
    balanced = {v.name: _found([1.0 / v.gpus] * 2, *([[10.0, 12.0]] * v.gpus)) for v in VARIANTS}
    assert [bar.ok for bar in scale._bars(1, balanced)] == [True] * 5
    uneven = balanced | {_TWO.name: _found([0.7, 0.7], [10.0, 12.0], [8.0, 11.0])}
    assert [bar.ok for bar in scale._bars(1, uneven)] == [True, True, False, True, False]
    idle = balanced | {_TWO.name: _found([0.0, 0.0], [0.0, 0.0], [0.0, 0.0])}  # no bar holds on that
    assert [bar.ok for bar in scale._bars(1, idle)] == [True, True, False, True, False]


def test_bytes_are_added_up_over_rounds_and_times_compared_within_them() -> None:
    one, two = _found([1.0, 4.0, 9.0], [6.0] * 3), _found([1.0, 2.0, 3.0], [1, 2, 3], [3, 2, 1])
    found = {VARIANTS[0].name: one, _TWO.name: two}
    row = scale._row(8, _TWO, found)
    assert (row["bytes_loaded"], row["bytes_max_min"]) == ([6.0, 6.0], 1.0)
    assert (row["io_path_s"], row["io_path_gain"]) == (2.0, 2.0)


def test_what_is_of_no_use_is_refused_before_a_model_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scale, "start_worker", lambda config: pytest.fail("loaded"))
    with pytest.raises(BudgetError, match="not a share"):
        scale.bench_scale(None, 1, Workload(budget="1GB"), None)
    with pytest.raises(BudgetError, match="keeps every expert"):
        scale.bench_scale(None, 1, Workload(policy="all-resident"), None)
    with pytest.raises(ConfigError, match="the link of one GPU"):
        scale.bench_scale(None, 1, Workload(policy="monde"), None)


def test_one_and_two_gpus_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scale, "VARIANTS", (VARIANTS[0], _TWO))
    report = scale.bench_scale(None, 1, Workload(budget="0.25", batches=(1, 2), prompts=2), None)
    assert [(row["batch"], row["gpus"]) for row in report.rows] == [(1, 1), (1, 2), (2, 1), (2, 2)]
    one, two = report.rows[:2]
    assert sum(two["needed"]) == one["needed"][0]  # one request after another: the same routing, shared out
    for one, two in zip(report.rows[::2], report.rows[1::2], strict=True):
        assert len(two["bytes_loaded"]) == 2
        assert one["shard_wait_s"] == 0 < two["shard_wait_s"]
        assert two["recomputed"] == 0
        busy_s = sum(one["spread"]["link_path_s"]["values"])
        slot = 393216  # bytes; on demand each copy is on a forward's way, at 2 GB/s after 10 us
        assert busy_s == pytest.approx(one["bytes_loaded"][0] / slot * (10e-6 + slot / 2e9))
        assert two["link_path_s"] > 0
    assert [len(one["spread"]["io_path_s"]["values"]) for one in report.rows[::2]] == [2, 1]
    assert len(report.bars) == 4
    assert report.executor == "emulated"
