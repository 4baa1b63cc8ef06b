"""The orders of eviction in Python: what the native ones are compared with. The product's classes say what each is."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Sequence
from itertools import groupby
from math import inf, log
from typing import Any

import numpy as np
from activeevict_reference import ImportanceState
from numpy.typing import NDArray
from reference import of_class

from tiermoe.actors.policies.eviction import SWEEP_SHARE, EvictionPolicy, decay_growth, first_evictable
from tiermoe.actors.policies.fmoe import probability_of
from tiermoe.actors.policies.moepic.split import OMEGA, RHO
from tiermoe.actors.policies.registry import PolicyContext
from tiermoe.actors.policies.slot_classes import make_eviction

_LEAST = 2.0**-150  # probability: below every positive one in float32
RESCALE_AT = 2.0**512


class Lru(EvictionPolicy):
    """`eviction.Lru`. order: the keys, least recently used first."""

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


class SweepLru(Lru):
    """`eviction.SweepLru`."""

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


class ValueOrder:
    """Keys by rising value, then rising stamp, then key. present: the entry of each key."""

    def __init__(self) -> None:
        self.present: dict[int, Entry] = {}

    def set(self, entries: Iterable[Entry]) -> None:
        """Add keys, or move them."""
        self.present |= {entry[2]: entry for entry in entries}

    def remove(self, key: int) -> None:
        """Raises KeyError if the key is absent."""
        del self.present[key]

    def first(self, count: int, wanted: Callable[[int], bool]) -> list[int]:
        """At most `count` keys for which `wanted` holds, lowest value first."""
        return first_evictable([key for *_, key in sorted(self.present.values())], count, wanted)


class Lfu(EvictionPolicy):
    """`eviction.Lfu`."""

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


class Lcp(EvictionPolicy):
    """`moepic.Lcp`. experts: of a layer."""

    def __init__(self, experts: int, rho: float = RHO, omega: float = OMEGA) -> None:
        self._rate, self._experts = log(1 / rho) / omega, experts
        self._count: dict[int, int] = {}  # mu
        self._value: dict[int, float] = {}
        self._order, self._stamp = ValueOrder(), 0
        self._before, self._tokens = 0, 0  # tokens before the present forward, and with it
        self._last = inf  # layer that was routed last: whatever comes first begins a forward

    def routed(self, keys: Sequence[int], counts: Sequence[int], tokens: int) -> None:
        if not keys:
            return
        layer = keys[0] // self._experts
        if layer <= self._last:
            self._before = self._tokens
        self._last = layer
        self._tokens = max(self._tokens, self._before + tokens)
        age, picked, values, entry_of = self._tokens * self._rate, self._count, self._value, self._order.present.get
        raised = list[Entry]()
        for key, count in zip(keys, counts, strict=True):
            mu = picked[key] = picked.get(key, 0) + count
            value = values[key] = log(mu) + age
            if (entry := entry_of(key)) is not None:
                raised.append((value, entry[1], key))
        if raised:
            self._order.set(raised)

    def admitted(self, key: int) -> None:
        now = self._tokens * self._rate  # the value of one pick
        self._stamp += 1
        self._order.set(((max(now, self._value.get(key, -inf)), self._stamp, key),))

    def used(self, keys: Iterable[int]) -> None:
        return None

    def removed(self, key: int) -> None:
        self._order.remove(key)

    def victims(self, count: int, evictable: Callable[[int], bool]) -> list[int]:
        return self._order.first(count, evictable)

    def ranked(self, keys: Sequence[int]) -> list[int]:
        return sorted(keys, key=lambda key: -self._value.get(key, -inf))


class Worth(EvictionPolicy):
    """`worth.WorthOrder`. State: the residents of each layer by last use, and those refused."""

    def __init__(self, layers: int, experts: int) -> None:
        self._experts = experts
        self._held: list[dict[int, None]] = [{} for _ in range(layers)]
        self._share = 0
        self._worths: NDArray[np.float64] | None = None
        self._uses: NDArray[np.int64] | None = None
        self._refused: dict[int, None] = {}
        self.layer = 0

    @property
    def refused(self) -> Collection[int]:
        return self._refused.keys()

    def bind(self, slots: int, worths: NDArray[np.float64]) -> None:
        self._share, self._worths = slots // len(self._held), worths

    def prompt(self, uses: NDArray[np.int64] | None) -> None:
        self._uses = uses

    def admitted(self, key: int) -> None:
        self._held[key // self._experts][key] = None

    def used(self, keys: Iterable[int]) -> None:
        for key in keys:
            held = self._held[key // self._experts]
            del held[key]
            held[key] = None

    def removed(self, key: int) -> None:
        del self._held[key // self._experts][key]
        self._refused.pop(key, None)

    def routed(self, keys: Sequence[int], counts: Sequence[int], tokens: int) -> None:
        if keys:
            self.layer = keys[0] // self._experts

    def refuse(self, key: int) -> None:
        if key in self._held[key // self._experts]:
            self._refused[key] = None

    def admit(self, key: int) -> None:
        self._refused.pop(key, None)

    def settled(self) -> frozenset[int]:
        found = list[int]()
        for layer, held in enumerate(self._held):
            if layer != self.layer:
                found += held if len(held) <= self._share else self._rank(layer, held)[len(held) - self._share :]
        return frozenset(found)

    def victims(self, count: int, evictable: Callable[[int], bool]) -> list[int]:
        if count <= 0:
            return []
        out = [key for key in self._refused if evictable(key)][:count]
        held, share, now = self._held, self._share, self.layer
        if len(out) < count and len(held[now]) >= share:
            out += self._least(now, count - len(out), evictable, ())
        if len(out) < count:
            fullest = sorted(range(len(held)), key=lambda layer: -len(held[layer]))
            for layer in fullest:
                if layer != now and len(held[layer]) > share and len(out) < count:
                    out += self._least(layer, min(count - len(out), len(held[layer]) - share), evictable, out)
            for layer in fullest:
                if len(out) == count:
                    break
                out += self._least(layer, count - len(out), evictable, out)
        return out

    def _least(
        self, layer: int, count: int, evictable: Callable[[int], bool], taken: Collection[int]
    ) -> list[int]:
        """The first `count` of a layer's residents to go, without those refused and `taken`."""
        held, refused = self._held[layer], self._refused
        there = [key for key in held if key not in refused and key not in taken and evictable(key)]
        return self._rank(layer, there)[:count]

    def _rank(self, layer: int, keys: Iterable[int]) -> list[int]:
        """Residents of a layer, given by last use: those of least worth first."""
        base = layer * self._experts
        if self._uses is not None and self._uses[layer].any():
            uses = self._uses[layer]
            return sorted(keys, key=lambda key: uses[key - base])
        if self._worths is None:
            return list(keys)
        worths = self._worths[layer]
        return sorted(keys, key=lambda key: (worths[key - base], key))


