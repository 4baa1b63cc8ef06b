"""Near-data execution (context-aware placement with mixed precision): quality, similarity of prefill and decode."""

from __future__ import annotations

from typing import Annotated, Any

from tiermoe.cluster.jobs.bench import options
from tiermoe.cluster.jobs.bench.experiment import Experiment, Grid, Served, Variant, Workload, variants
from tiermoe.cluster.jobs.bench.metrics import Bar
from tiermoe.cluster.jobs.bench.page import Figure, Panel, table
from tiermoe.cluster.jobs.bench.run import Study
from tiermoe.cluster.jobs.bench.serving import Split, record_split
from tiermoe.cluster.jobs.evaluate.quality import EvaluationOptions
from tiermoe.cluster.simulate.statistics import phase_cosines, routing_of
from tiermoe.errors import ConfigError

from .buddymoe import quality_of

_PAIRS = tuple(
    (f"{placement}, prefix-split {bits} bits", f"{placement}, uniform {bits} bits")
    for placement in ("context", "static") for bits in (3, 2)
)  # fmt: skip


def _variant(placement: str, kind: str, bits: int) -> Variant:
    changes: dict[str, Any] = {"precision": {"kind": kind, "bits": bits}}
    if placement == "static":
        changes["placement"] = {"kind": "static"}
    return Variant(f"{placement}, {kind} {bits} bits", "context-ndp-3bit", changes)


_SECTIONS = (
    Served("quality",
           variants(Variant("context, full precision", "context-ndp-full"),
                    *(_variant("context", "uniform", bits) for bits in (4, 3, 2, 1)),
                    *(_variant("context", "prefix-split", bits) for bits in (3, 2)),
                    *(_variant("static", kind, bits) for kind in ("uniform", "prefix-split") for bits in (3, 2))),
           links="none", serve=False, score="all"),
)  # fmt: skip
_TABLES = {
    "quality": table([("placement, precision", "{case}"),
                      ("perplexity", "{perplexity:.3f} ({perplexity_low:.3f} to {perplexity_high:.3f})"),
                      ("over lossless",
                       "{perplexity_ratio:.4f} ({perplexity_ratio_low:.4f} to {perplexity_ratio_high:.4f})"),
                      ("top-1 agreement",
                       "{top1_agreement:.2%} ({top1_agreement_low:.2%} to {top1_agreement_high:.2%})"),
                      ("mean KL (nats)", "{kl_nats:.5f} ({kl_nats_low:.5f} to {kl_nats_high:.5f})"),
                      ("multiple choice",
                       "{choice_accuracy:.1%} ({choice_accuracy_low:.1%} to {choice_accuracy_high:.1%})"),
                      ("experts on NDP", "{ndp_share:.1%}")]),
    "similarity": table([("layer", "{layer}"), ("own", "{own:.3f}"), ("another's", "{other:.3f}")],
                        source="similarity.layers"),
}  # fmt: skip
_FIGURES = {
    "ndp-similarity.png": Figure((Panel(source="similarity.layers", kind="bar", x="layer", y="own", executor="emulated",
                                        from_zero=True, mean=True, x_label="MoE layer",
                                        y_label="cosine similarity of prefill and decode"),), size=(6.4, 3.2)),
}  # fmt: skip


def _judge(study: Study) -> None:
    """Bars on pairs of variants (prefix-split, uniform) of equal average width, and on bytes of decode steps.

    Two bars for each pair: it is not significantly worse (KL), and the text suffices to exclude a noticeable loss.
    Variants of context placement must demand nothing while they decode.
    """
    options = study.experiment.workload.quality
    found = {
        outcome.policy: quality_of(outcome.quality, outcome.policy, outcome.lossless, options)
        for cell, measured in study.ran if cell.section == "quality"
        for outcome in measured.outcomes if outcome.quality is not None
    }  # fmt: skip
    for own, other in _PAIRS:
        what = f"{own} less {other}"
        lower = found[own].minus(found[other], "kl_nats").low
        study.bars.append(Bar(f"KL (nats), lower end of the paired interval, {what}", lower, "<=", 0.0))
        worse = found[own].minus(found[other], "perplexity").high / found[other]["perplexity"].value
        study.bars.append(Bar(f"perplexity, upper end of the paired interval, relative, {what}", worse, "<=", 0.005))
    demanded = sum(row["bytes_demanded_decode"] for row in study.rows if row["policy"].startswith("context"))
    study.bars.append(Bar("bytes demanded by decode under context placement", float(demanded), "<=", 0))


_ALIKE = 24  # windows


def _similarity(study: Study) -> dict[str, Any]:
    """Cosines of a document's expert activations in prefill and those in its own and in others' decode (Figure 4).

    Mean over the first windows of held-out text, which are decoded token by token. The cosine of two count vectors
    equals that of their distributions. Uniform routing gives 1 as well: the number says that both phases agree, not
    that routing is skewed. The paper has 0.89 for Mixtral-8x7B on TruthfulQA.
    """

    def measure() -> dict[str, Any]:
        from tiermoe.cluster.jobs.evaluate.scoring import Evaluation

        options = study.experiment.workload.quality
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

    found: dict[str, Any] = study.journal.step("ndp-similarity", measure)
    return found


def _after(study: Study) -> dict[str, Any]:
    _judge(study)
    return {"similarity": _similarity(study)}


def experiment(
    documents: options.Documents = None, windows: Annotated[int, options.count("Windows of each document.")] = 2
) -> Experiment:
    """Quality of near-data execution by precision and placement; similarity of prefill and decode."""
    return Experiment(
        name="ndp", title="Near-data execution: quality, similarity", own_keys=("policy", "quality", "budget"),
        sections=_SECTIONS, workload=Workload(quality=EvaluationOptions(documents=documents, windows=windows)),
        grid=Grid(("0.5",), (None,)), after=_after,  # K = half of each layer's experts
        shown=("case", "perplexity", "perplexity_ratio", "top1_agreement", "kl_nats", "choice_accuracy", "ndp_share"),
        tables=_TABLES, figures=_FIGURES,
    )  # fmt: skip
