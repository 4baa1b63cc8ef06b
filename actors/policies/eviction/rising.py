"""Keys in the order of a value that only rises: a change costs nothing until somebody looks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush, heapreplace

Entry = tuple[float, int, int]  # value, stamp, key
_SPARE = 64  # entries of removed keys that are always allowed


@dataclass
class RisingOrder:
    """Keys by rising value, then by the order in which they were added.

    State: the value and stamp of each key, and a heap with one entry for each, whose value may be from before the last
    rises: it is then too low, so the true lowest is found by renewing entries at the root until one is up to date. An
    entry is renewed at most once for all rises since it was last looked at. Removed keys leave their entry behind until
    it comes up, or until such entries are the most.

    `raise_to` is O(1), `add` and `remove` O(log n) amortized, `first` O(log n) for each key found, passed or renewed.
    """

    _present: dict[int, tuple[float, int]] = field(default_factory=dict)
    _stamp: int = 0
    # What looking changes is no part of the state.
    _heap: list[Entry] = field(default_factory=list, compare=False)
    looked_at: int = field(default=0, compare=False)

    def __contains__(self, key: int) -> bool:
        return key in self._present

    def add(self, key: int, value: float) -> None:
        """A key that is not there yet."""
        self._stamp += 1
        self._present[key] = (value, self._stamp)
        heappush(self._heap, (value, self._stamp, key))
        if len(self._heap) > 2 * len(self._present) + _SPARE:
            self._heap = [(value, stamp, key) for key, (value, stamp) in self._present.items()]
            heapify(self._heap)

    def raise_to(self, key: int, value: float) -> None:
        """A value that is not below the present one; of a key that is not there: nothing happens."""
        found = self._present.get(key)
        if found is not None:
            self._present[key] = (value, found[1])

    def remove(self, key: int) -> None:
        """KeyError: there is no such key."""
        del self._present[key]

    def first(self, count: int, wanted: Callable[[int], bool]) -> list[int]:
        """At most `count` keys for which `wanted` holds, lowest value first."""
        out: list[int] = []
        if count <= 0:
            return out
        heap, present = self._heap, self._present
        taken: list[Entry] = []
        while heap:
            self.looked_at += 1
            entry = heap[0]
            found = present.get(entry[2])
            if found is None or found[1] != entry[1]:
                heappop(heap)
            elif found[0] != entry[0]:
                heapreplace(heap, (*found, entry[2]))
            else:
                taken.append(heappop(heap))
                if wanted(entry[2]):
                    out.append(entry[2])
                    if len(out) == count:
                        break
        for entry in taken:
            heappush(heap, entry)
        return out
