"""What became of an expert cache's hits, loads and guesses: counters and timeline spans, apart from moving experts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import TYPE_CHECKING

from ...policies.plan import LayerPlan, Load
from ...policies.prefetch import PrefetchGovernor
from ...policies.residency import ResidencyError
from ..stats import EngineStats, LayerStats, SourceStats, Timeline
from .loader import LoadJob
from .slots import SlotMap

if TYPE_CHECKING:
    from .device import Copied

class CacheLedger:
    """The books of one `ExpertCache`, which tells it of every event, on the forward's thread.

    Keys are those of segments where experts are cut in two. A guess, that is a segment that a prefetch brought or
    brings, stays on the books until the first of: a layer uses it, it leaves the cache, its copy is given up.

    Args:
        stats: the counters. The cache's events write one `LayerStats` per MoE layer, the `SourceStats` of the guesses
            and `bytes_preloaded`; others write the rest.
        governor: told which guesses were used.
        timeline: gets a span for each copy and each wait.
        slot_map: layers and bytes of segments.
        divided: whether experts are cut in two; stays so. replicas: whether there are slots for low-bit replicas.

    Attributes:
        uses: forwards that ran each expert on this device, since the counters were reset; the list stays the same.
    """

    def __init__(
        self, stats: EngineStats, governor: PrefetchGovernor, timeline: Timeline, slot_map: SlotMap, divided: bool,
        replicas: bool = False,
    ) -> None:
        self.stats, self.governor, self.timeline = stats, governor, timeline
        self.uses = [0] * slot_map.keys
        self._keys, self._experts = slot_map.keys, slot_map.experts
        self._layer_of, self._bytes_of = slot_map.layer_of, slot_map.bytes_of
        self._divided, self._replicas = divided, replicas
        self._unused_prefetches: dict[int, SourceStats] = {}
        self._vacated: set[int] = set()  # keys sent away by pre-eviction since their layers last ran

    # -- a layer's forward -------------------------------------------------------------------------------

    def begin(self, layer: int, plan: LayerPlan) -> None:
        """Count hits and misses, guesses that hit, and what pre-eviction sent away too early."""
        stats = self.stats.layers[layer]
        stats.forwards += 1
        stats.waves += plan.waves
        if self._vacated:
            self._count_premature(stats, layer, plan)
        if self._divided:
            self._count_segments(stats, plan)
        else:
            stats.hits += plan.resident
            stats.misses += len(plan.run) - plan.resident
            if self._replicas:
                self._count_replicas(stats, plan)
        if self._unused_prefetches:
            self._count_guessed(stats, plan)

    def arriving(self, layer: int, keys: Sequence[int], jobs: Mapping[int, LoadJob]) -> None:
        """`layer` needs these, whose copies are under way: the guesses among them were right, and late."""
        late: set[int] = set()  # experts
        for key in keys:
            if jobs[key].prefetch:
                late.add(key % self._keys)
                if (source := self._unused_prefetches.pop(key, None)) is not None:
                    source.late += 1
                self.governor.used()
        self.stats.layers[layer].late_prefetches += len(late)

    def demanded(self, loads: Sequence[Load]) -> None:
        """A forward without rows of any prompt asked for these, of one layer, one at least."""
        layer = self._layer_of(loads[0].key)
        self.stats.layers[layer].bytes_demanded_decode += sum(self._bytes_of(load.key) for load in loads)

    def waited(self, layer: int, start_s: float, end_s: float) -> None:
        """The forward of `layer` stood still for a copy."""
        self.stats.layers[layer].blocked_io_s += end_s - start_s
        if self.timeline.enabled:
            self.timeline.span("wait", f"L{layer} wait", start_s, end_s)

    def ran(self, experts: Iterable[int]) -> None:
        """A forward has run these experts."""
        for key in experts:
            self.uses[key] += 1

    # -- copies ------------------------------------------------------------------------------------------

    def guessed(self, keys: Sequence[int], source: str) -> None:
        """Prefetches of these are queued; `source` says whose guess they are."""
        counters = self.stats.source(source)
        counters.queued += len(keys)
        self._unused_prefetches.update(dict.fromkeys(keys, counters))

    def landed(self, job: LoadJob, copied: Copied) -> None:
        """A copy has become resident: its bytes by cause, and the link's seconds where they are known."""
        key, stats = job.reservation.key, self.stats.layers[job.layer]
        if job.cause == "prefetch":
            stats.bytes_loaded_prefetch += self._bytes_of(key)
        elif job.cause == "migration":
            stats.bytes_loaded_migration += self._bytes_of(key)
        else:
            stats.bytes_loaded_demand += self._bytes_of(key)
        if key >= self._keys and self._replicas:
            stats.bytes_loaded_low_bit += self._bytes_of(key)
        if job.writeback:
            stats.bytes_written_back += self._bytes_of(key)
        if copied.event is None:
            stats.total_io_s += copied.end_s - copied.start_s
            stats.link_s += copied.link_s
            if self.timeline.enabled:
                self._show(job, copied)

    def timed(self, job: LoadJob, copied: Copied) -> None:
        """A copy on a GPU's stream has ended, after its layer may have gone on (`loader.Books`)."""
        stats = self.stats.layers[job.layer]
        stats.total_io_s += copied.end_s - copied.start_s
        stats.link_s += copied.link_s
        stats.link_path_s += copied.link_s  # which the layer itself can add only for what ended while it ran
        if self.timeline.enabled:
            self._show(job, copied)

    def held(self, layer: int, start_s: float, end_s: float) -> None:
        """The compute of `layer` stood still for a copy, on a GPU's stream (`loader.Books`)."""
        self.waited(layer, start_s, end_s)
        self.stats.layers[layer].io_path_s += end_s - start_s  # as above

    def preloaded(self, jobs: Sequence[LoadJob]) -> None:
        """These were loaded before the first request; they count in no layer."""
        self.stats.bytes_preloaded += sum(self._bytes_of(job.reservation.key) for job in jobs)

    def failed(self, job: LoadJob) -> None:
        """A copy raised. Only a guess's counts: another's fails the forward that needs it."""
        if job.prefetch:
            self.stats.layers[job.layer].failed_prefetches += 1

    # -- leaving -----------------------------------------------------------------------------------------

    def evicted(self, key: int) -> None:
        """It left the cache: a guess unused until now was wasted, and so were its bytes."""
        if (source := self._unused_prefetches.pop(key, None)) is not None:
            self.governor.wasted()
            source.wasted += 1
            self.stats.layers[self._layer_of(key)].bytes_wasted += self._bytes_of(key)

    def cancelled(self, key: int, moved_share: float) -> None:
        """Its load was dropped or failed, and no forward waits for it; of its bytes count those moved, as wasted."""
        if moved_share:
            stats, moved = self.stats.layers[self._layer_of(key)], round(self._bytes_of(key) * moved_share)
            stats.bytes_loaded_prefetch += moved
            stats.bytes_wasted += moved
        if (source := self._unused_prefetches.pop(key, None)) is not None:
            self.governor.wasted()
            source.cancelled += 1

    def forget(self, key: int) -> None:
        """Its load was given up: what is still on the books counts as neither used nor wasted."""
        self._unused_prefetches.pop(key, None)

    def vacated(self, layer: int, keys: Sequence[int]) -> None:
        """Pre-eviction sent these experts away before `layer`."""
        self._vacated.update(keys)
        self.stats.layers[layer].vacated += len(keys)

    def check_integrity(self, held: AbstractSet[int]) -> None:
        """Raise ResidencyError unless every guess on the books is held."""
        if not self._unused_prefetches.keys() <= held:
            raise ResidencyError(f"unused prefetches {sorted(self._unused_prefetches)} are not all held")

    # -- inside ------------------------------------------------------------------------------------------

    def _show(self, job: LoadJob, copied: Copied) -> None:
        track, key = "prefetch" if job.prefetch else "copy", job.reservation.key
        self.timeline.span(track, f"L{job.layer} E{key % self._experts}", copied.start_s, copied.end_s)

    def _count_premature(self, stats: LayerStats, layer: int, plan: LayerPlan) -> None:
        first = layer * self._experts
        mine = {key for key in self._vacated if first <= key < first + self._experts}
        self._vacated -= mine
        again = mine.intersection(plan.run[plan.resident + plan.arriving :])
        stats.bytes_premature += sum(map(self._bytes_of, again))

    def _count_segments(self, stats: LayerStats, plan: LayerPlan) -> None:
        """Count the experts that are here as a whole, those of which something lacks, and those with their top."""
        keys = self._keys
        lacking = {segment % keys for segment in plan.run[plan.resident :]}
        resident = plan.run[: plan.resident]
        stats.hits += len({segment % keys for segment in resident} - lacking)
        stats.misses += len(lacking)
        stats.top_hits += sum(segment in lacking for segment in resident)  # a top's number is its expert's

    def _count_replicas(self, stats: LayerStats, plan: LayerPlan) -> None:
        hits = sum(key >= self._keys for key in plan.run[: plan.resident])
        stats.low_bit_hits += hits
        stats.low_bit_misses += sum(key >= self._keys for key in plan.run) - hits

    def _count_guessed(self, stats: LayerStats, plan: LayerPlan) -> None:
        keys = self._keys
        lacking = {key % keys for key in plan.run[plan.resident :]}  # experts, of which a segment may be there
        guessed: set[int] = set()
        for key in plan.run[: plan.resident]:
            if (source := self._unused_prefetches.pop(key, None)) is not None:
                self.governor.used()
                guessed.add(key % keys)
                source.hits += 1
        stats.prefetched_hits += len(guessed - lacking)