class PerLayer(EvictionPolicy):
    """One independent policy for each layer: slots belong to layers. Keys are layer * experts + expert.

    Args:
        make: a policy for the experts of one layer.
    """

    def __init__(self, make: Callable[[], EvictionPolicy], layers: int, experts: int) -> None:
        self._experts = experts
        self._policies = [make() for _ in range(layers)]

    def of_class(self, slot_class: int) -> EvictionPolicy:
        """The policy of one layer; keys are those of the whole model."""
        return self._policies[slot_class]

    def admitted(self, key: int) -> None:
        self._policies[key // self._experts].admitted(key)

    def used(self, keys: Iterable[int]) -> None:
        for layer, group in groupby(keys, self._experts.__rfloordiv__):
            self._policies[layer].used(list(group))

    def routed(self, keys: Sequence[int], counts: Sequence[int], tokens: int) -> None:
        if keys:
            self._policies[keys[0] // self._experts].routed(keys, counts, tokens)

    def removed(self, key: int) -> None:
        self._policies[key // self._experts].removed(key)

    def victims(self, count: int, evictable: Callable[[int], bool]) -> list[int]:
        """Layer after layer: there is no order between layers."""
        out: list[int] = []
        for policy in self._policies:
            out += policy.victims(count - len(out), evictable)
        return out

    def ranked(self, keys: Sequence[int]) -> list[int]:
        """Each layer's order; the first of every layer come before the second ones."""
        position = {
            key: i
            for layer, policy in enumerate(self._policies)
            for i, key in enumerate(policy.ranked([k for k in keys if k // self._experts == layer]))
        }
        return sorted(keys, key=position.__getitem__)


class TwoPools(EvictionPolicy):
    """Two pools of slots with separate orders. Keys below `keys` leave by the preset's policy, the others by last use:
    bottoms of split experts, which serve the next layers and not the next token (MoEpic section 3.2), or low-bit
    replicas.

    Args:
        first: orders the keys below `keys`. second_class: slot class of the others.
    """

    def __init__(self, first: EvictionPolicy, keys: int, second_class: int) -> None:
        self._first, self._second = first, Lru()
        self._keys, self._second_class = keys, second_class
        self._last_used = self._second.order  # which most changes go to without another call
        self.routed, self.ranked = first.routed, first.ranked  # type: ignore[method-assign]

    def of_class(self, slot_class: int) -> EvictionPolicy:
        return self._second if slot_class == self._second_class else of_class(self._first, slot_class)

    def admitted(self, key: int) -> None:
        if key < self._keys:
            self._first.admitted(key)
        else:
            self._last_used[key] = None

    def used(self, keys: Iterable[int]) -> None:
        move, least = self._last_used.move_to_end, self._keys
        for key in keys:
            if key >= least:
                move(key)
        self._first.used([key for key in keys if key < least])

    def removed(self, key: int) -> None:
        if key < self._keys:
            self._first.removed(key)
        else:
            del self._last_used[key]

    def victims(self, count: int, evictable: Callable[[int], bool]) -> list[int]:
        """Over both pools, the first pool first; `of_class` gives the order of one slot class."""
        found = self._first.victims(count, evictable)
        return found + self._second.victims(count - len(found), evictable)


def split_eviction(make: Callable[[], EvictionPolicy], layers: int, experts: int) -> TwoPools:
    """For split experts: one policy for the tops of each layer (slot class l), last use for bottoms (class L)."""
    return TwoPools(PerLayer(make, layers, experts), layers * experts, layers)


def lowest(values: NDArray[np.float64], stamps: NDArray[np.int64], present: NDArray[np.bool_]) -> list[int]:
    """The present keys by rising value, then rising stamp, then key."""
    keys = present.nonzero()[0]
    return keys[np.lexsort((stamps[keys], values[keys]))].tolist()


def reference_of(
    options: Any, context: PolicyContext, *, split: bool = False, low_bit: bool = False
) -> EvictionPolicy:
    """`slot_classes.make_eviction`, in Python."""
    layers, experts = context.layers, context.experts
    if split:
        one = PolicyContext(layers, experts, context.top_k, one_layer=True, seed=context.seed)
        return split_eviction(lambda: reference_of(options, one), layers, experts)
    if low_bit:
        return TwoPools(reference_of(options, context), layers * experts, 1)
    match options.kind:
        case "lru":
            return Lru()
        case "lru-sweep":
            return SweepLru(layers, experts, options.share)
        case "lfu" | "lfu-decay":
            aged = options.half_life is not None and context.one_layer
            return Lfu(options.half_life / 32 if aged else options.half_life)
        case "lcp":
            return Lcp(experts, options.rho, options.omega)
        case "worth":
            return Worth(layers, experts)
        case "importance":
            given = options.model_dump(exclude={"kind"})
            return ImportanceOrder(layers, experts, **given, top_k=context.top_k)
        case "expert-map" | "expert-map-decay":
            return MapOrder(layers, experts, options.half_life)
    return make_eviction(options, context)


class MapOrder(EvictionPolicy):
    """`fmoe.ExpertMapEviction`."""

    def __init__(self, layers: int, experts: int, half_life: float | None = None) -> None:
        keys = layers * experts
        self.growth = decay_growth(half_life)
        self._unit = 1.0  # what a use counts now
        self._freq, self.probabilities = np.zeros(keys), np.ones(keys)
        self._stamp, self._resident = np.zeros(keys, np.int64), np.zeros(keys, np.bool_)
        self._credit = [0.0] * keys  # of what freq holds, what admission lent until the first use
        self._clock, self._told, self._experts = 0, False, experts

    def admitted(self, key: int) -> None:
        credit = self._credit[key] = max(0.0, self._unit - self._freq[key])
        self._freq[key] += credit
        self._clock += 1
        self._stamp[key], self._resident[key] = self._clock, True

    def used(self, keys: Iterable[int]) -> None:
        freq, credit, stamp, clock = self._freq, self._credit, self._stamp, self._clock
        for key in keys:
            freq[key] += self._unit - credit[key]
            credit[key] = 0.0
            clock += 1
            stamp[key] = clock
        self._clock = clock
        self._unit *= self.growth
        if self._unit > RESCALE_AT:
            self._freq /= self._unit
            self._credit = [lent / self._unit for lent in self._credit]
            self._unit = 1.0

    def removed(self, key: int) -> None:
        if not self._resident[key]:
            raise KeyError(key)
        self._freq[key] -= self._credit[key]
        self._credit[key], self._resident[key] = 0.0, False

    def victims(self, count: int, evictable: Callable[[int], bool]) -> list[int]:
        value = self.probabilities * self._freq
        return first_evictable(lowest(value, self._stamp, self._resident), count, evictable)

    def expect(self, keys: NDArray[np.integer], probabilities: NDArray[np.floating]) -> None:
        known = keys < len(self.probabilities)
        keys, probabilities = keys[known], probabilities[known]
        if not self._told and len(keys):
            self._told = True
            self.probabilities[:] = max(_LEAST, sum(probabilities.tolist()) / len(keys))
        self.probabilities[keys] = np.maximum(probabilities, _LEAST, dtype=np.float64)

    def expect_map(
        self, keys: NDArray[np.int32], priorities: NDArray[np.float32], now: int, experts: int
    ) -> None:
        self.expect(keys, probability_of(priorities, keys // experts, now))


class ImportanceOrder(EvictionPolicy):
    """`activeevict.ImportanceEviction`."""

    def __init__(
        self, layers: int, experts: int, alpha: float = 0.5, gamma: float = 0.97, window: int = 128, top_k: int = 1
    ) -> None:
        self.state = ImportanceState(layers, experts, alpha, gamma, window, top_k)
        self._resident, self._stamp, self._clock = self.state.resident, self.state.stamp, 0

    def admitted(self, key: int) -> None:
        self._resident[key] = True
        self._clock += 1
        self._stamp[key] = self._clock

    def used(self, keys: Iterable[int]) -> None:
        stamp, clock = self._stamp, self._clock
        for key in keys:
            clock += 1
            stamp[key] = clock
        self._clock = clock

    def removed(self, key: int) -> None:
        if not self._resident[key]:
            raise KeyError(key)
        self._resident[key] = False

    def victims(self, count: int, evictable: Callable[[int], bool]) -> list[int]:
        return first_evictable(self.state.lowest(len(self._resident)), count, evictable)
