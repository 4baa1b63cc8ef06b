"""The core against the same bookkeeping in plain Python: random passes, compared after each step."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from orders_reference import Lru, MapOrder, Worth, reference_of
from reference import Reference, Slots

from tiermoe.actors.core import _core
from tiermoe.actors.policies.eviction import EvictionPolicy, core_order
from tiermoe.actors.policies.fmoe import ExpertMapEviction
from tiermoe.actors.policies.moepic.split import Segments, SplitLayout
from tiermoe.actors.policies.plan import PlanError
from tiermoe.actors.policies.registry import PolicyContext, make, options
from tiermoe.actors.policies.slot_classes import SlotClasses, make_eviction
from tiermoe.actors.policies.worth import WorthOrder

LAYERS, EXPERTS, WHOLE = 3, 6, 64
KEYS = LAYERS * EXPERTS
TICK = 2.0**-12
COUNTS = [name for name in dir(_core.LayerCounts) if not name.startswith("_")]
OUTCOMES = [name for name in dir(_core.SourceCounts) if not name.startswith("_")]
TOTALS = ["decode_hits", "decode_misses", "decode_blocked_io_s", "bytes_preloaded"]
SOURCES = {"gate": 1, "map": 2}


def copy_s(nbytes: int) -> float:
    return (3 + nbytes) * TICK


class Both:
    """The core and its reference; `both` gives a call to each, and compares them."""

    def __init__(
        self, slots: Slots, reference: EvictionPolicy, order: Any, late_s: float = 0.0, writeback: bool = False,
        most: int = 0,
    ) -> None:  # fmt: skip
        self.clock, self._log = _core.Clock(), _core.AskedLog()
        self._most = most
        link = _core.VirtualLink(self.clock, copy_s, late_s)
        self.core = _core.Core(self._layout(slots), link, order, _core.Governor(), writeback)
        self.core.log_to(self._log)
        self.reference = Reference(slots, reference, copy_s, late_s, writeback)

    def _layout(self, slots: Slots) -> _core.Layout:
        parts = len(slots.nbytes) // slots.keys
        return _core.Layout(
            slots.layers, slots.experts, parts, slots.class_of, slots.slots, slots.nbytes if slots.split else [],
            slots.nbytes, slots.split, self._most,
        )  # fmt: skip

    def both(self, name: str, *args: Any) -> Any:
        wanted = getattr(self.reference, name)(*args)
        if name == "prefetch":
            args = (*args[:2], SOURCES[args[2]])
        elif name == "divide":
            args = (self._layout(args[0]), args[1])
        found = getattr(self.core, name)(*[list(a) if isinstance(a, set | frozenset) else a for a in args])
        self.compare(name)
        return found, wanted

    def decode(self, only: bool) -> None:
        self.core.decode_only = self.reference.decode_only = only

    def advance(self, ticks: int) -> None:
        self.clock.advance(ticks * TICK)
        self.reference.link.now_s += ticks * TICK

    def compare(self, after: str) -> None:
        core, reference = self.core, self.reference
        asked = self._log.take()
        assert asked == reference.asked, after
        reference.asked.clear()
        assert self.clock.now_s == reference.link.now_s, after
        assert core.states.tolist() == reference.states, after
        assert core.slots.tolist() == reference.slot, after
        assert core.pins.tolist() == reference.pins, after
        assert core.under_way == list(reference.flights), after
        assert core.uses.tolist() == reference.uses, after
        assert core.emptied == reference.emptied, after
        if after in ("begin", "next", "load"):
            return
        assert core.check() == "", after
        for layer, wanted in enumerate(reference.counts):
            found = core.counts(layer)
            assert {n: getattr(found, n) for n in COUNTS} == {n: wanted[n] for n in COUNTS}, (after, layer)
        for source, number in SOURCES.items():
            counted, wanted = core.source(number), reference.sources.get(source, {})
            assert {n: getattr(counted, n) for n in OUTCOMES} == {n: wanted.get(n, 0) for n in OUTCOMES}, after
        assert {n: getattr(core.totals, n) for n in TOTALS} == {n: reference.totals[n] for n in TOTALS}, after

    def forward(self, chance: random.Random, layer: int, low: float) -> None:
        """One layer, of a random routing."""
        first = layer * EXPERTS
        rows = chance.choice((1, 2, 2, 4, 24))
        experts = sorted({min(chance.randrange(EXPERTS), chance.randrange(EXPERTS)) for _ in range(rows)})
        keys = [first + e for e in experts]
        replicas = [key for key in keys if chance.random() < low]
        keep = set(chance.sample(range(KEYS), chance.choice((0, 0, 0, 2, 8))))
        self.both("arrive", layer)
        counts = [chance.randint(1, 4) for _ in keys]
        found, wanted = self.both("open", layer, keys, counts, max(counts), replicas)
        assert found == wanted
        here = [s for s in wanted if chance.random() < 0.9]  # peers run the others
        (run, resident, arriving, loads), plan = self.both("plan", here, keep)
        assert (run, resident, arriving) == (list(plan.run), plan.resident, plan.arriving)
        assert loads == [(x.key, -1 if x.evict is None else x.evict, x.after) for x in plan.loads]
        self.both("begin")
        self.both("load")
        if chance.random() < 0.5:
            self.guess(chance, low, layer)
        while True:
            span, reached = self.both("next")
            assert span == reached
            if span[0] == span[1]:
                break
            self.advance(chance.randrange(40))
        self.both("close")

    def guess(self, chance: random.Random, low: float, now: int = -1) -> None:
        """Prefetch for layers other than the present one."""
        keys = chance.sample(range(KEYS * (1 + (low > 0))), chance.randrange(5))
        keys = [key for key in keys if key % KEYS // EXPERTS != now]
        keep = set(chance.sample(range(KEYS), chance.randrange(3)))
        found, wanted = self.both("prefetch", keys, keep, chance.choice(sorted(SOURCES)))
        assert found == wanted

    def disturb(self, chance: random.Random, low: float, others: Sequence[Slots], most: int) -> None:
        """One of the things that happen between layers."""
        what, keys = chance.randrange(15), chance.sample(range(KEYS), chance.randrange(1, 8))
        layer = chance.randrange(LAYERS)
        if what < 4:
            self.guess(chance, low)
        elif what == 4:
            self.both("finish_prefetch", keys[:2], layer)
        elif what == 5:
            self.both("migrate", keys, chance.random() < 0.5)
        elif what == 6 and len(self.reference.where.slots) == 1:
            self.both("vacate", chance.randrange(4), layer)
        elif what == 7 and chance.random() < 0.3:
            self.both("flush")
        elif what == 8:
            states = self.reference.states
            self.both("preload", [k for k in keys if not any(states[s] for s in self.reference.segments([k]))])
        elif what == 9 and others:
            self.both("divide", replace(chance.choice(others)), keys)
        elif what == 10 and most:
            moves, wanted = self.both("resize", chance.randint(1, most))
            assert moves == wanted
        elif what == 11 and chance.random() < 0.3:
            self.both("reset_counts")
        elif what == 12:
            self.both("wait_all")
        elif what == 13:
            filled, wanted = self.both("fill", keys)
            assert filled == wanted
        else:
            self.decode(chance.random() < 0.5)
            self.advance(chance.randrange(200))


def drive(made: Both, seed: int, low: float = 0.0, others: Sequence[Slots] = (), most: int = 0) -> None:
    chance = random.Random(seed)
    made.both("preload", chance.sample(range(KEYS), 3))
    for turn in range(30):
        for _ in range(chance.randrange(3)):
            made.disturb(chance, low, others, most)
        made.forward(chance, turn % LAYERS, low)
    made.both("flush")


def whole(slots: int) -> Slots:
    return Slots(LAYERS, EXPERTS, [WHOLE] * KEYS, [slots])


CONTEXT = PolicyContext(LAYERS, EXPERTS, top_k=2)
KINDS = ("lru", "lru-sweep", "lfu", "lfu-decay", "lcp", "random", "expert-map", "expert-map-decay",
         "importance", "worth")  # fmt: skip
NATIVE = {"lru", "lru-sweep", "lfu", "lfu-decay", "lcp", "expert-map", "expert-map-decay", "importance", "worth"}


def told(policy: EvictionPolicy) -> EvictionPolicy:
    """With what a placer or a prefetch would have told it, in numbers that floats hold exactly."""
    numbers = np.random.default_rng(3).integers(1, 64, KEYS) / 64
    if isinstance(policy, ExpertMapEviction | MapOrder):
        policy.probabilities[:] = numbers
    elif isinstance(policy, Worth | WorthOrder):
        policy.bind(7, numbers.reshape(LAYERS, EXPERTS))
    return policy


@pytest.mark.parametrize("native", [True, False], ids=["native", "python"])
@pytest.mark.parametrize("kind", KINDS)
def test_whole_experts(kind: str, native: bool) -> None:
    """All orders of eviction, in pools of one slot and more; with copies back, and with slots that come and go."""
    chosen = options("eviction", kind)
    for seed, (slots, writeback, most) in enumerate(((1, False, 0), (4, True, 0), (7, False, 9))):
        policy = make_eviction(chosen, CONTEXT) if native else reference_of(chosen, CONTEXT)
        order = core_order(told(policy), KEYS)
        assert isinstance(order, _core.WholeOrder) == (native and kind in NATIVE)
        both = Both(whole(slots), told(reference_of(chosen, CONTEXT)), order, TICK * seed, writeback, most)
        drive(both, seed, most=most)


def cut(tops: tuple[int, ...], slots: tuple[int, ...], buffer: int) -> Slots:
    found = Segments(SplitLayout(8, tops, slots, buffer), EXPERTS)
    return Slots(LAYERS, EXPERTS, [8 * n for n in found.neurons], list(found.slots), list(found.class_of), split=True)


CUTS = [cut((2, 4, 6), (2, 1, 3), 2), cut((4, 0, 8), (3, 0, 2), 4), cut((1, 1, 1), (6, 6, 6), 3)]


@pytest.mark.parametrize("native", [True, False], ids=["native", "python"])
@pytest.mark.parametrize("kind", ["lru", "lcp", "lfu"])
def test_split_experts(kind: str, native: bool) -> None:
    chosen = options("eviction", kind)
    for seed in range(3):
        one = PolicyContext(1, EXPERTS, top_k=2, one_layer=True)
        tops = [make("eviction", chosen, one) if native else reference_of(chosen, one) for _ in range(LAYERS)]
        order = SlotClasses(tops, LAYERS, EXPERTS, split=True).handle
        both = Both(CUTS[seed], reference_of(chosen, CONTEXT, split=True), order, TICK * seed, writeback=seed == 1)
        drive(both, seed, others=CUTS)


@pytest.mark.parametrize("kind", ["lru", "lfu", "lru-sweep"])
def test_replicas(kind: str) -> None:
    chosen = options("eviction", kind)
    for seed, counts in enumerate(([2, 1], [4, 3], [6, 9])):
        slots = Slots(LAYERS, EXPERTS, [WHOLE] * KEYS + [16] * KEYS, counts, [0] * KEYS + [1] * KEYS)
        order = core_order(make_eviction(chosen, CONTEXT, low_bit=True), 2 * KEYS)
        both = Both(slots, reference_of(chosen, CONTEXT, low_bit=True), order, TICK * seed, writeback=seed == 1)
        drive(both, seed, low=0.4)


def test_free_slots_are_filled_and_the_most_wanted_leave_last() -> None:
    lru = options("eviction", "lru")
    both = Both(whole(4), Lru(), core_order(make_eviction(lru, CONTEXT), KEYS))
    assert both.both("fill", [9, 3, 9, 17, 0, 5, 2]) == (4, 4)
    both.both("wait_all")
    assert both.core.states[[9, 3, 17, 0]].tolist() == [2] * 4
    both.both("prefetch", [1, 2], set(), "gate")
    both.both("wait_all")
    assert both.core.states[[9, 3, 17, 0, 1, 2]].tolist() == [2, 2, 0, 0, 2, 2]
    assert both.both("fill", [9, 5]) == (0, 0)  # no slot is free


def test_no_slot_can_be_had() -> None:
    """What both say where a forward that failed has left its experts pinned."""
    lru = options("eviction", "lru")
    order = core_order(make_eviction(lru, CONTEXT), KEYS)
    both = Both(whole(2), Lru(), order)
    both.both("preload", [0, 1])
    both.both("open", 0, [0, 1], [1, 1], 1, [])
    both.both("plan", [0, 1], [])
    both.both("begin")
    with pytest.raises(PlanError, match="no slot can be freed for expert 6: the pool has 2") as wanted:
        both.reference.plan([6], [])
    with pytest.raises(PlanError) as found:
        both.core.plan([6], [])
    assert str(found.value) == str(wanted.value)
