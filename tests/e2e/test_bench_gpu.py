"""`bench gpu` on the CPU stand-in at toy sizes: every part, by the same code that a GPU runs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tiermoe.cluster.jobs.bench.gpu.decode import ALL, BUDGETS, PRESETS
from tiermoe.cluster.jobs.bench.gpu.job import PARTS, main

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


def test_every_part_runs_at_toy_sizes(tmp_path: Path) -> None:
    assert main(["--device", "cpu", "--sizes", "toy", "--out", str(tmp_path), "--seconds", "1700"]) == 0
    document = json.loads((tmp_path / "gpu.json").read_text(encoding="utf-8"))
    assert {name: found["outcome"] for name, found in document["parts"].items()} == {p.name: "done" for p in PARTS}
    for name in ("qwen", "mixtral", "deepseek"):
        rows = document["parts"][name]["rows"]
        ran = {(row["preset"], row["budget"]) for row in rows if row["kind"] == "decode"}
        assert ran == {(p, b) for p in PRESETS for b in (0.5, 1.0)} | {(ALL, 1.0)}, document["parts"][name]["notes"]
        assert {row["kind"] for row in rows} >= {"trace", "peaks", "shape", "reference", "decode"}
        near = [row["ndp"] for row in rows if row.get("preset") == "context-ndp-3bit" and row["budget"] == 0.5]
        assert near[0]["calls_per_token"] > 0
        assert near[0]["recomputed"] == 0
    assert {row["kind"] for row in document["parts"]["host"]["rows"]} >= {"host"}
    page = (tmp_path / "gpu.md").read_text(encoding="utf-8")
    assert "| device_name | cpu (stands in for a GPU) |\n| sizes | toy |" in page
    assert page.count("Outcome: done.") == len(PARTS)
    assert "Not run yet." not in page
    assert set(BUDGETS) == {0.1, 0.25, 0.5, 1.0}
