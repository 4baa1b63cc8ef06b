"""The page of `tiermoe bench buddymoe` from hand-made rows: ties, missed bars, and what they are put down to."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tiermoe.cluster.config import load_policy
from tiermoe.cluster.jobs.bench.buddymoe.findings import BYTES, Comparison, bars_of, comparisons
from tiermoe.cluster.jobs.bench.buddymoe.methods import DROP, ORIGINAL, OWN, PAPER, RANDOM, methods, write_methods
from tiermoe.cluster.jobs.bench.buddymoe.page import page, write_page
from tiermoe.cluster.jobs.bench.buddymoe.report import BuddyReport
from tiermoe.cluster.jobs.bench.buddymoe.scoring import quality_of
from tiermoe.cluster.jobs.bench.buddymoe.work import Workload
from tiermoe.cluster.jobs.bench.metrics import Spread
from tiermoe.cluster.jobs.bench.moepic.calibration import Calibration
from tiermoe.cluster.jobs.evaluate.quality import SUMS, EvaluationOptions, Quality
from tiermoe.errors import ConfigError

_OPTIONS = EvaluationOptions(documents=6, resamples=200, rows=1)
_CALIBRATION = Calibration(8, 32, 4, 400_000, 8e-3, 5e-4, 10.0)
_PROFILE = {"best_cosine": [0.25, 0.1], "better_than_none": 0.05, "taken": {"coactivation": 0.33, "output": 0.27},
            "peers": 25.0, "experts": 32}  # fmt: skip


def _row(policy: str, kl: list[float], loaded: float, **counted: float) -> dict[str, Any]:
    """One cell. kl: of each document, also what it costs in likelihood. loaded: megabytes of each token."""
    documents = len(kl)
    sums = {name: np.full(documents, 100.0) for name in SUMS}
    sums |= {
        "kl": 100 * np.array(kl), "extra_nll": 100 * np.array(kl), "agree": 100 * (1 - np.array(kl)),
        "nll": np.full(documents, 280.0), "loaded": np.full(documents, 1e8 * loaded),
        "correct": np.full(documents, 60.0),
    }  # fmt: skip
    quality = Quality(policy, policy == ORIGINAL, "emulated", sums, _OPTIONS).as_dict() | {
        "sums": {name: values.tolist() for name, values in sums.items()}, "picks": 1000, "substitutions": 0,
        "dropped": 0, "bytes_loaded_demand": 1e8, "bytes_loaded_prefetch": 3e8, "bytes_wasted": 1e8, "hits": 60,
        "misses": 40, "late_prefetches": 5, **counted,
    }  # fmt: skip
    spread = {name: asdict(Spread.of([value] * 2)) for name, value in (("tpot_s", 0.02), ("blocked_io_s", 0.1))}
    return {
        "setting": "rates", "policy": policy, "budget": "0.5", "link_gbps": 0.65, "lossless": policy == ORIGINAL,
        "hit_rate": 0.6, "ttft_ms": 100.0, "tpot_ms": 20.0, "spread": spread, "layers": [], "quality": quality,
    }  # fmt: skip


def _rows() -> list[dict[str, Any]]:
    """The paper's beats random and loads more; the recommended one ties with drop."""
    return [
        _row(ORIGINAL, [0.0] * 6, 9.0),
        _row(RANDOM, [0.05, 0.06, 0.05, 0.06, 0.05, 0.06], 4.0, substitutions=60),
        _row(DROP, [0.03, 0.05, 0.03, 0.05, 0.03, 0.05], 3.0, dropped=110),
        _row(PAPER, [0.04, 0.05, 0.04, 0.05, 0.04, 0.05], 5.0, substitutions=50),
        _row(OWN, [0.05, 0.03, 0.05, 0.03, 0.05, 0.03], 4.0, substitutions=55),
    ]


def _report(rows: list[dict[str, Any]]) -> BuddyReport:
    found = comparisons(rows, _OPTIONS)
    settings = {
        "model": "tiny", "links_gbps": [0.65], "latency_us": 10.0, "ratio": 2.5, "asked": 2.5, "link_given": False,
        "warm_prompts": 2, "repeats": 2, "prompts_of_a_repetition": 1, "prompt_tokens_each": 32, "max_tokens": 24,
        "budgets": ["0.5"], "quality": asdict(_OPTIONS), "load_average": 0.4,
    }  # fmt: skip
    return BuddyReport("buddymoe", "emulated", rows, bars_of(found), settings, (), asdict(_CALIBRATION),
                       [c.as_dict() for c in found], _PROFILE)  # fmt: skip


