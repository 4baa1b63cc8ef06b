"""From a layer's routing to its plan where an NDP worker shares the experts.

A placer follows sequences (`begin_forward`, `end_sequence`), asks the pure policies where each expert belongs, and lets
the cache carry a migration out. What belongs here is planned by `LoadOnMiss`; the rest goes to `LayerPlan.remote`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ..policies.placement import HotSet, RoutingCounts
from ..policies.plan import LayerPlan, LoadOnMiss, Remote
from ..policies.residency import State
from .cache import ExpertCache
from .routing import Routing
from .sequences import SequenceRows

Bits = Callable[[int, Sequence[int]], dict[int, int]]  # (layer, its cold experts by importance) -> bits of each


class Placer(ABC):
    """Decides per layer which of the needed experts run on the NDP worker.

    Args:
        cache: asked for residency and told to migrate.
        planner: plans what runs here.
        experts: per layer.
        available: whether the NDP worker is there; without it everything runs here.
    """

    preload: Sequence[int] = ()  # keys to load before the first request
    hot_per_layer: int | None = None

    def __init__(
        self, cache: ExpertCache, planner: LoadOnMiss, experts: int, available: Callable[[], bool]
    ) -> None:
        self._cache, self._planner, self._experts, self._available = cache, planner, experts, available
        self._alone = False  # the worker was missing at the last look: loads may have displaced what belongs here

    def begin_forward(self, sequences: Sequence[SequenceRows]) -> None:
        """The next forward carries these rows; a placer that follows sequences overrides it."""
        return None

    def end_sequence(self, name: str) -> None:
        """A sequence is over; from any thread."""
        return None

    @abstractmethod
    def plan(
        self, layer: int, needed: Sequence[int], routing: Routing, ids: torch.Tensor, weights: torch.Tensor
    ) -> LayerPlan:
        """Plan one layer.

        Args:
            needed: keys of `routing.experts`.
            ids, weights: [T, K].
        """

    def _settle(self, *, keep_others: bool) -> None:
        """Bring back what belongs here; for placements that have such a set."""
        return None

    def _reachable(self) -> bool:
        """Whether experts may be sent now; a worker that is back finds the placement as it should be."""
        if not self._available():
            self._alone = True
            return False
        if self._alone:
            self._alone = False
            self._settle(keep_others=False)
        return True

    def _split(self, needed: Sequence[int], remote: Sequence[Remote], keep: frozenset[int] = frozenset()) -> LayerPlan:
        cache, away = self._cache, {r.key for r in remote}
        here = [key for key in needed if key not in away] if away else needed
        plan = self._planner.plan(here, cache.residency, cache.eviction, keep)
        return replace(plan, remote=tuple(remote)) if remote else plan


class StaticPlacer(Placer):
    """A hot set that is chosen once and preloaded; everything else runs on the NDP worker, prompts too.

    hot: keys to hold, all of which fit. bits: per layer, the width of each expert that may run there.
    """

    def __init__(
        self,
        cache: ExpertCache,
        planner: LoadOnMiss,
        experts: int,
        available: Callable[[], bool],
        hot: Sequence[int],
        bits: Sequence[dict[int, int]],
    ) -> None:
        super().__init__(cache, planner, experts, available)
        self.preload, self._bits = tuple(hot), bits
        self.hot_per_layer = len(self.preload) // len(bits)

    def plan(
        self, layer: int, needed: Sequence[int], routing: Routing, ids: torch.Tensor, weights: torch.Tensor
    ) -> LayerPlan:
        if not self._reachable():
            return self._split(needed, (), frozenset(self.preload))
        bits, base, state = self._bits[layer], layer * self._experts, self._cache.residency.state
        return self._split(needed, [Remote(k, bits[k - base]) for k in needed if state(k) == State.ABSENT])

    def _settle(self, *, keep_others: bool) -> None:
        self._cache.migrate(self.preload, keep_others=keep_others)


class MondePlacer(Placer):
    """MoNDE: in every layer the experts with the most tokens are moved here, as far as that ends the layer sooner.

    choose: token rows and residency of each needed expert -> whether it runs here (`policies.placement.monde_split`).
    """

    def __init__(
        self,
        cache: ExpertCache,
        planner: LoadOnMiss,
        experts: int,
        available: Callable[[], bool],
        choose: Callable[[Sequence[int], Sequence[bool]], list[bool]],
        bits: int,
    ) -> None:
        super().__init__(cache, planner, experts, available)
        self._choose, self._bits = choose, bits

    def plan(
        self, layer: int, needed: Sequence[int], routing: Routing, ids: torch.Tensor, weights: torch.Tensor
    ) -> LayerPlan:
        if not self._reachable():
            return self._split(needed, ())
        state = self._cache.residency.state
        rows = [stop - start for start, stop in zip(routing.starts, routing.starts[1:], strict=False)]
        here = self._choose(rows, [state(k) != State.ABSENT for k in needed])
        return self._split(needed, [Remote(k, self._bits) for k, h in zip(needed, here, strict=True) if not h])


class ContextPlacer(Placer):
    """Prefill-guided placement and precision (Context-aware MoE inference on GPU-NDP, Algorithm 1).

    Rows of a prompt run here under the cache's ordinary rule and are counted (P, W). Before the first decode row of
    a sequence its counts enter the hot set, which is loaded (the sequence's one migration), and the widths of the
    other experts are chosen. From then on decode rows load nothing: an expert that is neither resident nor
    on its way runs on the NDP worker. Where rows of a prompt share the forward, what they load serves decode
    rows too.

    Args:
        hot: the hot set over the active sequences.
        bits: chooses the widths of a layer's cold experts.
        widest: bits for an expert that should be here and is not (a prompt's load took its slot).
        migrated: called once per migration.
    """

    def __init__(
        self,
        cache: ExpertCache,
        planner: LoadOnMiss,
        experts: int,
        available: Callable[[], bool],
        hot: HotSet,
        bits: Bits,
        widest: int,
        migrated: Callable[[], Any],
    ) -> None:
        super().__init__(cache, planner, experts, available)
        self._hot, self._choose_bits, self._widest, self._migrated = hot, bits, widest, migrated
        self.hot_per_layer = hot.hot_per_layer
        self._layers = len(cache.stats.layers)
        self._counting: dict[str, RoutingCounts] = {}
        self._decoding: set[str] = set()
        self._ended: deque[str] = deque()
        self._rows: list[SequenceRows] = []
        self._keep: frozenset[int] = frozenset()  # hot keys of sequences that decode
        self._bits: list[dict[int, int]] = [{} for _ in range(self._layers)]

    def begin_forward(self, sequences: Sequence[SequenceRows]) -> None:
        self._forget_ended()
        self._rows = list(sequences)
        prompts = [s.name for s in sequences if not s.decode]
        for name in prompts:
            self._decoding.discard(name)  # if it lost its KV cache and is fed again
            if name not in self._counting:
                self._counting[name] = RoutingCounts(self._layers, self._experts)
        admitted = [s.name for s in sequences if s.decode and s.name in self._counting]
        for name in admitted:
            self._hot.admit(name, self._counting.pop(name))
            self._decoding.add(name)
            self._migrated()
        if admitted:
            self._settle(keep_others=bool(self._counting))

    def end_sequence(self, name: str) -> None:
        self._ended.append(name)

    def plan(
        self, layer: int, needed: Sequence[int], routing: Routing, ids: torch.Tensor, weights: torch.Tensor
    ) -> LayerPlan:
        if not self._rows or self._rows[-1].stop != routing.tokens:  # a forward that was not announced
            return self._split(needed, ())
        prompts = [s for s in self._rows if not s.decode]
        wanted: set[int] = set()
        if prompts:
            wanted = self._count(layer, prompts, ids, weights)
        if len(prompts) == len(self._rows) or not self._reachable():
            return self._split(needed, (), self._keep)
        base, state, bits = layer * self._experts, self._cache.residency.state, self._bits[layer]
        remote = [
            Remote(k, bits.get(k - base, self._widest))
            for k in needed
            if k - base not in wanted and state(k) == State.ABSENT
        ]
        return self._split(needed, remote, self._keep)

    def _count(self, layer: int, prompts: list[SequenceRows], ids: torch.Tensor, weights: torch.Tensor) -> set[int]:
        """Add the prompts' rows to their counts; the experts that they need."""
        host_ids: NDArray[np.int64] = ids.cpu().numpy()
        host_weights: NDArray[np.floating] = weights.float().cpu().numpy()
        wanted: set[int] = set()
        for s in prompts:
            rows = host_ids[s.start : s.stop]
            self._counting[s.name].add(layer, rows, host_weights[s.start : s.stop])
            wanted.update(np.unique(rows).tolist())
        return wanted

    def _settle(self, *, keep_others: bool) -> None:
        """Bring the hot set in, nearest layer first, and choose the widths of the rest."""
        keys: list[int] = []
        for layer in range(self._layers):
            hot, order = self._hot.hot(layer), self._hot.order(layer)
            self._bits[layer] = self._choose_bits(layer, [e for e in order if e not in hot])
            keys += [layer * self._experts + e for e in order if e in hot]
        self._keep = frozenset(keys)
        self._cache.migrate(keys, keep_others=keep_others)

    def _forget_ended(self) -> None:
        while self._ended:
            name = self._ended.popleft()
            self._counting.pop(name, None)
            self._decoding.discard(name)
            if name in self._hot.active:
                self._hot.release(name)
        if not self._decoding:
            self._keep = frozenset()  # nothing decodes on it: a prompt may use every slot
