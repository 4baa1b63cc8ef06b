"""Prefetch by small predictors, one per layer, trained on recorded routing (ProMoE)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from .base import LayerSeen, PrefetchPolicy, Wanted
from .next_gate import predicted_experts

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


class StridePrefetch(PrefetchPolicy):
    """Stride prefetching with learned predictors (ProMoE, arXiv 2410.22134, sections 4 and 5).

    State: the predictors, fixed. Rule: when layer l's router has run, layer l's predictor scores the experts of layer
    l + stride for each token, and the experts that a top-k of these scores picks are asked for, by votes and then by
    their highest score (`predicted_experts`). So every layer from `stride` on is asked for once, `stride` layers ahead.

    Input: ProMoE feeds its predictors the layer's hidden state. These get the router's log-probabilities at layer l, a
    linear image of that state in E dimensions: it is what routing traces hold at two bytes a number, and the same on
    every executor. They see less than ProMoE's do.

    Cost: 2 * T * E * D multiply-adds per layer; (L - stride) * 2 * E * D * 4 bytes.

    Args:
        predictors: of layers 0..L-stride-1. experts: E. top: experts per token.
        stride: the distance that they were trained for.
    """

    name: ClassVar[str] = "stride"
    stateless: ClassVar[bool] = True
    needs_ids = False
    needs_probabilities: ClassVar[bool] = True

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
    """Fit one predictor; the same rows and options give the same weights.

    Loss: cross-entropy of the scores' softmax with the distribution that gives each picked expert 1/K. Adam with
    beta 0.9, 0.999.

    Args:
        probabilities: of layer l's router [N, E]. ids: the experts that layer l + stride's router picked [N, K].

    Raises:
        ValueError: no rows, or as many ids rows as there are not.
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
