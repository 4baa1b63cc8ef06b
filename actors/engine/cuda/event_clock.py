"""Host times of a GPU's events, without waiting for any."""

from __future__ import annotations

import time
from typing import Any

from .runtime import GpuRuntime

_RENEW_S = 1.0  # CUDA gives milliseconds as float32: over a second its steps are 0.06 us, over an hour 0.25 ms


class EventClock:
    """Places events on the host's `time.perf_counter` by their distance from an earlier event, the anchor.

    Which event is the anchor changes as time goes by, so that the distance stays short; what the places drift against
    the host's clock is what the GPU's own clock does.

    Waits for the GPU once, when it is made.
    """

    def __init__(self, runtime: GpuRuntime, stream: Any) -> None:
        self._runtime = runtime
        self._anchor = runtime.event()
        runtime.record(self._anchor, stream)
        runtime.synchronize(self._anchor)
        self._anchor_s = time.perf_counter()
        self._spare: list[Any] = []

    def event(self) -> Any:
        """An event to be recorded, waited for, and given to `read` once."""
        return self._spare.pop() if self._spare else self._runtime.event()

    def read(self, event: Any) -> float:
        """When an event happened that is done, `time.perf_counter` seconds. Nobody may use it after that."""
        since_s = self._runtime.elapsed_s(self._anchor, event)
        at_s = self._anchor_s + since_s
        if since_s > _RENEW_S:
            self._anchor, self._anchor_s, event = event, at_s, self._anchor
        self._spare.append(event)
        return at_s
