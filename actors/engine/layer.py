"""One MoE layer. Its pass is `core::Layer::run` (actors/core/layer.hpp), the only order of a pass.

A layer has one executor, which `executors.executor_of` chooses when the engine is assembled: kernels of native code on
the CPU, native launches on a GPU, or Python's kernels. Parts of a pass that are Python's (a rule, the placement, peers,
what looks ahead) are methods of a `Pass`, which the core makes when the first of them is needed; a pass without such
parts calls no Python.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, cast
from weakref import ref

import numpy as np
from numpy.typing import NDArray

from ..core import _core
from ..policies.plan import Part, by_peer
from .cache.cache import ExpertCache
from .hooks import NO_KEYS, Hooks, Native, Passed
from .placer import Placer
from .stats import LayerStats

if TYPE_CHECKING:  # torch: the simulator uses this module without it
    import torch

    from ...kernels.expert_ffn import ExpertKernel
    from .calls import RemoteCall
    from .host_view import Asked

# (layer, ids [T, K], weights [T, K]) as the model picked them; an observer that stores them copies them
Observer = Callable[[int, NDArray[np.integer], NDArray[np.float32]], None]


class Shared:
    """What the layers of one cache share.

    Args:
        backend: makes the views of Python's parts, and runs Python's kernels.
        last: the last layer; -1: nobody asks for a forward's end.
        check: check the cache's invariants after each pass.
        passes: where native code leaves the passes that have run; None: new ones, as all but the simulator have.

    Attributes:
        planned: whether the placement plans the present forward.
        inputs, out: of the present pass, or of several that run together.
        into: where native launches leave the sums of the present pass; None: in a new tensor.
        at_end: called when a forward's last layer has run.
    """

    def __init__(
        self, cache: ExpertCache, backend: Backend, placer: Placer, hooks: Hooks | None = None, last: int = -1,
        check: bool = False, passes: _core.Passes | None = None,
    ) -> None:  # fmt: skip
        self.cache, self.backend, self.placer = cache, backend, placer
        self.hooks = Hooks() if hooks is None else hooks
        self.last, self.check, self.planned = last, check, _core.Planned()
        # a `_core.CpuLayers`, or of recorded layers their run's
        self.passes: Any = _core.CpuLayers() if passes is None else passes
        self.passes.records = self.hooks.passed is not None
        self.inputs: Sequence[Any] = ()
        self.out: Any = None
        self.into: Any = None
        self.at_end: list[Callable[[], object]] = []

    def begin(self, inputs: Sequence[Any]) -> None:
        """A pass of these inputs begins, or several."""
        self.inputs, self.planned.now = inputs, not self.placer.local

    def report(self) -> None:
        """Give the passes so far to the watcher."""
        if self.hooks.passed is not None:
            for found in self.passes.take():
                self.hooks.passed(Passed._make(found))

    def end_forward(self) -> None:
        """The model's last layer has run."""
        self.report()
        for end in self.at_end:
            end()


class MoeLayer:
    """One MoE layer.

    Args:
        index: number among the MoE layers. experts: of a layer. shared: with the other layers of the cache.
        kernel: runs experts on the cache's slots. post: the model's norm after each expert, if it has one.
        make: makes the executor; None: Python's kernels.

    Attributes:
        observers: called with the routing of every forward.
        executor: runs the passes.
    """

    def __init__(
        self, index: int, experts: int, shared: Shared, kernel: ExpertKernel, post: torch.nn.Module | None = None,
        make: Callable[[MoeLayer], Executor] | None = None,
    ) -> None:  # fmt: skip
        self.index, self.experts, self.shared, self.kernel, self.post = index, experts, shared, kernel, post
        self.cache, self.backend, self.placer, self.hooks = shared.cache, shared.backend, shared.placer, shared.hooks
        self.observers: list[Observer] = []
        self._view: Any = None  # of the present pass, where it was read before
        self.executor: Executor = PythonExecutor(self) if make is None else make(self)
        if self.placer.native is not None:
            self.executor.core.placement(self.placer.native)

    @property
    def stats(self) -> LayerStats:
        """This layer's counters since the last reset."""
        return self.cache.layer_stats(self.index)

    @property
    def alone(self) -> bool:
        """Whether its passes are calls of `forward`, since somebody watches each one."""
        return bool(self.observers) or self.cache.timeline.enabled or self.shared.check

    def forward(self, *inputs: Any) -> Any:
        """hidden [T, H], ids [T, K], weights [T, K] -> [T, H].

        Raises:
            RuntimeFailure: a copy failed, or the cache was closed. After any error nothing is pinned.
        """
        shared, timeline = self.shared, self.cache.timeline
        began_s = time.perf_counter() if timeline.enabled else 0.0
        shared.begin(inputs)
        if self.observers or self.executor.looks:
            self._view = view = self.backend.look(self, bool(self.observers), *inputs)
            for observe in self.observers:
                observe(self.index, view.picked, view.weights)
        try:
            out = self.executor.run(*inputs)
        finally:
            self._view, shared.inputs, shared.out = None, (), None
        if self.index == shared.last:
            shared.end_forward()
        if timeline.enabled:
            self.cache.draw()
            timeline.span("compute", f"L{self.index} experts", began_s, time.perf_counter())
            if self.index == len(self.cache.stats.layers) - 1:
                timeline.end("forward")
        if shared.check:
            self.cache.check_integrity()
        return out

    def forward_into(self, out: torch.Tensor, *inputs: Any) -> None:
        """`forward`, whose output goes to `out` [T, H], which is contiguous and of its type. Raises as `forward`."""
        shared = self.shared
        shared.into = out
        try:
            made = self.forward(*inputs)
        finally:
            shared.into = None
        if made is not out:
            out.copy_(made)

    def begin_pass(self) -> Pass:
        """Python's parts of the present pass."""
        view, self._view = self._view, None
        return Pass(self, self.backend.look(self, False, *self.shared.inputs) if view is None else view)


