"""`tiermoe bench buddymoe` on the default model, with few methods and hardly any tokens."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tiermoe.cluster.config import default_model_dir
from tiermoe.cluster.jobs.bench.buddymoe import job
from tiermoe.cluster.jobs.bench.buddymoe.methods import DROP, ORIGINAL, OWN, PAPER, RANDOM
from tiermoe.cluster.jobs.bench.buddymoe.page import write_page
from tiermoe.cluster.jobs.bench.buddymoe.work import Workload
from tiermoe.cluster.jobs.bench.recorded import own_store
from tiermoe.cluster.jobs.bench.serving import run_config
from tiermoe.cluster.jobs.evaluate.quality import EvaluationOptions
from tiermoe.cluster.jobs.profile.command import ProfileOptions
from tiermoe.cluster.jobs.profile.job import profile_text

pytestmark = pytest.mark.slow

_METHODS = (ORIGINAL, RANDOM, DROP, PAPER, OWN)
_WORK = Workload(
    ("0.5",), link=2.0, prompt_tokens=24, max_tokens=4, warm=1,
    quality=EvaluationOptions(2, prefix=12, continuation=5, resamples=50, rows=1), methods=_METHODS,
)  # fmt: skip


def _with_own_store(folder: Path) -> str:
    """A configuration whose store is profiled on little text: the whole calibration text takes half a minute."""
    store, text = own_store(run_config(None), folder), folder / "text.txt"
    text.write_text((default_model_dir() / "calibration" / "prose.jsonl").read_text()[:6000])
    profile_text(store, default_model_dir(), text, ProfileOptions(output_tokens=64), progress=False)
    (folder / "config.yaml").write_text(f"store: {store}\n")
    return str(folder / "config.yaml")


def test_the_page_is_made_from_runs_and_an_interrupted_one_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = _with_own_store(tmp_path)
    report, kept = job.bench_buddymoe(None, 1, _WORK, tmp_path, None, config)
    write_page(report, tmp_path)
    beside = ["buddymoe-parts.partial.json", "buddymoe-runs.partial.json"]
    assert sorted(path.name for path in tmp_path.glob("*.partial.json")) == beside
    monkeypatch.setattr(job, "calibrate", lambda *a: pytest.fail("measured again"))
    monkeypatch.setattr(job.Scoring, "__call__", lambda *a: pytest.fail("scored again"))
    again, _ = job.bench_buddymoe(None, 1, _WORK, tmp_path, None, config)
    assert again.rows == report.rows
    for part in kept:
        part.discard()
    assert not list(tmp_path.glob("*.partial.json"))

    of = {row["policy"]: row for row in report.rows}
    assert tuple(of) == _METHODS
    exact = of[ORIGINAL]["quality"]
    assert exact["top1_agreement"] == 1.0
    assert exact["kl_nats"] < 1e-4
    assert exact["substitutions"] == exact["dropped"] == 0
    for name in (RANDOM, PAPER, OWN):
        assert of[name]["quality"]["substitutions"] > 0
    assert of[DROP]["quality"]["dropped"] > 0
    for row in report.rows:
        quality = row["quality"]
        assert quality["tokens"] == 10
        assert quality["loaded_per_token"] > 0
        assert quality["picks"] > quality["substitutions"] + quality["dropped"]
        assert row["spread"]["tpot_s"]["median"] > 0
    assert len(report.bars) == 16
    record = json.loads((tmp_path / "buddymoe.json").read_text())
    assert len(record["profile"]["best_cosine"]) == 8
    assert {c["verdict"] for c in record["comparisons"]} <= {"better", "tie", "worse"}
    assert (tmp_path / "buddymoe.png").exists()
