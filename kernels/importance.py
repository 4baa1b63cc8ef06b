"""Decisions of policies in C++: those of ActiveEvict and its state, and fMoE's order of eviction.

The references, with the equations, are `actors/policies/activeevict.py` and `actors/policies/fmoe`.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from . import _cpu

lowest_products = _cpu.lowest_products  # as `policies.fmoe.lowest_products`
expect_map = _cpu.expect_map  # as `policies.fmoe.ExpertMapEviction.expect_map`, once a map was told


class NativeBudget:
    """As `activeevict.BudgetDrops`, one native call for each method."""

    def fits(self, ids: NDArray[np.int64], resident: NDArray[np.bool_], available: int) -> bool:
        return _cpu.misses_fit(np.ascontiguousarray(ids, np.int64), resident, available)

    def drop(
        self, ids: NDArray[np.int64], weights: NDArray[np.float32], resident: NDArray[np.bool_], available: int,
        min_top_k: int, renormalise: bool,
    ) -> tuple[NDArray[np.int64], NDArray[np.float32], int]:  # fmt: skip
        ids, weights = np.ascontiguousarray(ids, np.int64), np.ascontiguousarray(weights, np.float32)
        kept, scaled = np.empty_like(ids), np.empty_like(weights)
        dropped = _cpu.budget_top_k(
            ids, weights, ids.shape[1], resident, available, min_top_k, renormalise, kept, scaled
        )  # fmt: skip
        return (kept, scaled, dropped) if dropped else (ids, weights, 0)


class NativeImportance:
    """As `activeevict.ImportanceState`, one native call for each method; sums differ in the last bits.

    Attributes:
        handle: for `_core.WholeOrder`.
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
        _cpu.importance_saw(self.handle, layer, np.ascontiguousarray(ids, np.int64))

    def release(
        self, seen: int, ids: NDArray[np.int64], layer: int, logits: NDArray[np.floating],
        states: NDArray[np.uint8], evictable: NDArray[np.uint8], free: int, threshold: float, most: int,
    ) -> list[int]:  # fmt: skip
        ids, logits = np.ascontiguousarray(ids, np.int64), np.ascontiguousarray(logits, np.float32)
        return _cpu.importance_release(
            self.handle, seen, ids, layer, logits, states, evictable, free, threshold, most
        )  # fmt: skip

    def target(
        self, layer: int, logits: NDArray[np.floating], held: NDArray[np.bool_], threshold: float, most: int
    ) -> int:
        logits = np.ascontiguousarray(logits, np.float32)
        return _cpu.importance_target(self.handle, layer, logits, held, threshold, most)

    def lowest(self, count: int) -> list[int]:
        return _cpu.importance_lowest(self.handle, count)