class Pass:
    """The parts of one pass that are Python's, called by the core in this order (`core::PythonParts`).

    Attributes:
        step: whose pass it is. view: of its inputs. routing: as it runs. remote: what peers run.
        calls: to peers. partials: the sums of those that have answered. work: what the backend keeps.
    """

    __slots__ = ("_joining", "calls", "partials", "remote", "routing", "step", "view", "work")

    routing: _core.Routing

    def __init__(self, step: MoeLayer, view: Any) -> None:
        self.step, self.view = step, view
        self.remote: Sequence[Part] = ()
        self.calls: Sequence[RemoteCall] = ()
        self.partials: list[tuple[RemoteCall, Any]] = []
        self._joining: Iterator[RemoteCall] = iter(())
        self.work: Any = None

    def reroute(self) -> tuple[NDArray[Any], NDArray[np.float32], frozenset[int]] | None:
        """Copies have landed: ids and weights that run [T, K], and keys of experts on low-bit replicas.

        None: the routing stays as the model picked it.
        """
        low, view = self._low(), self.view
        return (view.ids, view.weights, low) if low or view.ids is not view.picked else None

    def changed(self, ids: NDArray[Any], weights: NDArray[np.float32]) -> None:
        """A native rule has left this routing."""
        self.view.reroute(ids, weights, dropped=False)

    def route(self) -> tuple[_core.Routing, frozenset[int]]:
        """As `reroute`, where the routing is Python's."""
        low, step = self._low(), self.step
        self.routing = self.view.routing(step.index, step.experts)
        return self.routing, low

    def routed(self, routing: _core.Routing) -> None:
        """The experts' segments are known, and a native placement decides next; it sets `remote`."""
        step = self.step
        for watcher in step.hooks.watch:
            watcher.routed(step.index, routing)
        step.placer.show(step.index, self.view)

    def place(self, routing: _core.Routing, needed: Sequence[int]) -> tuple[Sequence[int], AbstractSet[int], bool]:
        """Who runs the segments: those that run here, residents that leave last, and whether others are sent."""
        step, self.routing = self.step, routing
        for watcher in step.hooks.watch:
            watcher.routed(step.index, routing)
        here, keep, remote = step.placer.where(step.index, needed, routing, self.view)
        self.remote = by_peer(remote)
        return here, keep, bool(remote)

    def send(self) -> None:
        """What is here is pinned."""
        self.calls = self.step.backend.send(self)
        self._joining = iter(self.calls)

    def scores(self, router: int) -> NDArray[np.float32]:
        """Of a router that native code asks by its number there [T, E]."""
        found = self.view.scores(self.step.executor.asked[router])
        return np.ascontiguousarray(found, np.float32)

    def ahead(self) -> None:
        """The layer's loads are queued: prefetch for later layers, or free slots for them."""
        step = self.step
        if step.hooks.ahead:  # which may read what the order of eviction knows
            step.shared.report()
            step.cache.tell_order()
        for hook in step.hooks.ahead:
            hook.layer(step.index, self.view)

    def begin(self, routing: _core.Routing) -> None:
        """Python's kernels run the pass."""
        self.routing = routing
        self.work = self.step.backend.begin(self)

    def run(self, groups: Groups, replicas: Replicas) -> None:
        """Residents together, then arrivals as they land."""
        self.step.backend.run(self, groups, replicas)

    def run_into(self, y: int, routing: _core.Routing, groups: Groups, replicas: Replicas) -> None:
        """What native kernels leave to Python's; y: the address of the pairs' rows [N, H]."""
        self.routing = routing
        cast(NativeBackend, self.step.backend).run_into(self, y, groups, replicas)

    def lost(self) -> Sequence[int]:
        """All that is planned here has run: the experts of the next peer that is lost or late; empty: there is none."""
        return next((call.keys for call in self._joining if not self.step.backend.join(self, call)), ())

    def combine(self) -> Any:
        """The output of Python's kernels, with the sums of peers."""
        return self.step.backend.combine(self)

    def add(self, out: Any) -> None:
        """Add the sums of peers. out [T, H]; None: that of the present pass."""
        cast(NativeBackend, self.step.backend).add(self, self.step.shared.out if out is None else out)

    def peer_s(self) -> tuple[float, float]:
        """Peers were joined: seconds that the GPU which waited longest waited, and those of the busiest link."""
        calls = self.calls
        if any(call.recomputed for call in calls):
            self.step.placer.displaced()
        return max(call.blocked_s for call in calls), max(call.link_s for call in calls)

    def ran(self) -> None:
        """The pass is closed."""
        for watcher in self.step.hooks.watch:
            watcher.ran(self.step.index)

    def _low(self) -> frozenset[int]:
        low = NO_KEYS
        for rule in self.step.hooks.reroute:
            low |= rule.layer(self.step.index, self.view)
        return low


