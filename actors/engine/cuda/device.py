"""The GPU as the cache and the loader see it (`engine.device.Device`)."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

import torch

from ...settings import CopySettings
from ..device import Copied, PinReport, Tensors
from .registration import pin_layers
from .runtime import GpuRuntime
from .staging import Staging

if TYPE_CHECKING:
    from ..pool import LayerWeights


class CudaDevice:
    """One GPU: which stream its compute is on, staged copies for a loader's thread, and registered host memory.

    Experts in pinned memory do not come this way: `StreamQueue` copies them without a thread.

    The compute may change its stream (transformers' batching has one of its own, probes run on the default one). The
    new one then waits for the old one's work, so that all compute is in one order and one event stands for all of it.

    Args:
        runtime: of the GPU. What is here runs on a fake one, too.
        staging_bytes: of each of the two pinned buffers, made with the first staged copy.
    """

    executor: Literal["real", "emulated"] = "real"

    def __init__(self, runtime: GpuRuntime, staging_bytes: int = 16 << 20) -> None:
        self.runtime, self.torch_device = runtime, runtime.device
        self._compute = runtime.current()
        self._staging_bytes = staging_bytes
        self._staging: Staging | None = None
        self._registered: list[tuple[int, int]] = []  # address, bytes

    def enter(self) -> None:
        self.runtime.enter()

    def compute_stream(self) -> Any:
        """The stream of the compute now, behind all that was enqueued on earlier ones; on the forward's thread."""
        stream = self.runtime.current()
        if stream != self._compute:
            event = self.runtime.event(timing=False)
            self.runtime.record(event, self._compute)
            self.runtime.wait_event(stream, event)
            self._compute = stream
        return stream

    def mark_use(self) -> Any:
        event = self.runtime.event(timing=False)
        self.runtime.record(event, self.compute_stream())
        return event

    def copy(self, dst: Tensors, src: Tensors, after: Any) -> Copied:
        if self._staging is None:
            self._staging = Staging(self.runtime, self._staging_bytes)
        start_s = time.perf_counter()
        self._staging.copy(dst, src, after)
        end_s = time.perf_counter()
        return Copied(start_s, end_s, None, end_s - start_s)

    def pin(
        self, layers: Sequence[LayerWeights], settings: CopySettings
    ) -> tuple[Sequence[LayerWeights], PinReport | None]:
        return pin_layers(self, layers, settings)

    def register(self, address: int, nbytes: int) -> str | None:
        """Pin these whole pages of host memory until `close`. None: done; else why it could not be."""
        problem = self.runtime.register(address, nbytes)
        if problem is None:
            self._registered.append((address, nbytes))
        return problem

    def unregister(self, address: int) -> None:
        """Undo `register`, of memory that no queue copies from."""
        self._registered = [one for one in self._registered if one[0] != address]
        self.runtime.unregister(address)

    def is_pinned(self, tensors: Tensors) -> bool:
        """Whether copies from all of these are asynchronous: registered here, or pinned when they were allocated."""
        return all(self._holds(t.data_ptr(), t.nbytes) or self._pinned_elsewhere(t) for t in tensors)

    def close(self) -> None:
        """Give registered memory back, once the queues that copy from it are closed. Safe to call twice."""
        while self._registered:
            self.runtime.unregister(self._registered.pop()[0])

    def _pinned_elsewhere(self, tensor: torch.Tensor) -> bool:
        """The driver is asked about single bytes: a neighbour's registration may hold the first page of a tensor."""
        return self.runtime.is_pinned(tensor) and self.runtime.is_pinned(tensor.view(-1)[-1:])

    def _holds(self, address: int, nbytes: int) -> bool:
        return any(first <= address and address + nbytes <= first + size for first, size in self._registered)
