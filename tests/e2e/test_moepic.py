"""`tiermoe bench moepic` on the default model, with few policies and hardly any tokens."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tiermoe.cluster.jobs.bench.moepic import findings, job, simulated, why
from tiermoe.cluster.jobs.bench.moepic.page import write_page
from tiermoe.cluster.jobs.bench.moepic.work import Workload

pytestmark = pytest.mark.slow

_WORK = Workload(
    ("0.25",), ratios=(2.5,), prompt_tokens=16, max_tokens=5, warm=3, prompts=1, tau=40, trace_prompts=(2, 2),
    trace_tokens=4, policies=("mixtral-offloading", "moepic"), ablation=("moepic",),
    ablation_budgets=("0.25",), thetas=(0.4,), zetas=(), rhos=(0.25,), omegas=(128,),
)  # fmt: skip


def test_the_page_is_made_from_runs_and_an_interrupted_one_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No bar can hold here, so that timelines and simulated links are made too."""
    for module in (findings, why):
        monkeypatch.setattr(module, "LIMIT", 1e-3)
    monkeypatch.setattr(simulated, "RATIOS", (2.5,))
    report, kept = job.bench_moepic(None, 1, _WORK, tmp_path, None)
    write_page(report, tmp_path)
    names = ("ablation", "budgets", "parts", "sensitivity")
    assert sorted(path.name for path in tmp_path.glob("*.partial.json")) == [f"moepic-{n}.partial.json" for n in names]
    monkeypatch.setattr(job, "calibrate", lambda *a: pytest.fail("measured again"))
    monkeypatch.setattr(job, "record_split", lambda *a: pytest.fail("recorded again"))
    again, _ = job.bench_moepic(None, 1, _WORK, tmp_path, None)
    assert again.rows == report.rows
    for part in kept:
        part.discard()
    assert not list(tmp_path.glob("*.partial.json"))
    assert [(row["setting"], row["policy"]) for row in report.rows] == [
        ("budgets", "mixtral-offloading"), ("budgets", "moepic"), ("ablation", "moepic"),
        ("sensitivity", "moepic"), ("sensitivity", "theta 0.4"),
    ]  # fmt: skip
    assert len({report.rows[i]["link_gbps"] for i in range(5)}) == 1
    assert 2 <= report.settings["ratios"][0] <= 3
    assert [bar.ok for bar in report.bars] == [False]
    (timeline,) = report.timelines
    assert timeline["best"] == "mixtral-offloading"
    assert timeline["own"]["steps"] == timeline["other"]["steps"] == 4
    assert 0 < timeline["own"]["experts_ms"] < timeline["own"]["token_ms"]
    assert report.simulated is not None
    assert {row["policy"] for row in report.simulated["rows"]} == {"mixtral-offloading", "moepic"}
    assert all(row["tpot_ms"] > 0 for row in report.simulated["rows"])
    text = (tmp_path / "moepic.md").read_text()
    assert "**Budget 0.25, " in text
    assert "holds on none of" in text
    assert json.loads((tmp_path / "moepic.json").read_text())["hits"]["sizes"] == [5, 11, 16, 21, 27]
