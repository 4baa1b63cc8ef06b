"""Prefetch by running a later layer's router on this layer's post-attention hidden state."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from .base import LayerSeen, PrefetchPolicy, Wanted


def predicted_experts(logits: NDArray[np.floating], top: int) -> list[int]:
    """Experts that a later router would pick, most wanted first.

    Each token votes for its `top` experts, ties by number; experts are ordered by votes, then by their
    highest logit, then by number (deterministic). This is the gate look-ahead of Mixtral-Offloading,
    AdapMoE and MoEpic (section on the speculative prefetcher), taken over all tokens of a batch.

    Args:
        logits: router logits [T, E].
        top: experts per token, at most E.
    """
    tokens, experts = logits.shape
    top = min(top, experts)
    if tokens == 1:
        return np.argsort(-logits[0], kind="stable")[:top].tolist()
    votes = picks(logits, top).sum(axis=0)
    order = np.lexsort((-logits.max(axis=0), -votes))  # stable: then by number
    return order[: np.count_nonzero(votes)].tolist()


def picks(scores: NDArray[np.floating], top: int) -> NDArray[np.bool_]:
    """Whether an expert is among the `top` greatest of its row of scores [T, E]; ties by number, lowest first.

    Args:
        top: at most E.
    """
    tokens, experts = scores.shape
    last = np.partition(scores, experts - top, axis=1)[:, experts - top, None]  # [T, 1], the top-th largest
    picked = scores >= last  # [T, E]
    if np.count_nonzero(picked) != tokens * top:  # ties at the last place: lowest numbers first
        above = scores > last
        tied = scores == last
        picked = above | (tied & (tied.cumsum(axis=1) <= top - above.sum(axis=1, keepdims=True)))
    return picked


class NextGatePrefetch(PrefetchPolicy):
    """Speculation by the gates of later layers (Mixtral-Offloading, arXiv 2312.17238, section 3.2; MoEpic; AdapMoE).

    State: none. Rule: when layer l's router has run, the routers of layers l+1..l+distance are run on layer l's input,
    and the experts that they would pick are asked for, nearer layers first (`predicted_experts`). The residual stream
    changes little from layer to layer, so near guesses are good. Cost: distance * T * H * E multiply-adds per layer.

    Mixtral-Offloading is this with LRU, distance 1 and `synchronous`.

    Args:
        layers, experts: L and E. top: experts per token.
    """

    name: ClassVar[str] = "next-gate"
    stateless: ClassVar[bool] = True
    needs_ids = False
    needs_lookahead: ClassVar[bool] = True

    def __init__(self, layers: int, experts: int, top: int, distance: int = 1, synchronous: bool = False) -> None:
        self._layers, self._experts, self._top = layers, experts, top
        self.distance, self.synchronous = distance, synchronous

    def observed(self, seen: LayerSeen) -> list[Wanted]:
        wanted: list[Wanted] = []
        self.predicted = None
        for layer in range(seen.layer + 1, min(seen.layer + 1 + self.distance, self._layers)):
            scores = seen.lookahead(layer - seen.layer)
            if scores is not None:
                if layer == seen.layer + 1:
                    self.predicted = scores
                picked = predicted_experts(scores, self._top)
                wanted += [Wanted(layer * self._experts + e, -float(len(wanted) + i)) for i, e in enumerate(picked)]
        return wanted
