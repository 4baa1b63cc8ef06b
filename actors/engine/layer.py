"""One MoE layer, one page: route, view, reroute, plan, begin, send, load, prefetch, run, combine, observe.

On the CPU a native call does it all where native code has the order of eviction, and the cache counts it later
(`ExpertCache.count_passes`); it calls a prefetch in Python at its place (`MoeLayer._look_ahead`). Such layers run
together in one call (`model.native.Joined`) unless a rule in Python reroutes. Where a policy in Python chooses victims,
it is three calls (`MoeLayer._planned`). The page is their reference: same output, loads, victims and counters.

Three executors run this page with different backends: the lead (`dispatch.DeviceBackend`), another shard
(`peers.shard`) and the simulator (`cluster.simulate.executor`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Protocol, cast

import numpy as np
from numpy.typing import NDArray

from ..policies.plan import LayerPlan
from .cache.cache import ExpertCache
from .host_view import StepView
from .stats import LayerStats

if TYPE_CHECKING:  # torch: the simulator uses this module without it
    import torch

    from ...kernels.expert_ffn import (
        Budget,
        ExpertKernel,
        Needed,
        ReleaseAhead,
        Replace,
        RoutersAhead,
    )
    from ..policies.routing import MissCosts
    from .dispatch import RemoteTask, Spans
    from .host_view import Routing
    from .serving.streams import SequenceRows

# (layer, ids [T, K], weights [T, K]) as the model picked them; an observer that stores them copies them
Observer = Callable[[int, NDArray[np.integer], NDArray[np.float32]], None]
NO_KEYS: frozenset[int] = frozenset()


class View(Protocol):
    """One layer of one forward, as the policies see it: `host_view.LayerView`, or a recorded layer.

    picked: experts as the model picked them [T, K]. ids, weights: as they will run [T, K']. tokens: T.
    """

    picked: NDArray[Any]
    ids: NDArray[Any]
    tokens: int

    @property
    def weights(self) -> NDArray[np.float32]: ...

    def reroute(self, ids: NDArray[Any], weights: NDArray[np.floating], dropped: bool) -> None:
        """From now on the layer runs these [T, K]. dropped: pairs of weight 0 do not run."""
        ...

    def routing(self) -> Routing:
        """The pairs that run, by expert."""
        ...


class NativeRun(Protocol):
    """A layer in native calls: `kernels.expert_ffn.NativeLayer`, or `split_layer.SplitLayer`, which `decides`.

    decides: victims and prefetches, too; then only `step` is called. plans: layers with misses, too. orders: it has the
    order of eviction, so `step` may be called. joins: `step` may run in one call with other layers'
    (`model.native.Joined`), as `handle`. source: the policy whose prefetches are part of `step`; None: there are none.
    waited_s: seconds that the last `finish` or `step` waited for copies. width: of rows, H.
    """

    decides: bool
    plans: bool
    orders: bool
    joins: bool
    handle: Any
    source: str | None
    waited_s: float
    width: int

    def look_ahead(self, ahead: RoutersAhead | ReleaseAhead) -> None:
        """What `step` prefetches by, or frees slots by."""
        ...

    def call(self, hooks: Callable[[int, int, int, int], object]) -> None:
        """What `step` calls instead, with the addresses of hidden [T, H] and ids [T, K], T and K."""
        ...

    def reroute(self, rule: Budget | Replace) -> None:
        """What `step` changes the routing by."""
        ...

    def step(self, hidden: Any, ids: Any, weights: Any, decode_only: bool, source: int) -> Any | list[int] | None:
        """The output; None: the pass is for the page; a list: see `ExpertCache.fail_native`. source: 0: no prefetch."""
        ...

    def run(self, *inputs: Any) -> Any | None:
        """The output of a pass without misses; or as `begin`."""
        ...

    def begin(self, *inputs: Any) -> Needed | None:
        """What the pass needs; None: it is for the page."""
        ...

    def load(self, victims: list[int], decode_only: bool) -> bool:
        """Evict these, load the missing experts; False: the cache is closed."""
        ...

    def finish(self) -> Any | None:
        """The output; None: a copy was cancelled."""
        ...


class Backend(Protocol):
    """The executor of a layer: a GPU or the CPU in its place, a shard, a recorded trace."""

    def native(self, step: MoeLayer) -> NativeRun | None:
        """The short cut of a layer; None: there is none."""
        ...

    def look(self, layer: int, weighed: bool, *inputs: Any) -> Any:
        """The `View` of the layer's inputs. weighed: the weights are read."""
        ...

    def send(self, step: MoeLayer, plan: LayerPlan, routing: Routing, view: Any) -> Sequence[RemoteTask]:
        """Send the plan's remote experts to their peers; waits for no answer."""
        ...

    def run(
        self, step: MoeLayer, plan: LayerPlan, spans: Spans, routing: Routing, view: Any, tasks: Sequence[RemoteTask]
    ) -> Any:
        """Run the plan (residents, arrivals, answers of peers); the layer's output. tasks: of `send`."""
        ...


class RerouteHook(Protocol):
    def layer(self, index: int, view: Any) -> frozenset[int]:
        """May change the view's routing; returns the keys of experts that run on low-bit replicas."""
        ...

    def native(self, index: int) -> Budget | Replace | None:
        """What native code needs to do `layer` at this layer; None: it cannot."""
        ...


class Watcher(Protocol):
    """always: it sees every layer; else those that `Placer.plan` has planned."""

    always: bool

    def routed(self, layer: int, routing: Routing) -> None:
        """A layer's final routing is known."""
        ...

    def ran(self, layer: int) -> None:
        """A layer's experts have run."""
        ...


class AheadHook(Protocol):
    """always: it sees every layer, by `layer` or by `skip`."""

    always: bool

    def native(self, index: int) -> RoutersAhead | ReleaseAhead | None:
        """What native code needs to do `layer` at this layer; None: it cannot."""
        ...

    def layer(self, index: int, view: Any) -> None:
        """The layer's demand loads are queued: prefetch for later layers, or free slots for them."""
        ...

    def idle(self, index: int) -> bool:
        """Whether `layer` would change nothing but what `skip` changes."""
        ...

    def skip(self, index: int, view: Any) -> None:
        """In place of an idle `layer`. view: may be None where `always` is false."""
        ...


@dataclass(frozen=True)
class Hooks:
    """A policy's additions to each layer's step."""

    reroute: Sequence[RerouteHook] = ()
    watch: Sequence[Watcher] = ()
    ahead: Sequence[AheadHook] = ()


class Placer:
    """Decides where a layer's experts run; this class: all on this device.

    Attributes:
        may_be_local: `local` may be true at times.
        local: every expert of the present forward runs here and is loaded on a miss, so native code may run its layers
            without `plan`.
        keep: residents that are evicted last.
        hot_per_layer: experts of each layer in the hot set; None: no fixed number.
        hooks: what it adds to each layer's step; those ahead only where it plans.
        miss_costs: what misses are expected to take; None: nothing is expected.
    """

    may_be_local = local = True
    hot_per_layer: int | None = None
    hooks: Hooks = Hooks()
    keep: frozenset[int] = NO_KEYS
    miss_costs: MissCosts | None = None

    def __init__(self, cache: ExpertCache) -> None:
        self._cache = cache

    def preload(self) -> None:
        """Load experts before the first request. Raises RuntimeFailure: a copy or a shard failed."""
        return None

    def begin_forward(self, sequences: Sequence[SequenceRows]) -> None:
        """The next forward carries these rows."""
        return None

    def end_sequence(self, name: str) -> None:
        """A sequence is over; from any thread."""
        return None

    def scored_at(self, layer: int) -> Sequence[int]:
        """The layers whose routers' scores on this layer's input `plan` reads."""
        return ()

    def resized(self) -> None:
        """The cache has another number of slots."""
        return None

    def displaced(self) -> None:
        """Experts of a lost peer were loaded here and may have displaced others."""
        return None

    def plan(self, layer: int, needed: Sequence[int], routing: Routing, view: Any) -> LayerPlan:
        """Plan one layer. needed: segments of `routing.experts`. view: has the ids and weights that run."""
        return self._cache.plan(needed, self.keep)


class MoeLayer:
    """The step of one MoE layer.

    Args:
        index: number among the MoE layers. experts: of a layer.
        kernel: runs experts on the cache's slots. post: the model's norm after each expert, if it has one.
        check: check the cache's invariants after each pass.

    Attributes:
        observers: called with the routing of every forward.
    """

    def __init__(
        self,
        index: int,
        experts: int,
        cache: ExpertCache,
        backend: Backend,
        placer: Placer,
        kernel: ExpertKernel,
        post: torch.nn.Module | None = None,
        hooks: Hooks | None = None,
        check: bool = False,
    ) -> None:
        self.index, self.experts, self.kernel, self.post = index, experts, kernel, post
        self.cache, self.backend, self.placer = cache, backend, placer
        self.hooks = Hooks() if hooks is None else hooks
        self.observers: list[Observer] = []
        self.check, self._last = check, index == len(cache.stats.layers) - 1
        self.native = backend.native(self) if placer.may_be_local else None
        if self.native is not None and not self.native.plans and any(hook.always for hook in self.hooks.ahead):
            self.native = None
        native = self.native
        self._in_one = native is not None and (native.decides or native.orders)  # a pass is one call
        self._reroutes = bool(self.hooks.reroute)  # in Python
        if native is not None and native.orders:
            self._leave_hooks(native)
        self._promising = True  # the last pass had no miss
        self._view: Any = None  # of the pass in a native call, where Python has rerouted it

    def _leave_hooks(self, native: NativeRun) -> None:
        """Have native code reroute if it can, and prefetch or free slots, or call the hooks that do.

        The placer's own hooks are for passes that it plans, which native code does not run.
        """
        hooks, own = self.hooks, self.placer.hooks.ahead
        others = [hook for hook in hooks.ahead if hook not in own]
        rules = [rule for hook in hooks.reroute if (rule := hook.native(self.index)) is not None]
        ahead = [found for hook in others if (found := hook.native(self.index)) is not None]
        self._reroutes = not len(rules) == len(hooks.reroute) < 2
        # what frees slots reads the routing as the model picked it
        if len(ahead) == len(others) == 1 and (not self._reroutes or ahead[0].source is not None):
            native.look_ahead(ahead[0])
        elif others:
            native.call(self._look_ahead)
        if rules and not self._reroutes:
            native.reroute(rules[0])

    @property
    def joins(self) -> NativeRun | None:
        """What runs a pass in one call, perhaps with other layers' (`model.native.Joined`)."""
        native = self.native
        fits = native is not None and self._in_one and native.joins and not self._reroutes and not self.check
        return native if fits and self.placer.may_be_local else None

    @property
    def stats(self) -> LayerStats:
        """This layer's counters since the last reset."""
        return self.cache.stats.layers[self.index]

    def forward(self, *inputs: Any) -> Any:
        """hidden [T, H], ids [T, K], weights [T, K] -> [T, H]; on other backends what `Backend.look` takes.

        Raises:
            RuntimeFailure: a copy failed, or the cache was closed. After any error nothing is pinned.
        """
        index, cache, backend, hooks = self.index, self.cache, self.backend, self.hooks
        native, low = self.native, NO_KEYS
        view: Any = None
        if native is not None:
            may_run = self.placer.local and (self._promising or native.plans)
            if may_run and not self.observers and cache.quiet:
                if self._reroutes:
                    view = backend.look(index, False, *inputs)
                    low = self._reroute(view)
                given = inputs if view is None else view.operands()
                out = (self._native if self._in_one else self._planned)(native, given, view)
                if out is not None:
                    return out
            if self.placer.local and (native.plans or cache.passes.words[0] > 1):
                cache.count_passes()
        cache.settle_times()
        stats = cache.stats.layers[index]
        blocked_s, busy_s = stats.blocked_io_s, stats.link_s
        if view is None:
            view = backend.look(index, bool(self.observers), *inputs)  # route (the model has done it), view
            for observe in self.observers:
                observe(index, view.picked, view.weights)
            cache.poll()
            low = self._reroute(view)  # reroute
        else:
            cache.poll()
        routing = view.routing()
        base = index * self.experts
        keys = list(map(base.__add__, routing.experts))
        needed = cache.open(index, keys, routing.counts, routing.tokens, low)
        for watcher in hooks.watch:
            watcher.routed(index, routing)
        plan = self.placer.plan(index, needed, routing, view)  # plan
        self._promising = plan.resident == len(plan.run)
        tasks: Sequence[RemoteTask] = ()
        try:
            cache.begin(index, plan)  # begin
            if plan.remote:
                tasks = backend.send(self, plan, routing, view)  # send
            cache.load()
            for hook in hooks.ahead:
                hook.layer(index, view)  # prefetch
            spans = dict(zip(keys, pairwise(routing.starts), strict=True))
            out = backend.run(self, plan, spans, routing, view, tasks)  # run, combine
        except BaseException:
            cache.abandon()
            raise
        self._observe(stats, stats.blocked_io_s - blocked_s, stats.link_s - busy_s, tasks)  # observe
        return out

    def _reroute(self, view: Any) -> frozenset[int]:
        """Change the view's routing; the keys of experts that run on low-bit replicas."""
        low = NO_KEYS
        for rule in self.hooks.reroute:
            low |= rule.layer(self.index, view)
        return low

    def _native(self, native: NativeRun, inputs: tuple[Any, ...], view: Any) -> Any | None:
        """The step in one native call; None: nothing was done that the page would not do."""
        cache, self._view = self.cache, view
        source = 0 if native.source is None else cache.counters.number_of(native.source)
        hidden, ids, weights = inputs
        try:
            out = native.step(hidden, ids, weights, cache.decode_only, source)
            if type(out) is list:
                cache.fail_native(out)
        except BaseException:
            cache.abandon()
            raise
        finally:
            self._view = None
        if out is None:
            return None
        if native.waited_s:
            stats = cache.stats.layers[self.index]
            stats.blocked_io_s += native.waited_s
            stats.io_path_s += native.waited_s
        if self._last:
            cache.count_passes()
        if self.check:
            cache.check_integrity()
        return out

    def _look_ahead(self, hidden: int, ids: int, tokens: int, top_k: int) -> None:
        """The hooks in Python of a pass in one native call, which gives the addresses of its inputs."""
        view, stats, native = self._view, self.stats, self.native
        if view is None and native is not None:
            view = StepView(hidden, ids, tokens, top_k, native.width)
        blocked_s = stats.blocked_io_s
        self._run_hooks(view)
        stats.io_path_s += stats.blocked_io_s - blocked_s  # of a synchronous prefetch

    def _run_hooks(self, view: Any) -> None:
        for hook in self.hooks.ahead:
            if hook.idle(self.index):
                hook.skip(self.index, view)
            else:
                hook.layer(self.index, view)

    def _planned(self, native: NativeRun, inputs: tuple[Any, ...], view: Any) -> Any | None:
        """The step in native calls, between which an order of eviction in Python decides; None: nothing was done that
        the page would not do.

        inputs: as they will run. view: has them; None: nothing has read them.
        """
        index, cache, ahead = self.index, self.cache, self.hooks.ahead
        needed: Needed | None = None
        if self._promising and 1 not in cache.counters.vacant and all(hook.idle(index) for hook in ahead):
            found: Any = native.run(*inputs)
            if found is not None and not isinstance(found, tuple):
                return self._ran_resident(found, inputs, view)
            needed = cast("Needed | None", found)
        elif native.plans:
            needed = native.begin(*inputs)
        if native.plans:
            cache.count_passes()
            cache.loads.dropped()
        if needed is None:
            return None
        stats = cache.stats.layers[index]
        blocked_s = stats.blocked_io_s
        cache.eviction.routed(needed.keys, needed.counts, len(inputs[0]))
        self._promising = needed.resident == len(needed.run)
        try:
            cache.load_native(index, needed, native)
            if any(hook.always or not hook.idle(index) for hook in ahead):
                self._run_hooks(self.backend.look(index, False, *inputs) if view is None else view)
            out = native.finish()
            if out is None:
                cache.fail_native(needed.run)
            stats.blocked_io_s += native.waited_s
        except BaseException:
            cache.abandon()
            raise
        cache.eviction.used(needed.run)
        if self._last:
            cache.count_passes()
        self._observe(stats, stats.blocked_io_s - blocked_s, 0.0, ())  # landings count their own share of the link
        return out

    def _ran_resident(self, out: Any, inputs: tuple[Any, ...], view: Any) -> Any:
        for hook in self.hooks.ahead:
            if view is None and hook.always:
                view = self.backend.look(self.index, False, *inputs)
            hook.skip(self.index, view)
        if self._last or self.check:
            self.cache.count_passes()
        if self.check:
            self.cache.check_integrity()
        return out

    def _observe(self, stats: LayerStats, io_s: float, link_s: float, tasks: Sequence[RemoteTask]) -> None:
        """Count the copies' share of the forward: of the GPU that waited longest, and of the busiest link."""
        for task in tasks:
            io_s, link_s = max(io_s, task.blocked_s), max(link_s, task.link_s)
            if task.recomputed:
                self.placer.displaced()
        stats.io_path_s += io_s
        stats.link_path_s += link_s
        for watcher in self.hooks.watch:
            watcher.ran(self.index)
        if self.check:
            self.cache.check_integrity()
