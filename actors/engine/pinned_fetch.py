"""How a GPU's tensors and router scores come to the host: the `Fetch` of `host_view` over one pinned buffer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import islice
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ...kernels import _launch
from ...kernels.device import on_device
from .cuda.runtime import SPIN_S, GpuRuntime
from .host_view import Asked, Router, routers_of, scores_of

# what the host reads; 16-bit floats as float32
_READ = (
    (torch.int64, np.int64), (torch.float32, np.float32), (torch.bfloat16, np.float32), (torch.float16, np.float32),
    (torch.int32, np.int32),
)  # fmt: skip


class PinnedFetch(_launch.Fetch):
    """The `Fetch` of one GPU: tensors and scores to the host with one kernel and one wait for all; for one thread.

    A kernel writes them to one pinned buffer, past the copies of experts in either direction; the next call reuses the
    buffer, and the results are copies of it. It also computes the scores of linear routers on few rows. The host polls,
    so that it keeps the interpreter's lock.

    Args:
        spin_s: of a wait, before it gives up the lock.

    Raises:
        RuntimeError or OSError: there is no driver.
    """

    def __init__(self, runtime: GpuRuntime, spin_s: float = SPIN_S) -> None:
        self._runtime, driver, copier = runtime, runtime.driver(), runtime.copier
        reads, block, scores = tuple[_launch.Launch, ...](), 0, 0
        stream: Callable[[], int] = lambda: runtime.handle(runtime.current())  # noqa: E731
        if copier is not None:
            stream, reads, block, scores = copier.stream, copier.reads, copier.block, copier.scores
        self._most_routers = max(0, len(reads) - 1)
        types = [(dtype, dtype.itemsize, dtype.itemsize == 2) for dtype, _ in _READ]
        super().__init__(
            runtime, driver.addresses, driver.context, stream, reads, block, scores, torch.int32, types, spin_s
        )

    def __call__(
        self, tensors: Sequence[torch.Tensor], hidden: torch.Tensor | None = None, asked: Sequence[Asked] = ()
    ) -> list[NDArray[Any]]:
        routers = {} if hidden is None else routers_of(asked, hidden)
        if len(routers) < len(asked) or len(routers) > self._most_routers:
            assert hidden is not None
            return self._with_others(tensors, hidden, asked, dict(islice(routers.items(), self._most_routers)))
        with on_device(self._runtime.device):
            self.enqueue(tensors, hidden, list(routers.values()))
        self.wait()
        return self.take()

    def _with_others(
        self,
        tensors: Sequence[torch.Tensor],
        hidden: torch.Tensor,
        asked: Sequence[Asked],
        routers: dict[Asked, Router],
    ) -> list[NDArray[Any]]:
        """`__call__` where the kernel computes the scores of `routers` alone; torch computes the others before."""
        others = [one for one in asked if one not in routers]
        with on_device(self._runtime.device):
            scores = [scores_of(one, hidden) for one in others]
            self.enqueue([*tensors, *scores], hidden, list(routers.values()))
        self.wait()
        found, given = self.take(), len(tensors)
        of = dict(zip([*others, *routers], found[given:], strict=True))
        return [*found[:given], *(of[one] for one in asked)]

    # what `fetch.hpp` calls

    def grown(self, nbytes: int) -> torch.Tensor:
        """A new buffer."""
        self._buffer = self._runtime.pinned(nbytes)
        with torch.inference_mode(False):  # else only a forward in that mode could write into it
            return self._buffer.view(torch.int32)

    def views(self, parts: Sequence[tuple[int, int, int, tuple[int, ...]]]) -> list[tuple[torch.Tensor, NDArray[Any]]]:
        """Parts of the buffer (place, bytes, type, shape) as tensors and arrays."""
        found = []
        with torch.inference_mode(False):
            for at, nbytes, kind, shape in parts:
                array = self._buffer.numpy()[at : at + nbytes].view(np.float32 if kind < 0 else _READ[kind][1])
                found.append((torch.from_numpy(array).view(shape), array.reshape(shape)))
        return found

    def copied(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copy where there is no kernel that can."""
        self._runtime.kernel_copy(target, source.detach().to(target.dtype))
