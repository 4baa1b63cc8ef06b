"""HOBBIT (arXiv 2411.01433), and MoE-APEX after it: experts of little importance to their tokens are loaded in low
precision, into separate slots, or not at all; prefetch uses the same thresholds.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, model_validator

from .prefetch import LayerSeen, NextGatePrefetch, PrefetchOptions, PrefetchPolicy, Wanted, predicted_experts
from .registry import PolicyContext, Preset, policy_class, register
from .routing import Ids, MissOptions, Weights, drop_pairs

Here = Callable[[int], bool]  # whether an expert of the layer is resident or on its way


@register("on_miss", "low-bit")
class LowBitOptions(MissOptions):
    """Unimportant missing experts are loaded as replicas into separate slots, by the thresholds t1 and t2 of
    `MixedPrecision`.
    """

    refusal: ClassVar[str] = "on_miss {kind} does not use low_bit's {keys}"
    kind: str = "low-bit"
    bits: Literal[1, 2, 3, 4, 8] = Field(default=4, description="width of the replicas in bits")
    share: float = Field(default=0.25, gt=0, lt=1, description="share of the expert memory for slots of replicas")
    t1: float = Field(default=0.6, ge=0, le=1)
    t2: float = Field(default=0.9, ge=0, le=1)
    guesses: bool = Field(default=True, description="next-gate prefetch loads replicas by the same thresholds")

    @model_validator(mode="after")
    def _consistent(self) -> LowBitOptions:
        if self.t1 > self.t2:
            raise ValueError(f"t1 {self.t1} is above t2 {self.t2}")
        return self

    def check(self, policy: Preset) -> None:
        super().check(policy)
        if policy.split.kind != "off" or policy.pre_evict.kind != "off":
            raise ValueError("on_miss low-bit divides the slots itself: leave split and pre_evict out")
        if policy.preload != "none":
            raise ValueError("on_miss low-bit is for caches that fill on demand: leave preload out")
        if policy.maps is not None or policy_class("eviction", policy.eviction.kind).uses_maps:
            raise ValueError("maps weigh experts in full only: on_miss low-bit takes another eviction and prefetch")
        if not self.guesses and policy.prefetch.kind != "next-gate":
            raise ValueError(f"low_bit.guesses is of prefetch next-gate, not of {policy.prefetch.kind}")

    def make_prefetch(self, options: PrefetchOptions, context: PolicyContext) -> PrefetchPolicy | None:
        """Next-gate prefetch asks for replicas, too."""
        if options.kind != "next-gate" or not self.guesses:
            return super().make_prefetch(options, context)
        return MixedGatePrefetch(
            context.layers, context.experts, options.experts(context), options.distance, options.synchronous,
            self.t1, self.t2,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class MixedPlan:
    """A layer's routing and the experts of it that run in low precision.

    ids [T, K], weights [T, K], as in `Rerouted`. low: experts that run in low precision. dropped: pairs that do not
    run.
    """

    ids: Ids
    weights: Weights
    low: frozenset[int] = frozenset()
    dropped: int = 0


def unimportance(weights: NDArray[np.floating]) -> NDArray[np.float64]:
    """Share of a token's routing weight that its more important experts have [T, K], in [0, 1) (HOBBIT section 3.2).

    With the token's experts by falling weight, ties by place, s_i = sum_{j < i} w_j / sum_j w_j. A token whose weights
    are all 0 gets zeros.

    Args:
        weights: [T, K], none negative.
    """
    order = np.argsort(-weights, axis=1, kind="stable")  # [T, K]
    falling = np.take_along_axis(weights.astype(np.float64), order, axis=1)
    before = np.cumsum(falling, axis=1) - falling
    total = falling.sum(axis=1, keepdims=True)
    scores = np.zeros(weights.shape)
    np.put_along_axis(scores, order, np.divide(before, total, out=np.zeros_like(before), where=total > 0), axis=1)
    return scores


class MixedPrecision:
    """Token-level dynamic loading (HOBBIT, section 3.2), for batches.

    With s the `unimportance` of a (token, expert) pair and s_e the least over an expert's pairs:

        in full, resident or in flight       -> runs in full
        s_e <= T1                            -> is loaded in full
        low-bit, resident or in flight       -> runs in low precision: nothing is loaded
        s_e <= T2                            -> is loaded in low precision
        else                                 -> its pairs are dropped

    All rows of an expert run at one precision, which its most important row decides; with one row this is the paper's
    rule, except that the paper drops beyond T2 even what its low-precision cache holds. State: none. Cost: O(T K log
    K).

    Args:
        t1, t2: T1 <= T2, in [0, 1]; 0.6 and 0.9 in the paper. renormalise: of tokens that lose experts, see
            `drop_pairs`.

    Raises:
        ValueError: thresholds out of order or range.
    """

    def __init__(self, t1: float, t2: float, renormalise: bool) -> None:
        if not 0 <= t1 <= t2 <= 1:
            raise ValueError(f"0 <= T1 <= T2 <= 1 does not hold for {t1} and {t2}")
        self.t1, self.t2, self._renormalise = t1, t2, renormalise

    def decide(self, ids: Ids, weights: Weights, full: Here, packed: Here) -> MixedPlan:
        """One layer of one forward; the arguments do not change.

        Args:
            ids, weights: [T, K] as the model picked them, ids distinct in a row.
            full, packed: whether an expert of the layer is there in full, or in low precision.
        """
        missing = [e for e in dict.fromkeys(ids.ravel().tolist()) if not full(e)]
        if not missing:
            return MixedPlan(ids, weights)
        scores = unimportance(weights)
        low, gone = set[int](), list[int]()
        for expert in missing:
            score = float(scores[ids == expert].min())
            if score <= self.t1:
                continue
            if score <= self.t2 or packed(expert):
                low.add(expert)
            else:
                gone.append(expert)
        if not gone:
            return MixedPlan(ids, weights, frozenset(low))
        # A token's first expert has a score of 0, so each keeps one.
        found = drop_pairs(ids, weights, np.isin(ids, gone), self._renormalise)
        return MixedPlan(found.ids, found.weights, frozenset(low), found.dropped)


class MixedGatePrefetch(NextGatePrefetch):
    """`NextGatePrefetch` with a precision for each expert (HOBBIT, arXiv 2411.01433, section 3.3; MoE-APEX after it).

    By the weights that a later router would give: an expert with `unimportance` at most T1 for some token is prefetched
    in full, up to T2 as its low-bit replica (`key + layers * experts`), else not at all.

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
            least = _least_unimportance(scores, self.top)
            for expert in predicted_experts(scores, self.top):
                if least[expert] <= self._t2:
                    packed = self._layers if least[expert] > self._t1 else 0
                    wanted.append(Wanted((layer + packed) * self._experts + expert, -float(len(wanted))))
        return wanted


def _least_unimportance(scores: NDArray[np.floating], top: int) -> NDArray[np.float64]:
    """The least of each expert [E] over the tokens that would pick it, else inf; scores: [T, E]."""
    count = min(top, scores.shape[1])
    picked = np.argsort(-scores, axis=1, kind="stable")[:, :count]  # [T, K]
    weights = np.maximum(np.take_along_axis(scores, picked, axis=1).astype(np.float64), 0.0)
    least = np.full(scores.shape[1], np.inf)
    np.minimum.at(least, picked, unimportance(weights))
    return least
