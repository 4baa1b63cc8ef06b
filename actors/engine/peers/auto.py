"""The placer of planned placements: each miss is waited for, loaded, or computed near data, as a planner says.

    begin_forward: prompts end, planned or local     a layer: `core::PlannedPlacement` (actors/core/planned.cpp)

The decision is the planner's (`policies.auto`, `policies.hybrid`), pure; native code gives it queues, clocks and
residency in the body of a layer's pass, and carries its answer out.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from ...core import _core
from ...policies.auto import Auto, Costs, Faster, Followed, Owners, Part, Without, forward_seconds
from ...policies.auto import LayerPlan as Choice
from ...policies.context_ndp import PlacementOptions
from ...policies.foreign import is_ours
from ...policies.hybrid import HybridRule, HybriMoe
from ...policies.registry import PolicyContext
from ...policies.registry import make as make_policy
from ...policies.routing import SequenceRows, take_ended
from ...policies.worth import WorthOrder
from ...store.learned import Uses
from ..host_view import LayerView
from ..stats import PlannerStats
from .placement import PeerPlacer

if TYPE_CHECKING:  # torch: the simulator uses this module without it
    from ..cache.cache import ExpertCache
    from .remote import NdpPool
    from .shards import Shards

# background copies in the counters: misses, and what a prompt needs next
SOURCE, STREAM = "background", "streamed"


class Planner(Protocol):
    """What decides: `policies.auto.Auto`, whose methods say more, or a rule of `policies.hybrid`.

    Native code calls `plan`, with owners as a plain tuple, and `used`, `admit`, `saw`, `took` and `filled`.
    """

    top_k: int

    @property
    def native(self) -> Any:
        """What native code asks: a `_core.Planner`, or this."""
        ...

    @property
    def keeps_prompt(self) -> bool: ...

    @property
    def costs(self) -> Costs: ...

    @property
    def worths(self) -> NDArray[np.float64]: ...

    def plan(
        self,
        layer: int,
        needed: Any,
        rows: Any,
        now_s: float,
        link_free_s: float,
        flight_keys: Any,
        arrival_s: Any,
        prompt_tokens: int,
        owners: Owners | None,
        room: int,
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


class _Prompts:
    """Counts the experts that prompts use, until their sequences decode.

    Attributes:
        rows: the sequences of the present forward. now: uses by its prompts [L, E]; None: it has none.
    """

    def __init__(self, shape: tuple[int, ...]) -> None:
        self.rows: list[SequenceRows] = []
        self.now: NDArray[np.int64] | None = None
        self._shape = shape
        self._uses: dict[str, NDArray[np.int64]] = {}  # of each expert [L, E]
        self._tokens: dict[str, int] = {}  # rows of these prompts
        self._over: deque[str] = deque()

    def end_sequence(self, name: str) -> None:
        self._over.append(name)  # from any thread: a forward may be counting it

    def share_out(self) -> None:
        """The last forward's prompts were counted together: each gets its rows' share."""
        if self.now is None or len(self.rows) < 2:
            return
        for s in self.rows:
            if not s.decode and s.name in self._uses:
                share = (s.stop - s.start) / self.rows[-1].stop
                self._uses[s.name] += np.rint(self.now * share).astype(np.int64)

    def take_ended(self, sequences: Sequence[SequenceRows]) -> tuple[NDArray[np.int64], int, int] | None:
        """Uses, tokens and number of the prompts whose sequences decode from now on; None: there are none."""
        for name in take_ended(self._over, sequences):
            self._uses.pop(name, None)
            self._tokens.pop(name, None)
        started = [s.name for s in sequences if s.decode and s.name in self._uses]
        if not started:
            return None
        counts = np.sum([self._uses.pop(name) for name in started], axis=0)
        return counts, sum(self._tokens.pop(name) for name in started), len(started)

    def begin(self, sequences: Sequence[SequenceRows], together: bool) -> list[tuple[int, int, Any]]:
        """The next forward: start, stop and uses of each sequence. together: its rows are counted together."""
        self.rows, self.now, found = list(sequences), None, list[tuple[int, int, Any]]()
        for s in sequences:
            if not s.decode:
                self.now = self._uses.setdefault(s.name, np.zeros(self._shape, np.int64))
                self._tokens[s.name] = self._tokens.get(s.name, 0) + s.stop - s.start
            found.append((s.start, s.stop, None if s.decode else self.now))
        if self.now is not None and together and len(sequences) > 1:
            self.now = np.zeros(self._shape, np.int64)
        return found


class AutoPlacer(PeerPlacer):
    """Carries out a planner's choice: an expert of this GPU runs here or near data, another GPU's there or near data.

    Without a living NDP worker every miss is loaded. A prompt counts its experts; while it runs, a layer that needs
    more than its share of the slots takes turns within that share, and the experts that the prompt uses most leave
    last, so decoding begins with them. Its copies for the next layer (`streamed`) take free slots, and those of other
    layers beyond their shares, only. Background copies are prefetches of the source `background`: they come behind
    demand, are dropped where they have not begun when their layer runs, and take the slot of the victim that the
    planner names.

    A planned layer costs more of the host than one that only loads. So a forward is planned, or it is `local`: every
    miss is loaded, residents of least worth leave, and the policy's prefetch runs. Without a living NDP worker all
    forwards are local, else `Faster` says which. Both give the same tokens. Of local forwards the planner hears what
    was used; in those with a prompt the order of eviction counts its experts.

    Costs are corrected by what was measured apart: each copy by the link's times of it, near-data work by the workers'
    kernels, a message by the time from the plan to its answer without those where the layer waited for it, an expert
    here by the rest of the layer, which is at most that. The whole time of a layer says what the parts do not
    (`Auto.took`). All of decodes; copies on a GPU's stream have no times on the host, so there the layers alone say
    what a copy costs beyond its start value.

    Args:
        pool: the NDP workers; None: there are none.
        probe: measures the start costs, in `preload`, and shares the experts out among the workers.
        make: makes the planner.
        reader: of the routers' scores, which `score` gives; None: the planner goes by none.

    Attributes:
        planner: after `preload`.
    """

    native: _core.PlannedPlacement

    def __init__(
        self, cache: ExpertCache, experts: int, shards: Shards | None, pool: NdpPool | None,
        probe: Callable[[], Costs], make: MakePlanner, score: Score | None = None, reader: ScoreReader | None = None,
    ) -> None:  # fmt: skip
        super().__init__(cache, experts, shards)
        self._score, self._reader = score, reader
        self._pool, self._probe, self._make, self._clock = pool, probe, make, cache.clock
        order = cache.eviction if isinstance(cache.eviction, WorthOrder) else None
        if order is not None and not is_ours(type(order)):
            order = None  # it may have changed what it inherits, so that the cache calls it in Python
        self._order = order
        self._states = np.zeros((len(cache.stats.layers), experts), np.uint8)  # as the planner sees them
        handle, gpus = None if order is None else order.handle, None if shards is None else partial(_gpus, shards)
        self.native = _core.PlannedPlacement(
            cache.core, handle, pool, gpus, cache.stats, self._states, cache.number_of(SOURCE), cache.number_of(STREAM)
        )
        self._prompts = _Prompts(self._states.shape)
        # the order, which notes what local forwards use; None: there are none
        self._notes = order if shards is None else None
        self.faster = Faster()
        self._began: _Began | None = None  # the last forward, which might have gone the other way
        self._forwards, self._decoded = [0, 0], 1  # forwards planned and local; rows of the last decode
        self.planner: Planner | None = None

    @property
    def local(self) -> bool:  # type: ignore[override]
        return self.native.local

    @property
    def may_be_local(self) -> bool:
        """Whether forwards may be local."""
        return self._notes is not None and self._cache.native_steps and self.faster.only != 0

    @property
    def may_prefetch(self) -> bool:
        """Whether `prefetches` may be true at times. Asked before there are layers, which say `native_steps`."""
        return self._pool is None or (self._notes is not None and self.faster.only != 0)

    @property
    def prefetches(self) -> bool:
        """Whether the policy's prefetch runs in the present forward: none of its misses is computed near data."""
        return self._pool is None or self.local

    @property
    def slots(self) -> int:
        """Of a layer, its share."""
        return min(max(1, self._cache.residency.slots // len(self._states)), self._experts)

    def preload(self) -> None:
        if self._shards is not None:
            self._shards.place((), keep_others=True)()  # drop the placement of an earlier lead
        costs = self._probe()  # which says who of the pool owns experts
        workers = 0 if self._pool is None else self._pool.owners
        planner = self.planner = self._make(costs, workers, self.slots, self._states)
        self.native.plan_by(planner.native, planner.worths)
        if self._order is not None:
            self._order.bind(self._cache.residency.slots, planner.worths)

    def begin_with(self, uses: Uses) -> bool:
        if isinstance(self.planner, Auto):
            self.planner.popularity(np.rint(uses.counts).astype(np.int64), round(uses.forwards))
        return True

    def begin_serving(self) -> None:
        """Measure once more: all processes have run by now. What the first forwards taught was of cold ones."""
        self._began, only = None, self.faster.only
        self.faster = Faster()
        self.faster.only = only
        self.preload()

    def resized(self) -> None:
        self._began = None  # a move is no part of a forward's time
        if self.planner is not None:
            self.planner.resize(self.slots)
            if self._order is not None:
                self._order.bind(self._cache.residency.slots, self.planner.worths)

    def begin_forward(self, sequences: Sequence[SequenceRows]) -> None:
        assert self.planner is not None
        planner, prompts = self.planner, self._prompts
        self._hear(planner, sequences)
        ended = prompts.take_ended(sequences)
        if ended is not None:
            planner.prompt_end(*ended, len([s for s in sequences if s.decode]))
        local = self._choose_way(planner, sequences)
        rows = prompts.begin(sequences, together=local)
        self.native.begin(rows, prompts.now is not None, local)
        if self._order is not None:
            self._order.prompt(prompts.now if planner.keeps_prompt else None)
        if sequences:
            self._forwards[int(local)] += 1
            self._decoded = sequences[-1].stop if prompts.now is None else self._decoded
        self._report(planner)

    def end_sequence(self, name: str) -> None:
        self._prompts.end_sequence(name)

    def scored_at(self, layer: int) -> Sequence[int]:
        reader = self._reader
        return () if reader is None else range(layer, min(layer + reader.ahead + 1, len(self._states)))

    def show(self, layer: int, view: LayerView) -> None:
        reader, score = self._reader, self._score
        if reader is None or score is None:
            return
        for later in self.scored_at(layer):
            logits = score(later, view) if later == layer or self._prompts.now is None else None
            if logits is None:
                return
            if later == layer:
                reader.scored(layer, logits)
            else:
                reader.foreseen(later, logits)

    def _hear(self, planner: Planner, sequences: Sequence[SequenceRows]) -> None:
        """Learn from the last forward."""
        notes, began = self._notes, self._began
        if notes is not None and self.local:
            noted = notes.noted()
            if self._prompts.now is None:
                for layer, experts in noted:
                    planner.used(layer, experts)
            else:
                self._prompts.share_out()
        if began is not None and began.names.intersection(s.name for s in sequences):
            self.faster.took(began.rows, int(self.local), self._clock() - began.at_s, began.prompt)
        self._began = None

    def _choose_way(self, planner: Planner, sequences: Sequence[SequenceRows]) -> bool:
        """Choose whether the forward that begins is local."""
        if not sequences or not self.may_be_local:
            return False
        rows, prompt, pool = sequences[-1].stop, not all(s.decode for s in sequences), self._pool
        local = True  # without workers there is nothing to choose
        if pool is not None and pool.available:
            layers, experts = self._states.shape
            expected_s = forward_seconds(
                planner.costs, layers, experts, planner.top_k, self.slots, pool.owners, rows,
                None if prompt else self.native.missed, prompt,
            )  # fmt: skip
            local = self.faster.choose(rows, expected_s, prompt) == 1
            self._began = _Began(rows, prompt, self._clock(), frozenset(s.name for s in sequences))
        if local and self._notes is not None:
            self._notes.note()
        return local

    def _report(self, planner: Planner) -> None:
        costs, followed = planner.costs, planner.followed()
        (planned, local), (planned_s, local_s) = self._forwards, self.faster.seconds(self._decoded)
        self._cache.stats.planner = PlannerStats(
            planner.error(), costs.copy_s, costs.near_s, costs.near_busy_s, costs.message_s, planned, local, planned_s,
            local_s, followed and followed.rule, followed and {"seen": followed.seen_s, **followed.rules_s},
        )  # fmt: skip


def _gpus(shards: Shards, keys: Sequence[int]) -> tuple[list[str | None], list[int], list[bool]]:
    """Of experts the other GPUs that run them (None: this one, as its owner or because that one is lost), the number of
    each, and whether it holds the expert.
    """
    found = [shards.peer_of(key) for key in keys]
    owners = [0 if peer is None else shards.owner_of(key) for key, peer in zip(keys, found, strict=True)]
    held = [bool(one) for one in shards.holds(keys)] if any(owners) else [False] * len(keys)
    return [None if peer is None else peer[0] for peer in found], owners, held


def make_auto(
    options: PlacementOptions, cache: ExpertCache, experts: int, top_k: int, shards: Shards | None,
    pool: NdpPool | None, probe: Callable[[], Costs], score: Score | None, without: Without = Without.NOTHING,
) -> AutoPlacer:  # fmt: skip
    """The placer of a planned placement: with the native planner of `auto`, or with the rule that its kind names.

    probe: the start costs, on an empty cache. score: for `PlacementOptions.scored`. without: of `Auto`.
    """
    layers = len(cache.stats.layers)
    rule: HybridRule | None = make_policy("placement", options, PolicyContext(layers, experts, top_k))

    def make(costs: Costs, workers: int, slots: int, states: NDArray[np.uint8]) -> Planner:
        if rule is not None:
            return rule.start(costs, workers, states)
        return Auto(layers, experts, top_k, slots, costs, workers, states, without)

    reader = rule if isinstance(rule, HybriMoe) else None
    placer = AutoPlacer(cache, experts, shards, pool, probe, make, score, reader)
    if rule is not None:
        placer.faster.only = 0  # another system's rule decides every layer
    return placer
