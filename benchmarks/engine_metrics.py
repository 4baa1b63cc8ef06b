"""Figures of one paper on the engine, or on rows of engine sections: MoEpic, BuddyMoE, near-data execution."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any, Literal

import numpy as np

from tiermoe.cluster.jobs.bench.metrics import Bar, Row, cells_of, median_of, metric
from tiermoe.cluster.jobs.bench.run import Study
from tiermoe.cluster.jobs.bench.serving import Split, record_split
from tiermoe.cluster.jobs.evaluate.quality import EvaluationOptions, Quality
from tiermoe.cluster.simulate.statistics import phase_cosines, routing_of
from tiermoe.errors import ConfigError

# -- MoEpic: memory for a TPOT (Figure 8) ------------------------------------------------------------------------------

Point = tuple[float, float]  # bytes of the budget, TPOT in milliseconds
_TARGETS = 5  # TPOTs


@metric("moepic-memory")
def moepic_memory(study: Study, *, section: str) -> dict[str, Any]:
    """The least expert memory that reaches each of five TPOTs, by policy, at the first link."""
    rows = [row for row in study.rows if row["section"] == section]
    rows = [row for row in rows if row["link_gbps"] == rows[0]["link_gbps"]]
    points: dict[str, list[Point]] = {}
    for row in rows:
        points.setdefault(row["policy"], []).append((median_of(row, "expert_budget_bytes"), float(row["tpot_ms"])))
    points = {policy: sorted(found) for policy, found in points.items()}
    # targets: evenly from the lowest TPOT of all to the middle policy's at the smallest budget, rounded up
    low = min(tpot for found in points.values() for _, tpot in found)
    smallest = sorted(found[0][1] for found in points.values())
    high = max(smallest[len(smallest) // 2], low)
    steps = [low + (high - low) * (i + 1) / _TARGETS for i in range(_TARGETS)]
    targets = sorted({float(f"{step + 0.05:.1f}") for step in steps})
    return {"footprints": [
        {"policy": policy, "target_ms": target} | least_budget(measured, target)
        for policy, measured in points.items() for target in targets
    ]}  # fmt: skip


def least_budget(points: Sequence[Point], target_ms: float) -> dict[str, Any]:
    """The least budget that reaches a TPOT, linear between measured budgets.

    TPOT never rises with the budget: more memory can always do what less memory did.

    Returns:
        bytes, None where no measured budget reaches it; at_most, whether a budget below the measured ones may do.
    """
    reached: list[Point] = []
    best = float("inf")
    for nbytes, tpot in points:
        best = min(best, tpot)
        reached.append((nbytes, best))
    if reached[0][1] <= target_ms:
        return {"bytes": reached[0][0], "at_most": True}
    for (small, above), (large, below) in pairwise(reached):
        if below <= target_ms:
            return {"bytes": small + (large - small) * (above - target_ms) / (above - below), "at_most": False}
    return {"bytes": None, "at_most": False}


# -- BuddyMoE: comparisons with paired intervals -----------------------------------------------------------------------

QUALITY = {  # by key of `evaluate.quality.MEASURES`: name, and whether less is better
    "perplexity_ratio": ("perplexity over lossless", True), "top1_agreement": ("top-1 agreement", False),
    "kl_nats": ("KL", True), "choice_accuracy": ("choice accuracy", False), "loaded_per_token": ("bytes", True),
}  # fmt: skip
Wanted = Literal["better", "no worse"]


@dataclass(frozen=True)
class Comparison:
    """One method less another in one measure, at one cache rate.

    low, high: 95% interval of the paired difference over documents. wanted: the bar's demand; None: no bar.
    """

    rate: str
    own: str
    other: str
    measure: str
    value: float
    low: float
    high: float
    wanted: Wanted | None

    @property
    def verdict(self) -> Literal["better", "tie", "worse"]:
        """Of `own`; a tie where the interval holds 0."""
        if self.low <= 0 <= self.high:
            return "tie"
        return "better" if (self.high < 0) == QUALITY[self.measure][1] else "worse"

    @property
    def bar(self) -> Bar:
        """Better: the worse end of the interval must be better than 0. No worse: the better end must not be worse."""
        worst, best = (self.high, self.low) if QUALITY[self.measure][1] else (-self.low, -self.high)
        text = f"cache rate {self.rate}: {QUALITY[self.measure][0]}, {self.own} less {self.other}"
        if self.wanted == "better":
            return Bar(f"{text}, worse end of 95%", worst, "<", 0.0)
        return Bar(f"{text}, better end of 95%", best, "<=", 0.0)

    def as_dict(self) -> dict[str, Any]:
        ok = None if self.wanted is None else self.bar.ok
        return asdict(self) | {"name": QUALITY[self.measure][0], "verdict": self.verdict, "ok": ok}


@metric("buddymoe-comparisons")
def buddymoe_comparisons(
    study: Study, *, section: str, wanted: Sequence[Mapping[str, Any]], against: Sequence[str]
) -> dict[str, Any]:
    """Compare every method with those of `against`, with paired intervals over documents.

    Args:
        wanted: comparisons that are bars: own, other, measures, and `is` (`better` or `no worse`).
    """
    found = list(comparisons(study.rows, section, wanted, against, study.experiment.workload.quality.options))
    study.bars += [comparison.bar for comparison in found if comparison.wanted is not None]
    return {"comparisons": [comparison.as_dict() for comparison in found]}


def comparisons(
    rows: Sequence[Row], section: str, wanted: Sequence[Mapping[str, Any]], against: Sequence[str],
    options: EvaluationOptions,
) -> Iterator[Comparison]:  # fmt: skip
    """The wanted comparisons, then those of every other method with `against`."""
    asked: dict[tuple[str, str, str], Wanted] = {
        (pair["own"], pair["other"], measure): pair["is"] for pair in wanted for measure in pair["measures"]
    }
    for (_, rate, _), of in cells_of(rows, section).items():
        qualities = {name: quality_of(row["quality"], row, options) for name, row in of.items()}
        others = [(own, other, measure) for other in against for own in of for measure in QUALITY if own != other]
        for own, other, measure in dict.fromkeys([*asked, *others]):
            if own in of and other in of:
                is_wanted = asked.get((own, other, measure))
                estimate = qualities[own].minus(qualities[other], measure)
                yield Comparison(rate, own, other, measure, estimate.value, estimate.low, estimate.high, is_wanted)


def quality_of(found: Mapping[str, Any], row: Row, options: EvaluationOptions) -> Quality:
    """The `Quality` of a `cells.score_worker` result, for paired differences."""
    sums = {name: np.asarray(values, np.float64) for name, values in found["sums"].items()}
    return Quality(row["policy"], row["lossless"], found["executor"], sums, options)


# -- near-data execution: quality, similarity of prefill and decode ----------------------------------------------------


@metric("ndp-quality")
def ndp_quality(study: Study, *, section: str, pairs: Sequence[Sequence[str]], placement: str) -> dict[str, Any]:
    """Bars on pairs of variants (prefix-split, uniform) of equal average width, and on bytes of decode steps.

    Two bars for each pair: it is not significantly worse (KL), and the text suffices to exclude a noticeable loss.
    Variants of `placement` must demand nothing while they decode.
    """
    options = study.experiment.workload.quality.options
    found = {
        outcome.policy: quality_of(outcome.quality, asdict(outcome), options)
        for cell, measured in study.ran if cell.section == section
        for outcome in measured.outcomes if outcome.quality is not None
    }  # fmt: skip
    for own, other in pairs:
        what = f"{own} less {other}"
        lower = found[own].minus(found[other], "kl_nats").low
        study.bars.append(Bar(f"KL (nats), lower end of the paired interval, {what}", lower, "<=", 0.0))
        worse = found[own].minus(found[other], "perplexity").high / found[other]["perplexity"].value
        study.bars.append(Bar(f"perplexity, upper end of the paired interval, relative, {what}", worse, "<=", 0.005))
    demanded = sum(row["bytes_demanded_decode"] for row in study.rows if row["policy"].startswith(placement))
    study.bars.append(Bar(f"bytes demanded by decode under {placement} placement", float(demanded), "<=", 0))
    return {}


_ALIKE = 24  # windows


@metric("ndp-similarity")
def ndp_similarity(study: Study) -> dict[str, Any]:
    """Cosines of a document's expert activations in prefill and those in its own and in others' decode (Figure 4).

    Mean over the first windows of held-out text, which are decoded token by token. The cosine of two count vectors
    equals that of their distributions. Uniform routing gives 1 as well: the number says that both phases agree, not
    that routing is skewed. The paper has 0.89 for Mixtral-8x7B on TruthfulQA.
    """

    def measure() -> dict[str, Any]:
        from tiermoe.cluster.jobs.evaluate.scoring import Evaluation

        options = study.experiment.workload.quality.options
        windows = Evaluation(study.base.model_dir, options).windows[:_ALIKE]
        texts = Split((), tuple(window.ids for window in windows))
        longest, out = max(map(len, texts.measure)), study.scratch / "similarity"
        recorded = record_split(study.base, texts, options.prefix, longest, 1, out, study.progress)
        routing = routing_of(recorded.header, recorded.measure)
        found = phase_cosines(routing.ids, routing.request, routing.decode, routing.experts)
        if found is None:
            raise ConfigError("the similarity of prefill and decode needs two documents", "give more --documents")
        own, other = found
        layers = [{"layer": i, "own": a, "other": b}
                  for i, (a, b) in enumerate(zip(own.tolist(), other.tolist(), strict=True))]  # fmt: skip
        count = len(recorded.measure)
        return {"own": float(own.mean()), "other": float(other.mean()), "sequences": count, "layers": layers}

    return {"similarity": study.journal.step("ndp-similarity", measure)}
