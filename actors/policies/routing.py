"""Changes of a layer's routing before it is carried out: what lossy policies decide, and what they are told.

    routing of the model -> Rerouting.reroute(layer, ids, weights, probabilities, view) -> Rerouted -> plan, load, run

A rule is a function of the routing and of where this layer's experts are. It is pure: NumPy, deterministic, no clock,
no device. What the model picked is what recorders and prefetch policies see; what the rule answers is what is planned,
loaded, counted and computed.

A pair (token, place) that a rule drops keeps its place: its weight becomes 0 and its id that of a kept expert of the
same token (`drop_pairs`), so nothing is loaded for it and no kernel changes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from .prefetch import PrefetchOptions, PrefetchPolicy
from .registry import PolicyContext, PolicyOptions, make, policy_base, register

if TYPE_CHECKING:
    from ..policy_settings import PolicySettings

Ids = NDArray[np.int64]
Weights = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class RerouteView:
    """What a rule may know of the cache.

    available: [E], whether this layer's experts are resident or on their way to this GPU; of a split expert its top,
    or its bottom where the layer has no tops. free_slots: further experts of this layer that could be here without one
    of it giving way. top_k: experts per token that the model picks. vacant: slots for this layer's experts that nobody
    occupies. emptied: how often the cache has become empty since it was made, as by `ExpertCache.flush`.

    Of several shards, the lead among them, which decides: available is of them all, each expert's of the shard that
    computes it. shard_of: [E], that shard; 0, the lead, also for experts of a shard that is lost. filling: [G], whether
    a shard's slots have never all been in use since it came, as far as the lead knows; of the lead `vacant` says it.
    None: there is one shard.
    """

    available: NDArray[np.bool_]
    free_slots: int
    top_k: int
    vacant: int = 0
    shard_of: NDArray[np.int64] | None = None
    filling: NDArray[np.bool_] | None = None
    emptied: int = 0


@dataclass(frozen=True, slots=True)
class Rerouted:
    """A layer's routing as it is to be carried out.

    ids [T, K], weights [T, K]. substituted, dropped: pairs that run on another expert than the model picked, and that
    do not run.
    """

    ids: Ids
    weights: Weights
    substituted: int = 0
    dropped: int = 0


@register("routing", "exact")
class RoutingOptions(PolicyOptions):
    """How many of the experts that the router picks a token uses; kind exact: all."""

    kind: str = "exact"
    narrowest: int = Field(default=1, ge=1, description="of budget-aware: experts that every token keeps")


@register("on_miss", "load")
class MissOptions(PolicyOptions):
    """What becomes of experts that are not on the device; kind load: they are loaded."""

    kind: str = "load"

    @property
    def uses_hops(self) -> bool:
        """Whether it matters to it on which GPU an expert is."""
        return False

    def check(self, policy: PolicySettings) -> None:
        if self.kind != "load" and policy.routing.kind != "exact":
            raise ValueError(f"on_miss {self.kind} is for exact routing")

    def make_prefetch(self, options: PrefetchOptions, context: PolicyContext) -> PrefetchPolicy | None:
        """The prefetch policy beside this rule."""
        made: PrefetchPolicy | None = make("prefetch", options, context)
        return made


@policy_base("routing", "on_miss")
class Rerouting(ABC):
    """A rule that changes routing.

    Attributes:
        Options: of the rule.
        name: what messages call it.
        needs_probabilities: whether it must be given those of the router, [T, E]; else it gets None.
        needs_view: whether it goes by where experts are.
        traced: whether a recorded trace holds what it goes by, so that the simulated executor can carry it out.
    """

    Options: ClassVar[type[PolicyOptions]] = PolicyOptions
    name: ClassVar[str]
    needs_probabilities: bool = False
    needs_view: ClassVar[bool] = True
    traced: ClassVar[bool] = False

    @classmethod
    def make(cls, options: Any, context: PolicyContext) -> Rerouting:
        """The rule in its first state.

        Raises:
            NotPrepared: what `tiermoe prepare` makes for it is not there.
        """
        return cls()

    def measured(self, link_bytes_per_s: float) -> None:
        """What the link carries, for rules that adapt to it."""
        return None

    @abstractmethod
    def reroute(
        self,
        layer: int,
        ids: Ids,
        weights: Weights,
        probabilities: NDArray[np.floating] | None,
        view: RerouteView,
    ) -> Rerouted:
        """Decide one layer of one forward; the arrays given are not written to.

        Args:
            layer: counted from 0 over MoE layers.
            ids, weights: [T, K] as the model picked them; the ids of a token differ.
            probabilities: softmax of the router's logits [T, E].
        """


def drop_pairs(ids: Ids, weights: Weights, dropped: NDArray[np.bool_], renormalise: bool) -> Rerouted:
    """The routing without the `dropped` pairs [T, K]; every token must keep one.

    The id of a dropped pair becomes that of its token's kept expert of greatest weight (the first of equals).

    Args:
        renormalise: scale each token's other weights so that their sum stays as it was, as a model does that
            normalises over the experts it picks; else they stay as they are.

    Raises:
        ValueError: a token would keep none.
    """
    if not dropped.any():
        return Rerouted(ids, weights)
    if dropped.all(axis=1).any():
        raise ValueError("a token keeps at least one expert")
    kept = np.where(dropped, np.float32(0), weights)
    heaviest = np.where(dropped, -np.inf, weights).argmax(axis=1)[:, None]  # [T, 1]
    if renormalise:
        whole, left = (np.cumsum(w, axis=1, dtype=np.float64)[:, -1:] for w in (weights, kept))  # [T, 1]
        scale = np.divide(whole, left, out=np.ones_like(left), where=dropped.any(axis=1, keepdims=True) & (left != 0))
        kept = (kept * scale).astype(np.float32)
    ids = np.where(dropped, np.take_along_axis(ids, heaviest, axis=1), ids)
    return Rerouted(ids, kept, dropped=int(np.count_nonzero(dropped)))


def drop_places(ids: Ids, weights: Weights, gone: Sequence[int], renormalise: bool) -> Rerouted:
    """`drop_pairs` of some places of a single token, to the last bit and faster: ids [1, K], weights [1, K].

    Raises:
        ValueError: the token would keep none.
    """
    picked, row = ids[0].tolist(), weights[0].tolist()
    kept = [0.0 if place in gone else weight for place, weight in enumerate(row)]
    staying = [place for place in range(len(row)) if place not in gone]
    if not staying:
        raise ValueError("a token keeps at least one expert")
    left = sum(kept)
    if renormalise and left:
        scale = sum(row) / left
        kept = [weight * scale for weight in kept]
    heaviest = picked[max(staying, key=row.__getitem__)]
    for place in gone:
        picked[place] = heaviest
    return Rerouted(np.array([picked], np.int64), np.array([kept], np.float32), dropped=len(gone))
