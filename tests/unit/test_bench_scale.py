"""The scale benchmark: what it starts, what it measures, and that its bars can fail."""

from __future__ import annotations

import math

import pytest

from tiermoe.cluster.jobs.bench import scale
from tiermoe.cluster.jobs.bench.harness import Spread
from tiermoe.cluster.jobs.bench.scale import VARIANTS, Variant
from tiermoe.errors import BudgetError


def test_budgets_are_equal_in_total_or_each() -> None:
    budgets = {(v.gpus, v.equal): v.config(None, "on-demand", 0.125, 2.0) for v in VARIANTS}
    assert {k: float(c.budget) for k, c in budgets.items()} == {
        (1, "total"): 0.125,
        (2, "total"): 0.0625, (4, "total"): 0.03125,
        (2, "per-GPU"): 0.125, (4, "per-GPU"): 0.125,
    }  # fmt: skip
    assert all(c.cluster.shards == k[0] for k, c in budgets.items())


def test_bars_fail_where_a_gpu_loads_more_or_nothing_is_gained() -> None:
    def found(io_path_s: float, balance: float) -> dict[str, Spread]:
        return {"io_path_s": Spread.of([io_path_s]), "bytes_most_over_least": Spread.of([balance])}

    results = {v.name: found(1.0 / v.gpus, 1.05) for v in VARIANTS}
    assert [bar.ok for bar in scale._bars(results)] == [True] * 5
    results[Variant(2, "per-GPU").name] = found(0.7, 1.2)
    assert [bar.ok for bar in scale._bars(results)] == [True, True, False, True, False]
    results[Variant(2, "per-GPU").name] = found(0.0, math.nan)  # nothing was loaded: no bar holds on that
    assert [bar.ok for bar in scale._bars(results)] == [True, True, False, True, False]


def test_a_budget_in_bytes_is_refused() -> None:
    with pytest.raises(BudgetError, match="not a share"):
        scale.bench_scale(None, 1, "on-demand", "1GB", 2.0, 1, None)


def test_one_and_two_gpus_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    two = Variant(2, "per-GPU")
    monkeypatch.setattr(scale, "VARIANTS", (VARIANTS[0], two))
    report = scale.bench_scale(None, 1, "on-demand", "0.25", 2.0, 2, None)
    rows = {(row["case"], row["measure"]): row["median"] for row in report.rows}
    assert rows[two.name, "bytes_loaded"] == rows[two.name, "bytes_loaded_most"] + rows[two.name, "bytes_loaded_least"]
    assert rows[two.name, "io_path_s"] > 0
    assert rows["1 GPU", "shard_wait_s"] == 0 < rows[two.name, "shard_wait_s"]
    assert rows[two.name, "recomputed"] == 0
    assert len(report.bars) == 2
    assert report.executor == "emulated"
