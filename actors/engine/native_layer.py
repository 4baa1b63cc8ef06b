"""A layer in one native call, which decides, accounts and runs or launches the kernels (`actors/core/layer.hpp`).

It does what the page of `layer.MoeLayer.forward` does. On the CPU rules and routers that native code knows are part of
the call. Other hooks are called in it, and other rules before it; on a GPU all, on the view that was fetched first.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple
from weakref import WeakMethod

import numpy as np
import torch
from numpy.typing import NDArray

from ...kernels import _cpu
from ...kernels.device import on_device
from ...kernels.expert_ffn import CPU_MAX_ROWS, CpuKernel, Launches
from ...kernels.substitute import BuddyLists, Options, numbers
from ..core import _core
from .host_view import StepView
from .layer import OnPassed, report_passes

if TYPE_CHECKING:
    from typing_extensions import CapsuleType

    from .cache.cache import ExpertCache
    from .dispatch import DeviceBackend
    from .host_view import LayerView
    from .layer import AheadHook, MoeLayer, RerouteHook
    from .prefetching import Prefetching

# Who looks ahead once a pass's loads are queued (`Asking` of kernels/cpu/table.hpp)
HOOKS, ABSENT, ALWAYS = range(3)


class RoutersAhead(NamedTuple):
    """Routers of later layers, on whose scores a prefetch goes.

    weight [layers * E, H] and bias [layers * E], or None, in float32; None: there are no layers to ask for. first: the
    nearest layer. top: experts of a row. by_votes: as `NextGatePrefetch`; else as `SpeculativePrefetch`, by
    probabilities. max_rows: of which scores are computed so. prefetching: whose it is.
    """

    weight: torch.Tensor | None
    bias: torch.Tensor | None
    first: int
    layers: int
    top: int
    by_votes: bool
    max_rows: int
    prefetching: Prefetching

    @property
    def reads_ids(self) -> bool:
        """Whether it goes by the routing as the model picked it."""
        return False


class ReleaseAhead(NamedTuple):
    """Slots that are freed for the next layer (`policies.activeevict.PreEviction`) by its router's scores.

    weight [E, H] and bias [E], or None, in float32. threshold, most: of the rule. max_rows: of an input. state:
    `kernels.importance.NativeImportance.handle`.
    """

    weight: torch.Tensor
    bias: torch.Tensor | None
    threshold: float
    most: int
    max_rows: int
    state: CapsuleType

    @property
    def reads_ids(self) -> bool:
        return True


class Budget(NamedTuple):
    """Pairs are dropped whose experts do not fit: as `policies.activeevict.BudgetAwareTopK`."""

    min_top_k: int
    renormalise: bool


class Replace(NamedTuple):
    """Missing experts are replaced by others, or left out: as `policies.buddymoe.MissRule` on one GPU.

    top_k: of the routings; others are for Python. tau, beta: None: no gate. weight [E, H] and bias [E], or None: the
    router whose probabilities the options ask for. draws [n] float32 and next [1] int64, the first that was not read:
    in their place. full [L] bool, emptied [1] int64: the rule's state. max_rows: of which probabilities are computed.
    """

    top_k: int
    buddies: BuddyLists
    options: Options
    tau: float | None
    beta: float | None
    weight: torch.Tensor | None
    bias: torch.Tensor | None
    draws: NDArray[np.float32] | None
    next: NDArray[np.int64] | None
    full: NDArray[np.bool_]
    emptied: NDArray[np.int64]
    max_rows: int


class NativeLayers:
    """What the native layers of one cache share.

    Attributes:
        shared: of the core.
        on_passed: called with each pass, once a forward and before what else the watchers see; None: nobody is.
    """

    def __init__(self) -> None:
        self.shared = _core.CpuLayers()
        self.on_passed: OnPassed | None = None

    def report(self) -> None:
        """Give the passes so far to the watcher."""
        if self.on_passed is not None:
            report_passes(self.shared, self.on_passed)


class NativeLayer:
    """One layer's passes.

    Args:
        layer: of the core. held: whose memory it uses.

    Attributes:
        layer: of the core.
        kernels_s: of the last pass, wall-clock and CPU time of the thread, where they are timed.
    """

    @staticmethod
    def of(step: MoeLayer, backend: DeviceBackend, all_layers: NativeLayers) -> NativeLayer | None:
        """None: the layer's kernel, its placer or its watchers are not for native code."""
        kernel, cache = step.kernel, backend.cache
        launches: Launches | None = getattr(kernel, "launches", None)
        told = [getattr(watcher, "passed", None) for watcher in step.hooks.watch if watcher.always]
        native = isinstance(kernel, CpuKernel) or launches is not None
        if not native or step.post is not None or backend.runner.low_bit is not None:
            return None
        if None in told or len(told) > 1:
            return None
        cache.native_steps = True
        all_layers.on_passed = told[0] if told else None
        all_layers.shared.records = bool(told)
        if not step.placer.may_be_local:
            return None
        if isinstance(kernel, CpuKernel):
            return CpuLayer(step, cache, kernel, all_layers)
        assert launches is not None
        return GpuLayer(step, cache, kernel, launches, all_layers)

    def __init__(
        self, step: MoeLayer, cache: ExpertCache, layer: _core.CpuLayer | _core.GpuLayer, all_layers: NativeLayers,
        held: object,
    ) -> None:  # fmt: skip
        self._index, self._last = step.index, step.index == len(cache.stats.layers) - 1
        self._cache, self._all, self.layer = cache, all_layers, layer
        self._held: list[object] = [held]

    def call(self, hooks: Callable[[StepView | None], object]) -> None:
        """A pass calls these once its copies are queued, unless native code looks ahead: with the view of its inputs if
        it is none of `run_view`. hooks: a method of who holds this layer, since no collector sees what the core holds.
        """
        raise NotImplementedError

    def adopt(self, rules: Sequence[RerouteHook], ahead: Sequence[AheadHook]) -> bool:
        """Do in native code what is known there of a layer's hooks. Whether rules and the look at the routing are;
        else a pass is one of `run_view`, of what Python has looked at and rerouted.
        """
        return False

    def run(self, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor | None:
        """As `run_view`, where `adopt` said so: hidden [T, H], ids [T, K], weights [T, K] -> [T, H]."""
        raise NotImplementedError

    def run_view(self, view: LayerView) -> torch.Tensor | None:
        """The output [T, H] of the pairs that the view runs; None: not run, and the step in Python repeats what was
        done. Raises what `ExpertCache` and the hooks do; then nothing is pinned.
        """
        raise NotImplementedError

    def report(self) -> None:
        """The watchers hear of the passes so far."""
        self._all.report()

    def time(self, on: bool) -> None:
        """Whether the kernels are timed."""
        self.layer.timed = on

    @property
    def kernels_s(self) -> tuple[float, float]:
        return self.layer.kernels_s


class GpuLayer(NativeLayer):
    """A layer whose experts are launched by native code (`kernels/triton/experts.hpp`)."""

    def __init__(
        self, step: MoeLayer, cache: ExpertCache, kernel: object, launches: Launches, all_layers: NativeLayers
    ) -> None:
        layer = _core.GpuLayer(
            cache.core, launches.experts, step.index, step.experts, cache.neurons, launches.most_rows, all_layers.shared
        )
        super().__init__(step, cache, layer, all_layers, kernel)
        self._run, self._call, self._device = layer.run, layer.call, launches.device

    def call(self, hooks: Callable[[StepView | None], object]) -> None:
        held = WeakMethod(hooks)

        def call() -> None:
            if (alive := held()) is not None:
                alive(None)

        self._call(call)

    def run_view(self, view: LayerView) -> torch.Tensor | None:
        ids = np.ascontiguousarray(view.ids, np.int64)
        with on_device(self._device):
            out: torch.Tensor | None = self._run(view.hidden, ids, view.device_weights)
        if self._last and out is not None:
            self._all.report()
        return out


class CpuLayer(NativeLayer):
    """A layer on the CPU.

    Attributes:
        handle: for `kernels.dense.Program.run_layers`. width: of rows, H.
        ahead: the prefetch that native code does; None: there is none, or its hook is called.
    """

    layer: _core.CpuLayer

    def __init__(self, step: MoeLayer, cache: ExpertCache, kernel: CpuKernel, all_layers: NativeLayers) -> None:
        self.width = kernel.width
        gate_up, down, neurons, activation = kernel.parts
        layer = _core.CpuLayer(
            cache.core, _cpu.table(), step.index, step.experts, neurons, kernel.width, CPU_MAX_ROWS,
            gate_up, down, activation, all_layers.shared,
        )  # fmt: skip
        super().__init__(step, cache, layer, all_layers, kernel)
        self.handle, self._run = layer.step, layer.run
        self.ahead: Prefetching | None = None

    def call(self, hooks: Callable[[StepView | None], object]) -> None:
        held, width = WeakMethod(hooks), self.width

        def call(hidden: int, ids: int, tokens: int, top_k: int) -> None:
            if (alive := held()) is not None:
                alive(StepView(hidden, ids, tokens, top_k, width))

        self.layer.call(call)

    def adopt(self, rules: Sequence[RerouteHook], ahead: Sequence[AheadHook]) -> bool:
        known = [rule for hook in rules if (rule := hook.native(self._index)) is not None]
        reads = [found for hook in ahead if (found := hook.native(self._index)) is not None]
        reroutes = len(known) == len(rules) < 2
        # after a rule in Python native code does not know what the model picked
        if len(reads) == len(ahead) == 1 and (reroutes or not reads[0].reads_ids):
            self.look_ahead(reads[0])
        if known and reroutes:
            self.reroute(known[0])
        return reroutes

    def look_ahead(self, ahead: RoutersAhead | ReleaseAhead) -> None:
        """A pass prefetches what these routers pick, or frees slots."""
        weight, bias = (0 if t is None else t.data_ptr() for t in (ahead.weight, ahead.bias))
        if isinstance(ahead, RoutersAhead):
            self.ahead = ahead.prefetching
            self.layer.ask_routers(
                weight, bias, ahead.first, ahead.layers, ahead.top, ahead.by_votes, ahead.max_rows,
                self._cache.number_of(self.ahead.policy.name),
            )  # fmt: skip
        else:
            self.layer.release_slots(weight, bias, ahead.threshold, ahead.most, ahead.max_rows, ahead.state)
        self._held.append(ahead)

    def reroute(self, rule: Budget | Replace) -> None:
        """A pass changes the routing so."""
        self._held.append(rule)
        if isinstance(rule, Budget):
            if rule.min_top_k:
                self.layer.drop_unfit(*rule)
            return
        weight, bias = (0 if t is None else t.data_ptr() for t in (rule.weight, rule.bias))
        draws, after = rule.draws, rule.next
        read = (0, 0, 0) if draws is None or after is None else (draws.ctypes.data, len(draws), after.ctypes.data)
        given = numbers((0, rule.top_k), rule.buddies, rule.options, rule.tau)
        self.layer.replace_missing(
            weight, bias, *read, rule.full.ctypes.data, rule.emptied.ctypes.data, rule.buddies.ids.ctypes.data,
            rule.buddies.similarity.ctypes.data, given, math.inf if rule.beta is None else rule.beta, rule.max_rows,
        )  # fmt: skip

    def asking(self, tokens: int) -> int:
        """`HOOKS`, `ABSENT` or `ALWAYS`, for a pass of so many rows."""
        ahead = self.ahead
        if ahead is None:
            return ABSENT
        if not ahead.takes(self._index, tokens):
            return HOOKS
        return ALWAYS if ahead.never_idle else ABSENT

    def run(self, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor | None:
        """hidden [T, H], ids [T, K], weights [T, K] -> [T, H]; None: not run, and the step in Python repeats what
        was done.

        It is so for other dtypes than float32, where an expert has more than `CPU_MAX_ROWS` rows, and for many pairs.
        Raises ValueError: there is no such expert; else what `ExpertCache` and the hooks do, and nothing is pinned.
        """
        float32 = torch.float32
        if hidden.dtype is not float32 or weights.dtype is not float32 or ids.dtype is not torch.int64:
            return None
        shape = ids.shape
        tokens, top_k = shape
        if hidden.shape != (tokens, self.width) or weights.shape != shape:
            raise ValueError(f"{tuple(hidden.shape)} rows, {tuple(shape)} ids and {tuple(weights.shape)} weights")
        hidden, ids, weights = hidden.contiguous(), ids.contiguous(), weights.contiguous()
        out, asking = torch.empty_like(hidden), self.asking(tokens)
        ran = self._run(hidden.data_ptr(), ids.data_ptr(), weights.data_ptr(), tokens, top_k, out.data_ptr(), asking)
        if ran and self._last:
            self.end_forward(asking)
        return out if ran else None

    def run_view(self, view: LayerView) -> torch.Tensor | None:
        return self.run(*view.operands())

    def end_forward(self, asking: int) -> None:
        """The model's last layer has run so: its watchers and its prefetch are told."""
        self._all.report()
        if self.ahead is not None and asking != HOOKS:
            self.ahead.ended()

    def fail(self) -> None:
        """Raises what the last pass in a program has raised."""
        self.layer.fail()


def asking_of(layers: Sequence[CpuLayer], tokens: int) -> int:
    """`CpuLayer.asking` of layers that run together: of the last one that looks ahead."""
    return next((layer.asking(tokens) for layer in reversed(layers) if layer.ahead is not None), ABSENT)
