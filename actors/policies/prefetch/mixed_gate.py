"""Prefetch by later layers' routers, in full what is likely to matter and in low precision what is not (HOBBIT)."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from ..mixed_precision import unimportance
from .base import LayerSeen, Wanted
from .next_gate import NextGatePrefetch, predicted_experts


class MixedGatePrefetch(NextGatePrefetch):
    """`NextGatePrefetch` with a precision for each guess (HOBBIT, arXiv 2411.01433, section 3.3; MoE-APEX after it).

    The weights that a later router would give stand in for those that it will give: a guess whose `unimportance` is
    at most T1 for some token is asked for in full, one up to T2 as its low-bit replica (`key + layers * experts`), and
    one above not at all.

    Args:
        layers, experts, top, distance, synchronous: as `NextGatePrefetch`. t1, t2: as `MixedPrecision`.
    """

    name: ClassVar[str] = "mixed-gate"
    lookahead_softmax: ClassVar[bool] = True

    def __init__(
        self, layers: int, experts: int, top: int, distance: int, synchronous: bool, t1: float, t2: float
    ) -> None:
        super().__init__(layers, experts, top, distance, synchronous)
        self._t1, self._t2 = t1, t2

    def observed(self, seen: LayerSeen) -> list[Wanted]:
        wanted: list[Wanted] = []
        self.predicted = None
        for layer in range(seen.layer + 1, min(seen.layer + 1 + self.distance, self._layers)):
            scores = seen.lookahead(layer - seen.layer)
            if scores is None:
                continue
            if layer == seen.layer + 1:
                self.predicted = scores
            least = _least_unimportance(scores, self._top)
            for expert in predicted_experts(scores, self._top):
                if least[expert] <= self._t2:
                    packed = self._layers if least[expert] > self._t1 else 0
                    wanted.append(Wanted((layer + packed) * self._experts + expert, -float(len(wanted))))
        return wanted


def _least_unimportance(scores: NDArray[np.floating], top: int) -> NDArray[np.float64]:
    """Of each expert [E] the least over the tokens that would pick it; inf where none would. scores: [T, E]."""
    count = min(top, scores.shape[1])
    picked = np.argsort(-scores, axis=1, kind="stable")[:, :count]  # [T, K]
    weights = np.maximum(np.take_along_axis(scores, picked, axis=1).astype(np.float64), 0.0)
    least = np.full(scores.shape[1], np.inf)
    np.minimum.at(least, picked, unimportance(weights))
    return least
