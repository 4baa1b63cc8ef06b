"""Decisions of policies in C++ (`cpu/importance.cpp`): those of ActiveEvict and its state, and fMoE's probabilities.

The equations are in `actors/policies/activeevict.py` and `actors/policies/fmoe`; tests/activeevict_reference.py is the
same in NumPy.
"""

from __future__ import annotations

import functools

import numpy as np
from numpy.typing import NDArray

from . import _cpu

expect_map = _cpu.expect_map  # a map's probabilities by key, from its priorities (`fmoe.probability_of`)


def misses_fit(ids: NDArray[np.int64], resident: NDArray[np.bool_], available: int) -> bool:
    """Whether all missing experts of a routing [T, K] fit into `available` slots. resident: [E]."""
    return _cpu.misses_fit(np.ascontiguousarray(ids, np.int64), resident, available)


def drop_beyond(
    ids: NDArray[np.int64], weights: NDArray[np.float32], resident: NDArray[np.bool_], available: int,
    min_top_k: int, renormalise: bool,
) -> tuple[NDArray[np.int64], NDArray[np.float32], int]:  # fmt: skip
    """The routing without the pairs beyond the widths of `activeevict.BudgetAwareTopK`, and how many they are.

    Args:
        ids, weights: the model's distinct picks [T, K], and their routing weights.
        resident: of the layer's experts [E], here or in flight. available: slots for others.
    """
    ids, weights = np.ascontiguousarray(ids, np.int64), np.ascontiguousarray(weights, np.float32)
    kept, scaled = np.empty_like(ids), np.empty_like(weights)
    dropped = _cpu.budget_top_k(
        ids, weights, ids.shape[1], resident, available, min_top_k, renormalise, kept, scaled
    )  # fmt: skip
    return (kept, scaled, dropped) if dropped else (ids, weights, 0)


class ImportanceState:
    """u, p-hat and the residents as arrays, and what follows from them (ActiveEvict, equations 8 to 17).

    Attributes:
        values: u [L, E]. predicted: p-hat [L, E]. resident: [L*E]. stamp: number of the last use [L*E].
        handle: for `_core.WholeOrder`.

    Args:
        layers, experts: L and E. alpha: weight of h in s. gamma, window: of u. top_k: K.
    """

    def __init__(self, layers: int, experts: int, alpha: float, gamma: float, window: int, top_k: int) -> None:
        self.values = np.zeros((layers, experts))
        self.predicted = np.zeros((layers, experts))
        self.resident = np.zeros(layers * experts, np.bool_)
        self.stamp = np.zeros(layers * experts, np.int64)
        powers = gamma ** np.arange(2 * window, dtype=np.float64)
        picked, seen = np.zeros((layers, window, top_k), np.int64), np.zeros(layers, np.int64)
        arrays = (powers, self.values, picked, seen, self.predicted, self.resident, self.stamp)
        self._held = arrays  # whose addresses the state has
        addresses = [array.ctypes.data for array in arrays]
        self.handle = _cpu.importance(layers, experts, window, top_k, alpha, *addresses)

    def saw(self, layer: int, ids: NDArray[np.int64]) -> None:
        """Tokens of a layer picked these distinct experts: ids [n, K]."""
        _cpu.importance_saw(self.handle, layer, np.ascontiguousarray(ids, np.int64))

    def release(
        self, seen: int, ids: NDArray[np.int64], layer: int, logits: NDArray[np.floating],
        states: NDArray[np.uint8], evictable: NDArray[np.uint8], free: int, threshold: float, most: int,
    ) -> list[int]:  # fmt: skip
        """`saw` of the layer `seen`, `target` of `layer`, and the evictable residents of least s that free its slots.

        Args:
            states, evictable: as the core has them (`engine.cache.residency`) [L*E]. free: slots that are free.
        """
        ids, logits = np.ascontiguousarray(ids, np.int64), np.ascontiguousarray(logits, np.float32)
        return _cpu.importance_release(
            self.handle, seen, ids, layer, logits, states, evictable, free, threshold, most
        )  # fmt: skip

    def target(
        self, layer: int, logits: NDArray[np.floating], held: NDArray[np.bool_], threshold: float, most: int
    ) -> int:
        """Predict a layer from its router's logits [T, E]; the slots of its release target (`PreEviction`)."""
        logits = np.ascontiguousarray(logits, np.float32)
        return _cpu.importance_target(self.handle, layer, logits, held, threshold, most)

    def lowest(self, count: int) -> list[int]:
        """The first `count` residents by rising s, then least recently used, then by key."""
        return _cpu.importance_lowest(self.handle, count)


def release_slots(
    logits: NDArray[np.floating], held: NDArray[np.bool_], top_k: int, threshold: float, most: int
) -> int:
    """`ImportanceState.target` of a layer by itself. held: experts that have a slot [E]."""
    return _layer(len(held), top_k).target(0, logits, held, threshold, most)


@functools.cache
def _layer(experts: int, top_k: int) -> ImportanceState:
    return ImportanceState(1, experts, 0.0, 1.0, 1, top_k)
