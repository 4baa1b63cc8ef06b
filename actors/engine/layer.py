"""One MoE layer, one page: route, view, plan, dispatch, combine, observe, prefetch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from ...kernels.expert_ffn import ExpertKernel
from ..policies.plan import LoadOnMiss
from ..policies.prefetch.next_gate import predicted_experts
from .cache import ExpertCache
from .dispatch import Dispatcher
from .placer import Placer
from .routing import Routing
from .shards import Shards
from .stats import LayerStats

RouterProbe = Callable[[torch.Tensor], torch.Tensor]
Observer = Callable[[int, torch.Tensor, torch.Tensor], None]  # (layer, ids [T, K], weights [T, K])


@dataclass(frozen=True)
class NextGate:
    """What the next-gate prefetcher needs of one later layer.

    logits: that layer's router on a hidden state [T, H] -> [T, E].
    """

    layer: int
    logits: RouterProbe
    top: int


class MoeLayer:
    """The experts of one layer, behind transformers' experts interface.

    Args:
        index: MoE layer, counted from 0 over layers with experts.
        kernel: runs experts on the cache's slots. post: the module's norm after each expert, if it has one.
        placer: sends experts to NDP workers or to other shards; None where every expert runs here.
        shards: the other shards, told of prefetches; None where there are none.
        next_gates: later layers to prefetch for, nearest first; empty for no prefetch.

    Attributes:
        observe: shown the routing of every forward, for whoever records it; None: nobody.
    """

    def __init__(
        self,
        index: int,
        experts: int,
        cache: ExpertCache,
        planner: LoadOnMiss,
        dispatcher: Dispatcher,
        kernel: ExpertKernel,
        post: torch.nn.Module | None,
        next_gates: Sequence[NextGate],
        check: bool,
        placer: Placer | None = None,
        shards: Shards | None = None,
    ) -> None:
        self.index, self._base, self._experts = index, index * experts, experts
        self._cache, self._planner, self._dispatcher = cache, planner, dispatcher
        self.kernel, self._post, self._next_gates, self._check = kernel, post, next_gates, check
        self._placer, self._shards = placer, shards
        self.observe: Observer | None = None

    @property
    def stats(self) -> LayerStats:
        """This layer's counters since the last reset."""
        return self._cache.stats.layers[self.index]

    def forward(self, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """hidden [T, H], ids [T, K], weights [T, K] -> [T, H].

        Raises:
            RuntimeFailure: a copy failed, or the cache was closed. Whatever is raised, nothing stays pinned.
        """
        cache, base = self._cache, self._base
        stats = self.stats
        blocked_s, busy_s = stats.blocked_io_s, stats.link_s
        routing = Routing.of(ids)  # route: done by the model, sorted here
        if self.observe is not None:
            self.observe(self.index, ids, weights)
        cache.poll()  # view
        needed = [base + e for e in routing.experts]
        cache.drop_stale(self.index, needed)
        if self._shards is not None:
            self._shards.at(self.index)
        if self._placer is None:
            plan = self._planner.plan(needed, cache.residency, cache.eviction)
        else:
            plan = self._placer.plan(self.index, needed, routing, ids, weights)
        try:
            cache.begin(self.index, plan)
            errands = self._dispatcher.send(self.index, plan, routing, hidden, weights) if plan.remote else []
            if plan.loads:
                cache.issue([load for load in plan.loads if not load.after])
            if self._next_gates:
                self._prefetch(hidden)
            out = self._dispatcher.run(self.index, plan, routing, hidden, weights, self.kernel, self._post, errands)
        except BaseException:
            cache.abandon()
            raise
        if self._placer is not None and any(e.recomputed for e in errands):
            self._placer.displaced()
        stats.io_path_s += max(stats.blocked_io_s - blocked_s, *(e.blocked_s for e in errands), 0.0)
        stats.link_path_s += max(stats.link_s - busy_s, *(e.link_s for e in errands), 0.0)
        if self._check:
            cache.check_integrity()
        return out

    def _prefetch(self, hidden: torch.Tensor) -> None:
        """Queue loads for later layers behind this layer's demand, while this layer computes.

        Nearest first: what a nearer layer wants does not give way to a farther one's guess. What other shards own
        goes to them, whose own governors decide.
        """
        allowed, shards = self._cache.governor.allows(), self._shards
        if not allowed and shards is None:
            return
        wanted: set[int] = set()
        theirs: list[int] = []
        for gate in self._next_gates:
            logits = gate.logits(hidden).float().cpu().numpy()
            base = gate.layer * self._experts
            keys = [base + e for e in predicted_experts(logits, gate.top)]
            if shards is not None:
                theirs += [key for key in keys if shards.peer_of(key) is not None]
                keys = [key for key in keys if shards.peer_of(key) is None]
            if allowed:
                self._cache.prefetch(keys, keep=wanted)
            wanted.update(keys)
        if shards is not None and theirs:
            shards.prefetch(self.index, theirs)
