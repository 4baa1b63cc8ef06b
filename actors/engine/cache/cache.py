"""The expert cache of one device: the core, which decides and accounts, with its slot tensors, sources and counters.

An expert is one segment or, with a split (`policies.moepic.split`), two, which are loaded, pinned, run and evicted one
by one. Plans and loads name segments; an unsplit expert's segment has the expert's key.

A layer's pass, migration and pre-eviction go to the `core` itself. All methods run on the forward's thread unless they
say otherwise. An arrived copy becomes resident in `poll` or `core.next`; on a GPU, once the compute's stream waits for
the copy.
"""

from __future__ import annotations

from collections.abc import Sequence
from collections.abc import Set as AbstractSet

import numpy as np
from numpy.typing import NDArray

from ...core import _core
from ...policies.eviction import EvictionPolicy, core_order
from ...policies.moepic.split import SplitLayout
from ...policies.residency import ResidencyError, State
from ..stats import EngineStats, HostMemoryStats, LayerResidency, LayerStats, Timeline
from .links import CAUSES, CacheLink
from .residency import Residency
from .slot_map import SlotMap

_LAYER_COUNTS = [name for name in dir(_core.LayerCounts) if not name.startswith("_")]
_SOURCE_COUNTS = [name for name in dir(_core.SourceCounts) if not name.startswith("_")]
_TOTALS = ("decode_hits", "decode_misses", "decode_blocked_io_s", "bytes_preloaded")


