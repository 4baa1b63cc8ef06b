"""Order of eviction: the cache owns slots, pins and bytes, an eviction policy decides which expert leaves first.

Here: LRU, LFU, random and Belady's optimum. The policy of a paper is in the paper's file; `slot_classes`
has the orders of caches with several classes of slots. Orders of this repository are native code, but for the last two;
`tests/orders_reference.py` has them in Python, for reading.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from typing import Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from ..core import _core
from .foreign import is_ours, shown
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
    """

    Options: ClassVar[type[PolicyOptions]] = PolicyOptions
    counted_as: ClassVar[CacheOrder | None] = None
    uses_maps: ClassVar[bool] = False
    per_layer: ClassVar[bool] = True

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


def first_evictable(order: Iterable[int], count: int, evictable: Callable[[int], bool]) -> list[int]:
    """The first `count` keys of an order for which `evictable` holds; scans no further than needed."""
    return list(islice(filter(evictable, order), max(0, count)))


class NativeOrder(EvictionPolicy):
    """An order of eviction in native code (`kernels/cpu/order.hpp`). A cache's core calls it without Python.

    Attributes:
        handle: the order.
    """

    def __init__(self, handle: _core.NativeOrder) -> None:
        self.handle = handle

    def admitted(self, key: int) -> None:
        self.handle.admitted(key)

    def used(self, keys: Iterable[int]) -> None:
        self.handle.used(list(keys))

    def routed(self, keys: Sequence[int], counts: Sequence[int], tokens: int) -> None:
        self.handle.routed(list(keys), list(counts), tokens)

    def removed(self, key: int) -> None:
        self.handle.removed(key)

    def victims(self, count: int, evictable: Callable[[int], bool]) -> list[int]:
        """With several classes of slots those of the first class come first."""
        may = np.fromiter(map(evictable, range(self.handle.segments)), np.bool_, self.handle.segments).view(np.uint8)
        found: list[int] = []
        for slot_class in range(self.handle.classes):
            found += self.handle.victims(slot_class, count - len(found), may)
        return found


class RankingOrder(NativeOrder):
    """An order that also has a place for experts without a slot."""

    handle: _core.WholeOrder

    def ranked(self, keys: Sequence[int]) -> list[int]:
        return sorted(keys, key=lambda key: -self.handle.priority(key))


def core_order(policy: EvictionPolicy, segments: int) -> _core.Order:
    """A policy's order as the core's. segments: of the cache, or of its class of slots.

    A class from outside of this repository may have changed what it inherits, so it is called in Python.
    """
    if isinstance(policy, NativeOrder) and is_ours(type(policy)):
        return policy.handle
    return _core.PythonOrder(policy, segments)


@register("eviction", "lru")
class Lru(RankingOrder):
    """Least recently used.

    State: the keys with a slot in order of last use; admission counts as a use. O(1) per key, `victims` O(keys passed).

    Args:
        layers, experts: L and E.
    """

    counted_as = "lru"

    @classmethod
    def make(cls, options: Any, context: PolicyContext) -> Lru:
        return cls(context.layers, context.experts)

    def __init__(self, layers: int, experts: int) -> None:
        super().__init__(_core.WholeOrder("lru", layers, experts))


@register("eviction", "lru-sweep")
class SweepLru(RankingOrder):
    """LRU, but Belady's order where a prompt sweeps through the model.

    A forward of many rows needs most experts of each layer, one layer after the other. LRU then evicts what the coming
    layers need, and keeps what a whole forward has to pass for. Belady's optimum evicts the expert whose next use is
    farthest away: of the layer just run, then of those before it, then of the last layer down to the next.

    State: as `Lru`; the present layer; how many tokens picked each expert in the last sweep [L E]. Rule: while the
    present layer needs at least `share` of its experts, layers by distance of their next use, farthest first; within a
    layer least picked first, which leaves its popular experts to the decode steps; then least recently used. Else LRU.
    Cost: a sort of the keys with a slot for each layer that sweeps.

    Args:
        layers, experts: L and E. share: of a layer's experts.
    """

    class Options(PolicyOptions):
        kind: str = "lru-sweep"
        share: float = Field(default=SWEEP_SHARE, gt=0, le=1, description="least share of a layer's experts in a sweep")

    counted_as = "lru"

    @classmethod
    def make(cls, options: Any, context: PolicyContext) -> SweepLru:
        return cls(context.layers, context.experts, options.share)

    def __init__(self, layers: int, experts: int, share: float = SWEEP_SHARE) -> None:
        super().__init__(_core.WholeOrder("lru-sweep", layers, experts, least=share * experts))


def decay_growth(half_life: float | None) -> float:
    """What a use counts more than one a call of `used` earlier. Raises ValueError: a half-life not above 0."""
    if half_life is not None and half_life <= 0:
        raise ValueError(f"the half-life is {half_life}, not above 0")
    return 1.0 if half_life is None else 2.0 ** (1.0 / half_life)


@register("eviction", "lfu")
class Lfu(RankingOrder):
    """Least frequently used (MoE-Infinity's cache; the base of fMoE's).

    State: freq, the forwards that ran each expert; it outlives eviction. An admitted expert counts as used at least
    once until its first use, so that a new prefetch is not the first victim. Ties: the expert admitted or used longest
    ago.

    Decay: with half-life h, a use counts 2^(-a/h) after a more calls of `used` (one layer each). Later uses count more
    instead, which gives the same order without aging.

    O(log n) per key admitted or used, O(1) per removal, `victims` O(k log k) for k keys passed.

    Args:
        layers, experts: L and E. half_life: h; None: no decay.
    """

    class Options(PolicyOptions):
        half_life: float | None = Field(default=None, gt=0, description="layers after which a use has half its weight")

    counted_as: ClassVar[CacheOrder | None] = "lfu"

    @classmethod
    def make(cls, options: Any, context: PolicyContext) -> Lfu:
        half_life = options.half_life
        if half_life is not None and context.one_layer:
            half_life /= _LAYERS
        return cls(context.layers, context.experts, half_life)

    def __init__(self, layers: int, experts: int, half_life: float | None = None) -> None:
        super().__init__(_core.WholeOrder("lfu", layers, experts, growth=decay_growth(half_life)))


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
