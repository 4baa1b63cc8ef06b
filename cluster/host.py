"""Cores of this machine, and how many of them a store takes.

Whether this machine has a GPU, without asking torch, which takes seconds to load.

Versions of what a result depends on.
"""

from __future__ import annotations

import os
import sys
from importlib import metadata
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


_FILES = ("/dev/nvidiactl", "/dev/dxg", "/dev/nvhost-gpu", "/dev/nvidia0")  # of the drivers, WSL and Tegra


def has_gpu() -> bool:
    """Whether a driver of a CUDA device is there."""
    return any(map(os.path.exists, _FILES))


_PACKAGES = ("tiermoe", "torch", "transformers", "ray")


def versions() -> dict[str, str]:
    """Versions of Python and of the main packages, from their metadata: none of them is imported.

    A package that is not installed is "absent": a clone may run without being installed, and GPU workers without Ray.
    """
    return {"python": sys.version.split()[0]} | {name: _version(name) for name in _PACKAGES}


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "absent"
