"""One MoE layer, one page: route, view, reroute, plan, dispatch, combine, observe, prefetch."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from ..policies.plan import LoadOnMiss
from .cache.cache import ExpertCache
from .dispatch import Dispatcher, Routing
from .host_view import HostViews, upload
from .pre_evicting import PreEvicting
from .rerouting import Rerouter
from .split import Configuring
from .stats import LayerStats

if TYPE_CHECKING:
    import torch

    from ...kernels.expert_ffn import ExpertKernel
    from .cache.low_bits import LowBits
    from .peers.placement import Placer
    from .peers.shards import Shards
    from .prefetching import Prefetching

# (layer, ids [T, K], weights [T, K]), as the model picked them; to be copied by who keeps them
Observer = Callable[[int, NDArray[np.integer], NDArray[np.float32]], None]
_NONE: frozenset[int] = frozenset()


class MoeLayer:
    """The experts of one layer, behind transformers' experts interface.

    Args:
        index: MoE layer, counted from 0 over layers with experts.
        kernel: runs experts on the cache's slots. post: the module's norm after each expert, if it has one.
        placer: sends experts to NDP workers or to other shards; None where every expert runs here.
        shards: the other shards, told of prefetches; None where there are none.
        prefetching: asks for later layers' experts; None where nothing does.
        rerouter: may change the routing, which `observe` and `prefetching` see as the model picked it; None where
            nothing does.
        pre_evicting: frees slots for the next layer; None where nothing does.
        views: what all of these read on the host; None: in host memory, as they come.
        low_bits: may have experts run in low precision or not at all; None where all run in full.

    Attributes:
        observe: shown the routing of every forward, for whoever records it; None: nobody.
        configuring: told of every pass; None where the cut of the cache does not adapt.
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
        check: bool,
        placer: Placer | None = None,
        shards: Shards | None = None,
        prefetching: Prefetching | None = None,
        rerouter: Rerouter | None = None,
        pre_evicting: PreEvicting | None = None,
        views: HostViews | None = None,
        low_bits: LowBits | None = None,
    ) -> None:
        self.index, self._base, self._experts = index, index * experts, experts
        self._cache, self._planner, self._dispatcher = cache, planner, dispatcher
        self.kernel, self._post, self._check = kernel, post, check
        self._placer, self._shards, self._prefetching, self._rerouter = placer, shards, prefetching, rerouter
        self._pre_evicting, self._low_bits = pre_evicting, low_bits
        self._views = HostViews() if views is None else views
        self.observe: Observer | None = None
        self.configuring: Configuring | None = None

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
        cache.settle_times()
        stats = self.stats
        blocked_s, busy_s = stats.blocked_io_s, stats.link_s
        # rows that peers may want start before the look, whose wait is then for both
        outgoing = None if self._placer is None else self._dispatcher.begin(hidden)
        view = self._views.look(self.index, hidden, ids, weights, self.observe is not None)  # route: done by the model
        if self.observe is not None:
            self.observe(self.index, view.picked, view.weights)
        cache.poll()  # view
        changed = self._rerouter is not None and self._rerouter.layer(self.index, view)
        low = _NONE
        if self._low_bits is not None:
            low, dropped = self._low_bits.layer(self.index, view)
            changed = changed or dropped
        if changed:
            weights = upload(view.weights, hidden.device).to(weights.dtype)
        routing = Routing.of(view.ids, hidden.device)
        keys = [base + e for e in routing.experts]
        needed = cache.segments(keys, low)
        cache.drop_stale(self.index, needed)
        cache.eviction.routed(keys, routing.counts, routing.tokens)
        if self.configuring is not None:
            self.configuring.routed(self.index, routing)
        if self._shards is not None:
            self._shards.at(self.index)
        if self._placer is None:
            plan = self._planner.plan(needed, cache.residency, cache.eviction)
        else:
            plan = self._placer.plan(self.index, needed, routing, view)
        try:
            cache.begin(self.index, plan)
            errands = []
            if plan.remote and outgoing is not None:
                errands = self._dispatcher.send(self.index, plan, routing, outgoing, view)
            if plan.loads:
                cache.issue([load for load in plan.loads if not load.after])
            if self._prefetching is not None:
                self._prefetching.layer(self.index, view)
            if self._pre_evicting is not None:
                self._pre_evicting.layer(self.index, view, view.picked)
            out = self._dispatcher.run(self.index, plan, routing, hidden, weights, self.kernel, self._post, errands)
        except BaseException:
            cache.abandon()
            raise
        if self._placer is not None and any(e.recomputed for e in errands):
            self._placer.displaced()
        io_s, link_s = stats.blocked_io_s - blocked_s, stats.link_s - busy_s  # of the GPU with most of it
        for errand in errands:
            io_s, link_s = max(io_s, errand.blocked_s), max(link_s, errand.link_s)
        stats.io_path_s += io_s
        stats.link_path_s += link_s
        if self.configuring is not None:
            self.configuring.ran(self.index)
        if self._check:
            cache.check_integrity()
        return out
