"""Named metrics of one paper each, on traces and on rows, in exact small cases."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import traces

from tiermoe.actors.engine.stats import EngineStats, LayerStats, SourceStats
from tiermoe.benchmarks.experiments.activeevict import bars_of, median_ratio
from tiermoe.benchmarks.experiments.buddymoe import Difference, differences, quality_of
from tiermoe.benchmarks.experiments.moepic import footprints, least_budget
from tiermoe.benchmarks.experiments.paper_fmoe import map_correlations
from tiermoe.benchmarks.papers import transfers
from tiermoe.cluster.config import default_model_dir
from tiermoe.cluster.jobs.bench.serving import (
    Calibration,
    Recorded,
    read_split,
    split_prompts,
)
from tiermoe.cluster.jobs.evaluate.quality import SUMS, EvaluationOptions, Quality
from tiermoe.cluster.jobs.evaluate.text import load_heldout
from tiermoe.cluster.simulate.machine import Machine
from tiermoe.errors import CheckpointError, ConfigError

_CALIBRATION = Calibration(
    layers=8, experts=32, top_k=4, expert_bytes=400_000, tpot_s=8e-3, moe_s=5e-4, latency_us=10.0
)


@pytest.fixture
def recorded(tmp_path: Path) -> Recorded:
    traces.write(tmp_path / "t", traces.header(layers=5), [(1, 2), (3,), (4, 5), (1, 2)], decodes=4)
    return read_split(tmp_path / "t", 3)


# -- rows, prompts, links ----------------------------------------------------------------------------------------------


def test_no_document_is_on_both_sides_of_the_split() -> None:
    split, heldout = split_prompts(default_model_dir(), 32), load_heldout(default_model_dir())
    document = {p.ids[:32]: i for i, passages in enumerate(heldout.documents) for p in passages}
    lead = len(heldout.leading)
    sides = [{document.get(prompt[lead:]) for prompt in side} for side in (split.learn, split.measure)]
    if lead == 0:
        assert not sides[0] & sides[1]
        assert None not in sides[0] | sides[1]
    assert len(split.learn) + len(split.measure) == len(heldout.passages)
    assert {len(prompt) for prompt in (*split.learn, *split.measure)} == {32}
    first = split.first(50)
    assert (len(first.learn), len(first.measure)) == (35, 15)
    with pytest.raises(CheckpointError, match=r"gives .* prompts, not 700 and 300"):
        split.first(1000)


def test_a_link_is_as_fast_as_a_ratio_asks_for() -> None:
    assert _CALIBRATION.compute_s == pytest.approx(1e-3)
    assert _CALIBRATION.load_s(1.0) == pytest.approx(4 * (4e-4 + 1e-5))
    slow, fast = _CALIBRATION.link(2.5), _CALIBRATION.link(1.0)
    assert (slow, fast) == (0.65, 1.7)
    assert _CALIBRATION.ratio(slow) == pytest.approx(2.5, rel=0.02)
    with pytest.raises(ConfigError, match="latency of 10 us alone"):
        _CALIBRATION.link(0.01)
    machine = Machine(name="x", forward_s=8e-3, dense_s=1e-3, dense_row_s=0, expert_s=5e-4, expert_row_s=0)
    shape = {"layers": 8, "experts": 32, "top_k": 4, "slot_bytes": 2_000_000}
    # a layer of one token takes 1 + 1 + 4 * 0.5 = 4 ms; at ratio 2 each of 4 experts has 2 ms
    found = Calibration.of_machine(shape, machine, 10.0).link(2.0, digits=3)
    assert found == pytest.approx(2e6 / (2e-3 - 1e-5) / 1e9, rel=0.01)


# -- MoEpic ------------------------------------------------------------------------------------------------------------


def _memory(tpot_ms: Mapping[tuple[str, str], float]) -> list[dict[str, Any]]:
    return [
        {"section": "budgets", "policy": policy, "budget": budget, "link_gbps": gbps, "tpot_ms": tpot,
         "values": {"expert_budget_bytes": [1e8 * float(budget)]}}
        for gbps in (0.65, 1.6) for (policy, budget), tpot in tpot_ms.items()
    ]  # fmt: skip


def test_memory_for_a_tpot_is_interpolated_and_never_falls_with_the_budget() -> None:
    points = [(10.0, 30.0), (20.0, 20.0), (40.0, 25.0), (80.0, 10.0)]
    assert least_budget(points, 25.0) == {"bytes": 15.0, "at_most": False}
    assert least_budget(points, 15.0)["bytes"] == 60.0  # from 20 ms at 40: more memory is not slower
    assert least_budget(points, 30.0) == {"bytes": 10.0, "at_most": True}
    assert least_budget(points, 9.0) == {"bytes": None, "at_most": False}
    rows = _memory({("a", "0.125"): 20.0, ("a", "0.5"): 10.0, ("b", "0.125"): 30.0, ("b", "0.5"): 20.0})
    found = footprints(rows)
    targets = sorted({row["target_ms"] for row in found})
    assert len(targets) == 5
    assert 10.0 < targets[0] < targets[-1] <= 30.1
    assert {(row["policy"], row["bytes"]) for row in found if row["target_ms"] == targets[-1]} == {
        ("a", 1.25e7), ("b", 1.25e7),
    }  # fmt: skip


# -- fMoE --------------------------------------------------------------------------------------------------------------


def test_maps_of_what_is_measured_itself_foretell_it(recorded: Recorded) -> None:
    known = Recorded(recorded.header, recorded.measure, recorded.measure)
    semantic, trajectory = map_correlations(known, 50, distance=1)
    assert (semantic["search"], trajectory["search"], trajectory["pairs"]) == ("semantic", "trajectory", 4 * 3)
    assert trajectory["mean_hit"] > map_correlations(recorded, 50, distance=1)[1]["mean_hit"]
    assert trajectory["mean_score"] > 0.9


# -- ActiveEvict -------------------------------------------------------------------------------------------------------


def test_measures_of_a_preset_that_prefetches() -> None:
    layer = LayerStats(
        hits=6, misses=4, late_prefetches=1, bytes_loaded_demand=300, bytes_loaded_prefetch=700, bytes_wasted=200,
        bytes_premature=100, bytes_written_back=500, blocked_io_s=0.02, link_s=0.1,
    )  # fmt: skip
    sources = {"next-gate": SourceStats(queued=8, hits=4, late=1, wasted=2, cancelled=1)}
    found = transfers(EngineStats(layers=[layer], prefetch_sources=sources, dropped=5).as_dict(), 10)
    assert asdict(found) == pytest.approx({
        "blocking_ms": 2.0, "total_ms": 10.0, "loaded_mb": 1e-4, "written_back_mb": 5e-5, "redundant": 0.3,
        "precision": (5 + 3) / (7 + 3), "recall": 5 / (5 + 3), "hit_rate": 0.6, "dropped": 0.5,
    })  # fmt: skip


def test_a_baseline_that_never_blocks_in_a_repetition_is_not_left_out() -> None:
    """Guards against a ratio of the other repetitions only, which such a baseline is best in."""
    assert median_ratio([5, 6, 5], [0, 5, 4]) == 1.25
    assert median_ratio([5, 6], [0, 5]) is None
    assert median_ratio([0, 6], [0, 5]) == 1.2  # neither blocks: nothing to compare
    assert median_ratio([0], [0]) is None


def _row(policy: str, blocking_ms: Sequence[float], section: str = "table", **more: Any) -> dict[str, Any]:
    """A row of one value is simulated, one of several was served."""
    values = {"blocking_ms": list(blocking_ms), "precision": more.pop("precision", [1.0]), "recall": [1.0]}
    return {
        "context": "short", "section": section, "policy": policy, "preset": policy, "writes_back": False,
        "budget": "0.25", "link_gbps": 2.0, "values": values,
    } | more  # fmt: skip


def test_bars_compare_with_the_best_prefetching_baseline_both_ways() -> None:
    def rows(swapped_ms: float) -> list[dict[str, Any]]:
        return [
            _row("on-demand", [6.0]), _row("moe-offloading", [swapped_ms], writes_back=True),
            _row("moe-offloading", [3.0], precision=[0.9]), _row("moe-apex", [9.0], writes_back=True),
            _row("moe-apex", [3.5]), _row("activeevict-lossless", [4.0]),
            _row("activeevict-lossless", [9.0], writes_back=True), _row("activeevict", [3.8]),
        ]  # fmt: skip

    swapped, plain, exact = bars_of(rows(8.0))
    assert swapped.name == "short: blocking I/O, as the baselines are, which write back"
    assert (swapped.value, swapped.ok) == (0.5, True)
    assert (plain.value, plain.ok) == (pytest.approx(4 / 3), False)
    assert (exact.value, exact.ok) == (1.0, True)
    assert not next(bars_of(rows(5.0))).ok


# -- BuddyMoE ----------------------------------------------------------------------------------------------------------

_OPTIONS = EvaluationOptions(documents=6, resamples=200, rows=1)
_PAPER, _OWN = "cft 0.95, 16 buddies, rho 3, by coactivation", "buddymoe-own-weight"


def _scored(policy: str, kl: list[float], loaded_mb: float) -> dict[str, Any]:
    """A row. kl: of each document, also what it costs in likelihood."""
    documents = len(kl)
    sums = {name: np.full(documents, 100.0) for name in SUMS}
    sums |= {
        "kl": 100 * np.array(kl), "extra_nll": 100 * np.array(kl), "agree": 100 * (1 - np.array(kl)),
        "nll": np.full(documents, 280.0), "loaded": np.full(documents, 1e8 * loaded_mb),
        "correct": np.full(documents, 60.0),
    }  # fmt: skip
    quality = Quality(policy, policy == "original", "emulated", sums, _OPTIONS).as_dict()
    quality["sums"] = {name: values.tolist() for name, values in sums.items()}
    return {"section": "rates", "context": "", "policy": policy, "budget": "0.5", "link_gbps": 0.65,
            "lossless": policy == "original", "quality": quality}  # fmt: skip


def test_a_difference_whose_interval_holds_zero_is_a_tie() -> None:
    def one(measure: str, value: float, low: float, high: float, wanted: Any = "better") -> Difference:
        return Difference("0.5", _OWN, "drop", measure, value, low, high, wanted)

    tie = one("kl_nats", -0.01, -0.03, 0.01)
    assert (tie.verdict, tie.bar.ok) == ("tie", False)
    for better in (one("kl_nats", -0.02, -0.03, -0.01), one("top1_agreement", 0.02, 0.01, 0.03)):
        assert (better.verdict, better.bar.ok, better.bar.value) == ("better", True, -0.01)
    worse = one("top1_agreement", -0.02, -0.03, -0.01)
    assert (worse.verdict, worse.bar.ok) == ("worse", False)
    same, more = (one("loaded_per_token", *values, "no worse") for values in ((0.0, 0.0, 0.0), (2.0, 1.0, 3.0)))
    assert (same.verdict, same.bar.ok) == ("tie", True)
    assert (more.verdict, more.bar.ok) == ("worse", False)


def test_bars_are_of_the_paper_s_buddy_and_of_the_recommended_one() -> None:
    """The paper's beats random and loads more; the recommended one ties with drop."""
    rows = [
        _scored("original", [0.0] * 6, 9.0), _scored("random", [0.05, 0.06] * 3, 4.0),
        _scored("drop", [0.03, 0.05] * 3, 3.0), _scored(_PAPER, [0.04, 0.05] * 3, 5.0),
        _scored(_OWN, [0.05, 0.03] * 3, 4.0),
    ]  # fmt: skip
    every = list(differences(rows, _OPTIONS))
    found = {(c.own, c.other, c.measure): c for c in every}
    assert len(found) == len(every)
    assert len([c for c in every if c.wanted]) == 16
    for measure in ("perplexity_ratio", "top1_agreement", "kl_nats"):
        assert found[_PAPER, "random", measure].verdict == "better"
        assert found[_OWN, "drop", measure].verdict == "tie"
    assert found[_PAPER, "random", "choice_accuracy"].verdict == "tie"
    assert found[_PAPER, "random", "loaded_per_token"].verdict == "worse"
    assert found[_PAPER, "original", "loaded_per_token"].verdict == "better"
    assert found[_PAPER, "random", "kl_nats"].value == pytest.approx(-0.01)
    assert found[_OWN, "random", "loaded_per_token"].bar.ok  # a tie
    saved = json.loads(json.dumps(rows[1]))
    assert quality_of(saved["quality"], "random", False, _OPTIONS)["kl_nats"].value == pytest.approx(0.055)