class ExpertCache:
    """Slots for experts of all layers on one device.

    Args:
        where: the slots, and where experts come from.
        link: makes the copies.
        eviction: with a split or replicas, one for all slot classes (`slot_classes.SlotClasses`).
        stats: counters, one `LayerStats` per MoE layer; the core's come by `live_stats` and `layer_stats`.
        min_useful: share of prefetches below which the governor pauses them (`core::Governor`).
        writeback: copy an evicted expert back to the host before its slot is used again, as systems that swap do; for
            comparison only. Replicas are not copied back. Not with `where.memory`.

    Attributes:
        core: decides and accounts. disk_gbps: of the disk that it is read from, as measured; None: of none.
        native_steps: whether the layers have kernels of native code; set by the executor.
        uses: forwards that needed each expert since the counters were reset, wherever it ran; the array object never
            changes.
    """

    def __init__(
        self, where: SlotMap, link: CacheLink, eviction: EvictionPolicy, stats: EngineStats, timeline: Timeline,
        min_useful: float = 0.0, writeback: bool = False,
    ) -> None:  # fmt: skip
        self.where, self.pool, self.neurons, self.bytes_of = where, where.pool, where.neurons, where.bytes_of
        self.low_bit, self.memory = where.low_bit, where.memory
        self.stats, self.timeline = stats, timeline
        stats.expert_bytes_peak = self.pool.bytes if self.memory is None else self.memory.least * where.slot_bytes
        if self.low_bit is not None:
            stats.expert_bytes_peak += self.low_bit.pool.bytes
            stats.low_bit_slots = self.low_bit.slots
        self._eviction = eviction
        self._order = core_order(eviction, (2 if where.class_of else 1) * where.keys)
        self.link, self.clock, self._place, self.disk_gbps = link.core, link.clock, link.place, link.gbps
        self._place()
        self.core = _core.Core(where.layout(), self.link, self._order, _core.Governor(min_useful), writeback)
        self.governor, self.uses = self.core.governor, self.core.uses
        self.residency = Residency(self.core, where)
        self.native_steps = False
        self._sources: dict[str, int] = {}  # of prefetches: number in the core
        self._seen: _core.Watched | None = None
        if timeline.enabled:
            self._seen = _core.Watched()
            self.core.watch(self._seen)

    @property
    def bytes_loaded(self) -> int:
        """Of all layers, since the counters were reset."""
        sums = self.core.summed
        return sums.bytes_loaded_demand + sums.bytes_loaded_prefetch + sums.bytes_loaded_migration

    # -- experts and their segments ----------------------------------------------------------------------

    @property
    def eviction(self) -> EvictionPolicy:
        """The order of eviction, with all events so far."""
        self.tell_order()
        return self._eviction

    def tell_order(self) -> None:
        """Report the events so far to an order of eviction in Python, which else gets them before it is asked."""
        self._order.tell()

    @property
    def split(self) -> SplitLayout | None:
        """The present split of the slots; None where a slot is a whole expert."""
        return self.where.split

    @property
    def layout(self) -> tuple[list[int], list[int]]:
        """Where experts are split: the first neuron of each slot in the pool, and the neurons of each segment."""
        segments = self.where.segments
        assert segments is not None  # there is a split
        return segments.first, segments.neurons

    def set_split(self, split: SplitLayout, fill: Sequence[int] = ()) -> None:
        """Split the same memory anew, between forwards; drops what is cached.

        Args:
            fill: experts whose tops are loaded at once, most urgent first, as many as their layers have slots, behind
                demand loads.

        Raises:
            ValueError: the split does not fit the pool; then nothing has changed.
        """
        if self.split is None:
            raise ValueError("a cache of whole experts cannot be split")
        self.where.check(split)
        self.core.settle()
        self.flush()
        self.where.divide(split)
        self._place()
        self.core.divide(self.where.layout(), list(fill))
        self.residency.laid_out(self.where)

    # -- copies ------------------------------------------------------------------------------------------

    def poll(self, layer: int = -1) -> None:
        """Make every arrived copy resident; a failed one frees its slot. layer: whose pass begins; -1: none does."""
        self.core.arrive(layer)
        self.draw()

    def settle_times(self) -> None:
        """Count the times of GPU copies that have ended by now."""
        self.core.settle_times()
        self.draw()

    def prefetch(self, keys: Sequence[int], keep: AbstractSet[int] = frozenset(), source: str = "command") -> int:
        """Queue loads of absent experts, most wanted first; returns the number queued.

        A replica (`LowBitPart`) is not loaded where its expert is present. Victims are neither pinned nor among `keys`
        or `keep` (what nearer layers want), so demand has a small pool to itself. `source` names the policy, for the
        counters.
        """
        return self.core.prefetch(list(keys), list(keep), self.number_of(source))

    def number_of(self, source: str) -> int:
        """The number in the core that stands for a source of prefetches."""
        return self._sources.setdefault(source, len(self._sources) + 1)

    # -- around forwards ---------------------------------------------------------------------------------

    def resize(self, slots: int) -> None:
        """Give the last slots' memory back, or take it again, between forwards; `memory` says how many there may be.

        Experts leave in the order of eviction; those that stay move out of the slots that go. Copies into those slots
        are cancelled or waited for.

        Raises:
            ResidencyError: a pinned expert is in the way. torch.OutOfMemoryError: no room for more slots. Then as many
                slots are there as before.
        """
        memory = self.memory
        if memory is None or not memory.least <= slots <= memory.most:
            raise ValueError(f"{slots} slots are not within what this cache may have")
        if slots > self.residency.slots:
            memory.resize(slots)
        before, moves = self.residency.slots, self.core.resize(slots)
        if slots < before:
            device = memory.device
            device.settle()  # what runs or is copied in slots that go, and dropped copies into free ones
            for key, from_, to in moves:
                layer = self.where.layer_of(key)
                device.move(self.pool.slot(to, layer), self.pool.slot(from_, layer))
            if moves:
                device.settle()
            memory.resize(slots)
        self.where.whole_slots = slots
        self.residency.laid_out(self.where)
        self.stats.slots = slots
        self.stats.expert_bytes_peak = max(self.stats.expert_bytes_peak, slots * self.residency.slot_bytes)

    def flush(self) -> None:
        """Wait for every copy under way, then empty all slots."""
        self.core.wait_all()
        self.settle_times()
        self.core.flush()

    def check_integrity(self) -> None:
        """Raise ResidencyError unless the core's invariants hold and the order of eviction knows what is held."""
        if fault := self.core.check():
            raise ResidencyError(fault)
        held = self.residency.held()
        if set(held) != set(self.eviction.victims(self.residency.slots, lambda key: True)):
            raise ResidencyError(f"the eviction policy does not know exactly the experts held, {held}")

    def fill_mapped(self) -> None:
        """Of a `MappedPool`: all experts are resident, each in its own slot, for good."""
        self.core.preload(range(self.where.keys))
        self.core.wait_all()
        self.core.arrive()
        self.check_mapped()

    def check_mapped(self) -> None:
        """Raise ResidencyError unless each expert is in its own slot, by which kernels of a `MappedPool` find it."""
        if any(self.residency.slot(key) != key for key in range(self.where.keys)):
            raise ResidencyError("an expert that runs where it lies is in another's slot")

    def close(self) -> None:
        """Stop the link. Safe to call twice."""
        self.link.close()

    # -- counters ----------------------------------------------------------------------------------------

    def layer_stats(self, layer: int) -> LayerStats:
        """A layer's counters so far; the record is live. From any thread, between forwards."""
        found = self.stats.layers[layer]
        _take(self.core.counts(layer), found, _LAYER_COUNTS)
        return found

    def live_stats(self) -> EngineStats:
        """The counters so far; the record is live. From any thread, between forwards."""
        stats, core, totals = self.stats, self.core, self.core.totals
        for layer in range(len(stats.layers)):
            self.layer_stats(layer)
        for name, number in list(self._sources.items()):  # a forward may add one
            found = core.source(number)
            if any(getattr(found, field) for field in _SOURCE_COUNTS) or name in stats.prefetch_sources:
                _take(found, stats.source(name), _SOURCE_COUNTS)
        _take(totals, stats, _TOTALS)
        stats.substitutions, stats.dropped = totals.substituted, totals.dropped
        stats.loads_in_flight, stats.prefetch_resting = self.link.pending, self.governor.resting
        if isinstance(self.link, _core.DiskLink):
            stats.host_memory = self._host_memory(self.link)
        return stats

    def _host_memory(self, link: _core.DiskLink) -> HostMemoryStats:
        total, (read_bytes, _, longest_s) = self.stats.total(), link.counts
        return HostMemoryStats(
            self.stats.slots, self.stats.expert_budget_bytes, total.hits, total.misses, total.bytes_loaded_demand,
            total.bytes_loaded_prefetch, total.bytes_wasted, total.blocked_io_s, self.disk_gbps or 0.0, read_bytes,
            longest_s,
        )  # fmt: skip

    def reset_stats(self) -> None:
        """Zero the counters; residency stays."""
        self.stats.reset()
        self.core.reset_counts()

    def draw(self) -> None:
        """Show on the timeline what has landed, and waits."""
        for wait, layer, segment, cause, start_s, end_s, link_s in () if self._seen is None else self._seen.take():
            if wait:
                self.timeline.span("wait", f"L{layer} wait", start_s, end_s)
            else:
                self._draw_copy(layer, segment, CAUSES[cause], start_s, end_s, link_s)

    def _draw_copy(
        self, layer: int, segment: int, cause: str, start_s: float, end_s: float, link_s: float
    ) -> None:
        args = {"bytes": self.bytes_of(segment), "cause": cause, "link_us": round(link_s * 1e6, 1)}
        track = "prefetch" if cause == "prefetch" else "copy"
        self.timeline.span(track, f"L{layer} E{segment % self.where.experts}", start_s, end_s, args)

    # -- for policies and displays -----------------------------------------------------------------------

    def shown(self, layer: int) -> Sequence[int]:
        """The segment that stands for each expert of a layer: its own, or its top."""
        first, segments = layer * self.where.experts, self.where.segments
        stop = first + self.where.experts
        return range(first, stop) if segments is None else segments.shown[first:stop]

    def occupancy(self, layer: int) -> tuple[NDArray[np.bool_], int]:
        """Which experts of a layer are resident or loading [E] (of split experts the tops), and the most that fit at
        once.
        """
        shown, residency = self.shown(layer), self.residency
        slots = residency.class_slots[residency.class_of(shown[0])]
        return residency.states[np.asarray(shown)] != 0, slots

    def vacant(self, layer: int) -> int:
        """Free slots for this layer's experts (of split experts for the tops)."""
        return self.residency.free_of(self.residency.class_of(self.shown(layer)[0]))

    def absent(self) -> float:
        """Share of all experts that are neither resident nor loading (of split experts the tops)."""
        states, segments = self.residency.states, self.where.segments
        shown = states[: len(self.stats.layers) * self.where.experts] if segments is None else states[segments.shown]
        return 1.0 - float(np.count_nonzero(shown)) / len(shown)

    def copy_s(self) -> float:
        """Mean seconds of the link for a copy of one whole expert, since the counters were reset; 0: it copied none."""
        counts = self.core.summed
        loaded = counts.bytes_loaded_demand + counts.bytes_loaded_prefetch + counts.bytes_loaded_migration
        return counts.total_io_s * self.residency.slot_bytes / loaded if loaded else 0.0

    def layer_residency(self) -> list[LayerResidency]:
        """State and uses of each layer's experts at this moment; from any thread."""
        states, uses, n, found = self.residency.states, self.uses, self.where.experts, list[LayerResidency]()
        for layer in range(len(self.stats.layers)):
            there = states[np.asarray(self.shown(layer))].tolist()
            found.append(LayerResidency(tuple(there), tuple(uses[layer * n : (layer + 1) * n].tolist())))
        return found

    def states(self) -> list[State]:
        """Of all experts, from any thread; of split experts the state of the top."""
        return [State(one) for layer in self.layer_residency() for one in layer.states]


def _take(found: object, into: object, names: Sequence[str]) -> None:
    for name in names:
        setattr(into, name, getattr(found, name))
