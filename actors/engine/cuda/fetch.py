"""Tensors of a GPU to the host: copies into pinned memory, and one wait for all of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

_ALIGNED = 16  # bytes, a multiple of every item's size
_FIRST_BYTES = 1 << 16
_KEPT = 64  # layouts that are remembered; decode has few

_Layout = tuple[tuple[torch.Size, torch.dtype], ...]


class PinnedFetch:
    """The `Fetch` of one GPU; for one thread. Waits for the current stream, once per call.

    The copies go to one pinned buffer, which the next call uses again; so what is returned is copied out of it.

    Args:
        device: of the tensors.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._copied = torch.cuda.Event()
        self._buffer = torch.empty(_FIRST_BYTES, dtype=torch.uint8, pin_memory=True)
        self._views: dict[_Layout, tuple[list[torch.Tensor], list[NDArray[Any]]]] = {}

    def __call__(self, tensors: Sequence[torch.Tensor]) -> list[NDArray[Any]]:
        layout = tuple([(tensor.shape, tensor.dtype) for tensor in tensors])
        known = self._views.get(layout)
        if known is None:
            with torch.inference_mode(False):  # else only a forward in that mode could write into what it makes
                known = self._lay_out(layout)
        places, arrays = known
        for place, tensor in zip(places, tensors, strict=True):
            place.copy_(tensor, non_blocking=True)
        self._copied.record(torch.cuda.current_stream(self._device))
        self.wait()
        return [np.array(array) for array in arrays]

    def wait(self) -> None:
        """Until the copies of this call are done: what the host waits for the device, apart for who measures it."""
        self._copied.synchronize()

    def _lay_out(self, layout: _Layout) -> tuple[list[torch.Tensor], list[NDArray[Any]]]:
        """Where tensors of these shapes and dtypes land in the buffer, which grows if they do not fit."""
        starts, end = [], 0
        for shape, dtype in layout:
            starts.append(end)
            end += -(-shape.numel() * dtype.itemsize // _ALIGNED) * _ALIGNED
        if end > self._buffer.numel():
            self._views.clear()
            self._buffer = torch.empty(1 << (end - 1).bit_length(), dtype=torch.uint8, pin_memory=True)
        elif len(self._views) >= _KEPT:
            self._views.clear()
        places = [
            self._buffer[start : start + shape.numel() * dtype.itemsize].view(dtype).view(shape)
            for start, (shape, dtype) in zip(starts, layout, strict=True)
        ]
        found = self._views[layout] = places, [place.numpy() for place in places]
        return found
