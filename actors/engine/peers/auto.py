"""The placer of planned placements: each miss is waited for, loaded, or computed near data, as a planner says.

    begin_forward: prompts end
    where (routing known): planner -> remote experts, loads            `layer` (loads issued): background copies
    ran (layer over): costs are corrected, worth, admission

The decision is the planner's (`policies.auto`, `policies.hybrid`), pure; this page gives it queues, clocks and
residency, and carries its answer out. It is a hook of the layer, too: `Watcher` and `AheadHook`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from ....kernels import _planner
from ...core import _core
from ...policies.auto import Action, Auto, Costs, Faster, Followed, Owners, Part, forward_seconds
from ...policies.auto import LayerPlan as Choice
from ...policies.context_ndp import PlacementOptions
from ...policies.hybrid import HybridRule, HybriMoe
from ...policies.plan import Remote, Where
from ...policies.registry import PolicyContext
from ...policies.registry import make as make_policy
from ...policies.residency import State
from ...policies.routing import SequenceRows, take_ended
from ...policies.worth import WorthOrder
from ..host_view import LayerView
from ..layer import Hooks
from ..stats import PlannerStats
from .layer_times import LayerTimes, PlannedLayer
from .placement import PeerPlacer

if TYPE_CHECKING:  # torch: the simulator uses this module without it
    from ..cache.cache import ExpertCache
    from .remote import NdpPool
    from .shards import Shards

# background copies in the counters: misses, and what a prompt needs next
SOURCE, STREAM = "background", "streamed"
_MISSES_STEP = 0.02  # weight of a layer in the mean share of misses
_STAGED = 3  # as the planner sees an expert that is here, in no slot that counts
# members of an enumeration take longer to look up than a layer has time for
_LOADING, _RESIDENT, _NEAR_DATA = int(State.LOADING), int(State.RESIDENT), int(Action.NEAR_DATA)
_NO_KEYS, _NO_TIMES = np.zeros(0, np.int32), np.zeros(0)


class Planner(Protocol):
    """What decides: `policies.auto.Auto`, whose methods say more, or a rule of `policies.hybrid`."""

    top_k: int

    @property
    def keeps_prompt(self) -> bool: ...

    @property
    def costs(self) -> Costs: ...

    @property
    def worths(self) -> NDArray[np.float64]: ...

    def plan(
        self, layer: int, needed: Any, rows: Any, now_s: float, link_free_s: float, flight_keys: Any, arrival_s: Any,
        prompt_tokens: int, owners: Owners | None, room: int,
    ) -> Choice: ...

    def used(self, layer: int, needed: Any) -> None: ...

    def prompt_end(self, counts: Any, tokens: int, requests: int, batch: int) -> None: ...

    def resize(self, slots: int) -> None: ...

    def admit(self, key: int) -> tuple[bool, int | None]: ...

    def saw(self, part: Part, expected_s: float, seen_s: float) -> None: ...

    def took(self, seen_s: float) -> None: ...

    def filled(self) -> None: ...

    def followed(self) -> Followed | None: ...

    def error(self) -> float: ...


class ScoreReader(Protocol):
    """A planner that goes by the routers' scores, too. ahead: later layers that it is shown."""

    ahead: int

    def scored(self, layer: int, logits: NDArray[np.floating]) -> None:
        """The logits [T, E] of the layer that is planned next."""
        ...

    def foreseen(self, layer: int, logits: NDArray[np.floating]) -> None:
        """Those of a later layer's router on that layer's input, in a decode."""
        ...


# (layer, view) -> logits [T, E] of that layer's router on the viewed layer's input; None: they are not known
Score = Callable[[int, Any], "NDArray[np.floating] | None"]
# (start costs, near-data workers, slots of a layer, residency [L, E]) -> the planner
MakePlanner = Callable[[Costs, int, int, NDArray[np.uint8]], Planner]


class _Began(NamedTuple):
    """A forward that has begun: its rows, whether some are a prompt's, when, and its sequences."""

    rows: int
    prompt: bool
    at_s: float
    names: frozenset[str]


