"""What a GPU's link leaves to Python: copies of memory that is not pinned (`Staging`), and casts (`DeviceSide`)."""

from __future__ import annotations

from typing import Any

import torch

from ..cache.device import Tensors
from .runtime import GpuRuntime


class Staging:
    """Two pinned buffers of `nbytes` on a stream of their own: the host fills one while the other is copied.

    Where dtypes differ, the store's bytes cross the link and are cast on the device. `copy` returns when the bytes have
    arrived, so that demand overtakes what is queued.
    """

    def __init__(self, runtime: GpuRuntime, nbytes: int) -> None:
        self._runtime, self._stream = runtime, runtime.stream()
        self._nbytes = nbytes
        self._buffers = [runtime.pinned(nbytes) for _ in range(2)]
        self._free: list[Any] = [None, None]  # done when the device has read the buffer
        self._turn = 0
        self._device_side = DeviceSide(runtime, nbytes)

    def copy(self, dst: Tensors, src: Tensors, after: Any) -> None:
        """dst <- src, after the event `after` (None: at once); either side may be the host's. The host waits."""
        runtime, stream = self._runtime, self._stream
        if after is not None:
            runtime.wait_event(stream, after)
        for d, s in zip(dst, src, strict=True):
            to_host = s.device == runtime.device and d.device != runtime.device
            for d_part, s_part in chunks(d, s, self._nbytes):
                if to_host:
                    self._down(d_part, s_part)
                else:
                    self._up(d_part, s_part)
        done = runtime.event(timing=False)
        runtime.record(done, stream)
        runtime.synchronize(done)

    def _up(self, d: torch.Tensor, s: torch.Tensor) -> None:
        runtime = self._runtime
        staged = self._next(s)
        staged.copy_(s)
        with runtime.on(self._stream):
            self._device_side.copy(d, staged)
        self._sent()

    def _down(self, d: torch.Tensor, s: torch.Tensor) -> None:
        runtime = self._runtime
        staged = self._next(s)
        with runtime.on(self._stream):
            runtime.copy(staged, s)
        runtime.synchronize(self._sent())
        d.copy_(staged)

    def _next(self, like: torch.Tensor) -> torch.Tensor:
        """A part of the next buffer shaped like a tensor, once the device has read its last content."""
        self._turn ^= 1
        if (free := self._free[self._turn]) is not None:
            self._runtime.synchronize(free)
        return self._buffers[self._turn][: like.nbytes].view(like.dtype).view(like.shape)

    def _sent(self) -> Any:
        event = self._free[self._turn] or self._runtime.event(timing=False)
        self._runtime.record(event, self._stream)
        self._free[self._turn] = event
        return event


class DeviceSide:
    """Copies on the entered stream, cast on the device where dtypes differ.

    Each stream has one cast buffer; operations of a stream run in order, so a chunk is cast before the next one lands.
    """

    def __init__(self, runtime: GpuRuntime, nbytes: int) -> None:
        self._runtime, self._nbytes = runtime, nbytes
        self._buffer: torch.Tensor | None = None

    @property
    def bytes(self) -> int:
        """Bytes of the cast buffer."""
        return 0 if self._buffer is None else self._buffer.nbytes

    def reserve(self) -> None:
        """Allocate the cast buffer now."""
        if self._buffer is None:
            self._buffer = self._runtime.buffer(self._nbytes)

    def copy(self, dst: torch.Tensor, src: torch.Tensor) -> None:
        """dst (device) <- src (pinned); both contiguous, of one shape."""
        if dst.dtype == src.dtype:
            self._runtime.copy(dst, src)
            return
        self.reserve()
        assert self._buffer is not None
        for d, s in chunks(dst, src, self._nbytes):
            landed = self._buffer[: s.nbytes].view(s.dtype)
            self._runtime.copy(landed, s)
            self._runtime.copy(d, landed)


def chunks(dst: torch.Tensor, src: torch.Tensor, nbytes: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Both as flat parts of at most `nbytes` of the source; contiguous tensors of one shape (else ValueError)."""
    if dst.shape != src.shape:
        raise ValueError(f"a copy of {tuple(src.shape)} to {tuple(dst.shape)}")
    step = max(1, nbytes // src.element_size())
    return list(zip(dst.view(-1).split(step), src.view(-1).split(step), strict=True))
