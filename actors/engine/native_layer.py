"""A layer in one native call, which decides, accounts and runs or launches the kernels (`actors/core/layer.hpp`).

Rules and routers that native code knows are part of the call, which on a GPU begins with reading the routing and what
they ask. Other hooks are called in it, and other rules before it; on a GPU a layer with one of these gets the view that
was fetched first.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, cast
from weakref import WeakMethod

import numpy as np
import torch
from numpy.typing import NDArray

from ...kernels import _cpu
from ...kernels.device import on_device
from ...kernels.expert_ffn import CPU_MAX_ROWS, CpuKernel, Launches
from ...kernels.router import MOST_GPU_ROWS, LinearRouter
from ...kernels.substitute import BuddyLists, Options, numbers
from ..core import _core
from .host_view import StepView, operands_of
from .layer import OnPassed, report_passes

if TYPE_CHECKING:
    from typing_extensions import CapsuleType

    from .cache.cache import ExpertCache
    from .dispatch import DeviceBackend
    from .host_view import Asked, Fetch, HostViews, LayerView
    from .layer import AheadHook, MoeLayer, RerouteHook
    from .prefetching import Prefetching

# Who looks ahead once a pass's loads are queued (`Asking` of kernels/cpu/table.hpp)
HOOKS, ABSENT, ALWAYS = range(3)


@dataclass(frozen=True)
class RoutersAhead:
    """Routers of later layers, on whose scores a prefetch goes (`core::RouterPrefetch`).

    asked: of all these layers, nearest first; None: there are no layers to ask for. first: the nearest layer. by: whose
    picks are prefetched. prefetching: whose it is.
    """

    asked: Asked | None
    first: int
    layers: int
    by: _core.ByScores
    prefetching: Prefetching

    reads_ids: ClassVar[bool] = False  # whether it goes by the routing as the model picked it

    @property
    def routers(self) -> list[Asked]:
        """Whose scores it reads."""
        return [] if self.asked is None else [self.asked]

    def apply(self, layer: NativeLayer) -> None:
        layer.ahead = self.prefetching
        layer.layer.ask_routers(layer.router(self.asked), self.first, self.layers, self.by)


@dataclass(frozen=True)
class ReleaseAhead:
    """Slots that are freed for the next layer (`policies.activeevict.PreEviction`) by its router's scores.

    own: of the first layer, there. asked: of the next layer; None: at the last. threshold, most: of the rule. state:
    `kernels.importance.ImportanceState.handle`. first: what the first layer's router says of the next forward's.
    """

    own: Asked | None
    asked: Asked | None
    threshold: float
    most: int
    state: CapsuleType
    first: _core.FirstScores

    reads_ids: ClassVar[bool] = True

    @property
    def routers(self) -> list[Asked]:
        return [asked for asked in (self.own, self.asked) if asked is not None]

    def apply(self, layer: NativeLayer) -> None:
        own, asked = layer.router(self.own), layer.router(self.asked)
        layer.layer.release_slots(own, asked, self.threshold, self.most, self.state, self.first)


@dataclass(frozen=True)
class Budget:
    """Pairs are dropped whose experts do not fit: as `policies.activeevict.BudgetAwareTopK`."""

    min_top_k: int
    renormalise: bool
    routers: ClassVar[tuple[Asked, ...]] = ()

    def apply(self, layer: NativeLayer) -> None:
        if self.min_top_k:
            layer.layer.drop_unfit(self.min_top_k, self.renormalise)


@dataclass(frozen=True)
class Replace:
    """Missing experts are replaced by others, or left out: as `policies.buddymoe.MissRule` on one GPU.

    top_k: of the routings; others are for Python. tau, beta: None: no gate. asked: the router whose probabilities the
    options ask for. draws [n] float32 and next [1] int64, the first that was not read: in their place. full [L] bool,
    emptied [1] int64: the rule's state.
    """

    top_k: int
    buddies: BuddyLists
    options: Options
    tau: float | None
    beta: float | None
    asked: Asked | None
    draws: NDArray[np.float32] | None
    next: NDArray[np.int64] | None
    full: NDArray[np.bool_]
    emptied: NDArray[np.int64]

    @property
    def routers(self) -> list[Asked]:
        return [] if self.asked is None else [self.asked]

    def apply(self, layer: NativeLayer) -> None:
        draws, after, buddies = self.draws, self.next, self.buddies
        read = (0, 0, 0) if draws is None or after is None else (draws.ctypes.data, len(draws), after.ctypes.data)
        layer.layer.replace_missing(
            layer.router(self.asked), *read, self.full.ctypes.data, self.emptied.ctypes.data, buddies.ids.ctypes.data,
            buddies.similarity.ctypes.data, numbers((0, self.top_k), buddies, self.options, self.tau),
            math.inf if self.beta is None else self.beta,
        )  # fmt: skip


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
        ahead: the prefetch that native code does; None: there is none, or its hook is called.
        on_host: its inputs are in host memory, so that hooks in Python may read them within a pass.
    """

    layer: _core.Layer
    on_host = True

    @staticmethod
    def of(step: MoeLayer, backend: DeviceBackend, all_layers: NativeLayers) -> NativeLayer | None:
        """None: the layer's kernel, its placer or its watchers are not for native code."""
        kernel, cache = step.kernel, backend.cache
        launches: Launches | None = getattr(kernel, "launches", None)
        told = [getattr(watcher, "passed", None) for watcher in step.hooks.watch if watcher.always]
        native = isinstance(kernel, CpuKernel) or launches is not None
        if not native or step.post is not None or backend.low_bit is not None:
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
        return GpuLayer(step, cache, kernel, launches, backend.views, all_layers)

    def __init__(self, step: MoeLayer, cache: ExpertCache, all_layers: NativeLayers, held: object) -> None:
        self._index, self._last = step.index, step.index == len(cache.stats.layers) - 1
        self._all, self._held = all_layers, [held]
        self.ahead: Prefetching | None = None

    def call(self, hooks: Callable[[Callable[[], Any]], object]) -> None:
        """A pass calls these once its copies are queued, unless native code looks ahead.

        hooks: takes what makes the view of the inputs; a method of who holds this layer, since no collector sees what
        the core holds.
        """
        raise NotImplementedError

    def adopt(self, rules: Sequence[RerouteHook], ahead: Sequence[AheadHook]) -> bool:
        """Do in native code what is known there of a layer's hooks. Whether a pass is one of `run`; else it is one of
        `run_view`, of what Python has looked at and rerouted.
        """
        known = [found for hook in rules if (found := self._known(hook)) is not None]
        reads = [found for hook in ahead if (found := self._known(hook)) is not None]
        reroutes = len(known) == len(rules) < 2
        # after a rule in Python native code does not know what the model picked
        looks = len(reads) == len(ahead) < 2 and (reroutes or not any(one.reads_ids for one in reads))
        if not self.on_host and not (reroutes and looks):
            return False
        for one in [*(known if reroutes else ()), *(reads if looks else ())]:
            one.apply(self)
            self._held.append(one)
        return reroutes

    def _known(self, hook: RerouteHook | AheadHook) -> Any:
        found = hook.native(self._index)
        return found if found is None or all(map(self._finds, found.routers)) else None

    def _finds(self, asked: Asked) -> bool:
        """Whether native code finds a router's scores."""
        raise NotImplementedError

    def router(self, asked: Asked | None) -> int:
        """The number of a router in native code; -1: of none."""
        raise NotImplementedError

    def asking(self, tokens: int) -> int:
        """`HOOKS`, `ABSENT` or `ALWAYS`, for a pass of so many rows."""
        ahead = self.ahead
        if ahead is None:
            return ABSENT
        if not ahead.takes(self._index, tokens):
            return HOOKS
        return ALWAYS if ahead.never_idle else ABSENT

    def run(self, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor | None:
        """As `run_view`, where `adopt` said so: hidden [T, H], ids [T, K], weights [T, K] -> [T, H]."""
        raise NotImplementedError

    def run_view(self, view: LayerView) -> torch.Tensor | None:
        """The output [T, H] of the pairs that the view runs; None: not run, and the step in Python repeats what was
        done. Raises what `ExpertCache` and the hooks do; then nothing is pinned.
        """
        raise NotImplementedError

    def end_forward(self, asking: int) -> None:
        """The model's last layer has run so: its watchers and its prefetch are told."""
        self._all.report()
        if self.ahead is not None and asking != HOOKS:
            self.ahead.ended()

    def report(self) -> None:
        """The watchers hear of the passes so far."""
        self._all.report()

    def time(self, by_cpu: bool | None) -> None:
        """Time the parts of a pass by the thread's CPU time, or by wall-clock; None: do not."""
        self.layer.time(by_cpu)

    def parts_s(self) -> dict[str, float]:
        """Seconds of the last pass by part of `model.profile.PARTS`, where it was timed."""
        return {"kernels": self.layer.kernels_s}


class GpuLayer(NativeLayer):
    """A layer whose experts are launched by native code (`kernels/triton/experts.hpp`)."""

    layer: _core.GpuLayer
    on_host = False

    def __init__(
        self, step: MoeLayer, cache: ExpertCache, kernel: object, launches: Launches, views: HostViews,
        all_layers: NativeLayers,
    ) -> None:  # fmt: skip
        super().__init__(step, cache, all_layers, kernel)
        self._asked: list[Asked] = []
        self._views, self._experts = views, step.experts
        layer = self.layer = _core.GpuLayer(
            cache.core, _cpu.table(), launches.experts, getattr(views.fetch, "reads", None), MOST_GPU_ROWS,
            partial(_fetched, views.fetch, self._asked), step.index, step.experts, cache.neurons, launches.most_rows,
            all_layers.shared,
        )  # fmt: skip
        self._run, self._run_view, self._device = layer.run, layer.run_view, launches.device

    def call(self, hooks: Callable[[Callable[[], Any]], object]) -> None:
        held, look = WeakMethod(hooks), partial(self._views.look, self._index)

        def call(hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> None:
            if (alive := held()) is not None:
                alive(partial(look, hidden, ids, weights))

        self.layer.call(call)

    def _finds(self, asked: Asked) -> bool:
        return True

    def router(self, asked: Asked | None) -> int:
        if asked is None:
            return -1
        self._asked.append(asked)
        fixed = isinstance(asked.probe, LinearRouter)  # others' operands may be of one input only
        operands = operands_of(asked, 1) if fixed else None
        return self.layer.router(operands, self._experts * getattr(asked.probe, "layers", 1))

    def run(self, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor | None:
        asking = self.asking(ids.shape[0])
        with on_device(self._device):
            out: torch.Tensor | None = self._run(hidden, ids, weights, asking)
        if self._last and out is not None:
            self.end_forward(asking)
        return out

    def run_view(self, view: LayerView) -> torch.Tensor | None:
        ids = np.ascontiguousarray(view.ids, np.int64)
        with on_device(self._device):
            out: torch.Tensor | None = self._run_view(view.hidden, ids, view.device_weights)
        if self._last and out is not None:
            self.end_forward(HOOKS)
        return out

    def parts_s(self) -> dict[str, float]:
        read_s, waited_s = self.layer.read_s
        return super().parts_s() | {"read": read_s, "wait": waited_s}


def _fetched(
    fetch: Fetch, asked: Sequence[Asked], tensors: Sequence[torch.Tensor], hidden: torch.Tensor, numbers: Sequence[int]
) -> list[NDArray[Any]]:
    """What native code cannot read by itself: tensors, then the scores of these routers."""
    found = fetch(tensors, hidden, [asked[number] for number in numbers])
    kinds = [None] * len(tensors) + [np.float32] * len(numbers)
    return [np.ascontiguousarray(array, kind) for array, kind in zip(found, kinds, strict=True)]


class CpuLayer(NativeLayer):
    """A layer on the CPU.

    Attributes:
        handle: for `kernels.dense.Program.run_layers`. width: of rows, H.
    """

    layer: _core.CpuLayer

    def __init__(self, step: MoeLayer, cache: ExpertCache, kernel: CpuKernel, all_layers: NativeLayers) -> None:
        super().__init__(step, cache, all_layers, kernel)
        self.width, self._experts = kernel.width, step.experts
        gate_up, down, neurons, activation = kernel.parts
        layer = self.layer = _core.CpuLayer(
            cache.core, _cpu.table(), step.index, step.experts, neurons, kernel.width, CPU_MAX_ROWS,
            gate_up, down, activation, all_layers.shared,
        )  # fmt: skip
        self.handle, self._run = layer.step, layer.run

    def call(self, hooks: Callable[[Callable[[], Any]], object]) -> None:
        held, width = WeakMethod(hooks), self.width

        def call(hidden: int, ids: int, tokens: int, top_k: int) -> None:
            if (alive := held()) is not None:
                alive(partial(StepView, hidden, ids, tokens, top_k, width))

        self.layer.call(call)

    def _finds(self, asked: Asked) -> bool:
        return isinstance(asked.probe, LinearRouter) and asked.probe.operands is not None and not asked.rows

    def router(self, asked: Asked | None) -> int:
        if asked is None:
            return -1
        weight, bias = cast("tuple[torch.Tensor, torch.Tensor | None]", cast("LinearRouter", asked.probe).operands)
        address = 0 if bias is None else bias.data_ptr()
        return self.layer.router(weight.data_ptr(), address, len(weight), self._experts if asked.softmax else 0)

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

    def fail(self) -> None:
        """Raises what the last pass in a program has raised."""
        self.layer.fail()


def asking_of(layers: Sequence[CpuLayer], tokens: int) -> int:
    """`CpuLayer.asking` of layers that run together: of the last one that looks ahead."""
    return next((layer.asking(tokens) for layer in reversed(layers) if layer.ahead is not None), ABSENT)
