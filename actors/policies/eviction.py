"""What the cache asks of an eviction policy. The cache owns slots, pins and bytes; a policy owns the order.

Keys in the order of a value that changes: what the policies that count keep.

Least recently used.

Least frequently used.

Random replacement, the same in every run.

One eviction policy for each layer, for caches whose slots belong to layers.

Who leaves first where experts are cut in two: each layer's tops by the preset's policy, bottoms by last use.

Who leaves first where low-bit replicas have slots of their own: experts in full by the preset's policy, replicas by
last use.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from itertools import groupby, islice


class EvictionPolicy(ABC):
    """Order of leaving over the experts that occupy a slot."""

    @abstractmethod
    def admitted(self, key: int) -> None:
        """An expert was given a slot (its bytes may still be on their way)."""

    @abstractmethod
    def used(self, keys: Iterable[int]) -> None:
        """A forward ran these experts, in this order."""

    def routed(self, keys: Sequence[int], counts: Sequence[int], tokens: int) -> None:
        """A layer's routing is known, before anything is planned; once a layer and forward, layers in rising order.

        Args:
            keys: experts of the layer that are needed, held or not.
            counts: tokens that picked each of them. tokens: of the forward.
        """
        return None

    def ranked(self, keys: Sequence[int]) -> list[int]:
        """These experts, held or not, most worth keeping first; changes nothing."""
        return list(keys)

    @abstractmethod
    def removed(self, key: int) -> None:
        """An expert lost its slot."""

    @abstractmethod
    def victims(self, count: int, evictable: Callable[[int], bool]) -> list[int]:
        """At most `count` admitted keys for which `evictable` holds, first to go first; changes nothing."""

    def of_class(self, slot_class: int) -> EvictionPolicy:
        """The order of leaving within one class of slots (`Residency`); who has one order for all is asked itself."""
        return self


def first_evictable(order: Iterable[int], count: int, evictable: Callable[[int], bool]) -> list[int]:
    """At most `count` keys of an order for which `evictable` holds; it looks no further than it must."""
    return list(islice(filter(evictable, order), max(0, count)))


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


class Lru(EvictionPolicy):
    """Least recently used.

    State: admitted keys in order of last use (admission counts as a use, so that a prefetched
    expert is not the first to go). `admitted`, `used`, `removed` are O(1) per key, `victims`
    is O(count + protected keys older than the victims).
    """

    def __init__(self) -> None:
        self._order: OrderedDict[int, None] = OrderedDict()

    def admitted(self, key: int) -> None:
        self._order[key] = None
        self._order.move_to_end(key)

    def used(self, keys: Iterable[int]) -> None:
        move = self._order.move_to_end
        for key in keys:
            move(key)

    def removed(self, key: int) -> None:
        del self._order[key]

    def ranked(self, keys: Sequence[int]) -> list[int]:
        places = {key: place for place, key in enumerate(self._order)}
        return sorted(keys, key=lambda key: -places.get(key, -1))

    def victims(self, count: int, evictable: Callable[[int], bool]) -> list[int]:
        return first_evictable(self._order, count, evictable)


_RESCALE_AT = 2.0**512


class Lfu(EvictionPolicy):
    """Least frequently used (MoE-Infinity's cache; the base of fMoE's).

    State: freq, the number of forwards that ran each expert; it outlives eviction. Until its first use an admitted
    expert counts as used once at least, so that a prefetched one is not the first to go. Equal ones: the one that was
    admitted or used longest ago.

    Decay: with a half-life h, a use counts 2^(-a/h) after a further calls of `used` (each is one layer run). It is kept
    by making later uses count more, which orders the experts alike, so nothing has to be aged.

    O(log n) per key admitted or used, O(1) per removal, `victims` O(k log k) where k keys are looked at.

    Args:
        half_life: h; None: uses count for good.
    """

    def __init__(self, half_life: float | None = None) -> None:
        if half_life is not None and half_life <= 0:
            raise ValueError(f"the half-life is {half_life}, not above 0")
        self._growth = 1.0 if half_life is None else 2.0 ** (1.0 / half_life)
        self._unit = 1.0  # what a use counts now
        self._freq: dict[int, float] = {}
        self._credit: dict[int, float] = {}  # of what freq holds, what admission lent until the first use
        self._order = ValueOrder()
        self._clock = 0

    def admitted(self, key: int) -> None:
        credit = max(0.0, self._unit - self._freq.get(key, 0.0))
        self._credit[key] = credit
        self._freq[key] = self._freq.get(key, 0.0) + credit
        self._place(key, self._tick())

    def used(self, keys: Iterable[int]) -> None:
        for key in keys:
            self._freq[key] += self._unit - self._credit.pop(key, 0.0)
            self._place(key, self._tick())
        self._unit *= self._growth
        if self._unit > _RESCALE_AT:
            self._rescale()

    def removed(self, key: int) -> None:
        self._order.remove(key)
        self._freq[key] -= self._credit.pop(key, 0.0)

    def ranked(self, keys: Sequence[int]) -> list[int]:
        return sorted(keys, key=lambda key: -self._weight(key) * self._freq.get(key, 0.0))

    def victims(self, count: int, evictable: Callable[[int], bool]) -> list[int]:
        return self._order.first(count, evictable)

    def _weight(self, key: int) -> float:
        """What the frequency is multiplied with."""
        return 1.0

    def _place(self, key: int, stamp: int) -> None:
        self._order.set(key, self._weight(key) * self._freq[key], stamp)

    def _place_again(self) -> None:
        """Frequencies or weights of all have changed."""
        for key in self._order:
            self._place(key, self._order.stamp(key))

    def _tick(self) -> int:
        self._clock += 1
        return self._clock

    def _rescale(self) -> None:
        for counts in (self._freq, self._credit):
            for key in counts:
                counts[key] /= self._unit
        self._unit = 1.0
        self._place_again()


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


class PerLayer(EvictionPolicy):
    """Policies of one kind, one for each layer, that know nothing of each other.

    Who needs a slot of a layer asks that layer's (`of`), which looks at no other's experts. Keys are
    layer * experts + expert.

    Args:
        make: a policy for the experts of one layer.
    """

    def __init__(self, make: Callable[[], EvictionPolicy], layers: int, experts: int) -> None:
        self._experts = experts
        self._policies = [make() for _ in range(layers)]

    def of(self, layer: int) -> EvictionPolicy:
        """The policy of one layer; its keys are those of the whole model."""
        return self._policies[layer]

    def admitted(self, key: int) -> None:
        self._policies[key // self._experts].admitted(key)

    def used(self, keys: Iterable[int]) -> None:
        for layer, group in groupby(keys, lambda key: key // self._experts):
            self._policies[layer].used(list(group))

    def routed(self, keys: Sequence[int], counts: Sequence[int], tokens: int) -> None:
        if keys:
            self._policies[keys[0] // self._experts].routed(keys, counts, tokens)

    def removed(self, key: int) -> None:
        self._policies[key // self._experts].removed(key)

    def victims(self, count: int, evictable: Callable[[int], bool]) -> list[int]:
        """Layer after layer: between experts of different layers there is no order."""
        out: list[int] = []
        for policy in self._policies:
            out += policy.victims(count - len(out), evictable)
        return out

    def ranked(self, keys: Sequence[int]) -> list[int]:
        """Each layer's in its order; the first of all layers come before the second ones."""
        places = {
            key: place
            for layer, policy in enumerate(self._policies)
            for place, key in enumerate(policy.ranked([k for k in keys if k // self._experts == layer]))
        }
        return sorted(keys, key=places.__getitem__)


class SplitEviction(EvictionPolicy):
    """One policy for each slot class, so that none is searched for a victim of another class.

    Tops of layer l (segments l * E to (l + 1) * E - 1, which are their experts' keys): a policy of the layer's own.
    Bottoms (segments from L * E on): least recently used; they are held for the next layers, not for the next token
    (MoEpic section 3.2).

    Args:
        make: a policy for the tops of one layer. layers, experts: L, E.
    """

    def __init__(self, make: Callable[[], EvictionPolicy], layers: int, experts: int) -> None:
        self._layers, self._keys = layers, layers * experts
        self._tops, self._bottoms = PerLayer(make, layers, experts), Lru()

    def of_class(self, slot_class: int) -> EvictionPolicy:
        return self._bottoms if slot_class == self._layers else self._tops.of(slot_class)

    def admitted(self, key: int) -> None:
        self._at(key).admitted(key)

    def used(self, keys: Iterable[int]) -> None:
        segments = list(keys)
        self._tops.used([segment for segment in segments if segment < self._keys])
        self._bottoms.used([segment for segment in segments if segment >= self._keys])

    def removed(self, key: int) -> None:
        self._at(key).removed(key)

    def victims(self, count: int, evictable: Callable[[int], bool]) -> list[int]:
        """Of any class, tops first; who needs a slot of one class asks `of_class`."""
        tops = self._tops.victims(count, evictable)
        return tops + self._bottoms.victims(count - len(tops), evictable)

    def routed(self, keys: Sequence[int], counts: Sequence[int], tokens: int) -> None:
        self._tops.routed(keys, counts, tokens)

    def ranked(self, keys: Sequence[int]) -> list[int]:
        """Experts, as the policies of the tops rank them: the first of all layers before the second ones."""
        return self._tops.ranked(keys)

    def _at(self, segment: int) -> EvictionPolicy:
        return self._tops if segment < self._keys else self._bottoms


class TwoWidths(EvictionPolicy):
    """One policy for each slot class, so that none is searched for a victim of another class.

    Slots of class 0 hold experts in full, those of class 1 replicas, whose keys are their experts' and `keys` more.

    Args:
        full: orders the experts in full. keys: experts of all layers.
    """

    def __init__(self, full: EvictionPolicy, keys: int) -> None:
        self._full, self._low, self._keys = full, Lru(), keys

    def of_class(self, slot_class: int) -> EvictionPolicy:
        return self._low if slot_class else self._full

    def admitted(self, key: int) -> None:
        self._at(key).admitted(key)

    def used(self, keys: Iterable[int]) -> None:
        keys = list(keys)
        self._full.used([key for key in keys if key < self._keys])
        self._low.used([key for key in keys if key >= self._keys])

    def removed(self, key: int) -> None:
        self._at(key).removed(key)

    def victims(self, count: int, evictable: Callable[[int], bool]) -> list[int]:
        """Of any class, experts in full first; who needs a slot of one class asks `of_class`."""
        found = self._full.victims(count, evictable)
        return found + self._low.victims(count - len(found), evictable)

    def routed(self, keys: Sequence[int], counts: Sequence[int], tokens: int) -> None:
        self._full.routed(keys, counts, tokens)

    def ranked(self, keys: Sequence[int]) -> list[int]:
        return self._full.ranked(keys)

    def _at(self, key: int) -> EvictionPolicy:
        return self._full if key < self._keys else self._low
