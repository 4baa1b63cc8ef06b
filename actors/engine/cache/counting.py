"""Counters of one expert cache: hits, bytes by cause, outcomes of prefetches, and timeline spans."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from typing import TYPE_CHECKING, Any

import numpy as np

from ....kernels import _cpu
from ...policies.plan import LayerPlan
from ...policies.prefetch import PrefetchGovernor
from ...policies.residency import ResidencyError
from ..stats import EngineStats, LayerStats, SourceStats, Timeline
from .slots import SlotMap

if TYPE_CHECKING:
    from .device import Copied
    from .loader import LoadJob


class PassRecord:
    """The passes that native calls have run and the eviction policy was not told of yet, oldest first.

    Attributes:
        words: word 0 is the number of words in use; an entry is layer, tokens, n, n keys, n counts of tokens.
    """

    def __init__(self, words: int = 1 << 14) -> None:
        self.words = np.zeros(words, np.int64)
        self.words[0] = 1

    def take(self) -> Iterator[tuple[int, int, list[int], list[int]]]:
        """Remove and give all passes: layer, tokens, keys, tokens of each key."""
        words, at = self.words[1 : int(self.words[0])].tolist(), 0
        self.words[0] = 1
        while at < len(words):
            layer, tokens, n = words[at : at + 3]
            first, at = at + 3, at + 3 + 2 * n
            yield layer, tokens, words[first : first + n], words[first + n : at]


class Pending:
    """The source of each key that was prefetched and not used yet.

    Attributes:
        marks: number of the source by key, 0: none; shared with native code.
    """

    def __init__(self, keys: int) -> None:
        self.marks, self._none = bytearray(keys), bytes(keys)
        self._sources: list[SourceStats] = [SourceStats()]

    def __bool__(self) -> bool:
        return self.marks != self._none

    def __iter__(self) -> Iterator[int]:
        return (key for key, number in enumerate(self.marks) if number)

    def __contains__(self, key: int) -> bool:
        return self.marks[key] != 0

    def number(self, source: SourceStats) -> int:
        """Of these counters in `marks`."""
        for number, known in enumerate(self._sources):
            if known is source:
                return number
        if len(self._sources) == 256:  # counters of resets long ago
            self.marks[:] = self._none
            del self._sources[1:]
        self._sources.append(source)
        return len(self._sources) - 1

    @property
    def sources(self) -> int:
        """Numbers in use, 0 included."""
        return len(self._sources)

    def source(self, number: int) -> SourceStats:
        return self._sources[number]

    def mark(self, keys: Sequence[int], source: SourceStats) -> None:
        """These were prefetched for it."""
        number = self.number(source)
        for key in keys:
            self.marks[key] = number

    def take(self, keys: Iterable[int]) -> list[tuple[int, SourceStats]]:
        """These are used or gone: which of them were prefetched, and for whom."""
        marks, found = self.marks, list[tuple[int, SourceStats]]()
        for key in keys:
            if number := marks[key]:
                marks[key] = 0
                found.append((key, self._sources[number]))
        return found


class CacheCounters:
    """Counts the events of one `ExpertCache`, on the forward's thread.

    Keys are those of segments where experts are split. A prefetched segment is pending until a layer uses it, it is
    evicted, or its load is given up.

    Args:
        stats: the cache writes one `LayerStats` per MoE layer, the prefetches' `SourceStats` and `bytes_preloaded`.
        divided: whether experts are split, for good. replicas: whether there are slots for low-bit replicas.

    Attributes:
        uses: forwards that ran each expert since the counters were reset; the array object never changes.
        pending: prefetched keys that were not used yet.
        vacant: 1 for each key that pre-eviction removed since its layer last ran.
        handle: counts the passes of native calls (`kernels/cpu/counts.hpp`), which `count_native` adds.
    """

    def __init__(
        self, stats: EngineStats, governor: PrefetchGovernor, timeline: Timeline, slot_map: SlotMap, divided: bool,
        replicas: bool = False,
    ) -> None:
        self.stats, self.governor, self.timeline = stats, governor, timeline
        self.uses = array("q", [0]) * slot_map.keys
        self._map, self._keys, self._experts = slot_map, slot_map.keys, slot_map.experts
        self._bytes_of = slot_map.bytes_of
        self._divided, self._replicas = divided, replicas
        self.pending = Pending(2 * slot_map.keys)  # segments, or experts and replicas
        self.vacant = bytearray(slot_map.keys)
        self._fields = np.zeros((len(stats.layers), _cpu.COUNTED), np.int64)
        self._outcomes = np.zeros((256, _cpu.OUTCOMES), np.int64)
        arrays: list[Any] = [self._fields, self._outcomes, self.uses, self.pending.marks, self.vacant, governor.words]
        self._held = [np.frombuffer(one, np.uint8) for one in arrays]
        fields, outcomes, uses, marks, vacant, words = (one.ctypes.data for one in self._held)
        self.handle = _cpu.counts(
            len(stats.layers), slot_map.experts, fields, outcomes, uses, marks, vacant, words, governor.min_useful,
            governor.window, governor.rest,
        )  # fmt: skip

    # -- a layer's forward -------------------------------------------------------------------------------

    def begin(self, layer: int, plan: LayerPlan) -> None:
        """Count hits, misses, prefetches that hit, and loads of experts that were pre-evicted too early."""
        stats, (run, resident, arriving, loads, _) = self.stats.layers[layer], plan
        stats.forwards += 1
        stats.waves += plan.waves if loads else 1
        if 1 in self.vacant:
            self.premature(layer, run[resident + arriving :])
        if self._divided:
            self._count_segments(stats, plan)
        else:
            stats.hits += resident
            stats.misses += len(run) - resident
            if self._replicas:
                self._count_replicas(stats, plan)
        if found := self.pending.take(run[:resident]):
            self._count_prefetched(stats, found, run[resident:])

    def late(self, layer: int, keys: Sequence[int]) -> None:
        """`layer` needs these, whose prefetches are under way."""
        for _, source in self.pending.take(keys):
            source.late += 1
        self.governor.used(len(keys))
        self.stats.layers[layer].late_prefetches += len({key % self._keys for key in keys})

    def demanded(self, layer: int, keys: Sequence[int]) -> None:
        """A decode-only forward demands loads of these."""
        self.stats.layers[layer].bytes_demanded_decode += sum(map(self._bytes_of, keys))

    def waited(self, layer: int, start_s: float, end_s: float, writing_s: float) -> None:
        """The forward of `layer` waited for a copy, `writing_s` of it while the copy's slot was copied back."""
        stats = self.stats.layers[layer]
        stats.blocked_io_s += end_s - start_s
        stats.writeback_blocked_s += writing_s
        if self.timeline.enabled:
            self.timeline.span("wait", f"L{layer} wait", start_s, end_s)

    def ran(self, segments: Sequence[int]) -> None:
        """A forward has run these segments; a split expert counts once."""
        shown, keys, uses = self._map.shown, self._keys, self.uses
        for segment in segments:
            if shown is None or shown[segment % keys] == segment:
                uses[segment % keys] += 1

    # -- copies ------------------------------------------------------------------------------------------

    def prefetched(self, keys: Sequence[int], source: str) -> None:
        """Prefetches of these keys are queued for `source`."""
        counters = self.stats.source(source)
        counters.queued += len(keys)
        self.pending.mark(keys, counters)

    def number_of(self, source: str) -> int:
        """The number that stands for a source of prefetches until the counters are reset."""
        return self.pending.number(self.stats.source(source))

    def landed(self, jobs: Sequence[LoadJob]) -> None:
        """Copies became resident, or failed: count their bytes by cause, and the link's seconds where known."""
        layers = self.stats.layers
        for job in jobs:
            if (copied := job.copied) is None:
                continue
            stats, nbytes, cause = layers[job.layer], job.nbytes, job.cause
            if cause == "prefetch":
                stats.bytes_loaded_prefetch += nbytes
            elif cause == "migration":
                stats.bytes_loaded_migration += nbytes
            else:
                stats.bytes_loaded_demand += nbytes
            if self._replicas and job.reservation.key >= self._keys:
                stats.bytes_loaded_low_bit += nbytes
            if job.writeback:
                stats.bytes_written_back += nbytes
                stats.writebacks += 1
                stats.writeback_link_s += 0.0 if copied.event is not None else copied.writeback_s
            if copied.event is None:
                stats.total_io_s += copied.end_s - copied.start_s
                stats.link_s += copied.link_s
                if self.timeline.enabled:
                    self._show(job, copied)

    def count_native(self, landed: Sequence[tuple[int, int, int, float, float, float]]) -> None:
        """Add what native calls have counted since the last call, and `NativeLoads.landed`, in `SlotMap.unit_bytes`."""
        for layer, demands, prefetches, io_s, link_s, path_s in landed:
            stats, nbytes = self.stats.layers[layer], self._map.unit_bytes(layer)
            stats.bytes_loaded_demand += demands * nbytes
            stats.bytes_loaded_prefetch += prefetches * nbytes
            stats.total_io_s += io_s
            stats.link_s += link_s
            stats.link_path_s += path_s
        for layer, found in enumerate(self._fields.tolist()):
            if any(found):
                stats, nbytes = self.stats.layers[layer], self._bytes_of(layer * self._experts)
                forwards, hits, misses, prefetched_hits, late, demanded, wasted, vacated, premature, *changed = found
                stats.forwards += forwards
                stats.waves += forwards
                stats.hits += hits
                stats.misses += misses
                stats.prefetched_hits += prefetched_hits
                stats.late_prefetches += late
                stats.bytes_demanded_decode += demanded * nbytes
                stats.bytes_wasted += wasted * nbytes
                stats.vacated += vacated
                stats.bytes_premature += premature * nbytes
                self.stats.substitutions += changed[0]
                self.stats.dropped += changed[1]
        self._fields[:] = 0
        for number, found in enumerate(self._outcomes[: self.pending.sources].tolist()):
            if any(found):
                self._prefetched(number, *found)
        self._outcomes[:] = 0

    def reset(self) -> None:
        """The counters of layers and sources are new ones; what was prefetched before counts for the old ones."""
        self._fields[:] = self._outcomes[:] = 0
        self.uses[:] = array("q", [0]) * len(self.uses)

    def passed_split(self, layers: Sequence[tuple[int, ...]], sources: Sequence[tuple[int, ...]]) -> None:
        """What native passes of split experts have counted (`_cpu.split_take`)."""
        for layer, forwards, waves, hits, misses, top_hits, prefetched, late, demanded, wasted in layers:
            stats, unit = self.stats.layers[layer], self._map.unit_bytes(layer)
            stats.forwards += forwards
            stats.waves += waves
            stats.hits += hits
            stats.misses += misses
            stats.top_hits += top_hits
            stats.prefetched_hits += prefetched
            stats.late_prefetches += late
            stats.bytes_demanded_decode += demanded * unit
            stats.bytes_wasted += wasted * unit
        for source in sources:
            self._prefetched(*source)

    def _prefetched(self, number: int, queued: int, hits: int, late: int, wasted: int, cancelled: int) -> None:
        """Add what native passes have counted of a source's prefetches."""
        source = self.pending.source(number)
        source.queued += queued
        source.hits += hits
        source.late += late
        source.wasted += wasted
        source.cancelled += cancelled

    def timed(self, job: LoadJob, copied: Copied) -> None:
        """A copy on a GPU's stream has ended, maybe after its layer (`loader.CopyTimes`)."""
        stats = self.stats.layers[job.layer]
        stats.total_io_s += copied.end_s - copied.start_s
        stats.link_s += copied.link_s
        stats.writeback_link_s += copied.writeback_s
        stats.link_path_s += copied.link_s  # the layer itself adds only what ended while it ran
        if self.timeline.enabled:
            self._show(job, copied)

    def device_waited(self, layer: int, start_s: float, end_s: float, writing_s: float) -> None:
        """The compute of `layer` waited for a copy, on a GPU's stream (`loader.CopyTimes`)."""
        self.waited(layer, start_s, end_s, writing_s)
        self.stats.layers[layer].io_path_s += end_s - start_s  # as above

    def preloaded(self, jobs: Sequence[LoadJob]) -> None:
        """These were loaded before the first request; they count in no layer."""
        self.stats.bytes_preloaded += sum(self._bytes_of(job.reservation.key) for job in jobs)

    def failed(self, job: LoadJob) -> None:
        """A copy raised. Only a prefetch counts: any other fails the forward that needs it."""
        if job.cause == "prefetch":
            self.stats.layers[job.layer].failed_prefetches += 1

    # -- leaving -----------------------------------------------------------------------------------------

    def evicted(self, keys: Sequence[int]) -> None:
        """They left the cache: a prefetch that no layer used was wasted."""
        if found := self.pending.take(keys):
            for key, source in found:
                source.wasted += 1
                self.stats.layers[self._map.layer_of(key)].bytes_wasted += self._bytes_of(key)
            self.governor.wasted(len(found))

    def cancelled(self, key: int, moved_share: float) -> None:
        """Its load was dropped or failed, and no forward waits for it; of its bytes count those moved, as wasted."""
        if moved_share:
            stats, moved = self.stats.layers[self._map.layer_of(key)], round(self._bytes_of(key) * moved_share)
            stats.bytes_loaded_prefetch += moved
            stats.bytes_wasted += moved
        for _, source in self.pending.take((key,)):
            self.governor.wasted()
            source.cancelled += 1

    def forget(self, key: int) -> None:
        """Its load was given up: a pending prefetch counts as neither used nor wasted."""
        self.pending.take((key,))

    def vacated(self, layer: int, keys: Sequence[int]) -> None:
        """Pre-eviction removed these experts before `layer`."""
        for key in keys:
            self.vacant[key] = 1
        self.stats.layers[layer].vacated += len(keys)

    def check_integrity(self, held: AbstractSet[int]) -> None:
        """Raise ResidencyError unless every pending prefetch occupies a slot."""
        if any(key not in held for key in self.pending):
            raise ResidencyError(f"unused prefetches {sorted(self.pending)} are not all held")

    # -- inside ------------------------------------------------------------------------------------------

    def _show(self, job: LoadJob, copied: Copied) -> None:
        track, key = "prefetch" if job.prefetch else "copy", job.reservation.key
        args = {"bytes": job.nbytes, "cause": job.cause, "link_us": round(copied.link_s * 1e6, 1)}
        self.timeline.span(track, f"L{job.layer} E{key % self._experts}", copied.start_s, copied.end_s, args)

    def premature(self, layer: int, missing: Sequence[int]) -> None:
        """Of these some may have been vacated since the layer last ran."""
        first = layer * self._experts
        for key in missing:
            if key < self._keys and self.vacant[key]:
                self.stats.layers[layer].bytes_premature += self._bytes_of(key)
        self.vacant[first : first + self._experts] = bytes(self._experts)

    def _count_segments(self, stats: LayerStats, plan: LayerPlan) -> None:
        """Count experts with all segments (hits), with a missing one (misses), and misses with the top resident."""
        keys, resident = self._keys, plan.run[: plan.resident]
        here, lacking = {s % keys for s in resident}, {s % keys for s in plan.run[plan.resident :]}
        stats.top_hits += len(lacking.intersection(resident))  # a top's number is its expert's
        stats.hits += len(here - lacking)
        stats.misses += len(lacking)

    def _count_replicas(self, stats: LayerStats, plan: LayerPlan) -> None:
        hits = sum(key >= self._keys for key in plan.run[: plan.resident])
        stats.low_bit_hits += hits
        stats.low_bit_misses += sum(key >= self._keys for key in plan.run) - hits

    def _count_prefetched(
        self, stats: LayerStats, found: Sequence[tuple[int, SourceStats]], others: Iterable[int]
    ) -> None:
        """Prefetches hit. others: experts, of which a segment may be there."""
        keys, used = self._keys, set[int]()
        for key, source in found:
            source.hits += 1
            used.add(key % keys)
        self.governor.used(len(found))
        for key in others:
            used.discard(key % keys)
        stats.prefetched_hits += len(used)
