"""Prefetch policies of the systems that the papers compare with: MoE-Infinity, ProMoE and Pre-gated MoE."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from .prefetch import (
    LayeredPrefetch,
    LayerSeen,
    NextGatePrefetch,
    NextLayerOptions,
    PrefetchOptions,
    PrefetchPolicy,
    Span,
    Wanted,
    most_probable,
    predicted_experts,
    ranked,
)
from .registry import NotPrepared, PolicyContext, register

_EPSILON = 1e-6


class MatrixCollection:
    """Expert activation matrices of at most `capacity` finished requests (MoE-Infinity's EAMC).

    When full, the matrix nearest to the new one is replaced, so that the spread stays. (The paper clusters its history
    off line by K-means and takes one matrix per cluster; this online rule is ours.)

    Attributes:
        counts: [C, L, E] int64. unit: the same with rows of length 1 [C, L, E], zero rows stay zero.
    """

    def __init__(self, layers: int, experts: int, capacity: int = 128) -> None:
        if capacity < 1:
            raise ValueError(f"capacity is {capacity}, one matrix at least must fit")
        self.capacity, self._size = capacity, 0
        self._counts = np.zeros((capacity, layers, experts), np.int64)
        self._unit = np.zeros((capacity, layers, experts), np.float32)

    def __len__(self) -> int:
        return self._size

    @property
    def counts(self) -> NDArray[np.int64]:
        return self._counts[: self._size]

    @property
    def unit(self) -> NDArray[np.float32]:
        return self._unit[: self._size]

    def add(self, counts: NDArray[np.int64]) -> None:
        """Add a request's matrix [L, E], unless it is empty."""
        if not counts.any():
            return
        place = self._size
        if place == self.capacity:
            place = int(row_similarity(unit_rows(counts), self.unit).sum(axis=1).argmax())
        else:
            self._size += 1
        self._counts[place], self._unit[place] = counts, unit_rows(counts)


@dataclass(eq=False)
class _Request:
    """counts: its matrix so far [L, E]. cosines: of its rows with each stored matrix's [C, L] at `version` of the
    collection.
    """

    counts: NDArray[np.int64]
    cosines: NDArray[np.float32]
    version: int


@register("prefetch", "activation-matrix")
class ActivationMatrixPrefetch(LayeredPrefetch):
    """Request-level expert activation matrices (MoE-Infinity, arXiv 2401.14361, section 4).

    State: the EAM M [L, E] of each running request, counts of (token, expert) pairs over its iterations, and a
    collection of the EAMs of finished requests.

    Rule: the predicted EAM is the stored one at the least distance
        d(M1, M2) = 1 - 1/L * sum_l cos(M1[l] / sum(M1[l]), M2[l] / sum(M2[l]))
    (0 for a row without counts). In each later layer l the experts with the greatest share p = M[l,e] / sum(M[l]) are
    prefetched with priority (p + epsilon) * (1 - (l - l_now) / L). Before a request's first layer those most popular
    over the whole collection are. We stop after `top` experts of each of `distance` layers; the paper continues until
    its buffers are full, where further prefetches only evict each other.

    Cost: O(C * E) per layer and sequence, as only one row changes; C * L * E * 12 bytes. The paper evicts by this
    matrix too; fMoE's baseline (its section 6.5) has LFU.

    Args:
        layers, experts: L and E. top: experts per layer. distance: layers ahead.
        collection: to begin with; None: an empty one of the default capacity. learn: add finished requests to it.
        synchronous: the forward waits for its prefetches, as MoE-Infinity's does.
    """

    name: ClassVar[str] = "activation-matrix"

    def __init__(
        self,
        layers: int,
        experts: int,
        top: int,
        distance: int = 3,
        synchronous: bool = False,
        collection: MatrixCollection | None = None,
        learn: bool = True,
    ) -> None:
        super().__init__(layers, experts, top, distance, synchronous)
        self.collection = MatrixCollection(layers, experts) if collection is None else collection
        self._learn = learn
        self._requests: dict[str, _Request] = {}
        self._version = 0  # of the collection

    def begin_forward(self, spans: Sequence[Span]) -> list[Wanted]:
        wanted: list[Wanted] = []
        for span in spans:
            request = self._requests.get(span.sequence)
            if request is None:
                counts = np.zeros((self._layers, self._experts), np.int64)
                self._requests[span.sequence] = _Request(counts, self._compare(counts), self._version)
                if len(self.collection):
                    wanted += self._wanted(self.collection.counts.sum(axis=0), -1)
            else:
                wanted += self._predicted(request, -1)
        return ranked(wanted)

    def observed(self, seen: LayerSeen) -> list[Wanted]:
        wanted: list[Wanted] = []
        for span in seen.spans:
            request, layer = self._requests[span.sequence], seen.layer
            request.counts[layer] += np.bincount(seen.ids[span.start : span.stop].ravel(), minlength=self._experts)
            if request.version == self._version:
                row = request.counts[layer] / np.linalg.norm(request.counts[layer])
                request.cosines[:, layer] = self.collection.unit[:, layer] @ row.astype(np.float32)
            wanted += self._predicted(request, layer)
        return ranked(wanted)

    def end(self, sequence: str) -> None:
        request = self._requests.pop(sequence, None)
        if request is not None and self._learn:
            self.collection.add(request.counts)
            self._version += 1

    def _nearest(self, request: _Request) -> int | None:
        """The stored matrix that a running request matches; the first of equals, None if there is none."""
        if request.version != self._version:
            request.cosines, request.version = self._compare(request.counts), self._version
        return int(request.cosines.sum(axis=1).argmax()) if len(self.collection) else None

    def _predicted(self, request: _Request, now: int) -> list[Wanted]:
        place = self._nearest(request)
        return [] if place is None else self._wanted(self.collection.counts[place], now)

    def _wanted(self, counts: NDArray[np.int64], now: int) -> list[Wanted]:
        wanted = []
        for layer in range(now + 1, min(now + 1 + self.distance, self._layers)):
            row = counts[layer]
            share, near = row / max(1, row.sum()), 1.0 - (layer - now) / self._layers
            for e in most_probable(share, self.top):
                wanted.append(Wanted(layer * self._experts + e, (float(share[e]) + _EPSILON) * near))
        return wanted

    def _compare(self, counts: NDArray[np.int64]) -> NDArray[np.float32]:
        return row_similarity(unit_rows(counts), self.collection.unit)


def unit_rows(counts: NDArray[np.int64]) -> NDArray[np.float32]:
    """[..., E] with rows of length 1; zero rows stay zero."""
    norms = np.linalg.norm(counts, axis=-1, keepdims=True)
    return np.divide(counts, norms, out=np.zeros(counts.shape), where=norms > 0).astype(np.float32)


def row_similarity(unit: NDArray[np.float32], stored: NDArray[np.float32]) -> NDArray[np.float32]:
    """Cosines of the rows of one matrix [L, E] with those of the stored ones [C, L, E]: [C, L]."""
    return np.einsum("le,cle->cl", unit, stored)


_FLOOR = 1e-4  # probabilities below it are alike: fp16 traces hold little more


@dataclass(frozen=True, eq=False)
class Predictor:
    """Layer l's input -> scores of layer l + stride's experts: two linear maps with a ReLU between.

    Shapes: mean, scale [E]; w1 [E, D], b1 [D]; w2 [D, E], b2 [E].
    """

    mean: NDArray[np.float32]
    scale: NDArray[np.float32]
    w1: NDArray[np.float32]
    b1: NDArray[np.float32]
    w2: NDArray[np.float32]
    b2: NDArray[np.float32]

    def __call__(self, probabilities: NDArray[np.floating]) -> NDArray[np.float32]:
        """Scores [T, E] from the router's probabilities [T, E]."""
        x = (features(probabilities) - self.mean) / self.scale
        return np.maximum(x @ self.w1 + self.b1, 0.0) @ self.w2 + self.b2


def features(probabilities: NDArray[np.floating]) -> NDArray[np.float32]:
    """Log-probabilities, floored [T, E]."""
    return np.log(np.maximum(np.asarray(probabilities, np.float32), np.float32(_FLOOR)))


@register("prefetch", "stride")
class StridePrefetch(PrefetchPolicy):
    """Stride prefetching with learned predictors (ProMoE, arXiv 2410.22134, sections 4 and 5).

    State: the predictors, fixed. Rule: after layer l's router, layer l's predictor scores the experts of layer l +
    stride for each token, and the experts in a top-k of these scores are prefetched (`predicted_experts`).

    Input: ProMoE's predictors see the layer's hidden state. Ours see the router's log-probabilities at layer l, a
    linear image of that state in E dimensions, which traces hold at two bytes a number.

    Cost: 2 * T * E * D multiply-adds per layer; (L - stride) * 2 * E * D * 4 bytes.

    Args:
        predictors: of layers 0..L-stride-1. experts: E. top: experts per token.
        stride: the distance that they were trained for.
    """

    class Options(PrefetchOptions):
        @property
        def needs(self) -> frozenset[str]:
            return frozenset({"predictors"})

    name: ClassVar[str] = "stride"
    stateless: ClassVar[bool] = True
    needs_ids = False
    needs_probabilities: ClassVar[bool] = True

    @classmethod
    def make(cls, options: Any, context: PolicyContext) -> PrefetchPolicy:
        if context.predictors is None:
            raise NotPrepared("needs predictors of stride prefetch", "see `tiermoe prepare --help`")
        top = options.experts(context)
        return cls(context.predictors, context.experts, top, options.distance, options.synchronous)

    def __init__(
        self, predictors: Sequence[Predictor], experts: int, top: int, stride: int, synchronous: bool = False
    ) -> None:
        self._predictors, self._experts, self._top = predictors, experts, top
        self.distance, self.synchronous = stride, synchronous

    def observed(self, seen: LayerSeen) -> list[Wanted]:
        if seen.layer >= len(self._predictors) or seen.probabilities is None:
            return []
        base = (seen.layer + self.distance) * self._experts
        picked = predicted_experts(self._predictors[seen.layer](seen.probabilities), self._top)
        return [Wanted(base + e, -float(place)) for place, e in enumerate(picked)]


@dataclass(frozen=True)
class TrainingOptions:
    """width: D. epochs, batch: passes over the rows, and rows of a step. rate: Adam's. seed: of weights and order."""

    width: int = 64
    epochs: int = 12
    batch: int = 128
    rate: float = 2e-3
    seed: int = 0


def train_predictor(
    probabilities: NDArray[np.floating], ids: NDArray[np.integer], options: TrainingOptions | None = None
) -> Predictor:
    """Fit one predictor, deterministically.

    Loss: cross-entropy of the scores' softmax with the distribution that gives each picked expert 1/K. Adam with beta
    0.9, 0.999.

    Args:
        probabilities: of layer l's router [N, E]. ids: the experts that layer l + stride's router picked [N, K].

    Raises:
        ValueError: there are no rows, or the two differ in length.
    """
    options = TrainingOptions() if options is None else options
    rows, experts = probabilities.shape
    if not rows or len(ids) != rows:
        raise ValueError(f"{rows} rows of probabilities and {len(ids)} of ids cannot train a predictor")
    x = features(probabilities)
    mean, scale = x.mean(axis=0), x.std(axis=0) + np.float32(1e-3)
    x = (x - mean) / scale
    target = np.zeros((rows, experts), np.float32)
    np.put_along_axis(target, ids.astype(np.int64), np.float32(1 / ids.shape[1]), axis=1)
    rng = np.random.default_rng(options.seed)
    width = options.width
    w = [
        rng.normal(0, np.sqrt(2 / experts), (experts, width)).astype(np.float32), np.zeros(width, np.float32),
        rng.normal(0, np.sqrt(1 / width), (width, experts)).astype(np.float32), np.zeros(experts, np.float32),
    ]  # fmt: skip
    first, second = [np.zeros_like(p) for p in w], [np.zeros_like(p) for p in w]
    for step, chosen in enumerate(_batches(rows, options, rng), start=1):
        size = options.rate * np.sqrt(1 - 0.999**step) / (1 - 0.9**step)
        for p, m, v, grad in zip(w, first, second, _gradients(w, x[chosen], target[chosen]), strict=True):
            m += 0.1 * (grad - m)
            v += 0.001 * (grad * grad - v)
            p -= np.float32(size) * m / (np.sqrt(v) + 1e-8)
    return Predictor(mean, scale, *w)


def _batches(rows: int, options: TrainingOptions, rng: np.random.Generator) -> Iterator[NDArray[np.int64]]:
    for _ in range(options.epochs):
        order = rng.permutation(rows)
        for start in range(0, rows, options.batch):
            yield order[start : start + options.batch]


def _gradients(
    w: Sequence[NDArray[np.float32]], x: NDArray[np.float32], target: NDArray[np.float32]
) -> list[NDArray[np.float32]]:
    w1, b1, w2, b2 = w
    hidden = np.maximum(x @ w1 + b1, 0.0)
    scores = hidden @ w2 + b2
    scores -= scores.max(axis=1, keepdims=True)
    picked = np.exp(scores)
    error = (picked / picked.sum(axis=1, keepdims=True) - target) / len(x)
    back = (error @ w2.T) * (hidden > 0)
    return [x.T @ back, back.sum(axis=0), hidden.T @ error, error.sum(axis=0)]


@dataclass(frozen=True, eq=False)
class PreGate:
    """Layer l's input -> scores of layer l + 1's experts: a linear map. Shapes: weight [E, H], bias [E]."""

    weight: NDArray[np.float32]
    bias: NDArray[np.float32]

    def __call__(self, hidden: NDArray[np.floating]) -> NDArray[np.float32]:
        """Scores [T, E] of hidden states [T, H]."""
        scores: NDArray[np.float32] = np.asarray(hidden, np.float32) @ self.weight.T + self.bias
        return scores


@register("prefetch", "pre-gated")
class PreGatedPrefetch(NextGatePrefetch):
    """Pre-gated MoE's predictor (ISCA 2024, arXiv 2308.12066, section 4) beside an unchanged model.

    State: the gates, fixed, which the executor holds on its device. Rule: after layer l's router, layer l's gate, a
    trained linear map on layer l's input, scores layer l + 1's experts, and the experts in a top-k of these scores are
    prefetched (`predicted_experts`). The first layer's experts are loaded on demand. Cost: T * H * E multiply-adds per
    layer; (L - 1) * E * (H + 1) * 4 bytes.

    Difference: in Pre-gated MoE layer l + 1 runs the gate's choice, after fine-tuning of the whole model. Here the
    model's own router decides, and tokens are exact. `tiermoe prepare --gates` trains only the gates, towards the
    output of layer l + 1's router, from its weights on.
    """

    class Options(NextLayerOptions):
        whole_layers: ClassVar[bool] = False  # of its base

        @property
        def needs(self) -> frozenset[str]:
            return frozenset({"gates"})

    name: ClassVar[str] = "pre-gated"
    needs_gates: ClassVar[bool] = True
