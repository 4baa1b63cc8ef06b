"""Time that passes only when it is told to, and a loader whose copies take that time: simulated, or on a stepped link.

The simulator replays a routing on it, and moves nothing. On a stepped link (`LinkSettings.layer_us`) the engine
computes for real, and the clock goes on by a stated time for each layer: what has arrived when a layer runs is the same
on every machine, however busy. Then the loader copies, at the moment at which the copy ends.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import TYPE_CHECKING, cast

from ....errors import RuntimeFailure
from ...policies.cost import Link, load_s
from .loader import HostWaits, LoadJob
from .slots import PendingExpert

if TYPE_CHECKING:
    import torch

    from ....kernels.expert_ffn import ExpertKernel
    from .device import Copied

class VirtualClock:
    """Seconds since it began."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s

    def advance(self, seconds: float) -> None:
        self.now_s += seconds


class VirtualCopy:
    """When a copy had the link, with the fields of `engine.device.Copied`."""

    __slots__ = ("end_s", "event", "link_s", "start_s")

    def __init__(self, start_s: float, end_s: float) -> None:
        self.start_s, self.end_s, self.event, self.link_s = start_s, end_s, None, end_s - start_s


class VirtualDone:
    """A copy's end, like `threading.Event`: to wait for it sets the clock to it."""

    __slots__ = ("_loader", "job")

    def __init__(self, loader: VirtualLoader) -> None:
        self._loader = loader
        self.job: LoadJob | None = None  # once it is submitted

    def is_set(self) -> bool:
        return self.job is not None and self._loader.ended(self.job)

    def wait(self) -> None:
        if self.job is None:
            raise AssertionError("waiting for a copy that was not submitted")
        self._loader.wait(self.job)

    def set(self) -> None:
        raise AssertionError("a copy on a virtual link ends by the clock")


class VirtualLoader(HostWaits):
    """`engine.loader.Loader` on a virtual clock and a link that carries one copy at a time.

    The same order: demand before prefetch, then first come first served, and a copy that has started is never
    interrupted. A copy has the link for its latency and its bytes over its rate, twice where a slot's last
    expert is copied back first; the next one starts when it ends. State is brought up to the clock whenever somebody
    asks; what happens at one instant happens in the order of the calls.
    """

    def __init__(
        self,
        clock: VirtualClock,
        link: Link | None,
        nbytes: int | Callable[[int], int],
        carry: Callable[[LoadJob], None] | None = None,
    ) -> None:
        """`link` None: copies take no time. `nbytes`: of a copy, or those of each key's.

        `carry`: moves a job's bytes, when its copy ends; None: nothing moves.
        """
        self._clock, self._link, self._nbytes, self._carry = clock, link, nbytes, carry
        self._closed = False
        self._heap: list[tuple[int, int, float, LoadJob]] = []  # priority, number, submitted at, job
        self._number = 0
        self._current: tuple[LoadJob, float, float] | None = None  # job, start, end
        self._free_s = 0.0

    def event(self) -> VirtualDone:
        return VirtualDone(self)

    def submit(self, jobs: list[LoadJob], priority: int) -> None:
        """Queue copies in this order. Raises RuntimeFailure after `close`."""
        if self._closed:
            raise RuntimeFailure("the expert cache is closed", "start a new worker")
        self._catch_up()
        now_s = self._clock.now_s
        for job in jobs:
            cast(VirtualDone, job.done).job = job
            heapq.heappush(self._heap, (priority, self._number, now_s, job))
            self._number += 1
        self._catch_up()

    def promote(self, job: LoadJob) -> None:
        self._catch_up()
        for i, (_, _, submitted_s, queued) in enumerate(self._heap):
            if queued is job:
                self._heap[i] = (0, self._number, submitted_s, job)
                self._number += 1
                heapq.heapify(self._heap)
                return

    def cancel(self, job: LoadJob) -> bool:
        self._catch_up()
        if job.started:
            return False
        job.cancelled = True
        self._heap = [entry for entry in self._heap if entry[3] is not job]
        heapq.heapify(self._heap)
        return True

    @property
    def pending(self) -> int:
        """Copies queued or under way when somebody last asked for one; from any thread."""
        return len(self._heap) + (self._current is not None)

    def close(self) -> None:
        """Drop what is queued. Safe to call twice."""
        self._closed = True
        for entry in self._heap:
            entry[3].cancelled = True
        self._heap.clear()

    def ended(self, job: LoadJob) -> bool:
        """Whether a copy has arrived, failed or was cancelled."""
        self._catch_up()
        return job.copied is not None or job.error is not None or job.cancelled

    def wait(self, job: LoadJob) -> None:
        """Let time pass until a copy has ended."""
        while not self.ended(job):
            if self._current is None:
                raise AssertionError("waiting for a copy that nobody makes")
            self._clock.now_s = self._current[2]

    def _catch_up(self) -> None:
        """End and start copies up to the present."""
        now_s = self._clock.now_s
        while True:
            if self._current is not None:
                job, start_s, end_s = self._current
                if end_s > now_s:
                    return
                self._free_s, self._current = end_s, None
                if self._arrived(job):
                    job.copied = cast("Copied", VirtualCopy(start_s, end_s))
            if not self._heap:
                return
            _, _, submitted_s, job = heapq.heappop(self._heap)
            job.started = True
            start_s = max(self._free_s, submitted_s)
            took_s = self._copy_s(job.reservation.key) * (2 if job.writeback else 1)
            self._current = (job, start_s, start_s + took_s)

    def _arrived(self, job: LoadJob) -> bool:
        if self._carry is not None:
            try:
                self._carry(job)
            except Exception as error:  # handed to the cache, as `Loader` does
                job.error = error
                return False
        return True

    def _copy_s(self, key: int) -> float:
        if self._link is None:
            return 0.0
        return load_s(self._nbytes if isinstance(self._nbytes, int) else self._nbytes(key), self._link)


def copy_now(job: LoadJob) -> None:
    """Move a job's bytes between tensors of this host, for `VirtualLoader`."""
    src = job.src
    if isinstance(src, PendingExpert):
        src.ask(())
        src = src.tensors()
    for target, source in zip(job.dst, src, strict=True):
        target.copy_(source)


class SteppedKernel:
    """A kernel after whose layers the clock goes on: what is asked for in one layer has that long until the next.

    A layer takes the same however many rows it has, as on a device that reads its weights once for all of them.

    Args:
        kernel: computes. clock: of the link. layer_s: seconds of a layer, all that lies between two layers' experts.
    """

    def __init__(self, kernel: ExpertKernel, clock: VirtualClock, layer_s: float) -> None:
        self.run, self._combine, self._clock, self._layer_s = kernel.run, kernel.combine, clock, layer_s

    def combine(self, y: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        out = self._combine(y, weights)
        self._clock.advance(self._layer_s)
        return out
