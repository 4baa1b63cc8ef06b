"""Order of eviction: the cache owns slots, pins and bytes, an eviction policy decides which expert leaves first.

Here: LRU, LFU, random and Belady's optimum. The policy of a paper is in the paper's file; `slot_classes`
has the orders of caches with several classes of slots.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from heapq import heapify, heappop, heappush
from itertools import islice
from typing import Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from .foreign import shown
from .registry import PolicyContext, PolicyOptions, policy_base, register

SWEEP_SHARE = 0.75  # of a layer's experts: a forward that needs so many sweeps through the model
HALF_LIFE = 4096.0  # of the policies that forget, in layers run: 128 tokens of a model of 32 layers
_LAYERS = 32  # of that model
CacheOrder = Literal["lcp", "lru", "lfu", "random"]


class EvictionAnswers:
    """Checks what an eviction policy answers; each method raises TypeError or ValueError. State: the admitted keys."""

    def __init__(self, context: PolicyContext) -> None:
        self._held: set[int] = set()

    def admitted(self, answer: Any, key: int) -> None:
        self._held.add(key)

    def removed(self, answer: Any, key: int) -> None:
        self._held.discard(key)

    def ranked(self, answer: Any, keys: Sequence[int]) -> list[int]:
        found = key_list(answer)
        if sorted(found) != sorted(keys):
            raise ValueError(f"it answered {found} for the keys {list(keys)}: other keys, not another order")
        return found

    def victims(self, answer: Any, count: int, evictable: Callable[[int], bool]) -> list[int]:
        found, wanted = key_list(answer), max(0, count)
        if len(found) > wanted:
            raise ValueError(f"it answered {len(found)} keys where {wanted} were asked for")
        if len(set(found)) < len(found):
            raise ValueError(f"it answered a key twice: {found}")
        for key in found:
            if key not in self._held:
                raise ValueError(f"it answered key {key}, which has no slot")
            if not evictable(key):
                raise ValueError(f"it answered key {key}, which cannot be evicted now (see `evictable`)")
        if len(found) < wanted < len(self._held):  # asked for all, it may keep some
            left = next((key for key in self._held if key not in found and evictable(key)), None)
            if left is not None:
                raise ValueError(f"it answered {len(found)} of {wanted} keys, and could have answered key {left}")
        return found


def key_list(answer: Any) -> list[int]:
    """The keys that a policy answered. Raises TypeError: it is no list of whole numbers."""
    if not isinstance(answer, list | tuple):
        raise TypeError(f"it answered {shown(answer)}, not a list of keys")
    for key in answer:
        if not isinstance(key, int | np.integer):
            raise TypeError(f"it answered {shown(key)} as a key")
    return [int(key) for key in answer]


@policy_base("eviction", answers=EvictionAnswers)
class EvictionPolicy(ABC):
    """Order of eviction over the experts that occupy a slot.

    Attributes:
        Options: of the policy.
        counted_as: the order in which `moepic.split.observe` counts hits at every cache size; None: no such count.
        uses_maps: whether it needs the expert maps of prefetch.
        per_layer: whether it can order the experts of one layer alone, as a split cache needs.
        learns_use: whether `used` changes anything.
    """

    Options: ClassVar[type[PolicyOptions]] = PolicyOptions
    counted_as: ClassVar[CacheOrder | None] = None
    uses_maps: ClassVar[bool] = False
    per_layer: ClassVar[bool] = True
    learns_use: bool = True

    @classmethod
    def make(cls, options: Any, context: PolicyContext) -> EvictionPolicy:
        """The policy in its first state."""
        return cls()

    @abstractmethod
    def admitted(self, key: int) -> None:
        """An expert got a slot; its bytes may still be in flight."""

    @abstractmethod
    def used(self, keys: Iterable[int]) -> None:
        """A forward ran these experts, in this order."""

    def routed(self, keys: Sequence[int], counts: Sequence[int], tokens: int) -> None:
        """A layer's routing is known. Called once per layer and forward, before planning, layers in rising order.

        Args:
            keys: experts of the layer that are needed, resident or not.
            counts: tokens that picked each of them. tokens: of the forward.
        """
        return None

    def ranked(self, keys: Sequence[int]) -> list[int]:
        """These experts, resident or not, in reverse order of eviction; changes nothing."""
        return list(keys)

    @abstractmethod
    def removed(self, key: int) -> None:
        """An expert lost its slot."""

    @abstractmethod
    def victims(self, count: int, evictable: Callable[[int], bool]) -> list[int]:
        """`count` admitted keys for which `evictable` holds, or all of them, in order of eviction; changes nothing."""

    def of_class(self, slot_class: int) -> EvictionPolicy:
        """The order of eviction within one slot class (`slot_classes`)."""
        return self


def first_evictable(order: Iterable[int], count: int, evictable: Callable[[int], bool]) -> list[int]:
    """The first `count` keys of an order for which `evictable` holds; scans no further than needed."""
    return list(islice(filter(evictable, order), max(0, count)))


@register("eviction", "lru")
class Lru(EvictionPolicy):
    """Least recently used.

    State: admitted keys in order of last use; admission counts as a use. O(1) per key, `victims` O(keys passed).

    Attributes:
        order: the keys, least recently used first.
    """

    counted_as = "lru"

    def __init__(self) -> None:
        self.order: OrderedDict[int, None] = OrderedDict()

    def admitted(self, key: int) -> None:
        self.order[key] = None
        self.order.move_to_end(key)

    def used(self, keys: Iterable[int]) -> None:
        move = self.order.move_to_end
        for key in keys:
            move(key)

    def removed(self, key: int) -> None:
        del self.order[key]

    def ranked(self, keys: Sequence[int]) -> list[int]:
        position = {key: i for i, key in enumerate(self.order)}
        return sorted(keys, key=lambda key: -position.get(key, -1))

    def victims(self, count: int, evictable: Callable[[int], bool]) -> list[int]:
        return first_evictable(self.order, count, evictable)


@register("eviction", "lru-sweep")
class SweepLru(Lru):
    """LRU, but Belady's order where a prompt sweeps through the model.

    A forward of many rows needs most experts of each layer, one layer after the other. LRU then evicts what the coming
    layers need, and keeps what a whole forward has to pass for. Belady's optimum evicts the expert whose next use is
    farthest away: of the layer just run, then of those before it, then of the last layer down to the next.

    State: as `Lru`; the present layer; how many tokens picked each expert in the last sweep [L E]. Rule: while the
    present layer needs at least `share` of its experts, layers by distance of their next use, farthest first; within a
    layer least picked first, which leaves its popular experts to the decode steps; then least recently used. Else LRU.
    Cost: a sort of the admitted keys for each layer that sweeps.

    Args:
        layers, experts: L and E. share: of a layer's experts.

    Attributes:
        least: experts of a layer that sweeps.
    """

    class Options(PolicyOptions):
        kind: str = "lru-sweep"
        share: float = Field(default=SWEEP_SHARE, gt=0, le=1, description="least share of a layer's experts in a sweep")

    @classmethod
    def make(cls, options: Any, context: PolicyContext) -> SweepLru:
        return cls(context.layers, context.experts, options.share)

    def __init__(self, layers: int, experts: int, share: float = SWEEP_SHARE) -> None:
        super().__init__()
        self._layers, self._experts, self.least = layers, experts, share * experts
        self._now: int | None = None  # the layer that sweeps
        self._picked = np.zeros(layers * experts, np.int64)

    def routed(self, keys: Sequence[int], counts: Sequence[int], tokens: int) -> None:
        self._now = None
        if len(keys) >= self.least:
            self._now = keys[0] // self._experts
            first = self._now * self._experts
            self._picked[first : first + self._experts] = 0
            self._picked[keys] = counts

    def victims(self, count: int, evictable: Callable[[int], bool]) -> list[int]:
        if self._now is None:
            return first_evictable(self.order, count, evictable)
        keys = np.fromiter(self.order, np.int64, len(self.order))
        until = (keys // self._experts - self._now - 1) % self._layers  # layers in between
        order = keys[np.lexsort((self._picked[keys], -until))]  # stable: then least recently used
        return first_evictable(order.tolist(), count, evictable)


Entry = tuple[float, int, int]  # value, stamp, key
_SPARE = 64  # outdated entries that are always allowed
RESCALE_AT = 2.0**512


class ValueOrder:
    """Keys by rising value, then rising stamp, then key.

    State: a binary heap, and the current entry of each key (`present`). Outdated entries stay in the heap until they
    come up, or outnumber the current ones. `set` is O(log n) amortized per entry, `remove` O(1), `first` O(k log k) for
    k entries passed: it walks down from the heap's root.
    """

    def __init__(self) -> None:
        self.present: dict[int, Entry] = {}
        self._heap: list[Entry] = []

    def set(self, entries: Iterable[Entry]) -> None:
        """Add keys, or move them."""
        heap, present = self._heap, self.present
        for entry in entries:
            present[entry[2]] = entry
            heappush(heap, entry)
        if len(heap) > 2 * len(present) + _SPARE:
            self._heap = list(present.values())
            heapify(self._heap)

    def remove(self, key: int) -> None:
        """Raises KeyError if the key is absent."""
        del self.present[key]

    def first(self, count: int, wanted: Callable[[int], bool]) -> list[int]:
        """At most `count` keys for which `wanted` holds, lowest value first."""
        out: list[int] = []
        heap, present = self._heap, self.present
        while heap and present.get(heap[0][2]) is not heap[0]:
            heappop(heap)
        frontier = [(heap[0], 0)] if heap and count > 0 else []
        while frontier:
            entry, at = heappop(frontier)
            for child in (2 * at + 1, 2 * at + 2):
                if child < len(heap):
                    heappush(frontier, (heap[child], child))
            if present.get(entry[2]) is entry and wanted(entry[2]):
                out.append(entry[2])
                if len(out) == count:
                    break
        return out


def decay_growth(half_life: float | None) -> float:
    """What a use counts more than one a call of `used` earlier. Raises ValueError: a half-life not above 0."""
    if half_life is not None and half_life <= 0:
        raise ValueError(f"the half-life is {half_life}, not above 0")
    return 1.0 if half_life is None else 2.0 ** (1.0 / half_life)


@register("eviction", "lfu")
class Lfu(EvictionPolicy):
    """Least frequently used (MoE-Infinity's cache; the base of fMoE's).

    State: freq, the forwards that ran each expert; it outlives eviction. An admitted expert counts as used at least
    once until its first use, so that a new prefetch is not the first victim. Ties: the expert admitted or used longest
    ago.

    Decay: with half-life h, a use counts 2^(-a/h) after a more calls of `used` (one layer each). Later uses count more
    instead, which gives the same order without aging.

    O(log n) per key admitted or used, O(1) per removal, `victims` O(k log k) for k keys passed.

    Args:
        half_life: h; None: no decay.

    Attributes:
        growth: what a use counts more than one a call of `used` earlier.
    """

    class Options(PolicyOptions):
        half_life: float | None = Field(default=None, gt=0, description="layers after which a use has half its weight")

    counted_as: ClassVar[CacheOrder | None] = "lfu"

    @classmethod
    def make(cls, options: Any, context: PolicyContext) -> Lfu:
        half_life = options.half_life
        return cls(half_life / _LAYERS if half_life is not None and context.one_layer else half_life)

    def __init__(self, half_life: float | None = None) -> None:
        self.growth = decay_growth(half_life)
        self._unit = 1.0  # what a use counts now
        self._freq: dict[int, float] = {}
        self._credit: dict[int, float] = {}  # of what freq holds, what admission lent until the first use
        self._order = ValueOrder()
        self._clock = 0

    def admitted(self, key: int) -> None:
        credit = max(0.0, self._unit - self._freq.get(key, 0.0))
        self._credit[key] = credit
        freq = self._freq[key] = self._freq.get(key, 0.0) + credit
        self._clock += 1
        self._order.set(((freq, self._clock, key),))

    def used(self, keys: Iterable[int]) -> None:
        freq, credit, moved = self._freq, self._credit, list[Entry]()
        for key in keys:
            freq[key] += self._unit - credit.pop(key, 0.0)
            self._clock += 1
            moved.append((freq[key], self._clock, key))
        self._order.set(moved)
        self._unit *= self.growth
        if self._unit > RESCALE_AT:
            for counts in (freq, credit):
                for key in counts:
                    counts[key] /= self._unit
            self._unit = 1.0
            present = self._order.present
            self._order.set([(freq[key], present[key][1], key) for key in present])

    def removed(self, key: int) -> None:
        self._order.remove(key)
        self._freq[key] -= self._credit.pop(key, 0.0)

    def ranked(self, keys: Sequence[int]) -> list[int]:
        return sorted(keys, key=lambda key: -self._freq.get(key, 0.0))

    def victims(self, count: int, evictable: Callable[[int], bool]) -> list[int]:
        return self._order.first(count, evictable)


@register("eviction", "lfu-decay")
class LfuDecay(Lfu):
    """`Lfu` with a half-life of 128 tokens of a 32-layer model."""

    class Options(Lfu.Options):
        half_life: float | None = Field(
            default=HALF_LIFE, gt=0, description="layers after which a use has half its weight"
        )

    counted_as = None


_MASK = (1 << 64) - 1


@register("eviction", "random")
class RandomOrder(EvictionPolicy):
    """Evicts any expert with equal probability (RND of MoEpic's Table 1), reproducibly.

    State: the admitted experts and the number of changes. Seed and changes determine the order (SplitMix64,
    Fisher-Yates as far as needed), so each admission or removal gives a new order, and repeated calls of `victims`
    agree. O(1) per change, `victims` O(keys passed).
    """

    counted_as = "random"
    learns_use = False

    def __init__(self, seed: int = 0) -> None:
        self._seed = seed
        self._changes = 0
        self._keys: list[int] = []
        self._position: dict[int, int] = {}

    @classmethod
    def make(cls, options: Any, context: PolicyContext) -> RandomOrder:
        return cls(context.seed)

    def admitted(self, key: int) -> None:
        self._changes += 1
        self._position[key] = len(self._keys)
        self._keys.append(key)

    def used(self, keys: Iterable[int]) -> None:
        return None

    def removed(self, key: int) -> None:
        self._changes += 1
        position, last = self._position.pop(key), self._keys.pop()
        if last != key:
            self._keys[position], self._position[last] = last, position

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


class SortedEviction(EvictionPolicy):
    """Base of policies that sort the residents anew after each change.

    State: residents, and the time of their last use [L*E]. O(1) per key admitted, used or removed; the first `victims`
    after a change sorts, O(L*E + n log n) for n resident.

    Args:
        layers, experts: L and E.
    """

    per_layer = False

    def __init__(self, layers: int, experts: int) -> None:
        self._resident = np.zeros(layers * experts, bool)
        self._stamp, self._clock = np.zeros(layers * experts, np.int64), 0
        self._order: list[int] | None = None  # of the residents, first to go first; None: to be sorted

    @abstractmethod
    def _sorted(self, keys: NDArray[np.int64]) -> NDArray[np.int64]:
        """These keys, first to go first."""

    def admitted(self, key: int) -> None:
        self._resident[key] = True
        self.used([key])

    def used(self, keys: Iterable[int]) -> None:
        keys = list(keys)
        self._stamp[keys] = np.arange(self._clock + 1, self._clock + 1 + len(keys))
        self._clock += len(keys)
        self._order = None

    def removed(self, key: int) -> None:
        if not self._resident[key]:
            raise KeyError(key)
        self._resident[key], self._order = False, None

    def victims(self, count: int, evictable: Callable[[int], bool]) -> list[int]:
        if count <= 0:  # as asked wherever slots are free: no reason to sort
            return []
        if self._order is None:
            self._order = self._sorted(self._resident.nonzero()[0]).tolist()
        return first_evictable(self._order, count, evictable)


class Belady(EvictionPolicy):
    """Evicts the expert whose next use is farthest: the most hits of any policy that loads on demand (Belady, 1966).

    State: the future steps of each expert, latest first, and the resident set. `routed` O(K), `victims` O(C log C).

    Args:
        ids: keys that each of n steps will need, in order: the routing of one layer [n, K], or steps of any lengths.
    """

    def __init__(self, ids: NDArray[np.integer] | Sequence[NDArray[np.integer]]) -> None:
        self._end = len(ids)
        self._later: dict[int, list[int]] = {}
        for step in range(len(ids) - 1, -1, -1):
            for key in ids[step].tolist():
                self._later.setdefault(key, []).append(step)
        self._resident: set[int] = set()

    def routed(self, keys: Sequence[int], counts: Sequence[int], tokens: int) -> None:
        for key in keys:
            self._later[key].pop()

    def admitted(self, key: int) -> None:
        self._resident.add(key)

    def used(self, keys: Iterable[int]) -> None:
        return None

    def removed(self, key: int) -> None:
        self._resident.remove(key)

    def victims(self, count: int, evictable: Callable[[int], bool]) -> list[int]:
        going = sorted((key for key in self._resident if evictable(key)), key=lambda key: (-self._next(key), key))
        return going[: max(0, count)]

    def _next(self, key: int) -> int:
        later = self._later.get(key)
        return later[-1] if later else self._end
