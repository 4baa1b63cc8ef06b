"""Split experts in native code (`kernels/cpu/split.hpp`): their order of eviction, and what its passes have counted.

The decisions are those of `LoadOnMiss`, `split_eviction` of `Lcp` or `Lru`, and `SpeculativePrefetch` or
`NextGatePrefetch`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from math import log
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ....kernels import _cpu
from ...policies.eviction import EvictionPolicy, first_evictable

if TYPE_CHECKING:
    from .counting import CacheCounters, PassRecord


class SplitOrder(EvictionPolicy):
    """`split_eviction` of `Lcp`, or of `Lru`, with the state in native arrays.

    Args:
        layers, experts: L and E. rho, omega: of `Lcp`; None: `Lru`.
    """

    learns_use = True

    def __init__(self, layers: int, experts: int, rho: float | None = None, omega: float = 1.0) -> None:
        self._layers, self._keys = layers, layers * experts
        rate = 0.0 if rho is None else log(1 / rho) / omega
        self.handle = _cpu.split_order(layers, experts, rate, rho is None)

    def admitted(self, key: int) -> None:
        _cpu.split_moved(self.handle, [key], True)

    def used(self, keys: Iterable[int]) -> None:
        _cpu.split_used(self.handle, list(keys))

    def routed(self, keys: Sequence[int], counts: Sequence[int], tokens: int) -> None:
        _cpu.split_routed(self.handle, list(keys), list(counts), tokens)

    def removed(self, key: int) -> None:
        _cpu.split_moved(self.handle, [key], False)

    def ranked(self, keys: Sequence[int]) -> list[int]:
        """Each layer's order; the first of every layer come before the second ones."""
        values = [_cpu.split_value(self.handle, key) for key in keys]
        experts, places, taken = self._keys // self._layers, dict[int, int](), [0] * self._layers
        for at in sorted(range(len(keys)), key=lambda at: -values[at]):
            layer = keys[at] // experts
            places[keys[at]], taken[layer] = taken[layer], taken[layer] + 1
        return sorted(keys, key=places.__getitem__)

    def victims(self, count: int, evictable: Callable[[int], bool]) -> list[int]:
        """Over all slot classes, the layers' tops first."""
        found: list[int] = []
        for slot_class in range(self._layers + 1):
            found += self._leaving(slot_class, count - len(found), evictable)
        return found

    def of_class(self, slot_class: int) -> EvictionPolicy:
        return _OfClass(self, slot_class)

    def _leaving(self, slot_class: int, count: int, evictable: Callable[[int], bool]) -> list[int]:
        return first_evictable(_cpu.split_leaving(self.handle, slot_class), count, evictable) if count > 0 else []


class _OfClass(EvictionPolicy):
    """One slot class of a `SplitOrder`."""

    def __init__(self, order: SplitOrder, slot_class: int) -> None:
        self._order, self._class = order, slot_class

    def admitted(self, key: int) -> None:
        self._order.admitted(key)

    def used(self, keys: Iterable[int]) -> None:
        self._order.used(keys)

    def removed(self, key: int) -> None:
        self._order.removed(key)

    def victims(self, count: int, evictable: Callable[[int], bool]) -> list[int]:
        return self._order._leaving(self._class, count, evictable)


class Passed(NamedTuple):
    """A pass that native code has run. began_s, ended_s: of `time.perf_counter`; waited_s: for copies, in between.

    scores: predicted for the next layer's experts, the highest of any row [1, E]; None: there are none.
    """

    layer: int
    tokens: int
    keys: list[int]
    counts: list[int]
    began_s: float
    ended_s: float
    waited_s: float
    scores: NDArray[np.float32] | None


class NativeSplit:
    """The passes of one cache's layers.

    Attributes:
        handle: for `CpuKernel.split_layer`.
        on_passed: called with each pass, once a forward and before any pass that Python runs.
    """

    def __init__(self, loads: _cpu.Loads, order: SplitOrder, counters: CacheCounters, passes: PassRecord) -> None:
        layers, experts = order._layers, order._keys // order._layers
        rows = 2 * layers
        self._counters, self._passes = counters, passes
        self._moments, self._scores = np.zeros((rows, 4)), np.zeros((rows, experts), np.float32)
        self._marks = np.frombuffer(counters.pending.marks, np.uint8)
        self.handle = _cpu.split(
            loads, order.handle, self._marks.ctypes.data, passes.words.ctypes.data, len(passes.words),
            self._moments.ctypes.data, self._scores.ctypes.data, rows,
        )  # fmt: skip
        self._order = order  # both outlive the handle
        self._loads = loads
        self.on_passed: Callable[[Passed], None] | None = None

    def count(self) -> None:
        """Count what native passes have done since the last call."""
        self._counters.passed_split(*_cpu.split_take(self.handle))
        if self._passes.words[0] == 1:
            return
        uses, on_passed = self._counters.uses, self.on_passed
        for row, (layer, tokens, keys, counts) in enumerate(self._passes.take()):
            for key in keys:
                uses[key] += 1
            if on_passed is not None:
                began_s, ended_s, waited_s, scored = self._moments[row].tolist()
                scores = self._scores[row : row + 1].copy() if scored else None
                on_passed(Passed(layer, tokens, keys, counts, began_s, ended_s, waited_s, scores))
