"""Calls on streams, events and pinned memory: all that is asked of `torch.cuda`.

So that tests run what decides on a fake GPU, which executes operations in any order that streams and events allow.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import cache, cached_property
from typing import TYPE_CHECKING, Any

import torch

from ....kernels.device import on_device
from ...core import _core
from .arena import CudaDriver
from .driver import cuda_driver

if TYPE_CHECKING:  # triton, which need not be there
    from ....kernels.triton.tables import Copier

_READ_ONLY = 8  # cudaHostRegisterReadOnly: the memory is mapped read-only, as the store's files are
_PLAIN = 0
# A host that waits keeps the interpreter's lock for so long: more than a decode step's layer takes until its routing is
# known, misses of the layer before included (eight experts of 17 MB at 12 GB/s are 11 ms). Whoever gets the lock in
# between may keep it for 5 ms. A prompt's waits are longer, and give it up.
SPIN_S = 20e-3
_MOVED = (torch.int32, torch.int64, torch.float32, torch.bfloat16)  # by `kernel_copy`: compiled before serving


class GpuRuntime:
    """One GPU, by `torch.cuda`. Streams and events are opaque; streams can be compared.

    Operations of one stream run in order, those of two streams in any order without an event.
    """

    def __init__(self, index: int) -> None:
        self.device = torch.device("cuda", index)

    def enter(self) -> None:
        """Make it the calling thread's current device."""
        torch.cuda.set_device(self.device)

    def bus(self) -> str:
        """Its PCI address, as the kernel writes it: `0000:3b:00.0`."""
        of = torch.cuda.get_device_properties(self.device)
        return f"{of.pci_domain_id:04x}:{of.pci_bus_id:02x}:{of.pci_device_id:02x}.0"

    def free_bytes(self) -> int:
        """Device memory that no process has taken; what torch keeps for this one counts as taken."""
        return int(torch.cuda.mem_get_info(self.device)[0])

    def stream(self, urgent: bool = False) -> torch.cuda.Stream:
        """A new stream. urgent: higher priority (of kernels, not of copies)."""
        return torch.cuda.Stream(self.device, priority=-1 if urgent else 0)

    def current(self) -> torch.cuda.Stream:
        """The stream of the calling thread's compute."""
        return torch.cuda.current_stream(self.device)

    def on(self, stream: torch.cuda.Stream) -> AbstractContextManager[Any]:
        """A context in which this thread's operations go to `stream`."""
        return torch.cuda.stream(stream)

    def event(self, timing: bool = True) -> torch.cuda.Event:
        """A new event; it may be recorded again once its last record is read."""
        return torch.cuda.Event(enable_timing=timing)

    def record(self, event: torch.cuda.Event, stream: torch.cuda.Stream) -> None:
        """The event is done when all that is enqueued on `stream` so far is."""
        event.record(stream)

    def wait_event(self, stream: torch.cuda.Stream, event: torch.cuda.Event) -> None:
        """What is enqueued on `stream` from now on runs after the event's last record."""
        stream.wait_event(event)

    def copy(self, dst: torch.Tensor, src: torch.Tensor) -> None:
        """Enqueue dst <- src on the entered stream. Host tensors are pinned; dtypes may differ only on the device."""
        dst.copy_(src, non_blocking=True)

    def kernel_copy(self, dst: torch.Tensor, src: torch.Tensor) -> None:
        """`copy` of small tensors of one dtype by a kernel, which does not queue behind the copies of experts."""
        if self.mapped:
            from ....kernels.triton.tables import kernel_copy

            with on_device(self.device):
                kernel_copy(dst, src)
        else:
            dst.copy_(src, non_blocking=True)

    @property
    def copier(self) -> Copier | None:
        """The kernels of small copies, for native code; None: native code has to call `kernel_copy`."""
        if not self.mapped:
            return None
        from ....kernels.triton.tables import copier_of

        return copier_of(self.device)

    def launch(self, act: Callable[[], None]) -> None:
        """Call `act`, which launches kernels on the entered stream."""
        act()

    @cached_property
    def mapped(self) -> bool:
        """Whether kernels read and write pinned host memory; tried once, with a wait for the GPU."""
        try:
            from ....kernels.triton.tables import kernel_copy

            with torch.cuda.device(self.device), torch.inference_mode(False):
                for dtype in _MOVED:
                    numbers = torch.arange(3000).to(dtype).pin_memory()
                    there, back = numbers.new_zeros(3000, device=self.device), torch.zeros_like(numbers).pin_memory()
                    kernel_copy(there, numbers)
                    kernel_copy(back, there)
                    torch.cuda.synchronize(self.device)
                    if not (torch.equal(there.cpu(), numbers) and torch.equal(back, numbers)):
                        return False
        except Exception:  # no Triton, it cannot access the pointer, or the C compiler of its launchers failed
            return False
        return True

    def query(self, event: torch.cuda.Event) -> bool:
        """Whether the event is done, without waiting."""
        return bool(event.query())

    def synchronize(self, event: torch.cuda.Event) -> None:
        """Make the host wait for an event without the interpreter's lock. On a forward's way see `wait`."""
        event.synchronize()

    def wait(self, event: torch.cuda.Event) -> None:
        """Make the host wait for an event on a forward's way: it polls, and keeps the lock for up to `SPIN_S`."""
        self._driver.wait_for(event.cuda_event, SPIN_S)

    def elapsed_s(self, earlier: torch.cuda.Event, later: torch.cuda.Event) -> float:
        """Seconds between two events that are done and were made with `timing`."""
        return float(earlier.elapsed_time(later)) * 1e-3

    def settle(self) -> None:
        """Make the host wait for all streams."""
        torch.cuda.synchronize(self.device)

    def handle(self, stream: torch.cuda.Stream) -> int:
        """The driver's own name of a stream."""
        return int(stream.cuda_stream)

    @cached_property
    def _driver(self) -> _core.Driver:
        return self.driver()

    def driver(self) -> _core.Driver:
        """The driver's calls, for a link in native code. Raises RuntimeError or OSError: there are none."""
        with torch.cuda.device(self.device):
            torch.zeros(1, device=self.device)  # the context is there, and current on this thread
            return cuda_driver()

    def page_driver(self) -> CudaDriver:
        """Device memory page by page. Raises RuntimeError or OSError: there is none of this kind."""
        with torch.cuda.device(self.device):
            return CudaDriver(self.device)

    def buffer(self, nbytes: int) -> torch.Tensor:
        """Device memory [nbytes], uint8."""
        with torch.inference_mode(False):  # a forward may make it, and others use it
            return torch.empty(nbytes, dtype=torch.uint8, device=self.device)

    def pinned(self, nbytes: int) -> torch.Tensor:
        """Pinned host memory [nbytes], uint8."""
        with torch.cuda.device(self.device), torch.inference_mode(False):
            return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        """Whether copies from this host tensor are asynchronous."""
        return bool(tensor.is_pinned())

    def register(self, address: int, nbytes: int) -> str | None:
        """Pin whole pages of host memory. None: done; else why it could not be."""
        codes = []
        with torch.cuda.device(self.device):
            for flag in (_READ_ONLY, _PLAIN):  # a driver without the first refuses it; the second needs writable pages
                code = int(torch.cuda.cudart().cudaHostRegister(address, nbytes, flag))
                if code == 0:
                    return None
                codes.append(code)
                self._forget_error()
        return f"cudaHostRegister gave error {codes[0]} as read-only memory and {codes[1]} as plain memory"

    def unregister(self, address: int) -> None:
        """Undo `register`, once no copy from there is under way."""
        with torch.cuda.device(self.device):
            if int(torch.cuda.cudart().cudaHostUnregister(address)) != 0:
                self._forget_error()

    def _forget_error(self) -> None:
        """Clear the error of a refused call, which CUDA reports at the next kernel."""
        try:
            torch.empty(1, device=self.device).fill_(0)
        except RuntimeError:
            return


@cache
def _runtime(index: int) -> GpuRuntime:
    return GpuRuntime(index)


def runtime_of(device: torch.device) -> GpuRuntime:
    """The runtime of a GPU; no index: of the current one."""
    return _runtime(torch.cuda.current_device() if device.index is None else device.index)
