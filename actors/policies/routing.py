"""Changes of a layer's routing before it is carried out: the decisions of lossy policies, and their inputs.

    routing of the model -> Rerouting.reroute(layer, ids, weights, probabilities, view) -> Rerouted -> plan, load, run

A rule is a pure function of the routing and of where this layer's experts are: NumPy, deterministic, no clock, no
device. Recorders and prefetch policies see what the model picked; planning, loading, counting and computation use the
rule's answer.

A dropped pair (token, place) keeps its place, with weight 0 and the id of a kept expert of the same token
(`drop_pairs`), so nothing is loaded for it and no kernel changes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from ..core import _core
from .foreign import shown
from .prefetch import PrefetchOptions, PrefetchPolicy
from .registry import PolicyContext, PolicyOptions, Preset, make, policy_base, register

Ids = NDArray[np.int64]
Weights = NDArray[np.float32]


def softmax(logits: NDArray[np.floating]) -> NDArray[np.float64]:
    """The probabilities of each row of logits [T, E], in float64, in an array of their own."""
    shares: NDArray[np.float64] = logits.astype(np.float64)
    shares -= shares.max(axis=1, keepdims=True)
    np.exp(shares, out=shares)
    shares /= shares.sum(axis=1, keepdims=True)
    return shares


class RerouteView(NamedTuple):  # made in each layer: a frozen dataclass takes three times as long
    """What a rule may know of the cache.

    available: [E], whether this layer's experts are resident or in flight to this GPU; of a split expert its top, or
    its bottom where the layer has no tops. free_slots: further experts of this layer that fit without evicting one of
    it. top_k: experts per token that the model picks. vacant: unoccupied slots for this layer's experts. emptied: how
    often the cache has become empty, as by `ExpertCache.flush`.

    With several shards the lead decides: available covers all shards, each expert on the shard that computes it.
    shard_of: [E], that shard; 0, the lead, also for experts of a lost shard. filling: [G], whether a shard's slots have
    never all been in use, as far as the lead knows; its own state is in `vacant`. None: there is one shard.
    """

    available: NDArray[np.bool_]
    free_slots: int
    top_k: int
    vacant: int = 0
    shard_of: NDArray[np.int64] | None = None
    filling: NDArray[np.bool_] | None = None
    emptied: int = 0


class SequenceRows(NamedTuple):
    """The rows `start` to `stop` of the next forward belong to sequence `name`.

    decode: the sequence's prefill is over; False for every row of its prompt.
    """

    name: str
    start: int
    stop: int
    decode: bool


def take_ended(over: deque[str], sequences: Sequence[SequenceRows]) -> list[str]:
    """Take the names of sequences that are over. One that this forward still carries, since it was cancelled after its
    rows were chosen, stays for the next.
    """
    carried, names = {s.name for s in sequences}, [over.popleft() for _ in range(len(over))]
    over.extend(name for name in names if name in carried)
    return [name for name in names if name not in carried]


@dataclass(frozen=True, slots=True)
class Rerouted:
    """A layer's routing as it is carried out.

    ids [T, K], weights [T, K]. substituted, dropped: pairs that run on another expert than the model's, or not at all.
    """

    ids: Ids
    weights: Weights
    substituted: int = 0
    dropped: int = 0


@register("routing", "exact")
class RoutingOptions(PolicyOptions):
    """How many of the router's experts a token uses; kind exact: all."""

    kind: str = "exact"
    min_top_k: int = Field(default=1, ge=1, description="with budget-aware: least experts that a token keeps")


@register("on_miss", "load")
class MissOptions(PolicyOptions):
    """What happens to missing experts; kind load: they are loaded."""

    kind: str = "load"

    @property
    def uses_hops(self) -> bool:
        """Whether it depends on which GPU has an expert."""
        return False

    def check(self, policy: Preset) -> None:
        if self.kind != "load" and policy.routing.kind != "exact":
            raise ValueError(f"on_miss {self.kind} is for exact routing")

    def make_prefetch(self, options: PrefetchOptions, context: PolicyContext) -> PrefetchPolicy | None:
        """The prefetch policy beside this rule."""
        made: PrefetchPolicy | None = make("prefetch", options, context)
        return made