class Executor(Protocol):
    """Runs a layer's passes.

    looks: it needs the view of each pass; else that is made where a part is Python's.
    asked: routers whose scores Python finds, by their numbers in native code.
    """

    looks: bool
    asked: list[Asked]

    @property
    def core(self) -> _core.Layer:
        """The layer in native code."""
        ...

    def run(self, *inputs: Any) -> Any:
        """One pass: the inputs and the output of `MoeLayer.forward`."""
        ...


class PythonExecutor:
    """Runs passes whose kernels are Python's, by the layer's backend."""

    looks = True

    def __init__(self, step: MoeLayer) -> None:
        self.asked: list[Asked] = []
        core = self.core = _core.PythonLayer(
            step.cache.core, step.index, step.experts, step.cache.neurons, step.shared.passes, weakly(step)
        )  # fmt: skip
        self._run = core.run

    def run(self, *inputs: Any) -> Any:
        return self._run()


def install(step: MoeLayer, to: Native) -> None:
    """Give native code the layer's parts: its own, and Python's behind them.

    Where inputs are not in host memory, one read brings all that Python's parts read, so all hooks are of one kind.
    """
    hooks, shared, placer = step.hooks, step.shared, step.placer
    rules = [hook.native(step.index, to) for hook in hooks.reroute]
    looks = [hook.native(step.index, to) for hook in hooks.ahead]
    can_reroute, can_look = (len(some) == 1 and None not in some for some in (rules, looks))
    if not to.on_host and ((rules and not can_reroute) or (looks and not can_look)):
        can_reroute = can_look = False
    for can, some in ((can_reroute, rules), (can_look, looks)):
        if can and some[0] is not None:
            some[0]()
    to.core.parts(
        weakly(step), shared.planned, rule=bool(rules), ahead=bool(looks),
        watched=bool(hooks.watch) or bool(placer.scored_at(step.index)), alone=not to.on_host,
    )  # fmt: skip


def weakly(step: MoeLayer) -> Callable[[], Pass]:
    """`begin_pass` for the core, which no collector looks into."""
    held = ref(step)

    def begin() -> Pass:
        alive = held()
        assert alive is not None  # it runs
        return alive.begin_pass()

    return begin


# as `ExpertKernel` and `PackedKernel` take them
Groups: TypeAlias = "list[tuple[int, int, int, int, bool]]"
Replicas: TypeAlias = "list[tuple[int, int, int]]"


class Backend(Protocol):
    """What the parts of a pass that are Python's ask of a device."""

    def look(self, step: MoeLayer, weighed: bool, *inputs: Any) -> Any:
        """The `View` of the layer's inputs. weighed: the weights are read."""
        ...

    def send(self, of: Pass) -> Sequence[RemoteCall]:
        """Send `of.remote` to their peers; waits for no answer."""
        ...

    def begin(self, of: Pass) -> Any:
        """The copies are queued, and Python's kernels run the pass: what the further methods find as `of.work`."""
        ...

    def run(self, of: Pass, groups: Groups, replicas: Replicas) -> None:
        """Run experts that are in their slots, and replicas by their slot."""
        ...

    def join(self, of: Pass, call: RemoteCall) -> bool:
        """Take a peer's answer; False: there is none, and its experts run here, in full precision."""
        ...

    def combine(self, of: Pass) -> Any:
        """The layer's output, with the sums of peers."""
        ...


class NativeBackend(Backend, Protocol):
    """A backend beside native kernels, which leave some parts to it."""

    def run_into(self, of: Pass, y: int, groups: Groups, replicas: Replicas) -> None:
        """As `run`; y: the address of the pairs' rows."""
        ...

    def add(self, of: Pass, out: Any) -> None:
        """Add the sums of peers to out [T, H]."""
        ...
