"""One MoE layer. Its pass is `core::Layer::run` (actors/core/layer.hpp), whatever executes it.

Where peers, replicas, a norm after experts or other kernels than native code's take part, the parts of the pass are
methods of Python (`Pass`), with the backends of the lead (`dispatch.DeviceBackend`), of another shard (`peers.shard`)
and of the simulator (`cluster.simulate.backend`). Else they are native, too: on a GPU and on the CPU (`native_layer`;
on the CPU many layers in one call, `model.native.Joined`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeAlias, cast

import numpy as np
from numpy.typing import NDArray

from ..core import _core
from ..policies.plan import Part, Where, by_peer
from .cache.cache import ExpertCache
from .stats import LayerStats

if TYPE_CHECKING:  # torch: the simulator uses this module without it
    import torch

    from ...kernels.expert_ffn import ExpertKernel
    from ..policies.routing import SequenceRows
    from .native_layer import Budget, CpuLayer, NativeLayer, ReleaseAhead, Replace, RoutersAhead
    from .peers.remote import RemoteCall

# (layer, ids [T, K], weights [T, K]) as the model picked them; an observer that stores them copies them
Observer = Callable[[int, NDArray[np.integer], NDArray[np.float32]], None]
NO_KEYS: frozenset[int] = frozenset()


class Passed(NamedTuple):
    """Passes of n layers, one behind the other, that native code has run.

    layer: the first. tokens: of each. counts: rows of each expert [n, E]. scores: predicted for the next layer's
    experts, the highest of any row [n, E], NaN where there are none; None: there are none at all. began_s, ended_s: of
    the link's clock [n]; waited_s: for copies, in between [n].
    """

    layer: int
    tokens: int
    counts: NDArray[np.int64]
    scores: NDArray[np.float64] | None
    began_s: list[float]
    ended_s: list[float]
    waited_s: list[float]


OnPassed = Callable[[Passed], object]


def report_passes(passes: _core.CpuLayers | _core.VirtualRun, on_passed: OnPassed) -> None:
    """Give each pass that native code has run since the last call."""
    for found in passes.take():
        on_passed(Passed._make(found))


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

    def routing(self, layer: int, experts: int) -> _core.Routing:
        """The pairs that run, by expert. experts: of a layer."""
        ...


# as `ExpertKernel` and `PackedKernel` take them
Groups: TypeAlias = "list[tuple[int, int, int, int, bool]]"
Replicas: TypeAlias = "list[tuple[int, int, int]]"


class Backend(Protocol):
    """What a pass of Python asks its executor: a GPU or the CPU in its place, a shard, a recorded trace."""

    def look(self, step: MoeLayer, weighed: bool, *inputs: Any) -> Any:
        """The `View` of the layer's inputs. weighed: the weights are read."""
        ...

    def send(self, of: Pass) -> Sequence[RemoteCall]:
        """Send `of.remote` to their peers; waits for no answer."""
        ...

    def begin(self, of: Pass) -> Any:
        """The copies are queued: what the further methods find as `of.work`."""
        ...

    def run(self, of: Pass, groups: Groups, replicas: Replicas) -> None:
        """Run experts that are in their slots, and replicas by their slot."""
        ...

    def join(self, of: Pass, call: RemoteCall) -> bool:
        """Take a peer's answer; False: there is none, and its experts run here, in full precision."""
        ...

    def combine(self, of: Pass) -> Any:
        """The layer's output."""
        ...


class RerouteHook(Protocol):
    def layer(self, index: int, view: Any) -> frozenset[int]:
        """May change the view's routing; returns the keys of experts that run on low-bit replicas."""
        ...

    def native(self, index: int) -> Budget | Replace | None:
        """What native code needs to do `layer` at this layer; None: it cannot."""
        ...


