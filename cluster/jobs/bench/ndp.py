"""What near-data execution costs in quality, how well prefill foretells decode, and whether both sides overlap."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from rich.progress import Progress

from ....actors.engine.layer import Observer
from ....actors.engine.serving.scoring import score_with
from ....actors.policies.context_ndp import PlacementOptions, PrecisionOptions
from ....actors.policy_settings import PolicySettings
from ....actors.settings import EngineSettings
from ...config import RunConfig, engine_settings
from ...local import LocalWorker
from ..evaluate.quality import EvaluationOptions, Quality
from ..evaluate.scoring import Evaluation
from ..prepare import ensure_prepared, ensure_replicas
from .metrics import Bar, Report, ratio
from .overlap import MEMORY_GBPS, SHAPE, bench_overlap
from .serving import run_config, start_worker, store_dir
from .similarity import Similarity, activation_similarity

BUDGET = "0.5"  # K = half of each layer's experts
_WIDTHS = (1, 2, 3, 4)
OWN_KEYS = ("policy", "budget")


@dataclass(frozen=True)
class Variant:
    """One row of the table. bits: None for full precision."""

    placement: Literal["context", "static"]
    precision: Literal["full", "uniform", "prefix-split"]
    bits: int | None

    @property
    def name(self) -> str:
        width = "full precision" if self.bits is None else f"{self.precision} {self.bits} bits"
        return f"{self.placement}, {width}"

    def policy(self) -> PolicySettings:
        return PolicySettings(
            name=self.name,
            lossless=self.precision == "full",
            placement=PlacementOptions(kind=self.placement),
            precision=PrecisionOptions(kind=self.precision, bits=self.bits),
        )


VARIANTS = (
    Variant("context", "full", None),
    *(Variant("context", "uniform", bits) for bits in (4, 3, 2, 1)),
    *(Variant("context", "prefix-split", bits) for bits in (3, 2)),
    *(Variant("static", "uniform", bits) for bits in (3, 2)),
    *(Variant("static", "prefix-split", bits) for bits in (3, 2)),
)


@dataclass
class NdpReport(Report):
    """The report, with what its page shows beside the rows."""

    similarity: Similarity | None = None
    strangers: Similarity | None = None  # prefill of one document against decode of the next

    def as_dict(self) -> dict[str, Any]:
        found = {"similarity": self.similarity, "strangers": self.strangers}
        return super().as_dict() | {name: asdict(value) for name, value in found.items() if value is not None}


def bench_ndp(
    model: str | None,
    options: EvaluationOptions,
    repeats: int,
    progress: Progress | None = None,
    file: str | None = None,
) -> NdpReport:
    """Measure all of it.

    Args:
        model: checkpoint folder with held-out text; None: the default model.
        options: how much text is scored.
        repeats: requests of the overlap measurement, which is of a model of its own.
        file: configuration of everything but `OWN_KEYS`.
    """
    config = run_config(model, file, policy="on-demand", budget=BUDGET)  # each variant brings a policy of its own
    base = engine_settings(config)
    store = ensure_prepared(config.model_dir, store_dir(config), progress=progress is not None)
    ensure_replicas(store, config.model_dir, _WIDTHS, config.ndp.group_size, progress=progress is not None)
    evaluation = Evaluation(config.model_dir, options)
    found, rows = _qualities(base, store, evaluation, progress)
    similarity, strangers = _similarity(config, evaluation, progress)
    overlap = bench_overlap(repeats, progress)
    report = NdpReport(
        "ndp",
        "emulated",
        rows=rows,
        bars=[
            *_no_worse(found),
            Bar("bytes demanded by decode under context placement", _decode_bytes(rows), "<=", 0),
            Bar("layer time over the longer of GPU and NDP part", overlap.over_longer.median, "<=", 1.15),
        ],
        settings={
            "config": file,
            "model": config.model_dir.name,
            "budget": BUDGET,
            "group_size": config.ndp.group_size,
            "evaluation": asdict(options),
            "overlap": {"shape": asdict(SHAPE), "modelled_memory_gbps": MEMORY_GBPS, "repeats": repeats},
        },
        shown=("case", "perplexity", "perplexity_ratio", "top1_agreement", "kl_nats", "choice_accuracy", "ndp_share"),
        similarity=similarity,
        strangers=strangers,
    )
    spread = {name: {k: v for k, v in asdict(s).items() if k != "values"} for name, s in _spreads(overlap)}
    report.settings["overlap"] |= {"layers": overlap.layers, "layer_s": overlap.layer_s, "gpu_s": overlap.gpu_s,
                                   "ndp_s": overlap.ndp_s} | spread  # fmt: skip
    return report


def _qualities(
    base: EngineSettings, store: Path, evaluation: Evaluation, progress: Progress | None
) -> tuple[dict[Variant, Quality], list[dict[str, Any]]]:
    """Each variant on the same text, and the rows of the table."""
    found: dict[Variant, Quality] = {}
    rows = []
    for variant in VARIANTS:
        with closing(_worker(base, variant, store)) as worker:
            worker.start()
            found[variant] = evaluation.measure(worker, progress)
            total = worker.stats().total()
            rows.append(
                {"case": variant.name}
                | {k: v for k, v in found[variant].as_dict().items() if k not in ("policy", "executor")}
                | {
                    "ndp_share": ratio(total.ndp_experts, total.ndp_experts + total.hits + total.misses),
                    "bytes_demanded_decode": total.bytes_demanded_decode,
                }
            )
    return found, rows


def _spreads(overlap: Any) -> list[tuple[str, Any]]:
    return [("over_longer", overlap.over_longer), ("over_sum", overlap.over_sum)]


def _worker(base: EngineSettings, variant: Variant, store: Path) -> LocalWorker:
    return LocalWorker(base.model_copy(update={"policy": variant.policy()}), store)


def _no_worse(found: dict[Variant, Quality]) -> Iterator[Bar]:
    """Prefix-split against uniform at the same average: the paper's claim, for both placements.

    Two bars each: it is not significantly worse (KL), and the text suffices to tell that it is not noticeably worse.
    """
    for placement in ("context", "static"):
        for bits in (3, 2):
            split = found[Variant(placement, "prefix-split", bits)]
            uniform = found[Variant(placement, "uniform", bits)]
            what = f"prefix-split less uniform, {placement}, {bits} bits"
            lower = split.minus(uniform, "kl_nats").low
            yield Bar(f"KL (nats), lower end of the paired interval, {what}", lower, "<=", 0.0)
            worse = split.minus(uniform, "perplexity").high / uniform["perplexity"].value
            yield Bar(f"perplexity, upper end of the paired interval, relative, {what}", worse, "<=", 0.005)


def _decode_bytes(rows: Sequence[dict[str, Any]]) -> float:
    return float(sum(row["bytes_demanded_decode"] for row in rows if row["case"].startswith("context")))


def _similarity(
    config: RunConfig, evaluation: Evaluation, progress: Progress | None
) -> tuple[Similarity, Similarity]:
    """Of each document's own prefill and decode, and of its prefill with the next document's decode."""
    resident = config.model_copy(update={"policy": "all-resident", "budget": "1.0"})
    with closing(start_worker(resident)) as worker:
        engine = worker.engine
        shape = (2, len(evaluation.windows), len(engine.layers), engine.experts)
        counts = np.zeros(shape, np.int64)  # [prefill or decode, D, L, E]
        windows = evaluation.windows
        shown = windows if progress is None else progress.track(windows, description="prefill and decode activations")
        for number, window in enumerate(shown):
            for layer in engine.layers:
                layer.observers[:] = [_counter(counts[:, number], engine)]
            score_with(worker, window.ids, evaluation.options.prefix)
    prefill, decode = counts
    return activation_similarity(prefill, decode), activation_similarity(prefill, np.roll(decode, 1, axis=0))


def _counter(counts: np.ndarray, engine: Any) -> Observer:
    """Counts [2, L, E] of one document."""

    def count(layer: int, ids: np.ndarray, weights: np.ndarray) -> None:
        phase = int(engine.cache.decode_only)
        counts[phase, layer] += np.bincount(ids.ravel(), minlength=counts.shape[-1])

    return count
