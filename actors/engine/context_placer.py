"""Prefill-guided placement in the engine: counts prompts, moves the hot set once per sequence."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ..policies.context_ndp import HotSet, RoutingCounts
from ..policies.plan import LayerPlan, LoadOnMiss
from .cache import ExpertCache
from .host_view import LayerView
from .ndp_pool import NdpPool
from .placer import HotPlacer
from .routing import Routing
from .sequences import SequenceRows
from .shards import Shards

Bits = Callable[[int, Sequence[int]], dict[int, int]]  # (layer, its cold experts by importance) -> bits of each


class ContextPlacer(HotPlacer):
    """Prefill-guided placement and precision (Context-aware MoE inference on GPU-NDP, Algorithm 1).

    Rows of a prompt run on the GPUs under the caches' ordinary rule and are counted (P, W). Before the first decode row
    of a sequence its counts enter the hot set, which is loaded (the sequence's one migration), and the widths of the
    other experts are chosen. From then on decode rows load nothing. Where rows of a prompt share the forward, what they
    load serves decode rows too. A prompt that ends without a decode row leaves slots with what it needed: the
    hot set of the others is brought back then.

    Args:
        hot: the hot set over the active sequences.
        bits: chooses the widths of a layer's cold experts.
        widest: bits for a hot expert that is on no GPU.
        migrated: called once per migration.
    """

    def __init__(
        self,
        cache: ExpertCache,
        planner: LoadOnMiss,
        experts: int,
        shards: Shards | None,
        pool: NdpPool,
        widest: int,
        hot: HotSet,
        bits: Bits,
        migrated: Callable[[], Any],
    ) -> None:
        super().__init__(cache, planner, experts, shards, pool, widest)
        self._hot, self._choose_bits, self._migrated = hot, bits, migrated
        self.hot_per_layer = hot.places.per_layer
        self._layers = len(cache.stats.layers)
        self._counting: dict[str, RoutingCounts] = {}
        self._decoding: set[str] = set()
        self._ended: deque[str] = deque()
        self._rows: list[SequenceRows] = []
        self._bits: list[dict[int, int]] = [{} for _ in range(self._layers)]

    def preload(self) -> None:
        if self._shards is not None:
            self._shards.place((), keep_others=True)()  # whatever another lead may have told them

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
            self._choose_widths()
        if admitted or (self._displaced and self._decoding and self._pool.available):
            self._hold(self._by_importance(), keep_others=bool(self._counting))

    def end_sequence(self, name: str) -> None:
        self._ended.append(name)

    def plan(self, layer: int, needed: Sequence[int], routing: Routing, view: LayerView) -> LayerPlan:
        if not self._rows or self._rows[-1].stop != routing.tokens:  # a forward that was not announced
            return self._on_gpus(needed)
        prompts = [s for s in self._rows if not s.decode]
        warm: set[int] = set()
        if prompts:
            warm = self._count(layer, prompts, view)
        if len(prompts) == len(self._rows):
            return self._on_gpus(needed, self._keep)
        return self._plan_hot(layer, needed, self._bits[layer], warm)

    def _count(self, layer: int, prompts: list[SequenceRows], view: LayerView) -> set[int]:
        """Add the prompts' rows to their counts; the experts that they need."""
        ids, weights = view.ids, view.weights
        wanted: set[int] = set()
        for s in prompts:
            rows = ids[s.start : s.stop]
            self._counting[s.name].add(layer, rows, weights[s.start : s.stop])
            wanted.update(np.unique(rows).tolist())
        return wanted

    def _choose_widths(self) -> None:
        """The width of every cold expert, for the sequences that are active now."""
        for layer in range(self._layers):
            hot = self._hot.hot(layer)
            self._bits[layer] = self._choose_bits(layer, [e for e in self._hot.order(layer) if e not in hot])

    def _by_importance(self) -> list[int]:
        """Hot keys, nearest layer first."""
        keys: list[int] = []
        for layer in range(self._layers):
            hot = self._hot.hot(layer)
            keys += [layer * self._experts + e for e in self._hot.order(layer) if e in hot]
        return keys

    def _forget_ended(self) -> None:
        while self._ended:
            name = self._ended.popleft()
            if self._counting.pop(name, None) is not None:
                self._displaced = True  # by a prompt that brings no placement of its own
            self._decoding.discard(name)
            if name in self._hot.active:
                self._hot.release(name)
        if not self._decoding and self._hot_keys:  # nothing decodes on it: a prompt may use every slot
            self._take(())
            if self._shards is not None:
                self._shards.place((), keep_others=True)()
