"""The page of `tiermoe bench activeevict` from hand-made rows, its bars, and the measures from counters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tiermoe.actors.engine.stats import EngineStats, LayerStats, SourceStats
from tiermoe.cluster.jobs.bench.activeevict.bars import bars_of
from tiermoe.cluster.jobs.bench.activeevict.measures import transfers
from tiermoe.cluster.jobs.bench.activeevict.page import page, write_page
from tiermoe.cluster.jobs.bench.activeevict.simulated import link_gbps
from tiermoe.cluster.jobs.bench.activeevict.work import Workload
from tiermoe.cluster.jobs.bench.metrics import Report
from tiermoe.cluster.simulate.executor import Machine
from tiermoe.errors import ConfigError


def row(section: str, policy: str, blocking_ms: float, **more: Any) -> dict[str, Any]:
    return {
        "context": "short", "section": section, "policy": policy, "preset": policy, "lossless": policy != "activeevict",
        "writes_back": False, "budget": 0.25, "ratio": 1.0, "link_gbps": 2.0, "tpot_ms": 9.0, "ttft_ms": 20.0,
        "blocking_ms": blocking_ms, "total_ms": 10.0, "loaded_mb": 2.0, "written_back_mb": 0.0, "redundant": 0.1,
        "precision": 1.0, "recall": 1.0, "hit_rate": 0.5, "dropped": 0.0,
    } | more  # fmt: skip


def rows(swapped_ms: float = 8.0) -> list[dict[str, Any]]:
    swap = {"writes_back": True, "written_back_mb": 2.0, "precision": 0.9}
    return [
        row("table", "on-demand", 6.0),
        row("table", "moe-offloading", swapped_ms, **swap), row("table", "moe-offloading", 3.0, precision=0.9),
        row("table", "moe-apex", 9.0, **swap), row("table", "moe-apex", 3.5, precision=0.8),
        row("table", "activeevict-lossless", 4.0), row("table", "activeevict-lossless", 9.0, **swap | {"precision": 1}),
        row("table", "activeevict", 3.8),
        *(row("capacity", name, 4.0, budget=b) for name in ("activeevict-lossless", "activeevict-lru", "activeevict")
          for b in (0.25, 0.5)),
        row("alpha", "0", 5.0), row("alpha", "1", 4.5), row("alpha", "lru", 6.0),
    ]  # fmt: skip


def report(found: list[dict[str, Any]]) -> Report:
    settings = {
        "model": "tiny", "contexts": {"short": 32}, "learn": 1, "measure": 2, "max_tokens": 8, "load_average": 0.5,
    }  # fmt: skip
    return Report("activeevict", "simulated", found, bars_of(found), settings)


def test_bars_compare_with_the_best_prefetching_baseline_both_ways() -> None:
    swapped, plain, exact = bars_of(rows())
    assert (swapped.value, swapped.ok) == (pytest.approx(0.5), True)
    assert (plain.value, plain.ok) == (pytest.approx(4 / 3), False)
    assert (exact.value, exact.ok) == (1.0, True)
    assert not bars_of(rows(swapped_ms=5.0))[0].ok


def test_the_page_says_what_is_missed_and_why(tmp_path: Path) -> None:
    write_page(report(rows()), tmp_path)
    text = (tmp_path / "activeevict.md").read_text()
    assert text == page(report(rows()).as_dict())
    assert "| short: blocking I/O, where nobody writes back | 1.33 | <= 0.7 | missed |" in text
    assert "activeevict-lossless blocks 4 ms a token" in text
    assert "8 as it is (moe-offloading) and 3 where it writes nothing back (moe-offloading)" in text
    assert "| 0.25 | moe-apex | yes | 9 |" in text
    assert "activeevict (lossy)" in text
    assert (tmp_path / "activeevict.png").stat().st_size > 1000
    assert (tmp_path / "activeevict.json").exists()


def test_measures_of_a_preset_that_prefetches() -> None:
    layer = LayerStats(
        hits=6, misses=4, late_prefetches=1, bytes_loaded_demand=300, bytes_loaded_prefetch=700, bytes_wasted=200,
        bytes_premature=100, bytes_written_back=500, blocked_io_s=0.02, link_s=0.1,
    )  # fmt: skip
    sources = {"next-gate": SourceStats(queued=8, hits=4, late=1, wasted=2, cancelled=1)}
    found = transfers(EngineStats(layers=[layer], prefetch_sources=sources, dropped=5).as_dict(), 10)
    assert found.blocking_ms == pytest.approx(2.0)
    assert found.total_ms == pytest.approx(10.0)
    assert found.loaded_mb == pytest.approx(1e-4)
    assert found.written_back_mb == pytest.approx(5e-5)
    assert found.redundant == pytest.approx(0.3)
    assert found.precision == pytest.approx((5 + 3) / (7 + 3))
    assert found.recall == pytest.approx(5 / (5 + 3))
    assert (found.hit_rate, found.dropped) == (pytest.approx(0.6), pytest.approx(0.5))


def test_measures_of_a_preset_that_fetches_after_the_gate() -> None:
    found = transfers(EngineStats(layers=[LayerStats(misses=3, bytes_loaded_demand=30)]).as_dict(), 1)
    assert (found.precision, found.recall, found.redundant) == (1.0, 1.0, 0.0)
    nothing = transfers(EngineStats(layers=[LayerStats()]).as_dict(), 1)
    assert (nothing.precision, nothing.recall, nothing.redundant) == (1.0, 1.0, 0.0)


def test_a_link_is_chosen_by_what_computing_takes() -> None:
    machine = Machine(name="x", forward_s=8e-3, dense_s=1e-3, dense_row_s=0, expert_s=5e-4, expert_row_s=0)
    # a layer of one token takes 1 + 1 + 4 * 0.5 = 4 ms; at ratio 2 each of 4 experts has 2 ms
    assert link_gbps(machine, 8, 4, 2_000_000, 2.0) == pytest.approx(2e6 / (2e-3 - 1e-5) / 1e9, rel=0.01)
    with pytest.raises(ConfigError, match="no link"):
        link_gbps(machine, 8, 4, 2_000_000, 1e-3)


_WRONG: list[dict[str, Any]] = [
    {"measure": 0}, {"budgets": ()}, {"budgets": (1.5,)}, {"budgets": (0.5, 0.5)}, {"ratios": (0.0,)},
    {"ratios": (float("nan"),)}, {"ratios": (1.0, float("inf"))}, {"ratios": (1.0, 1.0)}, {"repeats": 0}, {"parts": ()},
    {"parts": ("real",)},
]  # fmt: skip


@pytest.mark.parametrize("wrong", _WRONG)
def test_sizes_are_checked(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        Workload(**wrong)
