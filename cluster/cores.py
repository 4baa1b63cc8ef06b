"""Cores of this machine, and how many of them a store takes."""

from __future__ import annotations

import os

STORE_CPUS = 1.0


def usable_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
