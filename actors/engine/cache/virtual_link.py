"""A virtual clock, and a loader whose copies take virtual time: for the simulator and the stepped link.

The simulator replays a routing and moves no bytes. On a stepped link (`LinkSettings.layer_us`) the engine computes for
real, and the clock advances by a stated time a layer: what has arrived when a layer runs is the same on every machine.
The loader then copies at the moment at which the copy ends.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from functools import cache
from math import inf
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ....errors import RuntimeFailure
from ...policies.cost import Link, load_s
from .loader import DEMAND, HostWaits, LoadJob

if TYPE_CHECKING:
    import torch

    from ....kernels import _cpu
    from ....kernels.expert_ffn import ExpertKernel, NativeLayer


_Queued = tuple[float, LoadJob]  # with the time at which it was submitted


class VirtualClock:
    """Seconds since it began."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s

    def advance(self, seconds: float) -> None:
        self.now_s += seconds


class VirtualCopy:
    """The fields of `cache.device.Copied`, without torch."""

    __slots__ = ("end_s", "link_s", "start_s", "writeback_s")
    event = None

    def __init__(self, start_s: float, end_s: float, writeback_s: float) -> None:
        self.start_s, self.end_s = start_s, end_s
        self.link_s, self.writeback_s = end_s - start_s, writeback_s


class VirtualLoader(HostWaits):
    """`Loader` on a virtual clock and a link that carries one copy at a time, in the same order.

    A copy takes the link's latency and its bytes over the rate, twice with a write-back; the next starts when it ends.
    Every question first brings the state up to the clock.

    Attributes:
        submitted_bytes: of all copies that were ever queued.
    """

    def __init__(
        self, clock: VirtualClock, link: Link | None, carry: Callable[[LoadJob], None] | None = None,
        late_s: float = 0.0,
    ) -> None:  # fmt: skip
        """`link` None: copies take no time. `carry`: moves a job's bytes, when its copy ends; None: nothing moves.

        late_s: from a copy's end until who waits for it goes on.
        """
        self.clock, self._carry, self._late_s = clock, carry, late_s
        self._copy_s = cache(lambda nbytes: 0.0 if link is None else load_s(nbytes, link))
        self._closed = False
        self._demand, self._prefetch = deque[_Queued](), deque[_Queued]()
        self.submitted_bytes = 0
        self._current: LoadJob | None = None  # None: nothing is queued either
        self._start_s, self._end_s, self._free_s = 0.0, inf, 0.0  # of the current copy; when the one before ended

    def event(self) -> Any:
        """None: a copy ends by the clock."""
        return None

    def submit(self, jobs: list[LoadJob], priority: int) -> None:
        """Queue copies in this order. Raises RuntimeFailure after `close`."""
        if self._closed:
            raise RuntimeFailure("the expert cache is closed", "start a new worker")
        self.catch_up()
        now_s, queue = self.clock.now_s, self._demand if priority == DEMAND else self._prefetch
        for job in jobs:
            queue.append((now_s, job))
            self.submitted_bytes += job.nbytes
        if self._current is None and queue:
            self._start()
            self.catch_up()

    def arrived(self, jobs: Iterable[LoadJob]) -> list[LoadJob]:
        self.catch_up()
        found = list[LoadJob]()
        for job in jobs:
            if job.copied is not None or job.error is not None or job.cancelled:
                found.append(job)
        return found

    def join(self, job: LoadJob, layer: int) -> bool:
        self.wait(job)
        return True

    def overtake(self, job: LoadJob) -> bool:
        self.wait(job)
        return True

    def promote(self, job: LoadJob) -> None:
        self.catch_up()
        if (queued := self._leave(job)) is not None:
            self._demand.append(queued)

    def cancel(self, job: LoadJob) -> bool:
        self.catch_up()
        if job.started:
            return False
        job.cancelled = True
        self._leave(job)
        return True

    @property
    def pending(self) -> int:
        """Copies queued or under way at the last question; from any thread."""
        return len(self._demand) + len(self._prefetch) + (self._current is not None)

    def busy_until(self) -> float | None:
        """When the copy under way ends; None: the link is idle."""
        self.catch_up()
        return None if self._current is None else self._end_s

    def close(self) -> None:
        """Drop what is queued. Safe to call twice."""
        self._closed = True
        for queue in (self._demand, self._prefetch):
            for _, job in queue:
                job.cancelled = True
            queue.clear()

    def wait(self, job: LoadJob) -> None:
        """Let time pass until a copy has ended, and `late_s` more where it had not."""
        self.catch_up()
        begin_s = self.clock.now_s
        while job.copied is None and job.error is None and not job.cancelled:
            if self._current is None:
                raise AssertionError("waiting for a copy that is not queued")
            self.clock.now_s = self._end_s
            self.catch_up()
        if self._late_s and self.clock.now_s > begin_s:
            self.clock.advance(self._late_s)
            self.catch_up()

    def catch_up(self) -> None:
        """End and start the copies that do so by now."""
        while self._end_s <= self.clock.now_s:
            job, self._current = self._current, None
            assert job is not None  # it ends
            start_s, end_s = self._start_s, self._end_s
            self._free_s, self._end_s = end_s, inf
            try:
                if self._carry is not None:
                    self._carry(job)
                writeback_s = (end_s - start_s) / 2 if job.writeback else 0.0
                job.copied = VirtualCopy(start_s, end_s, writeback_s)  # type: ignore[assignment]  # the same fields
            except Exception as error:  # handed to the cache, as `Loader` does
                job.error = error
            if self._demand or self._prefetch:
                self._start()

    def _start(self) -> None:
        """Begin the first queued copy on the idle link."""
        submitted_s, job = (self._demand or self._prefetch).popleft()
        job.started, self._current = True, job
        start_s, copy_s = max(self._free_s, submitted_s), self._copy_s(job.nbytes)
        self._start_s, self._end_s = start_s, start_s + (2 * copy_s if job.writeback else copy_s)

    def _leave(self, job: LoadJob) -> _Queued | None:
        """Take a job out of its queue; None: it is in none."""
        for queue in (self._demand, self._prefetch):
            for queued in queue:
                if queued[1] is job:
                    queue.remove(queued)
                    return queued
        return None


