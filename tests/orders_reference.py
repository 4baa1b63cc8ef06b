"""Orders of eviction that the product keeps in native code alone, in Python."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np
from activeevict_reference import ImportanceState
from numpy.typing import NDArray

from tiermoe.actors.policies.eviction import RESCALE_AT, EvictionPolicy, decay_growth, first_evictable
from tiermoe.actors.policies.fmoe import probability_of
from tiermoe.actors.policies.registry import PolicyContext, PolicyOptions
from tiermoe.actors.policies.slot_classes import make_eviction

_LEAST = 2.0**-150  # probability: below every positive one in float32


def lowest(values: NDArray[np.float64], stamps: NDArray[np.int64], present: NDArray[np.bool_]) -> list[int]:
    """The present keys by rising value, then rising stamp, then key."""
    keys = present.nonzero()[0]
    return keys[np.lexsort((stamps[keys], values[keys]))].tolist()


def reference_of(options: PolicyOptions, context: PolicyContext) -> EvictionPolicy:
    """The order of a cache of whole experts, in Python."""
    if options.kind.startswith("expert-map"):
        return MapOrder(context.layers, context.experts, options.half_life)  # type: ignore[attr-defined]
    if options.kind == "importance":
        given = options.model_dump(exclude={"kind"})
        return ImportanceOrder(context.layers, context.experts, **given, top_k=context.top_k)
    return make_eviction(options, context)


class MapOrder(EvictionPolicy):
    """`fmoe.ExpertMapEviction`."""

    def __init__(self, layers: int, experts: int, half_life: float | None = None) -> None:
        keys = layers * experts
        self.growth = decay_growth(half_life)
        self._unit = 1.0  # what a use counts now
        self._freq, self.probabilities = np.zeros(keys), np.ones(keys)
        self._stamp, self._resident = np.zeros(keys, np.int64), np.zeros(keys, np.bool_)
        self._credit = [0.0] * keys  # of what freq holds, what admission lent until the first use
        self._clock, self._told, self._experts = 0, False, experts

    def admitted(self, key: int) -> None:
        credit = self._credit[key] = max(0.0, self._unit - self._freq[key])
        self._freq[key] += credit
        self._clock += 1
        self._stamp[key], self._resident[key] = self._clock, True

    def used(self, keys: Iterable[int]) -> None:
        freq, credit, stamp, clock = self._freq, self._credit, self._stamp, self._clock
        for key in keys:
            freq[key] += self._unit - credit[key]
            credit[key] = 0.0
            clock += 1
            stamp[key] = clock
        self._clock = clock
        self._unit *= self.growth
        if self._unit > RESCALE_AT:
            self._freq /= self._unit
            self._credit = [lent / self._unit for lent in self._credit]
            self._unit = 1.0

    def removed(self, key: int) -> None:
        if not self._resident[key]:
            raise KeyError(key)
        self._freq[key] -= self._credit[key]
        self._credit[key], self._resident[key] = 0.0, False

    def victims(self, count: int, evictable: Callable[[int], bool]) -> list[int]:
        value = self.probabilities * self._freq
        return first_evictable(lowest(value, self._stamp, self._resident), count, evictable)

    def expect(self, keys: NDArray[np.integer], probabilities: NDArray[np.floating]) -> None:
        known = keys < len(self.probabilities)
        keys, probabilities = keys[known], probabilities[known]
        if not self._told and len(keys):
            self._told = True
            self.probabilities[:] = max(_LEAST, sum(probabilities.tolist()) / len(keys))
        self.probabilities[keys] = np.maximum(probabilities, _LEAST, dtype=np.float64)

    def expect_map(
        self, keys: NDArray[np.int32], priorities: NDArray[np.float32], now: int, experts: int
    ) -> None:
        self.expect(keys, probability_of(priorities, keys // experts, now))


class ImportanceOrder(EvictionPolicy):
    """`activeevict.ImportanceEviction`."""

    def __init__(
        self, layers: int, experts: int, alpha: float = 0.5, gamma: float = 0.97, window: int = 128, top_k: int = 1
    ) -> None:
        self.state = ImportanceState(layers, experts, alpha, gamma, window, top_k)
        self._resident, self._stamp, self._clock = self.state.resident, self.state.stamp, 0

    def admitted(self, key: int) -> None:
        self._resident[key] = True
        self._clock += 1
        self._stamp[key] = self._clock

    def used(self, keys: Iterable[int]) -> None:
        stamp, clock = self._stamp, self._clock
        for key in keys:
            clock += 1
            stamp[key] = clock
        self._clock = clock

    def removed(self, key: int) -> None:
        if not self._resident[key]:
            raise KeyError(key)
        self._resident[key] = False

    def victims(self, count: int, evictable: Callable[[int], bool]) -> list[int]:
        return first_evictable(self.state.lowest(len(self._resident)), count, evictable)
