"""What one process of a deployment has counted: the answer of every actor's `sample`, one call a second at most.

`cluster.attach.samples` asks all of them side by side. Numbers are counted where they happen and read here.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import psutil

Counters = dict[str, float]
_NOTHING: Mapping[str, Any] = {}


@dataclass(frozen=True)
class ProcessSample:
    """Counters of one process since it began; an actor that Ray starts again begins anew.

    Attributes:
        at_s: when, by the monotonic clock of its node: only of use beside another sample of the same process.
        rss_bytes: resident memory, shared pages (a mapped store) among it.
        cpu_s: user and system seconds of all threads.
        counters: by name, which ends with the unit where it is not a count.
        peers: by the name of the process at the other end, such as "ndp/0": `messages_sent`, `messages_received`,
            `bytes_sent`, `bytes_received`, `waited_s` (threads that waited for its answers); of what computes experts
            `rows_sent` and `rows_received` too.
    """

    at_s: float
    pid: int
    rss_bytes: int
    cpu_s: float
    counters: Counters = field(default_factory=dict)
    peers: dict[str, Counters] = field(default_factory=dict)


def take_sample(counters: Mapping[str, float] = _NOTHING, peers: Mapping[str, Counters] = _NOTHING) -> ProcessSample:
    """The sample of this process with these counters."""
    times, rss_bytes = os.times(), int(psutil.Process().memory_info().rss)
    now_s, cpu_s = time.monotonic(), times.user + times.system
    return ProcessSample(now_s, os.getpid(), rss_bytes, cpu_s, dict(counters), dict(peers))