def copy_now(job: LoadJob) -> None:
    """Move a job's bytes between tensors of this host, for `VirtualLoader`."""
    src = job.src
    if not isinstance(src, tuple):  # a `PendingExpert`
        src.ask(())
        src = src.tensors()
    for target, source in zip(job.dst, src, strict=True):
        target.copy_(source)


class SteppedKernel:
    """A kernel that advances the clock by `layer_s` after each layer, whatever the number of rows."""

    def __init__(self, kernel: ExpertKernel, clock: VirtualClock, layer_s: float) -> None:
        self.run, self._combine, self._clock, self._layer_s = kernel.run, kernel.combine, clock, layer_s
        self._kernel = kernel

    def combine(self, y: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        out = self._combine(y, weights)
        self._clock.advance(self._layer_s)
        return out

    def native(
        self, layer: int, states: NDArray[np.uint8], slots: NDArray[np.int32], record: NDArray[np.int64],
        counts: _cpu.Counts, loads: None, orders: bool,
    ) -> SteppedNative | None:  # fmt: skip
        """`CpuKernel.native` on this clock; None: the kernel has no such call."""
        make = getattr(self._kernel, "native", None)
        if make is None:
            return None
        return SteppedNative(make(layer, states, slots, record, counts), self._clock, self._layer_s)


class SteppedNative:
    """A `NativeLayer` for passes without misses that advances the clock like `SteppedKernel`."""

    decides, plans, orders, waited_s = False, False, False, 0.0

    def __init__(self, layer: NativeLayer, clock: VirtualClock, layer_s: float) -> None:
        self._layer, self._clock, self._layer_s = layer, clock, layer_s

    def run(self, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor | None:
        out = self._layer.run(hidden, ids, weights)
        assert not isinstance(out, tuple)  # it does not plan
        if out is not None:
            self._clock.advance(self._layer_s)
        return out