class ReroutingAnswers:
    """Checks what a rule answers; raises TypeError or ValueError."""

    def __init__(self, context: PolicyContext) -> None:
        self._experts = context.experts

    def reroute(
        self, answer: Any, layer: int, ids: Ids, weights: Weights, probabilities: Any, view: RerouteView
    ) -> Rerouted:
        if not isinstance(answer, Rerouted):
            raise TypeError(f"it answered {shown(answer)}, not Rerouted")
        for name, array, given, kinds in (("ids", answer.ids, ids, "iu"), ("weights", answer.weights, weights, "f")):
            if not isinstance(array, np.ndarray) or array.dtype.kind not in kinds or array.shape != given.shape:
                what = f"{array.dtype} {array.shape}" if isinstance(array, np.ndarray) else shown(array)
                raise TypeError(f"it answered {name} that are {what}, not {given.dtype} {given.shape}")
        if answer.ids.size and not (answer.ids.min() >= 0 and answer.ids.max() < self._experts):
            raise ValueError(f"it answered ids that are no experts; there are 0 to {self._experts - 1}")
        if not np.isfinite(answer.weights).all():
            raise ValueError("it answered weights that are not finite")
        if not (answer.substituted or answer.dropped) and not (
            np.array_equal(answer.ids, ids) and np.array_equal(answer.weights, weights)
        ):
            raise ValueError("it answered another routing, and counts no pair as substituted or dropped")
        return Rerouted(
            np.ascontiguousarray(answer.ids, np.int64), np.ascontiguousarray(answer.weights, np.float32),
            answer.substituted, answer.dropped,
        )  # fmt: skip


@policy_base("routing", "on_miss", answers=ReroutingAnswers)
class Rerouting(ABC):
    """A rule that changes routing.

    Attributes:
        Options: of the rule.
        name: in messages.
        needs_probabilities: `reroute` needs those of the router, [T, E]; else it gets None.
        traced: recorded traces have its inputs, so that the simulated executor supports it.
    """

    Options: ClassVar[type[PolicyOptions]] = PolicyOptions
    name: ClassVar[str]
    needs_probabilities: bool = False
    traced: ClassVar[bool] = False

    @classmethod
    def make(cls, options: Any, context: PolicyContext) -> Rerouting:
        """The rule in its first state. Raises NotPrepared: an artifact of `tiermoe prepare` is missing."""
        return cls()

    def measured(self, link_bytes_per_s: float) -> None:
        """Measured link speed, for rules that adapt to it."""
        return None

    def keeps(self, ids: Ids, view: RerouteView) -> bool:
        """Whether it is known without weights and probabilities that `reroute` changes neither this routing nor the
        rule; then it need not be asked.
        """
        return False

    @abstractmethod
    def reroute(
        self, layer: int, ids: Ids, weights: Weights, probabilities: NDArray[np.floating] | None, view: RerouteView
    ) -> Rerouted:
        """Decide one layer of one forward; the arguments do not change.

        Args:
            layer: from 0 over MoE layers. probabilities: softmax of the router's logits [T, E].
            ids, weights: [T, K] as the model picked them, ids distinct in a row.
        """


class NativeRule(Rerouting):
    """A rule in native code (`actors/core/rules.hpp`), which a layer's pass calls without Python.

    Attributes:
        handle: the rule, of all layers.
    """

    def __init__(self, handle: _core.Rule) -> None:
        self.handle = handle

    def keeps(self, ids: Ids, view: RerouteView) -> bool:
        return self.handle.keeps(np.ascontiguousarray(ids, np.int64), view.available, view.vacant)

    def reroute(
        self, layer: int, ids: Ids, weights: Weights, probabilities: NDArray[np.floating] | None, view: RerouteView
    ) -> Rerouted:
        shares = None if probabilities is None else np.ascontiguousarray(probabilities, np.float32)
        found = self.handle.reroute(
            layer, np.ascontiguousarray(ids, np.int64), np.ascontiguousarray(weights, np.float32), shares,
            view.available, view.vacant, view.emptied, view.shard_of, view.filling,
        )  # fmt: skip
        return Rerouted(ids, weights) if found is None else Rerouted(*found)


def drop_pairs(ids: Ids, weights: Weights, dropped: NDArray[np.bool_], renormalise: bool) -> Rerouted:
    """The routing without the `dropped` pairs [T, K], each of which gets the id of its token's heaviest kept expert.

    Args:
        renormalise: scale each token's other weights to the old sum, as a model does that normalises over its picks.

    Raises:
        ValueError: a token would keep no expert.
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
