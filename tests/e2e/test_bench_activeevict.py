"""The whole of `bench activeevict` on the default model with hardly any tokens."""

from __future__ import annotations

from pathlib import Path

import pytest

from tiermoe.cluster.jobs.bench.activeevict.job import ABLATION, PRESETS, Workload, bench_activeevict
from tiermoe.cluster.jobs.bench.activeevict.page import write_page

pytestmark = pytest.mark.slow


def test_the_page_is_made_from_replays(tmp_path: Path) -> None:
    work = Workload((("short", 12),), 1, 1, 6, (0.25,), (0.5,), (2.0,), (0.0, 1.0))
    report = bench_activeevict(None, work, None)
    assert len(report.rows) == 2 * len(PRESETS) + len(ABLATION) + 1 + 3
    assert {row["policy"] for row in report.rows if row["section"] == "table"} == set(PRESETS)
    for row in report.rows:
        assert (row["written_back_mb"] > 0) == row["writes_back"]
        assert row["lossless"] == (row["preset"] not in ("activeevict", "moe-apex"))
        assert row["precision"] == row["recall"] == 1.0 or row["preset"].startswith("moe-")
    assert len(report.bars) == 3
    write_page(report, tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"activeevict.md", "activeevict.json", "activeevict.png"}
