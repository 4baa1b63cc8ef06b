"""A GPU without one: copies are queued and happen when the test or a wait lets them, in order.

The destination of a copy to the host holds NaN until it happens, so that whoever reads too early is found out; a copy
from the host reads its source when it happens, so that whoever writes there too early is found out too.
"""

from __future__ import annotations

import torch


class FakeCompute:
    """The runtime of `cuda.activations`.

    Args:
        lazy: whether copies wait for `run`, or for a wait for an event behind them; else they happen at once.

    Attributes:
        log: "copy", "record" and "synchronize" in their order.
    """

    device = torch.device("cpu")

    def __init__(self, lazy: bool = True) -> None:
        self._lazy = lazy
        self._queue: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._enqueued = self._done = 0
        self._pinned: list[torch.Tensor] = []
        self.log: list[str] = []

    def current(self) -> str:
        return "compute"

    def event(self, timing: bool = True) -> list[int]:
        return []

    def record(self, event: list[int], stream: str) -> None:
        assert stream == "compute"
        event[:] = [self._enqueued]
        self.log.append("record")

    def copy(self, dst: torch.Tensor, src: torch.Tensor) -> None:
        assert (dst.shape, dst.dtype) == (src.shape, src.dtype)
        assert self._is_pinned(dst) or self._is_pinned(src), "a copy to or from memory that is not registered"
        if self._is_pinned(dst):
            dst.fill_(float("nan") if dst.is_floating_point() else -1)
        self.log.append("copy")
        if not src.is_floating_point():  # numbers of rows: the compute here is not queued, and is about to read them
            dst.copy_(src)
            return
        self._queue.append((dst, src))
        self._enqueued += 1
        if not self._lazy:
            self.run()

    def query(self, event: list[int]) -> bool:
        return self._done >= event[0]

    def synchronize(self, event: list[int]) -> None:
        self.log.append("synchronize")
        self.run(event[0])

    def pinned(self, nbytes: int) -> torch.Tensor:
        self._pinned.append(torch.zeros(nbytes + 64, dtype=torch.uint8))
        begin = -self._pinned[-1].data_ptr() % 64
        return self._pinned[-1][begin : begin + nbytes]

    def run(self, until: int | None = None) -> None:
        """Let the copies happen, all or the first `until` of the run."""
        while self._queue and (until is None or self._done < until):
            dst, src = self._queue.pop(0)
            dst.copy_(src)
            self._done += 1

    def _is_pinned(self, tensor: torch.Tensor) -> bool:
        at = tensor.data_ptr()
        return any(p.data_ptr() <= at and at + tensor.nbytes <= p.data_ptr() + p.nbytes for p in self._pinned)
