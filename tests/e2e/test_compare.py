"""`tiermoe bench compare` and `bench fmoe` on the default model: two policies, one budget, one repetition."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tiermoe.cluster.jobs.bench.fmoe import job
from tiermoe.cluster.jobs.bench.fmoe.page import write_page

pytestmark = pytest.mark.slow

_MAIN = "from tiermoe.cluster.cli import main; main()"


def test_two_policies_side_by_side(tmp_path: Path) -> None:
    prompts, out = tmp_path / "prompts.txt", tmp_path / "out.json"
    prompts.write_text("The quick brown fox\ndef main(arguments):\n")
    done = subprocess.run(
        [
            sys.executable, "-c", _MAIN, "bench", "compare", "--policies", "on-demand,next-gate", "--budgets", "0.25",
            "--links", "2", "--prompts", str(prompts), "--repeat", "1", "--max-tokens", "4", "--json", str(out),
        ],
        capture_output=True, text=True, timeout=280, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    report = json.loads(out.read_text())
    assert (report["name"], report["executor"]) == ("compare", "emulated")
    on_demand, next_gate = report["rows"]
    assert (on_demand["policy"], next_gate["policy"]) == ("on-demand", "next-gate")
    asked = [sum(row["spread"][name]["median"] for name in ("hits", "misses")) for row in report["rows"]]
    assert asked[0] == asked[1] > 0  # the same tokens, so the same experts
    assert next_gate["spread"]["prefetched_hits"]["median"] > 0
    assert "prefetched_hits" in on_demand["spread"]
    assert len(on_demand["layers"]) == 8
    assert not (tmp_path / "out.partial.json").exists()


def test_the_page_of_fmoe_is_made_from_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole of `bench fmoe` with two policies and hardly any tokens; what is kept meanwhile is gone at the end."""
    monkeypatch.setattr(job, "OFFLINE", ("promoe", "fmoe"))
    monkeypatch.setattr(job, "ONLINE", ("fmoe",))
    monkeypatch.setattr(job, "DISTANCES", (1, 3))
    work = job.Workload(4, 16, 3, ("0.25",), (16.0,), trace_tokens=3, trace_prompts=4, capacities=(8,))
    report, kept = job.bench_fmoe(None, 1, work, tmp_path, None)
    write_page(report, tmp_path)
    assert sorted(path.name for path in tmp_path.glob("*.partial.json")) == [
        "fmoe-7-3.partial.json", "fmoe-online.partial.json",
    ]  # fmt: skip
    for part in kept:
        part.discard()
    assert not list(tmp_path.glob("*.partial.json"))
    assert [(row["setting"], row["policy"]) for row in report.rows] == [
        ("7:3", "promoe"), ("7:3", "fmoe"), ("online", "fmoe"),
    ]  # fmt: skip
    promoe, fmoe, _ = (row["spread"] for row in report.rows)
    assert promoe["prefetch_sources.stride.queued"]["median"] > 0
    assert fmoe["hits"]["median"] + fmoe["misses"]["median"] == promoe["hits"]["median"] + promoe["misses"]["median"]
    text = (tmp_path / "fmoe.md").read_text()
    assert "**promoe**: fmoe's TPOT is lower in" in text
    assert report.expert_maps["hit_rates"][0]["maps"] == 8
