"""From a layer's routing to its plan where other processes share the experts.

Two things are decided for each needed expert: on a GPU or near data, and on which of them. A placer follows sequences
(`begin_forward`, `end_sequence`), asks the pure policies where each expert belongs, and lets the caches carry a
migration out. An expert that runs on a GPU runs on the one that owns it, on the lead where that one is lost; one near
data on the NDP worker that the pool chooses. What runs on this GPU is planned by `LoadOnMiss`; the rest goes to
`LayerPlan.remote`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import replace

from ..policies.plan import LayerPlan, LoadOnMiss, Remote
from ..policies.residency import State
from .cache import ExpertCache
from .host_view import LayerView
from .ndp_pool import NdpPool
from .routing import Routing
from .sequences import SequenceRows
from .shards import Shards


class Placer(ABC):
    """Decides per layer which of the needed experts run elsewhere, and where.

    Args:
        cache: asked for residency and told to migrate.
        planner: plans what runs here.
        experts: per layer.
        shards: the other GPUs; None where there are none.

    Attributes:
        hot_per_layer: experts of each layer that the placement keeps on the GPUs; None where it keeps none by number.
    """

    hot_per_layer: int | None = None

    def __init__(self, cache: ExpertCache, planner: LoadOnMiss, experts: int, shards: Shards | None) -> None:
        self._cache, self._planner, self._experts, self._shards = cache, planner, experts, shards

    def preload(self) -> None:
        """Load what is to be there before the first request; for placements that have such a set.

        Raises:
            RuntimeFailure: a copy failed, or a shard did not do it.
        """
        return None

    def begin_forward(self, sequences: Sequence[SequenceRows]) -> None:
        """The next forward carries these rows; a placer that follows sequences overrides it."""
        return None

    def end_sequence(self, name: str) -> None:
        """A sequence is over; from any thread."""
        return None

    def displaced(self) -> None:
        """Experts of a lost peer were loaded here; they may have taken the slots of those that belong here."""
        return None

    @abstractmethod
    def plan(self, layer: int, needed: Sequence[int], routing: Routing, view: LayerView) -> LayerPlan:
        """Plan one layer.

        Args:
            needed: keys of `routing.experts`.
            view: the ids and weights that run.
        """

    def _gpu_of(self, key: int) -> str | None:
        """The other GPU that computes an expert if a GPU does; None: this one, as owner or because that one is lost."""
        found = self._shards.peer_of(key) if self._shards is not None else None
        return None if found is None else found[0]

    def _on_gpus(self, needed: Sequence[int], keep: frozenset[int] = frozenset()) -> LayerPlan:
        """Every expert on the GPU that owns it."""
        found = [(key, self._gpu_of(key)) for key in needed] if self._shards is not None else []
        return self._split(needed, [Remote(key, 0, gpu) for key, gpu in found if gpu is not None], keep)

    def _split(self, needed: Sequence[int], remote: Sequence[Remote], keep: frozenset[int] = frozenset()) -> LayerPlan:
        cache, away = self._cache, {r.key for r in remote}
        here = [key for key in needed if key not in away] if away else needed
        plan = self._planner.plan(here, cache.residency, cache.eviction, keep)
        return replace(plan, remote=tuple(remote)) if remote else plan


class GpuPlacer(Placer):
    """Every expert to the GPU that owns it; those of a lost one to the lead, until it is back."""

    def plan(self, layer: int, needed: Sequence[int], routing: Routing, view: LayerView) -> LayerPlan:
        return self._on_gpus(needed)


class HotPlacer(Placer):
    """Placements with a hot set: hot experts on their GPUs, the others near data, where nothing has to be loaded.

    An expert of this GPU runs here if it is resident or on its way; whether one of another GPU is, is taken from
    the hot set, which that GPU was told to hold. A hot expert that is on no GPU (a prompt's load took its slot, or its
    GPU is lost) runs near data on its widest replica. Where no NDP worker is there, all run on the GPUs, and what
    those loads displaced is brought back when one is.

    Args:
        pool: the NDP workers.
        widest: bits for a hot expert that is on no GPU.
    """

    def __init__(
        self, cache: ExpertCache, planner: LoadOnMiss, experts: int, shards: Shards | None, pool: NdpPool, widest: int
    ) -> None:
        super().__init__(cache, planner, experts, shards)
        self._pool, self._widest = pool, widest
        self._hot_keys: frozenset[int] = frozenset()  # of all GPUs
        self._keep: frozenset[int] = frozenset()  # of this one
        self._displaced = False

    def displaced(self) -> None:
        self._displaced = True

    def _plan_hot(
        self, layer: int, needed: Sequence[int], bits: Mapping[int, int], warm: AbstractSet[int] = frozenset()
    ) -> LayerPlan:
        """Plan a layer by the hot set.

        Args:
            bits: of the layer's cold experts.
            warm: further experts of the layer that are to run on the GPUs.
        """
        base, state = layer * self._experts, self._cache.residency.state
        remote, cold = [], []
        for key in needed:
            gpu = self._gpu_of(key)
            there = state(key) != State.ABSENT if gpu is None else key in self._hot_keys
            if not there and key - base not in warm:
                cold.append(key)
            elif gpu is not None:
                remote.append(Remote(key, 0, gpu))
        workers = self._pool.choose(cold) if cold else []
        if workers is None:
            self._displaced = True
            return self._on_gpus(needed, self._keep)
        remote += [Remote(k, bits.get(k - base, self._widest), w) for k, w in zip(cold, workers, strict=True)]
        return self._split(needed, remote, self._keep)

    def _hold(self, keys: Sequence[int], *, keep_others: bool) -> None:
        """Have every GPU load its hot experts, most urgent first."""
        mine, asked = self._take(keys), None
        if self._shards is not None:
            asked = self._shards.place(keys, keep_others=keep_others)
        self._cache.migrate(mine, keep_others=keep_others)
        if asked is not None:
            asked()
        self._displaced = False

    def _take(self, keys: Sequence[int]) -> list[int]:
        """From now on these are hot; those of this GPU."""
        mine = [key for key in keys if self._shards is None or self._shards.owner_of(key) == 0]
        self._hot_keys, self._keep = frozenset(keys), frozenset(mine)
        return mine


class StaticPlacer(HotPlacer):
    """A hot set that is chosen once and preloaded; everything else runs near data, prompts too.

    hot: keys to hold, all of which fit. bits: per layer, the width of each cold expert.
    """

    def __init__(
        self,
        cache: ExpertCache,
        planner: LoadOnMiss,
        experts: int,
        shards: Shards | None,
        pool: NdpPool,
        widest: int,
        hot: Sequence[int],
        bits: Sequence[Mapping[int, int]],
    ) -> None:
        super().__init__(cache, planner, experts, shards, pool, widest)
        self._hot, self._bits = tuple(hot), bits
        self.hot_per_layer = len(self._hot) // len(bits)

    def preload(self) -> None:
        mine, asked = self._take(self._hot), None
        if self._shards is not None:
            asked = self._shards.preload(self._hot)
        self._cache.preload(mine)
        if asked is not None:
            asked()

    def begin_forward(self, sequences: Sequence[SequenceRows]) -> None:
        if self._displaced and self._pool.available:
            self._hold(self._hot, keep_others=False)

    def plan(self, layer: int, needed: Sequence[int], routing: Routing, view: LayerView) -> LayerPlan:
        return self._plan_hot(layer, needed, self._bits[layer])


class MondePlacer(Placer):
    """MoNDE on one GPU: in every layer the experts with the most tokens are moved there, as far as that pays.

    choose: token rows and residency of each needed expert, and the NDP workers that are there -> whether each expert
    runs here (`policies.placement.monde_split`). bits: of the others.
    """

    def __init__(
        self,
        cache: ExpertCache,
        planner: LoadOnMiss,
        experts: int,
        pool: NdpPool,
        choose: Callable[[Sequence[int], Sequence[bool], int], list[bool]],
        bits: int,
    ) -> None:
        super().__init__(cache, planner, experts, None)
        self._pool, self._choose, self._bits = pool, choose, bits

    def plan(self, layer: int, needed: Sequence[int], routing: Routing, view: LayerView) -> LayerPlan:
        there = self._pool.living
        if not there:
            return self._split(needed, ())
        state = self._cache.residency.state
        rows = [stop - start for start, stop in zip(routing.starts, routing.starts[1:], strict=False)]
        here = self._choose(rows, [state(k) != State.ABSENT for k in needed], there)
        away = [k for k, h in zip(needed, here, strict=True) if not h]
        workers = self._pool.choose(away)
        if workers is None:  # the last one was lost just now
            return self._split(needed, ())
        return self._split(needed, [Remote(k, self._bits, w) for k, w in zip(away, workers, strict=True)])