class Watcher(Protocol):
    """always: it sees every layer; else those that `Placer.where` has planned.

    One that sees every layer may have a method `passed`, which is told of passes in native calls (`Passed`); else
    the parts of its layers' passes are Python's.
    """

    always: bool

    def routed(self, layer: int, routing: _core.Routing) -> None:
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
            without `where`.
        keep: residents that are evicted last.
        hot_per_layer: experts of each layer in the hot set; None: no fixed number.
        hooks: what it adds to each layer's step; those ahead only where it plans.
        native: decides in place of `where`; None: `where` does.
    """

    may_be_local = local = True
    hot_per_layer: int | None = None
    hooks: Hooks = Hooks()
    keep: frozenset[int] = NO_KEYS
    native: _core.Placement | None = None

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
        """The layers whose routers' scores on this layer's input it reads."""
        return ()

    def show(self, layer: int, view: Any) -> None:
        """A layer's routing is known, and `native` decides next: read the routers' scores."""
        return None

    def resized(self) -> None:
        """The cache has another number of slots."""
        return None

    def displaced(self) -> None:
        """Experts of a lost peer were loaded here and may have displaced others."""
        return None

    def where(self, layer: int, needed: Sequence[int], routing: _core.Routing, view: Any) -> Where:
        """Who runs a layer's experts. needed: segments of `routing.experts`. view: has the ids and weights that run."""
        return Where(needed, self.keep)


class Pass:
    """The parts of one pass that are in Python, called by the core in this order (`core::PythonLayer`).

    Attributes:
        step: whose pass it is. view: of its inputs. routing: as it runs. remote: experts that run elsewhere, by peer.
        calls: to peers. work: what the backend keeps.
    """

    __slots__ = ("_joining", "_low", "calls", "remote", "routing", "step", "view", "work")

    routing: _core.Routing

    def __init__(self, step: MoeLayer, view: Any, low: frozenset[int] | None) -> None:
        self.step, self.view, self._low = step, view, low
        self.remote: Sequence[Part] = ()
        self.calls: Sequence[RemoteCall] = ()
        self._joining: Iterator[RemoteCall] = iter(())
        self.work: Any = None

    def route(self) -> tuple[_core.Routing, frozenset[int]]:
        """Copies have landed: the routing that runs, and the keys of its experts that run on low-bit replicas."""
        step, low = self.step, self._low
        if low is None:
            low = step.reroute(self.view)
        self.routing = self.view.routing(step.index, step.experts)
        return self.routing, low

    def routed(self) -> None:
        """The experts' segments are known, and a native placement decides next; it sets `remote`."""
        step = self.step
        for watcher in step.hooks.watch:
            watcher.routed(step.index, self.routing)
        step.placer.show(step.index, self.view)

    def place(self, needed: Sequence[int]) -> tuple[Sequence[int], AbstractSet[int], bool]:
        """Who runs the segments: those that run here, residents that leave last, and whether others are sent."""
        step, routing = self.step, self.routing
        for watcher in step.hooks.watch:
            watcher.routed(step.index, routing)
        here, keep, remote = step.placer.where(step.index, needed, routing, self.view)
        self.remote = by_peer(remote)
        return here, keep, bool(remote)

    def send(self) -> None:
        """What is here is pinned."""
        self.calls = self.step.backend.send(self)
        self._joining = iter(self.calls)

    def ahead(self) -> None:
        """The layer's loads are queued: prefetch for later layers, or free slots for them."""
        step = self.step
        if step.hooks.ahead:  # which may read what the order of eviction knows
            step.cache.tell_order()
        for hook in step.hooks.ahead:
            hook.layer(step.index, self.view)
        self.work = step.backend.begin(self)

    def run(self, groups: Groups, replicas: Replicas) -> None:
        """Residents together, then arrivals as they land."""
        self.step.backend.run(self, groups, replicas)

    def join(self) -> Sequence[int]:
        """All that is planned here has run: the experts of the next peer that is lost or late; empty: there is none."""
        return next((call.keys for call in self._joining if not self.step.backend.join(self, call)), ())

    def combine(self) -> tuple[Any, float, float]:
        """The output; seconds that the GPU which waited longest waited, and those of the busiest link."""
        out, calls = self.step.backend.combine(self), self.calls
        if not calls:
            return out, 0.0, 0.0
        if any(call.recomputed for call in calls):
            self.step.placer.displaced()
        return out, max(call.blocked_s for call in calls), max(call.link_s for call in calls)


