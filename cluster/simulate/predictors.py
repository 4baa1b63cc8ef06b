"""From traces: trained stride predictors, profiles of experts, and recall of prefetch policies by distance."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ...actors.policies.baselines import Predictor, train_predictor
from ...actors.policies.buddymoe.buddies import ExpertProfile, RoutingCounts, renormalised, warmup_weights
from ...actors.policies.prefetch import PrefetchPolicy, Wanted
from ...actors.store.artifacts import PredictorsOf, read_predictors
from ...errors import TraceError
from .recorded import RecordedForward, RecordedLayer, see, spans_of
from .trace import Iteration, Request, TraceHeader

TRAINING_ROWS = 20_000  # of predictors, at most


def train_predictors(
    header: TraceHeader,
    requests: Iterable[Request],
    stride: int,
    advanced: Callable[[], None] | None = None,
) -> list[Predictor]:
    """Train predictors of layers 0..L-stride-1 on a trace's first `TRAINING_ROWS` rows, which are in memory.

    Args:
        advanced: called after each layer.

    Raises:
        TraceError: no layer is that far ahead, or there are no rows.
    """
    if not 0 < stride < header.layers:
        raise TraceError(f"no layer of {header.layers} is {stride} ahead", "give a smaller stride")
    probabilities, ids, rows = [], [], 0
    for request in requests:
        for step in request.iterations:
            probabilities.append(step.probabilities)
            ids.append(step.ids)
            rows += len(step.tokens)
        if rows >= TRAINING_ROWS:
            break
    if not rows:
        raise TraceError("the trace has no rows to train on", "record a longer trace")
    seen, picked = np.concatenate(probabilities)[:TRAINING_ROWS], np.concatenate(ids)[:TRAINING_ROWS]
    found = []
    for layer in range(header.layers - stride):
        found.append(train_predictor(seen[:, layer], picked[:, layer + stride]))
        if advanced is not None:
            advanced()
    return found


def routing_profile(
    header: TraceHeader,
    requests: Iterable[Request],
    warmup_steps: int = 0,
    warmup_weight: float = 1.0,
    advanced: Callable[[], None] | None = None,
) -> ExpertProfile:
    """A profile of the experts by a trace's routing, without likeness of outputs.

    Args:
        warmup_steps: first tokens of a request, which count `warmup_weight`. advanced: called after each request.

    Raises:
        TraceError: pairs of so many experts take more than `TraceHeader.refuse_pairs` allows.
    """
    header.refuse_pairs(4, "take a policy without buddies")  # two sums, and their copies
    layers = [RoutingCounts(header.experts) for _ in range(header.layers)]
    for request in requests:
        row = 0
        for step in request.iterations:
            counts = warmup_weights(np.arange(row, row + len(step.tokens)), warmup_steps, warmup_weight)
            row += len(step.tokens)
            for layer, routing in enumerate(layers):
                routing.add(step.ids[:, layer], renormalised(step.weights[:, layer]), counts)
        if advanced is not None:
            advanced()
    return ExpertProfile(
        np.stack([layer.pairs.activations for layer in layers]),
        np.stack([layer.pairs.binary for layer in layers]),
        np.stack([layer.pairs.weighted for layer in layers]),
        np.stack([layer.entropies for layer in layers]),
        None,
    )


def load_predictors(path: Path, header: TraceHeader, stride: int) -> list[Predictor]:
    """Read predictors from a file.

    Raises:
        TraceError: the file is missing, malformed, not finite, or of another model or stride.
    """
    return read_predictors(path, predictors_for(header, stride))


def predictors_for(header: TraceHeader, stride: int) -> PredictorsOf:
    """The model and stride of predictors trained on a trace."""
    return PredictorsOf(header.fingerprint, header.layers, header.experts, stride)


MakePolicy = Callable[[int], PrefetchPolicy | None]  # distance -> a fresh policy that asks that far ahead


@dataclass(frozen=True, eq=False)
class Recall:
    """Recall of one source at one distance d."""

    source: str
    distance: int
    overall: float  # over all predictions; 0 without predictions
    per_layer: tuple[float, ...]  # share of layer l's experts in the first K wanted at layer l - d [L]; NaN: none
    predictions: int  # (token, layer) pairs


def split(requests: Sequence[Request], share: float) -> tuple[list[Request], list[Request]]:
    """The first `share` of the requests, for learning, and the rest, for measuring."""
    cut = int(len(requests) * share + 0.5)
    return list(requests[:cut]), list(requests[cut:])


def recall(
    header: TraceHeader,
    sources: Mapping[str, MakePolicy],
    distances: Iterable[int],
    learn: Sequence[Request],
    measure: Sequence[Request],
    advanced: Callable[[], None] | None = None,
) -> list[Recall]:
    """Recall of each source at each distance, on the decode iterations of `measure` (one token each).

    Policies see all of `learn` first and continue to learn from `measure`, as in serving.

    Args:
        sources: give None for distances that they lack.
        advanced: called after each source and distance.
    """
    table = []
    for name, make in sources.items():
        for distance in distances:
            policy = make(distance)
            if policy is not None:
                found, asked = _measure(header, policy, distance, learn, measure)
                table.append(_recall(name, distance, found, asked, header.top_k))
            if advanced is not None:
                advanced()
    return table


def shown(
    policy: PrefetchPolicy, request: Request, header: TraceHeader
) -> Iterator[tuple[Iteration, int, Sequence[Wanted]]]:
    """Show a policy a request as in serving: each iteration and layer with the experts that the policy wants."""
    name = f"trace-{request.number}"
    for step in request.iterations:
        parts = [(name, step)]
        spans, forward = spans_of(parts), RecordedForward(parts)
        policy.begin_forward(spans)
        for layer in range(header.layers):
            yield step, layer, policy.observed(see(layer, spans, RecordedLayer(layer, forward)))
    policy.end(name)


def _measure(
    header: TraceHeader, policy: PrefetchPolicy, distance: int, learn: Sequence[Request], measure: Sequence[Request]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Experts found [L] and predictions made [L]."""
    experts, top = header.experts, header.top_k
    found, asked = np.zeros(header.layers, np.int64), np.zeros(header.layers, np.int64)
    for request in [*learn, *measure]:
        counted = request.number >= measure[0].number if measure else False
        for step, layer, wanted in shown(policy, request, header):
            target = layer + distance
            if not (counted and step.decode and target < header.layers):
                continue
            first = [want.key % experts for want in wanted if want.key // experts == target][:top]
            found[target] += len(set(first) & set(step.ids[0, target].tolist()))
            asked[target] += 1
    return found, asked


def _recall(name: str, distance: int, found: NDArray[np.int64], asked: NDArray[np.int64], top: int) -> Recall:
    per_layer = [float(f) / (top * a) if a else float("nan") for f, a in zip(found, asked, strict=True)]
    predictions = int(asked.sum())
    overall = float(found.sum()) / (top * predictions) if predictions else 0.0
    return Recall(name, distance, overall, tuple(per_layer), predictions)