class AutoPlacer(PeerPlacer):
    """Carries out a planner's choice: an expert of this GPU runs here or near data, another GPU's there or near data.

    Without a living NDP worker every miss is loaded. A prompt counts its experts; while it runs, a layer that needs
    more than its share of the slots takes turns within that share, and the experts that the prompt uses most leave
    last, so decoding begins with them. Its copies for the next layer (`streamed`) take free slots, and those of other
    layers beyond their shares, only. Background copies are prefetches of the source `background`: they come behind
    demand, are dropped where they have not begun when their layer runs, and take the slot of the victim that the
    planner names.

    Native code runs a layer in a fraction of this page's time, but it only loads. So a forward is planned here, or it
    is `local`: every miss is loaded, by native code or on this page (an expert of many rows), residents of least worth
    leave, and the policy's prefetch runs. Without a living NDP worker all forwards are local, else `Faster` says which.
    Both give the same tokens. Of local forwards the planner hears what was used; in those with a prompt native code
    counts its experts.

    Costs are corrected by what was measured apart: each copy by the link's times of it, near-data work by the workers'
    kernels, a message by the time from the plan to its answer without those where the layer waited for it, an expert
    here by the rest of the layer, which is at most that. The whole time of a layer says what the parts do not
    (`Auto.took`). All of decodes; copies on a GPU's stream have no times on the host, so there the layers alone say
    what a copy costs beyond its start value.

    Args:
        pool: the NDP workers; None: there are none.
        order: the cache's order of eviction; None: another one than `worth`, which then decides alone.
        probe: measures the start costs, in `preload`.
        make: makes the planner.
        reader: of the routers' scores, which `score` gives; None: the planner goes by none.
    """

    always = False  # as a Watcher and as an AheadHook

    def __init__(
        self, cache: ExpertCache, experts: int, shards: Shards | None, pool: NdpPool | None,
        order: WorthOrder | None, probe: Callable[[], Costs], make: MakePlanner, score: Score | None = None,
        reader: ScoreReader | None = None,
    ) -> None:  # fmt: skip
        super().__init__(cache, experts, shards)
        self._score, self._reader = score, reader
        self._pool, self._order, self._probe, self._make, self._clock = pool, order, probe, make, cache.clock
        self.hooks = Hooks(watch=(self,), ahead=(self,))
        layers = len(cache.stats.layers)
        self._states = np.zeros((layers, experts), np.uint8)  # as the planner sees them
        self._seen = self._states.reshape(-1).data  # of one item, a third of NumPy's time
        self._held = cache.residency.states.data
        self._slots = self._slots_of_layer()
        self._counting: dict[str, NDArray[np.int64]] = {}  # prompts: uses of each expert [L, E]
        self._tokens: dict[str, int] = {}  # rows of these prompts
        self._over: deque[str] = deque()
        self._rows: list[SequenceRows] = []
        self._prompt: NDArray[np.int64] | None = None  # uses by the prompts of the present forward [L, E]
        self._pass: PlannedLayer | None = None
        self._wanted: Sequence[Any] = ()
        self._arrivals: dict[int, float] = {}  # of copies under way, as expected
        self._took_s = cache.core.took_s  # of the last copy of each expert, as far as known
        self._filling: set[int] = set()  # background copies under way
        self._spared: frozenset[int] | None = None  # in a prompt: residents that its copies ahead do not displace
        self._link_free_s = 0.0
        self._times: LayerTimes | None = None  # with the planner
        # the order, which notes what local forwards use; None: there are none
        self._notes = order if isinstance(order, WorthOrder) and shards is None else None
        self.faster = Faster()
        self._began: _Began | None = None  # the last forward, which might have gone the other way
        self._missed: float | None = None  # mean share of a decode layer's experts that were not here
        self._forwards, self._decoded = [0, 0], 1  # forwards planned and local; rows of the last decode
        self.planner: Planner | None = None  # after `preload`

    @property
    def may_be_local(self) -> bool:  # type: ignore[override]
        return self._notes is not None and self._cache.native_steps and self.faster.only != 0

    @property
    def may_prefetch(self) -> bool:
        """Whether `prefetches` may be true at times. Asked before there are layers, which say `native_steps`."""
        return self._pool is None or (self._notes is not None and self.faster.only != 0)

    @property
    def prefetches(self) -> bool:
        """Whether the policy's prefetch runs in the present forward: none of its misses is computed near data."""
        return self._pool is None or self.local

    def preload(self) -> None:
        if self._shards is not None:
            self._shards.place((), keep_others=True)()  # drop the placement of an earlier lead
        self._plan_by(self._probe())

    def resized(self) -> None:
        self._slots, self._began = self._slots_of_layer(), None  # a move is no part of a forward's time
        if self.planner is not None:
            self.planner.resize(self._slots)
            if self._order is not None:
                self._order.bind(self._cache.residency.slots, self.planner.worths)

    def _slots_of_layer(self) -> int:
        layers = len(self._cache.stats.layers)
        return min(max(1, self._cache.residency.slots // layers), self._experts)

    def _plan_by(self, costs: Costs) -> None:
        workers = 0 if self._pool is None else len(self._pool.members)
        self.planner = self._make(costs, workers, self._slots, self._states)
        self._times = LayerTimes(self._cache, self.planner)
        if self._order is not None:
            self._order.bind(self._cache.residency.slots, self.planner.worths)

    # -- around forwards -----------------------------------------------------------------------------------------------

    def begin_forward(self, sequences: Sequence[SequenceRows]) -> None:
        assert self.planner is not None
        planner = self.planner
        self._hear(planner, sequences)
        for name in take_ended(self._over, sequences):
            self._counting.pop(name, None)
            self._tokens.pop(name, None)
        self._rows = list(sequences)
        decoding = [s.name for s in sequences if s.decode]
        started = [name for name in decoding if name in self._counting]
        if started:
            counts = np.sum([self._counting.pop(name) for name in started], axis=0)
            planner.prompt_end(counts, sum(self._tokens.pop(name) for name in started), len(started), len(decoding))
        self._choose_way(planner, sequences)
        self._prompt = None
        for s in sequences:
            if not s.decode:
                self._prompt = self._counting.setdefault(s.name, np.zeros(self._states.shape, np.int64))
                self._tokens[s.name] = self._tokens.get(s.name, 0) + s.stop - s.start
        if self._prompt is not None and self.local and len(sequences) > 1:
            self._prompt = np.zeros(self._states.shape, np.int64)  # native code counts all rows together
        if self._order is not None:
            self._order.prompt(self._prompt if planner.keeps_prompt else None)
        if sequences:
            self._forwards[int(self.local)] += 1
            self._decoded = sequences[-1].stop if self._prompt is None else self._decoded
        self._report(planner)

    def _hear(self, planner: Planner, sequences: Sequence[SequenceRows]) -> None:
        """Learn from the last forward."""
        notes, began, total = self._notes, self._began, self._rows[-1].stop if self._rows else 0
        if notes is not None and self.local:
            noted, together = notes.noted(), self._prompt
            if together is None:
                for layer, experts in noted:
                    planner.used(layer, experts)
            elif len(self._rows) > 1:
                for s in self._rows:
                    if not s.decode and s.name in self._counting:
                        share = (s.stop - s.start) / total
                        self._counting[s.name] += np.rint(together * share).astype(np.int64)
        if began is not None and began.names.intersection(s.name for s in sequences):
            self.faster.took(began.rows, int(self.local), self._clock() - began.at_s, began.prompt)
        self.local, self._began = False, None

    def _choose_way(self, planner: Planner, sequences: Sequence[SequenceRows]) -> None:
        """Choose whether the forward that begins is local."""
        if not sequences or not self.may_be_local:
            return
        rows, prompt, pool = sequences[-1].stop, not all(s.decode for s in sequences), self._pool
        if pool is None or not pool.available:
            self.local = True  # there is nothing to choose
        else:
            layers, experts = self._states.shape
            expected_s = forward_seconds(
                planner.costs, layers, experts, planner.top_k, self._slots, len(pool.members), rows,
                None if prompt else self._missed,
            )  # fmt: skip
            self.local = self.faster.choose(rows, expected_s, prompt) == 1
            self._began = _Began(rows, prompt, self._clock(), frozenset(s.name for s in sequences))
        if self.local and self._notes is not None:
            self._notes.note()
            if self._times is not None:
                self._times.ended_s = 0.0

    def end_sequence(self, name: str) -> None:
        self._over.append(name)  # from any thread: a forward may be counting it

    # -- a layer -------------------------------------------------------------------------------------------------------

    def scored_at(self, layer: int) -> Sequence[int]:
        reader = self._reader
        return () if reader is None else range(layer, min(layer + reader.ahead + 1, len(self._states)))

    def where(self, layer: int, needed: Sequence[int], routing: _core.Routing, view: LayerView) -> Where:
        planner, base, pool, now_s = self.planner, layer * self._experts, self._pool, self._clock()
        times = self._times
        assert planner is not None
        assert times is not None
        if layer and self._prompt is None:
            times.begun(now_s)
        announced = bool(self._rows) and self._rows[-1].stop == routing.tokens
        prompts = announced and self._prompt is not None
        keep, self._spared = self._begin_prompt(layer, view) if prompts else frozenset[int](), None
        self._wanted, self._pass = (), None
        if self.local:  # native code leaves layers with many rows of an expert to this page
            return self._split(needed, (), self._all_at_once(planner, needed, keep))
        self._look()
        if prompts and self._order is not None:
            self._spared = keep.union(range(base, min(base + 2 * self._experts, len(self._seen))))
        if self._reader is not None and self._score is not None:
            self._show_scores(layer, view, self._reader, self._score)
        experts, gpus = np.array(routing.experts, np.int32), self._gpus_of(needed)
        choice, near = None, list[Remote]()
        if pool is None or pool.available:
            rows, tokens = np.array(routing.counts, np.int32), 0 if self._prompt is None else routing.tokens
            queue, owners = self._queue(now_s), self._owners_of(needed, gpus)
            choice = planner.plan(layer, experts, rows, now_s, *queue, tokens, owners, self._room(needed, gpus))
            if choice.near_data and pool is not None:
                actions = choice.actions.tolist()
                away = [key for key, action in zip(needed, actions, strict=True) if action == _NEAR_DATA]
                workers = pool.choose(away)
                if workers is not None:
                    near = [Remote(key, 0, worker) for key, worker in zip(away, workers, strict=True)]
                    for key in away:
                        gpus.pop(key, None)
            self._wanted = choice.wanted
        found = self._split(needed, [*[Remote(key, 0, gpu) for key, gpu in gpus.items()], *near], keep)
        learns = announced and self._prompt is None
        if learns:
            held = self._held
            share = (len(needed) - [held[key] for key in needed].count(_RESIDENT)) / len(needed)
            self._missed = share if self._missed is None else self._missed + _MISSES_STEP * (share - self._missed)
        self._pass = PlannedLayer(
            layer, experts, now_s, choice, len(found.here), len(near), (), announced, learns, times.counted(layer)
        )
        return found

    def _gpus_of(self, needed: Sequence[int]) -> dict[int, str]:
        """The other GPUs that run experts, by key: their owners, which are not lost."""
        if self._shards is None:
            return {}
        found = [(key, self._gpu_of(key)) for key in needed]
        return {key: gpu for key, gpu in found if gpu is not None}

    def _owners_of(self, needed: Sequence[int], gpus: Mapping[int, str]) -> Owners | None:
        """As the planner sees these GPUs."""
        if self._shards is None or not gpus:
            return None
        owners = [self._shards.owner_of(key) if key in gpus else 0 for key in needed]
        return Owners(np.array(owners, np.uint8), np.array(self._shards.holds(needed), np.uint8))

    def routed(self, layer: int, routing: _core.Routing) -> None:
        """As a `Watcher`."""
        return None

    def native(self, index: int) -> None:
        """As an `AheadHook`: native code cannot do it."""
        return None

    def idle(self, index: int) -> bool:
        return self.local

    def skip(self, index: int, view: Any) -> None:
        return None

    def layer(self, index: int, view: Any) -> None:
        """The demand loads are queued: queue the background copies behind them."""
        now_s, held, found = self._clock(), self._held, self._pass
        assert self.planner is not None
        copy_s, free_s = self.planner.costs.copy_s, max(self._link_free_s, now_s)
        if found is not None:
            run, resident = self._cache.core.planned
            found.loaded = run[resident:]
        for key in () if found is None else found.loaded:
            if held[key] == _LOADING and key not in self._arrivals:
                free_s += copy_s
                self._arrivals[key] = free_s
        mine = [wanted for wanted in self._wanted if self._gpu_of(wanted.key) is None]
        if self._spared is not None:
            queued = self._stream([wanted.key for wanted in mine], self._spared)
        else:
            queued = [wanted.key for wanted in mine if self._fetch(wanted.key, wanted.victim)]
        for key in queued:
            free_s += copy_s
            self._arrivals[key] = free_s
        self._link_free_s = free_s

    def ran(self, layer: int) -> None:
        """The layer is over."""
        found, planner, times, self._pass = self._pass, self.planner, self._times, None
        if found is None or planner is None or times is None or found.layer != layer:
            return
        times.ended(found, self._clock(), bool(self._arrivals))
        if found.learns:
            planner.used(layer, found.needed)
            self._look()
            staged, base = set() if self._order is None else set(self._order.refused), layer * self._experts
            again = [base + e for e in found.needed.tolist() if base + e in staged] if staged else ()
            for key in (*found.loaded, *again):
                self._admit(key)

    # -- inside --------------------------------------------------------------------------------------------------------

    def _begin_prompt(self, layer: int, view: LayerView) -> frozenset[int]:
        """Count the rows of prompts; the residents that this layer's loads spare."""
        for s in () if self.local else self._rows:  # of a local forward the order has counted them
            if not s.decode:
                picked = view.ids[s.start : s.stop].ravel()
                self._counting[s.name][layer] += np.bincount(picked, minlength=self._experts)
        return frozenset() if self._order is None else self._order.settled()

    def _all_at_once(self, planner: Planner, needed: Sequence[int], keep: frozenset[int]) -> frozenset[int]:
        """Less residents that are kept, those of least worth, so that the layer's misses find slots side by side.

        In turns each expert runs alone. What leaves is at most what one layer needs beyond its share: the layers behind
        it take these slots from one another.
        """
        short = len(needed) - (self._cache.residency.slots - len(keep))  # none of these is kept: it is this layer
        if not 0 < short <= len(keep):
            return keep
        kept = np.fromiter(keep, np.int64, len(keep))
        order = np.lexsort((kept, planner.worths.reshape(-1)[kept]))
        return keep.difference(kept[order[:short]].tolist())

    def _show_scores(self, layer: int, view: LayerView, reader: ScoreReader, score: Score) -> None:
        for later in self.scored_at(layer):
            logits = score(later, view) if later == layer or self._prompt is None else None
            if logits is None:
                return
            if later == layer:
                reader.scored(layer, logits)
            else:
                reader.foreseen(later, logits)

    def _look(self) -> None:
        """Read the residency: refused experts are staged, and background copies that have arrived are judged."""
        seen, held, planner = self._seen, self._held, self.planner  # held tells of copies in native code, too
        assert planner is not None
        seen[:] = held
        if self._order is not None:
            for key in self._order.refused:
                if seen[key] == _RESIDENT:
                    seen[key] = _STAGED
        for key in [key for key in self._arrivals if held[key] != _LOADING]:
            del self._arrivals[key]
            took_s = float(self._took_s[key])
            if took_s >= 0.0:
                planner.saw(Part.COPY, planner.costs.copy_s, took_s)
        for key in [key for key in self._filling if held[key] != _LOADING]:
            self._filling.discard(key)
            if held[key] == _RESIDENT:
                planner.filled()
                self._admit(key)

    def _admit(self, key: int) -> None:
        """Let the planner say whether an expert that has come stays."""
        order = self._order
        if order is None or self.planner is None or self._held[key] != _RESIDENT:
            return
        self._seen[key] = _STAGED  # it counts for no slot while it is judged
        admitted, victim = self.planner.admit(key)
        if not admitted:
            order.refuse(key)
            return
        order.admit(key)
        self._seen[key] = _RESIDENT
        if victim is not None:
            order.refuse(victim)
            self._seen[victim] = _STAGED

    def _queue(self, now_s: float) -> tuple[float, NDArray[np.int32], NDArray[np.float64]]:
        """When the link is free, and the copies under way with the time of each arrival."""
        if not self._arrivals:
            self._link_free_s = now_s
            return now_s, _NO_KEYS, _NO_TIMES
        keys = np.fromiter(self._arrivals, np.int32, len(self._arrivals))
        times = np.fromiter(self._arrivals.values(), np.float64, len(self._arrivals))
        return max(now_s, self._link_free_s), keys, np.maximum(times, now_s)

    def _room(self, needed: Sequence[int], gpus: Mapping[int, str]) -> int:
        """Slots that a prompt's copies for the next layer may take, behind this layer's loads."""
        if self._spared is None:
            return 0
        seen = self._states.reshape(-1)
        free = seen >= _RESIDENT
        free[list(self._spared)] = False
        missing = sum(seen[key] == State.ABSENT for key in needed if key not in gpus)
        return max(0, self._cache.residency.free_slots + int(np.count_nonzero(free)) - missing)

    def _stream(self, keys: Sequence[int], spared: frozenset[int]) -> list[int]:
        """Queue a prompt's copies for the next layer, most wanted first; returns those that found a slot."""
        cache, order = self._cache, self._order
        absent = [key for key in keys if cache.residency.state(key) == State.ABSENT]
        if not absent or order is None:
            return []
        at_work, order.layer = order.layer, absent[0] // self._experts
        cache.prefetch(absent, spared, STREAM)
        order.layer = at_work
        return [key for key in absent if cache.residency.state(key) != State.ABSENT]

    def _fetch(self, key: int, victim: int | None) -> bool:
        """Queue a background copy."""
        cache, order = self._cache, self._order
        if cache.residency.state(key) != State.ABSENT:
            return False
        if order is None:
            return cache.prefetch((key,), source=SOURCE) > 0
        at_work, order.layer = order.layer, key // self._experts
        if victim is not None:
            order.refuse(victim)
        queued = cache.prefetch((key,), source=SOURCE) > 0
        order.layer = at_work
        if queued:
            self._filling.add(key)
        elif victim is not None:
            order.admit(victim)
        return queued

    def _report(self, planner: Planner) -> None:
        costs, followed = planner.costs, planner.followed()
        (planned, local), (planned_s, local_s) = self._forwards, self.faster.seconds(self._decoded)
        self._cache.stats.planner = PlannerStats(
            planner.error(), costs.copy_s, costs.near_s, costs.near_busy_s, costs.message_s, planned, local, planned_s,
            local_s, followed and followed.rule, followed and {"seen": followed.seen_s, **followed.rules_s},
        )  # fmt: skip


def make_auto(
    options: PlacementOptions, cache: ExpertCache, experts: int, top_k: int, shards: Shards | None,
    pool: NdpPool | None, probe: Callable[[], Costs], score: Score | None,
) -> AutoPlacer:  # fmt: skip
    """The placer of a planned placement: with the native planner of `auto`, or with the rule that its kind names.

    probe: the start costs, on an empty cache. score: for `PlacementOptions.scored`.
    """
    order = cache.eviction if isinstance(cache.eviction, WorthOrder) else None
    layers = len(cache.stats.layers)
    rule: HybridRule | None = make_policy("placement", options, PolicyContext(layers, experts, top_k))

    def make(costs: Costs, workers: int, slots: int, states: NDArray[np.uint8]) -> Planner:
        if rule is not None:
            return rule.start(costs, workers, states)
        return Auto(_planner, layers, experts, top_k, slots, costs, workers, states)

    reader = rule if isinstance(rule, HybriMoe) else None
    placer = AutoPlacer(cache, experts, shards, pool, order, probe, make, score, reader)
    if rule is not None:
        placer.faster.only = 0  # another system's rule decides every layer
    return placer