class MoeLayer:
    """The step of one MoE layer.

    Args:
        index: number among the MoE layers. experts: of a layer.
        kernel: runs experts on the cache's slots. post: the model's norm after each expert, if it has one.
        check: check the cache's invariants after each pass.

    Attributes:
        observers: called with the routing of every forward.
        native: runs passes whose parts are native; None: there are none.
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
        self.check = check
        self._pass = _core.PythonLayer(cache.core, index, experts, cache.neurons, _core.CpuLayers())
        if placer.native is not None:
            self._pass.placement(placer.native)
        self.native: NativeLayer | None = None
        self._looks = True  # in Python, before a pass in a native call
        self._view: Any = None  # of such a pass

    def run_natively(self, native: NativeLayer) -> None:
        """Run passes so from now on. It reroutes if it can, and prefetches or frees slots, or calls the hooks that do.

        The placer's own hooks are for passes that it plans, which native code does not run.
        """
        self.native, own = native, self.placer.hooks.ahead
        others = [hook for hook in self.hooks.ahead if hook not in own]
        if others:
            native.call(self._look_ahead)
        self._looks = not native.adopt(self.hooks.reroute, others)

    @property
    def joinable(self) -> CpuLayer | None:
        """The native layer, if one call may run its whole pass, also with other layers' (`model.native.Joined`)."""
        native = self.native
        joins = native is not None and native.on_host and not self._looks and not self.check
        return cast("CpuLayer", native) if joins else None

    @property
    def runs_natively(self) -> bool:
        """Whether the next pass may be a native call."""
        free = not self.observers and not self.cache.timeline.enabled  # nobody watches what happens within
        return self.native is not None and self.placer.local and free

    @property
    def stats(self) -> LayerStats:
        """This layer's counters since the last reset."""
        return self.cache.layer_stats(self.index)

    def forward(self, *inputs: Any) -> Any:
        """hidden [T, H], ids [T, K], weights [T, K] -> [T, H]; on other backends what `Backend.look` takes.

        Raises:
            RuntimeFailure: a copy failed, or the cache was closed. After any error nothing is pinned.
        """
        view, low, native = None, None, self.native
        if native is not None:
            if self.runs_natively:
                if self._looks:
                    view = self.backend.look(self, False, *inputs)
                    if self.hooks.reroute:
                        self.cache.poll(self.index)
                        low = self.reroute(view)
                out = self._native(native, inputs, view)
                if out is not None:
                    return out
            native.report()
        if view is None:
            view = self.backend.look(self, bool(self.observers), *inputs)
            for observe in self.observers:
                observe(self.index, view.picked, view.weights)
        out = self._pass.run(Pass(self, view, low))
        self.cache.draw()
        for watcher in self.hooks.watch:
            watcher.ran(self.index)
        if self.check:
            self.cache.check_integrity()
        return out

    def reroute(self, view: Any) -> frozenset[int]:
        """Change the view's routing, once copies have landed; the keys of experts that run on low-bit replicas."""
        low = NO_KEYS
        for rule in self.hooks.reroute:
            low |= rule.layer(self.index, view)
        return low

    def _native(self, native: NativeLayer, inputs: tuple[Any, ...], view: Any) -> Any | None:
        """The step in one native call; None: not run, and `forward` does it."""
        self._view = view
        try:
            out = native.run(*inputs) if view is None else native.run_view(view)
        finally:
            self._view = None
        if out is not None and self.check:
            self.cache.check_integrity()
        return out

    def _look_ahead(self, look: Callable[[], Any]) -> None:
        """The hooks in Python of a pass in one native call. look: makes its view, if Python has not looked before."""
        view, native = look() if self._view is None else self._view, self.native
        assert native is not None
        native.report()
        self.cache.tell_order()
        for hook in self.hooks.ahead:
            if hook.idle(self.index):
                hook.skip(self.index, view)
            else:
                hook.layer(self.index, view)
