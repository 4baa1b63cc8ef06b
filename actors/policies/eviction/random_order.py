"""Random replacement, the same in every run."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from .base import EvictionPolicy

_MASK = (1 << 64) - 1


class RandomOrder(EvictionPolicy):
    """Evicts any expert, all with the same probability (RND of MoEpic's Table 1).

    State: the admitted experts and the number of changes so far, of which, with the seed, the order of leaving is drawn
    (SplitMix64 numbers and a Fisher-Yates shuffle as far as it is looked at). So it is another after each admission and
    removal, and `victims` gives the same when asked twice.

    O(1) per change, `victims` O(keys passed).

    Args:
        seed: of the order.
    """

    def __init__(self, seed: int = 0) -> None:
        self._seed = seed
        self._changes = 0
        self._keys: list[int] = []
        self._place: dict[int, int] = {}

    def admitted(self, key: int) -> None:
        self._changes += 1
        self._place[key] = len(self._keys)
        self._keys.append(key)

    def used(self, keys: Iterable[int]) -> None:
        return None

    def removed(self, key: int) -> None:
        self._changes += 1
        place, last = self._place.pop(key), self._keys.pop()
        if last != key:
            self._keys[place], self._place[last] = last, place

    def victims(self, count: int, evictable: Callable[[int], bool]) -> list[int]:
        out: list[int] = []
        if count <= 0:
            return out
        keys, moved, total = self._keys, dict[int, int](), len(self._keys)
        state = _mixed(self._seed ^ _mixed(self._changes))
        for i in range(total):
            state = _mixed(state)
            j = i + state % (total - i)
            key = keys[moved.get(j, j)]
            moved[j] = moved.get(i, i)
            if evictable(key):
                out.append(key)
                if len(out) == count:
                    break
        return out


def _mixed(number: int) -> int:
    """The next number of SplitMix64 (Steele, Lea, Flood, 2014)."""
    z = (number + 0x9E3779B97F4A7C15) & _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)
