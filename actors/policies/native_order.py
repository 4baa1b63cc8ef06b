"""Orders of eviction that are kept in native code (`kernels/cpu/order.hpp`): the core reads them in place."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal

import numpy as np

from ..core import _core
from .eviction import EvictionPolicy

Kind = Literal["lru", "lru-sweep", "lfu", "expert-map", "importance", "worth"]
_NUMBERS: dict[Kind, int] = {  # `Order::Kind`
    "lru": 0, "lru-sweep": 1, "lfu": 2, "expert-map": 3, "importance": 4, "worth": 5,
}  # fmt: skip


def whole_order(kind: Kind, layers: int, experts: int, **given: Any) -> _core.WholeOrder:
    """An order of whole experts. given: of the kind, see `_core.WholeOrder`."""
    return _core.WholeOrder(_NUMBERS[kind], layers, experts, **given)


class NativeOrder(EvictionPolicy):
    """An order of eviction in native code. A cache's core takes its handle, and calls it without Python.

    Attributes:
        handle: the order.

    Args:
        slot_class: whose victims.
    """

    def __init__(self, handle: _core.NativeOrder, slot_class: int = 0) -> None:
        self.handle, self._class = handle, slot_class

    def admitted(self, key: int) -> None:
        self.handle.admitted(key)

    def used(self, keys: Iterable[int]) -> None:
        self.handle.used(list(keys))

    def routed(self, keys: Sequence[int], counts: Sequence[int], tokens: int) -> None:
        self.handle.routed(list(keys), list(counts), tokens)

    def removed(self, key: int) -> None:
        self.handle.removed(key)

    def victims(self, count: int, evictable: Callable[[int], bool]) -> list[int]:
        may = np.fromiter(map(evictable, range(self.handle.segments)), np.bool_, self.handle.segments)
        return self.handle.victims(self._class, count, may.view(np.uint8))
