"""The GPU as cache and loader see it (`engine.cache.device.Device`), and pinning of the store's pages."""

from __future__ import annotations

import contextlib
import logging
import mmap
import os
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal, Protocol

import numpy as np
import torch

from ...settings import CopySettings
from ..cache.device import Copied, PinReport, Tensors
from ..cache.slots import HostLayer
from .lane import Staging
from .runtime import GpuRuntime

_log = logging.getLogger(__name__)
_SAY_EVERY_S = 5.0
_TOUCH_BYTES = 16 << 20  # pages that a thread fills at a time
_COPY_ITEMS = 8 << 20  # that a thread copies at a time


class Registrar(Protocol):
    """Registers host memory: `CudaDevice`, or a test's."""

    def register(self, address: int, nbytes: int) -> str | None:
        """Pin these whole pages. None: done; else why it could not be."""
        ...

    def unregister(self, address: int) -> None: ...
    def is_pinned(self, tensors: Tensors) -> bool: ...


def pin_layers(
    device: Registrar, layers: Sequence[HostLayer], settings: CopySettings
) -> tuple[list[HostLayer], PinReport]:
    """Pin these layers as far as the settings and the driver allow, layer by layer.

    A file's mapping is registered as read-only memory, which some drivers and file systems refuse; the setting
    `unpinned` then says whether the layer is copied to pinned memory of this process or staged. Pinning goes on after a
    refusal: files can lie on several file systems. With the setting `pin: copy` layers are copied first, and registered
    where they lie if there is no room for a copy.

    Returns:
        The layers, with the copied ones replaced, and a report.
    """
    limit = None if settings.pinned_gib is None else int(settings.pinned_gib * (1 << 30))
    total, said_s, began_s = sum(_nbytes(layer.tensors) for layer in layers), time.monotonic(), time.monotonic()
    out, problem = list[HostLayer](), None
    registered = copied = staged = 0
    for layer in layers:
        nbytes, pinned = _nbytes(layer.tensors), layer
        if device.is_pinned(layer.tensors):
            registered += nbytes
        elif limit is not None and registered + copied + nbytes > limit:
            staged += nbytes
            problem = problem or "the limit that copies.pinned_gib sets is reached"
        elif settings.pin == "copy" and (first := _pinned_copy(device, layer.tensors)) is not None:
            pinned = layer.moved(first)
            copied += nbytes
        elif (refusal := _register(device, layer.tensors)) is None:
            registered += nbytes
        else:
            problem = problem or refusal
            copy = _pinned_copy(device, layer.tensors) if settings.unpinned == "copy" else None
            if copy is not None:
                pinned = layer.moved(copy)
                copied += nbytes
            else:
                staged += nbytes
        out.append(pinned)
        if time.monotonic() - said_s > _SAY_EVERY_S:
            said_s = time.monotonic()
            _log.info("pinned %.1f of %.1f GiB", (registered + copied) / (1 << 30), total / (1 << 30))
    return out, PinReport(registered, copied, staged, problem, time.monotonic() - began_s)


def page_ranges(tensors: Iterable[torch.Tensor], page: int = mmap.PAGESIZE) -> list[tuple[int, int]]:
    """The whole pages of these tensors, as (address, bytes), in disjoint ranges."""
    spans = sorted((t.data_ptr() // page * page, -(-(t.data_ptr() + t.nbytes) // page) * page) for t in tensors)
    out: list[tuple[int, int]] = []
    for first, last in spans:
        if out and first <= out[-1][1]:
            out[-1] = (out[-1][0], max(last, out[-1][1]))
        else:
            out.append((first, last))
    return [(first, last - first) for first, last in out]


def fill_pages(tensor: torch.Tensor, page: int = mmap.PAGESIZE) -> int:
    """Read one byte of every page, a thread per core, so that all pages are in memory; returns their sum."""
    flat = tensor.view(-1).view(torch.uint8).numpy()

    def touch(first: int) -> int:  # NumPy gives up the interpreter's lock while it sums
        return int(np.sum(flat[first : first + _TOUCH_BYTES : page], dtype=np.int64))

    with _thread_per_core() as pool:
        return sum(pool.map(touch, range(0, len(flat), _TOUCH_BYTES // page * page)))


def _thread_per_core() -> ThreadPoolExecutor:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return ThreadPoolExecutor(cores, "tiermoe-pages")


def _register(device: Registrar, tensors: Tensors) -> str | None:
    for tensor in tensors:
        fill_pages(tensor)
    done: list[int] = []
    for address, nbytes in page_ranges(tensors):
        if (problem := device.register(address, nbytes)) is not None:
            for other in done:  # the layer is staged or copied as a whole: do not pin a part of it for nothing
                device.unregister(other)
            return problem
        done.append(address)
    return None


def _pinned_copy(device: Registrar, tensors: Tensors) -> Tensors | None:
    """A layer in registered memory of this process; None where memory is short, or the driver refuses.

    Not torch's pinned memory, which rounds sizes up to powers of two.
    """
    sizes = [-(-t.nbytes // mmap.PAGESIZE) * mmap.PAGESIZE for t in tensors]
    try:
        memory = mmap.mmap(-1, sum(sizes), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError:  # no room for it a second time
        return None
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without them
            memory.madvise(mmap.MADV_HUGEPAGE)
    out, first = list[torch.Tensor](), 0
    for tensor, size in zip(tensors, sizes, strict=True):
        flat = torch.frombuffer(memory, dtype=tensor.dtype, count=tensor.numel(), offset=first)
        parts = zip(flat.split(_COPY_ITEMS), tensor.view(-1).split(_COPY_ITEMS), strict=True)
        with _thread_per_core() as pool:
            list(pool.map(lambda part: part[0].copy_(part[1]), parts))
        out.append(flat.view(tensor.shape))
        first += size
    return tuple(out) if device.register(out[0].data_ptr(), sum(sizes)) is None else None


def _nbytes(tensors: Tensors) -> int:
    return sum(t.nbytes for t in tensors)


class CudaDevice:
    """One GPU: its compute stream, staged copies for a loader's thread, and registered host memory.

    `StreamQueue` copies experts in pinned memory without a thread. The compute may change its stream (transformers'
    batching has its own, probes use the default one); the new one then waits for the old one's work, so that one event
    stands for all compute.

    Args:
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
        """The compute's present stream, ordered behind the earlier ones; on the forward's thread."""
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
        self, layers: Sequence[HostLayer], settings: CopySettings
    ) -> tuple[Sequence[HostLayer], PinReport | None]:
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
        """Whether all of these are registered here, or were pinned when they were allocated."""
        return all(self._holds(t.data_ptr(), t.nbytes) or self._allocated_pinned(t) for t in tensors)

    def close(self) -> None:
        """Unregister host memory, after the copy queues. Safe to call twice."""
        while self._registered:
            self.runtime.unregister(self._registered.pop()[0])

    def _allocated_pinned(self, tensor: torch.Tensor) -> bool:
        # The driver answers for single bytes: a neighbour's registration may hold the first page of a tensor.
        return self.runtime.is_pinned(tensor) and self.runtime.is_pinned(tensor.view(-1)[-1:])

    def _holds(self, address: int, nbytes: int) -> bool:
        return any(first <= address and address + nbytes <= first + size for first, size in self._registered)
