"""Where experts are cached and how bytes get there: CUDA, or the CPU standing in for a GPU.

A device copies host tensors into slot tensors (on the loader's thread) and lets the compute wait
for a copy. It knows no experts and decides nothing.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch

from ...errors import ConfigError
from ..settings import LinkSettings

Tensors = tuple[torch.Tensor, ...]


@dataclass(frozen=True, slots=True)
class Copied:
    """A finished copy.

    start_s, end_s: the time the link was given to it, `time.perf_counter` seconds.
    event: what the compute stream must wait for; None when the bytes are already there.
    link_s: what it took by the clock of the link: on the stand-in latency and bytes at the stated rate, however late
    the processor was; on a GPU the same as the time above.
    """

    start_s: float
    end_s: float
    event: Any
    link_s: float = 0.0


class Device(Protocol):
    """What the cache and the loader need of a device.

    The bytes of a copy are those written to the slot, in the slot's dtype, in every counter and on both
    executors; a link that carries a narrower store dtype moves fewer.
    """

    torch_device: torch.device
    executor: Literal["real", "emulated"]

    def mark_use(self) -> Any:
        """A token for 'all compute enqueued so far', which a later copy into its slots waits for."""
        ...

    def copy(self, dst: Tensors, src: Tensors, after: Any) -> Copied:
        """Copy one expert; called on the loader's thread. `after` is a token of `mark_use`."""
        ...

    def wait(self, copied: Copied) -> None:
        """Make compute enqueued from now on see the copied bytes."""
        ...

    def pin_host(self, tensors: Tensors) -> bool:
        """Register host memory as pinned; False when the device cannot."""
        ...


class CpuDevice:
    """The CPU stands in for a GPU: bounded slots, and a link throttled to a stated rate.

    A copy occupies the link for `latency_us + bytes / gbps`; copies follow each other without
    overlap, as on one PCIe direction.
    With `gbps` None the link is as fast as memory and only latency is added.
    """

    executor: Literal["real", "emulated"] = "emulated"

    def __init__(self, link: LinkSettings) -> None:
        self.torch_device, self.link = torch.device("cpu"), link
        self._latency_s = link.latency_us * 1e-6
        self._bytes_per_s = link.gbps * 1e9 if link.gbps is not None else None
        self._link_free_s = 0.0

    def mark_use(self) -> None:
        return None  # compute is synchronous: what was enqueued is done

    def copy(self, dst: Tensors, src: Tensors, after: Any) -> Copied:
        start_s = max(time.perf_counter(), self._link_free_s)
        duration_s = self._latency_s
        for d, s in zip(dst, src, strict=True):
            d.copy_(s)
            if self._bytes_per_s is not None:
                duration_s += d.nbytes / self._bytes_per_s
        end_s = max(start_s + duration_s, time.perf_counter())
        self._link_free_s = end_s
        while (left_s := end_s - time.perf_counter()) > 0:
            time.sleep(left_s)
        return Copied(start_s, end_s, None, duration_s)

    def wait(self, copied: Copied) -> None:
        return None

    def pin_host(self, tensors: Tensors) -> bool:
        return False


class CudaDevice:
    """One CUDA device with one copy stream beside the compute stream.

    The loader's thread waits for each copy before it starts the next, so that at most one is under way and a
    demand load overtakes every queued prefetch; the thread of the forward never waits for the device here.
    Double buffering through pinned staging memory and more streams are later work.
    """

    executor: Literal["real", "emulated"] = "real"

    def __init__(self, index: int = 0) -> None:
        self.torch_device = torch.device("cuda", index)
        self._stream = torch.cuda.Stream(self.torch_device)

    def mark_use(self) -> Any:
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self.torch_device))
        return event

    def copy(self, dst: Tensors, src: Tensors, after: Any) -> Copied:
        stream = self._stream
        start_s = time.perf_counter()
        with torch.cuda.stream(stream):
            if after is not None:
                stream.wait_event(after)
            for d, s in zip(dst, src, strict=True):
                # Cast on the device: the link carries the store's bytes.
                staged = s if s.dtype == d.dtype else s.to(self.torch_device, non_blocking=True)
                d.copy_(staged, non_blocking=True)
            done = torch.cuda.Event()
            done.record(stream)
        done.synchronize()
        end_s = time.perf_counter()
        return Copied(start_s, end_s, done, end_s - start_s)

    def wait(self, copied: Copied) -> None:
        torch.cuda.current_stream(self.torch_device).wait_event(copied.event)

    def pin_host(self, tensors: Tensors) -> bool:
        cudart = torch.cuda.cudart()
        for tensor in tensors:
            read_only = 8  # cudaHostRegisterReadOnly: the mapping is read-only
            if int(cudart.cudaHostRegister(tensor.data_ptr(), tensor.nbytes, read_only)) != 0:
                return False
        return True


def make_device(kind: str, link: LinkSettings, gpu: int | None = None) -> Device:
    """The device for `auto`, `cpu` or `cuda`.

    Args:
        gpu: number of the CUDA device, which becomes this process's current one; None: the current one.

    Raises:
        ConfigError: CUDA is asked for and not there, or there are too few GPUs.
    """
    if kind == "auto":
        kind = "cuda" if torch.cuda.is_available() else "cpu"
    if kind == "cpu":
        return CpuDevice(link)
    if not torch.cuda.is_available():
        raise ConfigError("device cuda is not available", "use --device cpu (the CPU stands in for a GPU)")
    if gpu is not None:
        if gpu >= torch.cuda.device_count():
            raise ConfigError(
                f"shard {gpu} needs GPU {gpu}, this machine shows {torch.cuda.device_count()}",
                "use fewer shards, or --device cpu (the CPU stands in for GPUs)",
            )
        torch.cuda.set_device(gpu)
    return CudaDevice(torch.cuda.current_device())
