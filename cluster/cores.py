"""Cores of this machine, and how many of them a store takes."""

from __future__ import annotations

import os
from pathlib import Path

STORE_CPUS = 1.0
_QUOTA = Path("/sys/fs/cgroup/cpu.max")


def usable_cores() -> int:
    """Cores that this process may keep busy: by its affinity, and by the quota of the control group around it."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = _QUOTA.read_text(encoding="ascii").split()
        return max(1, min(cores, int(quota) // int(period)))
    except (OSError, ValueError):  # no such group, or "max"
        return cores