def test_a_difference_whose_interval_holds_zero_is_a_tie() -> None:
    tie = Comparison("0.5", OWN, DROP, "kl_nats", -0.01, -0.03, 0.01, "better")
    assert (tie.verdict, tie.bar.ok) == ("tie", False)
    better = Comparison("0.5", OWN, DROP, "kl_nats", -0.02, -0.03, -0.01, "better")
    assert (better.verdict, better.bar.ok, better.bar.value) == ("better", True, -0.01)
    higher = Comparison("0.5", OWN, DROP, "top1_agreement", 0.02, 0.01, 0.03, "better")
    assert (higher.verdict, higher.bar.ok, higher.bar.value) == ("better", True, -0.01)
    worse = Comparison("0.5", OWN, DROP, "top1_agreement", -0.02, -0.03, -0.01, "better")
    assert (worse.verdict, worse.bar.ok) == ("worse", False)
    same = Comparison("0.5", PAPER, RANDOM, BYTES, 0.0, 0.0, 0.0, "no worse")
    assert (same.verdict, same.bar.ok) == ("tie", True)
    more = Comparison("0.5", PAPER, RANDOM, BYTES, 2.0, 1.0, 3.0, "no worse")
    assert (more.verdict, more.bar.ok) == ("worse", False)


def test_bars_are_of_the_paper_s_buddy_and_of_the_recommended_one() -> None:
    found = {(c.own, c.other, c.measure): c for c in comparisons(_rows(), _OPTIONS)}
    assert len([c for c in found.values() if c.wanted]) == 16
    for measure in ("perplexity_ratio", "top1_agreement", "kl_nats"):
        assert found[PAPER, RANDOM, measure].verdict == "better"
        assert found[OWN, DROP, measure].verdict == "tie"
    assert found[PAPER, RANDOM, "choice_accuracy"].verdict == "tie"
    assert found[PAPER, RANDOM, BYTES].verdict == "worse"
    assert found[PAPER, ORIGINAL, BYTES].verdict == "better"
    assert found[PAPER, RANDOM, "kl_nats"].value == pytest.approx(-0.01)
    assert found[OWN, RANDOM, BYTES].bar.ok  # a tie


def test_the_page_says_what_is_tied_and_what_is_missed(tmp_path: Path) -> None:
    report = _report(_rows())
    write_page(report, tmp_path)
    text = (tmp_path / "buddymoe.md").read_text()
    assert text == page(report.as_dict())
    assert "Of 16 comparisons 9 hold, 6 are ties where better was asked for, and 1 go the other way." in text
    assert f"**Cache rate 0.5, {PAPER} against {RANDOM}.** Tied: choice accuracy. Worse: bytes." in text
    assert f"**Cache rate 0.5, {OWN} against {DROP}.** Tied: perplexity over lossless, top-1 agreement, KL" in text
    assert f"{OWN} replaces 5.5% of the routers' picks and leaves out 0.0%, {DROP} 0.0% and 11.0%." in text
    assert "75% of its bytes are guesses" in text
    assert "33% of the cases by coactivation and 27% of the cases by output" in text
    bar = f"| 0.5 | {PAPER} | {ORIGINAL} | bytes a token | better | -4.00 MB (-4.00 to -4.00) | fewer | ok |"
    assert bar in text
    kept = json.loads((tmp_path / "buddymoe.json").read_text())
    assert quality_of(kept["rows"][1], _OPTIONS)["kl_nats"].value == pytest.approx(0.055)
    assert (tmp_path / "buddymoe.png").stat().st_size > 0


def test_a_page_of_bars_that_all_hold_explains_nothing() -> None:
    rows = _rows()
    paper = _row(PAPER, [0.01] * 6, 4.0)
    for row in (paper, own := _row(OWN, [0.01] * 6, 3.0)):
        row["quality"]["sums"]["correct"] = [70.0] * 6
    text = page(_report([*rows[:3], paper, own]).as_dict())
    assert "Of 16 comparisons 16 hold" in text
    assert "The experts themselves" not in text


def test_methods_derive_from_presets(tmp_path: Path) -> None:
    found = methods(top_k=4)
    names = [method.name for method in found]
    assert len(set(names)) == len(names) == 13
    assert {ORIGINAL, RANDOM, DROP, PAPER, OWN} <= set(names)
    files = write_methods(found, tmp_path / "policies")
    by_output = load_policy(files[PAPER.replace("coactivation", "output")])
    assert by_output.on_miss == load_policy("buddymoe").on_miss.model_copy(update={"by": "output"})
    assert load_policy(files[PAPER]).on_miss == load_policy("buddymoe").on_miss
    assert load_policy(files[f"{RANDOM}, rho 3"]).on_miss.rho == 3
    assert ORIGINAL not in files
    own = load_policy(OWN).on_miss
    assert (own.weights, own.by, own.rho) == ("buddy", "output", None)
    assert own.eta > 0
    assert "cft 0.95, 16 buddies, by output" in [method.name for method in methods(top_k=6)]


def test_sizes_are_checked() -> None:
    for wrong, said in (({"max_tokens": 2}, "--max-tokens is 2"), ({"ratio": 0.0}, "--ratio is 0"),
                        ({"warm": 0}, "--warm is 0"), ({"rates": ("2",)}, "budget '2' is a share outside"),
                        ({"rates": ("0.5", "0.5")}, "--rates names one twice")):  # fmt: skip
        with pytest.raises(ConfigError, match=said):
            Workload(**wrong)
