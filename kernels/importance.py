"""Orders of eviction in C++: ActiveEvict's state and decisions, and fMoE's order.

The references, with the equations, are `actors/policies/activeevict.py` and `actors/policies/fmoe`.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from . import _cpu

lowest_products = _cpu.lowest_products  # as `policies.fmoe.lowest_products`


class NativeImportance:
    """As `activeevict.ImportanceState`, one native call for each method; sums differ in the last bits."""

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
        self._made = _cpu.importance(layers, experts, window, top_k, alpha, *addresses)

    def saw(self, layer: int, ids: NDArray[np.int64]) -> None:
        _cpu.importance_saw(self._made, layer, np.ascontiguousarray(ids, np.int64))

    def target(
        self, layer: int, logits: NDArray[np.floating], held: NDArray[np.bool_], threshold: float, most: int
    ) -> int:
        logits = np.ascontiguousarray(logits, np.float32)
        return _cpu.importance_target(self._made, layer, logits, held, threshold, most)

    def lowest(self, count: int) -> list[int]:
        return _cpu.importance_lowest(self._made, count)
