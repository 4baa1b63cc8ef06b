"""The executors of a layer's pass, and the one place where a layer gets its own.

    kernel of the layer                                   executor
    C++ on the CPU, no norm behind the experts            CpuExecutor: many rows and replicas by Python's kernels
    Triton's, replicas' too, no norm                      GpuExecutor: other types and row counts by Python's kernels
    others (dtypes, activations, norms)                   layer.PythonExecutor

A layer's rule and what looks ahead are native where native code has them (`native` of a hook), else Python's.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from numpy.typing import NDArray

from ...kernels import _cpu
from ...kernels.device import on_device
from ...kernels.expert_ffn import CpuKernel, Launches
from ...kernels.host_experts import HostKernel
from ...kernels.router import MOST_GPU_ROWS, LinearRouter
from ..core import _core
from .host_view import operands_of
from .layer import Executor, MoeLayer, PythonExecutor, install

if TYPE_CHECKING:
    from .dispatch import DeviceBackend
    from .host_view import Asked, Fetch


def executor_of(step: MoeLayer) -> Executor:
    """The executor of a layer whose backend is a `DeviceBackend`: see the table of this module."""
    kernel, backend = step.kernel, cast("DeviceBackend", step.backend)
    launches: Launches | None = getattr(kernel, "launches", None)
    if step.post is None and isinstance(kernel, CpuKernel | HostKernel):
        return CpuExecutor(step, kernel)
    low: Launches | None = getattr(backend.low_bit, "launches", None)
    if step.post is None and launches is not None and (backend.low_bit is None or low is not None):
        return GpuExecutor(step, launches, low, backend)
    return PythonExecutor(step)


class NativeExecutor:
    """A layer whose kernels are native.

    Attributes:
        core: the layer in native code. held: whose memory it uses.
        on_host: its inputs are in host memory, so that each of Python's parts may read them for itself.
    """

    core: _core.Layer
    looks, on_host = False, True

    def __init__(self, step: MoeLayer) -> None:
        self.held: list[object] = [step.kernel]
        self.asked: list[Asked] = []
        step.cache.native_steps = True

    def finds(self, asked: Asked) -> bool:
        """As of `hooks.Native`."""
        raise NotImplementedError

    def router(self, asked: Asked | None) -> int:
        """As of `hooks.Native`."""
        raise NotImplementedError

    def time(self, by_cpu: bool | None) -> None:
        """Time the parts of a pass by the thread's CPU time, or by wall-clock; None: do not."""
        self.core.time(by_cpu)

    def parts_s(self) -> dict[str, float]:
        """Seconds of the last pass by part of `host_times.PARTS`, where it was timed."""
        return {"kernels": self.core.kernels_s, "place": self.core.placed_s}


class CpuExecutor(NativeExecutor):
    """A layer on the CPU.

    Attributes:
        handle: for `kernels.dense.Program.run_layers`. width: of rows, H.
    """

    core: _core.CpuLayer

    def __init__(self, step: MoeLayer, kernel: CpuKernel | HostKernel) -> None:
        super().__init__(step)
        self.width, self._experts, self._shared = kernel.width, step.experts, step.shared
        core = self.core = _core.CpuLayer(
            step.cache.core, _cpu.table(), step.index, step.experts, kernel.experts, step.shared.passes
        )
        self.handle, self._run = core.step, core.run
        install(step, self)

    def finds(self, asked: Asked) -> bool:
        return isinstance(asked.probe, LinearRouter) and asked.probe.operands is not None and not asked.rows

    def router(self, asked: Asked | None) -> int:
        if asked is None:
            return -1
        weight, bias = cast("tuple[torch.Tensor, torch.Tensor | None]", cast("LinearRouter", asked.probe).operands)
        self.held.append((weight, bias))
        address = 0 if bias is None else bias.data_ptr()
        return self.core.router(weight.data_ptr(), address, len(weight), self._experts if asked.softmax else 0)

    def run(self, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """hidden [T, H], ids [T, K], weights [T, K] -> [T, H].

        Raises ValueError: there is no such expert; else what the cache and Python's parts do, and nothing is pinned.
        """
        shape = ids.shape
        tokens, top_k = shape
        if hidden.shape != (tokens, self.width) or weights.shape != shape:
            raise ValueError(f"{tuple(hidden.shape)} rows, {tuple(shape)} ids and {tuple(weights.shape)} weights")
        dtype = hidden.dtype
        if not dtype is weights.dtype is torch.float32 or ids.dtype is not torch.int64:
            hidden, ids, weights = hidden.float(), ids.long(), weights.float()
        hidden, ids, weights = hidden.contiguous(), ids.contiguous(), weights.contiguous()
        self._shared.out = out = torch.empty_like(hidden)
        self._run(hidden.data_ptr(), ids.data_ptr(), weights.data_ptr(), tokens, top_k, out.data_ptr())
        return out if out.dtype is dtype else out.to(dtype)

    def fail(self) -> None:
        """Raises what the last pass in a program has raised."""
        self.core.fail()


class GpuExecutor(NativeExecutor):
    """A layer whose experts are launched by native code (`kernels/triton/experts.hpp`)."""

    core: _core.GpuLayer
    on_host = False

    def __init__(self, step: MoeLayer, launches: Launches, low: Launches | None, backend: DeviceBackend) -> None:
        super().__init__(step)
        self.held.append(backend.low_bit)
        fetch = backend.views.fetch
        self._experts, self._device, self._shared = step.experts, launches.device, step.shared
        core = self.core = _core.GpuLayer(
            step.cache.core, launches.experts, None if low is None else low.experts, getattr(fetch, "reads", None),
            MOST_GPU_ROWS, partial(_fetched, fetch, self.asked), step.index, step.experts, step.cache.neurons,
            launches.most_rows, step.shared.passes,
        )  # fmt: skip
        self._run = core.run
        install(step, self)

    def finds(self, asked: Asked) -> bool:
        return True

    def router(self, asked: Asked | None) -> int:
        if asked is None:
            return -1
        self.asked.append(asked)
        fixed = isinstance(asked.probe, LinearRouter)  # others' operands may be of one input only
        operands = operands_of(asked, 1) if fixed else None
        return self.core.router(operands, self._experts * getattr(asked.probe, "layers", 1))

    def run(self, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        with on_device(self._device):
            out: torch.Tensor = self._run(hidden, ids, weights, self._shared.into)
        return out

    def parts_s(self) -> dict[str, float]:
        read_s, waited_s = self.core.read_s
        return super().parts_s() | {"read": read_s, "wait": waited_s}


def _fetched(
    fetch: Fetch, asked: Sequence[Asked], tensors: Sequence[torch.Tensor], hidden: torch.Tensor, numbers: Sequence[int]
) -> list[NDArray[Any]]:
    """What native code cannot read by itself: tensors, then the scores of these routers."""
    found = fetch(tensors, hidden, [asked[number] for number in numbers])
    kinds = [None] * len(tensors) + [np.float32] * len(numbers)
    return [np.ascontiguousarray(array, kind) for array, kind in zip(found, kinds, strict=True)]
