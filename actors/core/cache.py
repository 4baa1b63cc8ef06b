# ruff: noqa
"""The expert cache over the core: what engine, placers and hooks of policies in Python see of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from typing import Any

import numpy as np

from ..engine.cache.native_order import native_order
from ..engine.cache.native_split import SplitOrder
from ..engine.cache.slots import SlotMap
from ..engine.stats import LayerResidency, PhaseCounter
from ..policies.moepic.split import Segments, SplitLayout
from ..policies.plan import LayerPlan
from ..policies.residency import ResidencyError, State
from . import _core

_STATES = tuple(State)
_WHOLE = ("hits", "misses", "prefetched_hits", "top_hits", "low_bit_hits", "low_bit_misses", "late_prefetches", "forwards",
          "waves", "bytes_loaded_demand", "bytes_loaded_prefetch", "bytes_loaded_migration", "bytes_loaded_low_bit",
          "bytes_demanded_decode", "failed_prefetches", "bytes_wasted", "vacated", "bytes_premature",
          "bytes_written_back", "writebacks", "blocked_io_s", "writeback_link_s", "writeback_blocked_s", "total_io_s",
          "link_s")  # fmt: skip


class ResidencyView:
    def __init__(self, core: Any, slots: Sequence[int], slot_bytes: int, class_of: Sequence[int]) -> None:
        self._core, self.slot_bytes = core, slot_bytes
        self.again(slots, class_of)

    def again(self, slots: Sequence[int], class_of: Sequence[int]) -> None:
        core = self._core
        self.class_slots, self.slots, self._class_of = tuple(slots), sum(slots), class_of
        self._states, self._evictable, self._slots, self._pins = core.states, core.evictable, core.slots, core.pins
        self.keys = len(self._states)

    @property
    def arrays(self) -> Any:
        return self._states, self._evictable, self._slots, self._pins

    @property
    def emptied(self) -> int:
        return self._core.emptied

    def state(self, key: int) -> State:
        return _STATES[self._states[key]]

    def slot(self, key: int) -> int:
        found = int(self._slots[key])
        if found < 0:
            raise KeyError(key)
        return found

    held_slot = slot

    def evictable(self, keep: Any = ()) -> Callable[[int], bool]:
        mask = self._evictable.copy()
        mask[list(keep)] = 0
        return mask.tobytes().__getitem__  # type: ignore[return-value]

    def states(self) -> list[State]:
        return [_STATES[x] for x in self._states]

    def occupied(self, first: int = 0, stop: int | None = None) -> Any:
        return self._states[first:stop] != 0

    def absent(self, first: int, stop: int) -> int:
        return int(np.count_nonzero(self._states[first:stop] == 0))

    def class_of(self, key: int) -> int:
        return self._class_of[key] if len(self._class_of) else 0

    def free_of(self, slot_class: int) -> int:
        return self._core.free_of(slot_class)

    @property
    def free_slots(self) -> int:
        return self._core.free_slots

    def held(self) -> list[int]:
        return self._states.nonzero()[0].tolist()

    def pinned(self, key: int) -> bool:
        return bool(self._pins[key])

    # what `SlotMap` asks
    def divide(self, class_of: Sequence[int], slots: Sequence[int], class_bytes: Sequence[int]) -> None:
        self.given = class_of, slots, class_bytes


class _Job:
    def __init__(self, core: Any, key: int) -> None:
        self._core, self._key = core, key
        self.event, self.start_s = None, 0.0

    @property
    def copied(self) -> Any:
        return self if self._core.took_s[self._key] >= 0 else None

    @property
    def end_s(self) -> float:
        return float(self._core.took_s[self._key])


class _Loads:
    def __init__(self, core: Any) -> None:
        self._core = core

        self.under_way = self

    def __contains__(self, key: int) -> bool:
        return self._core.state(key) == 1

    def __getitem__(self, key: int) -> _Job:
        return _Job(self._core, key)


class CoreCache:
    native = None

    def __init__(
        self, pool: Any, weights: Any, device: Any, residency: Any, eviction: Any, governor: Any, stats: Any,
        timeline: Any, loader: Any = None, clock: Any = None, cut: SplitLayout | None = None, writeback: bool = False,
        low_bit: Any = None,
    ) -> None:  # fmt: skip
        self.pool, self.device, self.clock, self.stats, self.timeline = pool, device, clock, stats, timeline
        self.policy = self.eviction = eviction
        self.passes = type("P", (), {"words": [1]})
        layers = len(weights)
        self._layers, self._experts = layers, residency.keys // layers
        self._map = SlotMap(pool, weights, residency)
        self.neurons, self.whole_slots, self.divided, self.low_bit = pool.neurons, residency.slots, cut is not None, low_bit
        self._slot_bytes, self._expert_bytes = residency.slot_bytes, self._map.bytes_of(0)
        self._keys = residency.keys
        self._segments: Segments | None = None
        layout = self._lay_out(cut, residency)
        native = native_order(eviction, layers, self._experts) if cut is None and low_bit is None else None
        if native is not None:
            self.eviction, self._order = native, _core.WholeOrder(native.handle)
        elif isinstance(eviction, SplitOrder):
            self._order = _core.TopsAndBottoms(eviction.handle)
        else:
            self._order = _core.PythonOrder(eviction)
            self._order.segments = layout[1]
        self.link = loader
        self.core = _core.Core(layout[0], loader, self._order, _core.Governor(governor.min_useful, governor.window, governor.rest), writeback)
        self.governor = self.core.governor

        self.residency = ResidencyView(self.core, layout[2], residency.slot_bytes, layout[3])
        self.loads = _Loads(self.core)
        self.quiet = False
        self._phases = PhaseCounter(stats)
        self._sources: dict[str, int] = {}
        stats.expert_bytes_peak = pool.bytes
        if low_bit is not None:
            stats.expert_bytes_peak += low_bit.pool.bytes
            stats.low_bit_slots = low_bit.slots
        self.plan_now: Any = None

    def _lay_out(self, cut: SplitLayout | None, residency: Any = None) -> Any:
        keys = self._keys
        if cut is not None:
            self._segments = found = Segments(cut, self._experts)
            whole = self._expert_bytes
            size = [n * whole // cut.neurons for n in found.neurons]
            made = _core.Layout(self._layers, self._experts, 2, found.class_of, found.slots, found.neurons, size, True)
            return made, 2 * keys, found.slots, found.class_of
        if self.low_bit is not None:
            classes, slots = [0] * keys + [1] * keys, [self.whole_slots, self.low_bit.slots]
            size = [self._expert_bytes] * keys + [self.low_bit.slot_bytes] * keys
            return _core.Layout(self._layers, self._experts, 2, classes, slots, [], size, False), 2 * keys, slots, classes
        slots = [residency.slots]
        return _core.Layout(self._layers, self._experts, 1, [], slots, [], [self._expert_bytes] * keys, False), keys, slots, []

    # counters ---------------------------------------------------------------------------------------------
    def sync(self, layer: int | None = None) -> None:
        for i in range(self._layers) if layer is None else (layer,):
            found, stats = self.core.counts(i), self.stats.layers[i]
            for name in _WHOLE:
                setattr(stats, name, getattr(found, name))

    def begin_forward(self, decode: bool) -> None:
        self.sync()
        self.decode_only = self.core.decode_only = decode
        self._phases.begin(decode)

    decode_only = False

    @property
    def uses(self) -> Any:
        return self.core.uses

    @property
    def cut(self) -> SplitLayout | None:
        return None if self._segments is None else self._segments.cut

    @property
    def layout(self) -> Any:
        assert self._segments is not None
        return self._segments.first, self._segments.neurons

    def segments(self, keys: Sequence[int], low: AbstractSet[int] = frozenset()) -> Sequence[int]:
        return self.core.segments(list(keys))

    def open(self, layer: int, keys: Sequence[int], counts: Sequence[int], tokens: int, low: Any = frozenset()) -> Any:
        return self.core.open(layer, list(keys), list(counts), tokens, list(low))

    def next(self) -> tuple[int, int]:
        found = self.core.next()
        if found[0] == found[1]:
            self.sync()
        return found

    def standing(self, layer: int) -> Any:
        base = layer * self._experts
        shown = range(base, base + self._experts) if self._segments is None else self._segments.shown[base : base + self._experts]
        slots = self.residency.class_slots[self.residency.class_of(shown[0])]
        return self.residency.occupied()[list(shown)], slots

    def vacant(self, layer: int) -> int:
        key = layer * self._experts
        return self.residency.free_of(self.residency.class_of(key if self._segments is None else self._segments.shown[key]))

    # pass -------------------------------------------------------------------------------------------------
    def settle_times(self) -> None: ...
    def count_passes(self) -> None: ...

    def poll(self) -> None:
        self.core.arrive()

    def plan(self, here: Sequence[int], keep: Any = ()) -> LayerPlan:
        run, resident, arriving, loads = self.core.plan(list(here), list(keep))
        return LayerPlan(tuple(run), resident, arriving, tuple(loads))

    def begin(self, layer: int, plan: LayerPlan) -> None:
        self.core.begin()

    def load(self) -> None:
        self.core.load()

    def abandon(self) -> None:
        self.core.abandon()

    def prefetch(self, keys: Sequence[int], keep: Any = frozenset(), source: str = "command") -> int:
        number = self._sources.setdefault(source, len(self._sources) + 1)
        return self.core.prefetch(list(keys), list(keep), number)

    def finish_prefetch(self, keys: Sequence[int], layer: int) -> None:
        self.core.finish_prefetch(list(keys), layer)

    def vacate(self, slots: int, layer: int) -> None:
        self.core.vacate(slots, layer)

    def leave(self, victims: Sequence[int], layer: int) -> None:
        self.core.leave(list(victims), layer)

    def drop_stale(self, layer: int, needed: Sequence[int]) -> None:
        self.core.drop_stale(layer, list(needed))

    def migrate(self, keys: Sequence[int], *, keep_others: bool) -> None:
        self.core.migrate(list(keys), keep_others)

    def preload(self, keys: Sequence[int]) -> None:
        self.core.preload(list(keys))
        self.stats.bytes_preloaded = self.core.totals.bytes_preloaded

    def flush(self) -> None:
        self.core.flush()

    def recut(self, cut: SplitLayout, fill: Sequence[int] = ()) -> None:
        layout, segments, slots, classes = self._lay_out(cut)
        if isinstance(self._order, _core.PythonOrder):
            self._order.segments = segments
        self.core.divide(layout, list(fill))
        self.residency.again(slots, classes)

    def check_integrity(self) -> None:
        if fault := self.core.check():
            raise ResidencyError(fault)
        held = set(self.residency.held())
        if held != set(self.eviction.victims(self.residency.slots, lambda key: True)):
            raise ResidencyError("the order of eviction holds others")

    def live_stats(self) -> Any:
        self.sync()
        for source, number in self._sources.items():
            found, kept = self.core.source(number), self.stats.source(source)
            for name in ("queued", "hits", "late", "wasted", "cancelled"):
                setattr(kept, name, getattr(found, name))
        self._phases.settle()
        self.stats.loads_in_flight, self.stats.prefetch_resting = self.link.pending, self.governor.resting
        return self.stats

    def reset_stats(self) -> None:
        self.stats.reset()
        self.core.reset_counts()

    def layer_residency(self) -> list[LayerResidency]:
        states = [int(x) for x in (self.residency._states if self._segments is None else [self.residency._states[s] for s in self._segments.shown])]
        uses, n = self.uses.tolist(), self._experts
        return [LayerResidency(tuple(states[i : i + n]), tuple(uses[i : i + n])) for i in range(0, len(uses), n)]
