"""The GPU as cache and loader see it (`engine.cache.device.Device`), and pinning of the store's pages."""

from __future__ import annotations

import contextlib
import logging
import mmap
import time
from bisect import bisect_right, insort
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from sys import maxsize
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from ....limits import usable_cores
from ...numa import MemoryNode, bring
from ...settings import CopySettings
from ..cache.device import Copied, HostExperts, PinReport, Tensors
from .arena import CudaArena, Pages
from .runtime import GpuRuntime
from .staging import Staging

_log = logging.getLogger(__name__)
_SAY_EVERY_S = 5.0
_TOUCH_BYTES = 16 << 20  # pages that a thread fills at a time
_COPY_ITEMS = 8 << 20  # that a thread copies at a time


def pin_layers(
    device: CudaDevice, layers: Sequence[HostExperts], settings: CopySettings
) -> tuple[list[HostExperts], PinReport]:
    """Pin these layers as far as the settings and the driver allow.

    A file's mapping is registered as read-only memory, which some drivers and file systems refuse; the setting
    `unpinned` then says whether the layer is copied to pinned memory of this process or staged. Pinning goes on after a
    refusal: files can lie on several file systems. With the setting `pin: copy` layers are copied first, and registered
    where they lie if there is no room for a copy.

    Returns:
        The layers, with the copied ones replaced, and a report.
    """
    limit = None if settings.pinned_gib is None else int(settings.pinned_gib * (1 << 30))
    total, said_s, began_s = sum(_nbytes(layer.tensors) for layer in layers), time.monotonic(), time.monotonic()
    out, problem = list(layers), None
    registered = copied = 0
    waiting = list(range(len(layers)))
    while waiting:
        in_place, beyond = [], []  # beyond: the limit; there may be room once others were refused
        wanted = 0
        for i in waiting:
            tensors = layers[i].tensors
            if device.is_pinned(tensors):
                registered += _nbytes(tensors)
            elif limit is not None and registered + copied + wanted + _nbytes(tensors) > limit:
                beyond.append(i)
            elif settings.pin == "copy" and (copy := _pinned_copy(device, tensors)) is not None:
                out[i] = layers[i].moved(copy)
                copied += _nbytes(tensors)
            else:
                fill_pages(*tensors)
                if device.near is not None:
                    bring(map(_pages, tensors), device.near)
                in_place.append(i)
                wanted += _nbytes(tensors)
            if time.monotonic() - said_s > _SAY_EVERY_S:
                said_s = time.monotonic()
                _log.info("pinned %.1f of %.1f GiB", (registered + copied + wanted) / (1 << 30), total / (1 << 30))
        refusals = _register_all(device, [layers[i].tensors for i in in_place])
        for i, refusal in zip(in_place, refusals, strict=True):
            if refusal is None:
                registered += _nbytes(layers[i].tensors)
                continue
            problem = problem or refusal
            copy = _pinned_copy(device, layers[i].tensors) if settings.unpinned == "copy" else None
            if copy is not None:
                out[i] = layers[i].moved(copy)
                copied += _nbytes(copy)
        waiting = beyond if any(refusals) else []
        if beyond:
            problem = problem or "the limit that copies.pinned_gib sets is reached"
    staged = total - registered - copied
    return out, PinReport(registered, copied, staged, problem, time.monotonic() - began_s)


def _pages(tensor: torch.Tensor) -> tuple[int, int]:
    """Where the whole pages of a tensor begin and end."""
    page, end = mmap.PAGESIZE, tensor.data_ptr() + tensor.nbytes
    return tensor.data_ptr() // page * page, -(-end // page) * page


