"""Keys in the order of a value that changes: what the policies that count keep."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush

Entry = tuple[float, int, int]  # value, stamp, key
_SPARE = 64  # outdated entries that are always allowed


@dataclass
class ValueOrder:
    """Keys by rising value, then by rising stamp, then by key.

    State: a binary heap of entries, of which those that were overtaken stay until they are as many as the others, and
    the present entry of each key. `set` is O(log n) amortized, `remove` O(1) amortized, `first` O(k log k) for the k
    entries that it passes: it walks down from the heap's root and changes nothing.
    """

    _heap: list[Entry] = field(default_factory=list)
    _present: dict[int, Entry] = field(default_factory=dict)

    def __contains__(self, key: int) -> bool:
        return key in self._present

    def stamp(self, key: int) -> int:
        """KeyError: there is no such key."""
        return self._present[key][1]

    def __iter__(self) -> Iterator[int]:
        """Over the keys as they are now; they may be moved meanwhile."""
        return iter(list(self._present))

    def set(self, key: int, value: float, stamp: int) -> None:
        """Add a key, or move it."""
        entry = self._present[key] = (value, stamp, key)
        heappush(self._heap, entry)
        self._tidy()

    def remove(self, key: int) -> None:
        """KeyError: there is no such key."""
        del self._present[key]
        self._tidy()

    def first(self, count: int, wanted: Callable[[int], bool]) -> list[int]:
        """At most `count` keys for which `wanted` holds, lowest value first."""
        out: list[int] = []
        heap = self._heap
        frontier = [(heap[0], 0)] if heap and count > 0 else []
        while frontier:
            entry, at = heappop(frontier)
            for child in (2 * at + 1, 2 * at + 2):
                if child < len(heap):
                    heappush(frontier, (heap[child], child))
            if self._present.get(entry[2]) is entry and wanted(entry[2]):
                out.append(entry[2])
                if len(out) == count:
                    break
        return out

    def _tidy(self) -> None:
        if len(self._heap) > 2 * len(self._present) + _SPARE:
            self._heap = list(self._present.values())
            heapify(self._heap)
