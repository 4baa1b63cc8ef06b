"""The whole of `bench activeevict` on the default model with hardly any tokens."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tiermoe.cluster.jobs.bench.activeevict import job
from tiermoe.cluster.jobs.bench.activeevict.page import write_page
from tiermoe.cluster.jobs.bench.activeevict.work import ABLATION, PREFETCHING, PRESETS, Workload

pytestmark = pytest.mark.slow

_WORK = Workload(
    (("short", 12),), 1, 1, 6, (0.25,), (0.5,), (2.0,), (0.0, 1.0), parts=("simulated",), repeats=2
)


def test_the_page_is_made_from_replays_and_runs_are_added_to_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    report, kept = job.bench_activeevict(None, _WORK, tmp_path, None, None)
    write_page(report, tmp_path)
    assert [path.name for path in tmp_path.glob("*.partial.json")] == ["activeevict-simulated.partial.json"]
    monkeypatch.setattr(job, "simulate", lambda *a: pytest.fail("replayed again"))
    assert job.bench_activeevict(None, _WORK, tmp_path, None, None)[0].rows == report.rows
    for part in kept:
        part.discard()
    assert len(report.rows) == 2 * len(PRESETS) + len(ABLATION) + 1 + 3
    assert {row["policy"] for row in report.rows if row["section"] == "table"} == set(PRESETS)
    for row in report.rows:
        assert (row["written_back_mb"] > 0) == row["writes_back"]
        assert row["lossless"] == (row["preset"] not in ("activeevict", "moe-apex"))
        assert row["precision"] == row["recall"] == 1.0 or row["preset"].startswith("moe-")
    assert len(report.bars) == 3
    names = {"activeevict.md", "activeevict.json", "activeevict.png"}
    assert {path.name for path in tmp_path.iterdir()} == names

    work, earlier = replace(_WORK, parts=("emulated",)), tmp_path / "activeevict.json"
    both, kept = job.bench_activeevict(None, work, tmp_path, earlier, None)
    assert both.rows[: len(report.rows)] == report.rows
    assert (both.executor, both.ok) == ("simulated, emulated", all(bar.ok for bar in both.bars))
    assert [bar.name for bar in both.bars[3:]] == [
        bar.name.replace("short", "short, emulated") for bar in report.bars
    ]  # fmt: skip
    ran = both.rows[len(report.rows) :]
    assert [row["policy"] for row in ran] == [*PRESETS, *PREFETCHING]
    for row in ran:
        assert row["link_gbps"] == report.rows[0]["link_gbps"]
        assert (row["written_back_mb"] > 0) == row["writes_back"]
        assert row["precision"] == row["recall"] == 1.0 or row["preset"].startswith("moe-")
        assert row["same_tokens"] == 1.0 or not row["lossless"]
        assert len(row["values"]["blocking_ms"]) == len(row["replayed"]["blocking_ms"]) == 2
    on_demand = ran[0]  # its bytes depend on the routing alone
    assert on_demand["values"]["loaded_mb"] == pytest.approx(on_demand["replayed"]["loaded_mb"], rel=1e-4)
    assert on_demand["values"]["total_ms"] == pytest.approx(on_demand["replayed"]["total_ms"], rel=1e-3)
    write_page(both, tmp_path)
    assert "## Emulated: the engine itself" in (tmp_path / "activeevict.md").read_text()
    again, _ = job.bench_activeevict(None, work, tmp_path, earlier, None)  # nothing is served a second time
    assert again.rows == both.rows
    for part in kept:
        part.discard()
    assert {path.name for path in tmp_path.iterdir()} == names