def _merged(spans: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """The same pages in disjoint ranges; those that only touch stay two, for they may be of two files."""
    out: list[tuple[int, int]] = []
    for first, last in sorted(spans):
        if out and first < out[-1][1]:
            out[-1] = (out[-1][0], max(last, out[-1][1]))
        else:
            out.append((first, last))
    return out


def fill_pages(*tensors: torch.Tensor, page: int = mmap.PAGESIZE) -> int:
    """Read one byte of every page, a thread per core, so that all pages are in memory; returns their sum."""

    def touch(part: NDArray[np.uint8]) -> int:  # NumPy gives up the interpreter's lock while it sums
        return int(np.sum(part[::page], dtype=np.int64))

    size, flat = _TOUCH_BYTES // page * page, [tensor.view(-1).view(torch.uint8).numpy() for tensor in tensors]
    with _thread_per_core() as pool:
        return sum(pool.map(touch, (one[at : at + size] for one in flat for at in range(0, len(one), size))))


def _thread_per_core() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(usable_cores(), "tiermoe-pages")


def _register_all(device: CudaDevice, layers: Sequence[Tensors]) -> list[str | None]:
    """Register the pages of these layers, each page once: of each layer None, or why it is not registered.

    Layers of one file meet within a page, which CUDA registers once only, and a copy may not span two registrations. So
    the ranges of all are merged. Where a range is refused, its layers are tried in halves. A layer is registered as a
    whole, or not at all.
    """
    problems: list[str | None] = [None] * len(layers)

    def register(wanted: Sequence[int]) -> None:
        own = {i: [_pages(t) for t in layers[i] if not device.is_pinned((t,))] for i in wanted}
        merged = _merged(span for spans in own.values() for span in spans)
        ranges = {i: [merged[bisect_right(merged, (at, maxsize)) - 1] for at, _ in own[i]] for i in wanted}
        in_order = dict.fromkeys(span for i in wanted for span in ranges[i])
        found = {span: device.register(span[0], span[1] - span[0]) for span in in_order}
        refused = [i for i in wanted if any(found[span] for span in ranges[i])]
        kept = {span for i in wanted if i not in refused for span in ranges[i]}
        for span, problem in found.items():
            if problem is None and span not in kept:
                device.unregister(span[0])
        if len(wanted) == 1:
            for i in refused:
                problems[i] = next(filter(None, (found[span] for span in ranges[i])))
        else:
            half = (len(refused) + 1) // 2
            for part in filter(None, (refused[:half], refused[half:])):
                register(part)

    register(range(len(layers)))
    return problems


def _pinned_copy(device: CudaDevice, tensors: Tensors) -> Tensors | None:
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

    A `StreamLink` copies experts in pinned memory without a thread. The compute may change its stream (transformers'
    batching has its own, probes use the default one); the new one then waits for the old one's work, so that one event
    stands for all compute.

    Args:
        staging_bytes: of each of the two pinned buffers, made with the first staged copy.
        near: the memory node that this process keeps to, where pages lie that it pins; None: it keeps to none.
    """

    executor: Literal["real", "emulated"] = "real"

    def __init__(self, runtime: GpuRuntime, staging_bytes: int = 16 << 20, near: MemoryNode | None = None) -> None:
        self.runtime, self.torch_device, self.near = runtime, runtime.device, near
        self._compute = runtime.current()
        self._staging_bytes = staging_bytes
        self._staging: Staging | None = None
        self._registered: list[tuple[int, int]] = []  # address, bytes; by address
        self._pages: Pages | None = None
        self._arenas: list[CudaArena] = []

    def enter(self) -> None:
        self.runtime.enter()

    def free_bytes(self) -> int:
        return self.runtime.free_bytes()

    def arena_problem(self) -> str | None:
        try:
            self._pages = self._pages or Pages(self.runtime.page_driver())
        except (AttributeError, OSError, RuntimeError) as error:  # the first: a driver that lacks a call
            return str(error)
        return None

    def arena(self, nbytes: int) -> CudaArena:
        self._pages = self._pages or Pages(self.runtime.page_driver())
        self._arenas.append(CudaArena(self._pages, nbytes))
        return self._arenas[-1]

    def settle(self) -> None:
        self.runtime.settle()

    def move(self, dst: Tensors, src: Tensors) -> None:
        with self.runtime.on(self.compute_stream()):
            for d, s in zip(dst, src, strict=True):
                self.runtime.copy(d, s)

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
        return Copied(start_s, end_s, end_s - start_s)

    def pin(
        self, layers: Sequence[HostExperts], settings: CopySettings
    ) -> tuple[Sequence[HostExperts], PinReport | None]:
        return pin_layers(self, layers, settings)

    def register(self, address: int, nbytes: int) -> str | None:
        """Pin these whole pages of host memory until `close`. None: done; else why it could not be."""
        problem = self.runtime.register(address, nbytes)
        if problem is None:
            insort(self._registered, (address, nbytes))
        return problem

    def unregister(self, address: int) -> None:
        """Undo `register`, of memory that no queue copies from."""
        self._registered = [one for one in self._registered if one[0] != address]
        self.runtime.unregister(address)

    def is_pinned(self, tensors: Tensors) -> bool:
        """Whether all of these are registered here, or were pinned when they were allocated."""
        return all(self._holds(t.data_ptr(), t.nbytes) or self._allocated_pinned(t) for t in tensors)

    def close(self) -> None:
        """Unregister host memory and give arenas back, after the copy queues. Safe to call twice."""
        while self._registered:
            self.runtime.unregister(self._registered.pop()[0])
        if self._pages is not None:
            self.settle()
            for arena in self._arenas:
                arena.close()
            self._pages.close()
            self._arenas, self._pages = [], None

    def _allocated_pinned(self, tensor: torch.Tensor) -> bool:
        # The driver answers for single bytes: a neighbour's registration may hold the first page of a tensor.
        return self.runtime.is_pinned(tensor) and self.runtime.is_pinned(tensor.view(-1)[-1:])

    def _holds(self, address: int, nbytes: int) -> bool:
        place = bisect_right(self._registered, (address, maxsize)) - 1
        return place >= 0 and address + nbytes <= sum(self._registered[place])
