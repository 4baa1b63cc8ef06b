"""What this machine offers, without loading a heavy library: cores, a GPU, the versions of packages."""

from __future__ import annotations

import os
import sys
from importlib import metadata
from pathlib import Path

STORE_CPUS = 1.0  # that Ray reserves for a store
_THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
_QUOTA = Path("/sys/fs/cgroup/cpu.max")
_GPU_FILES = ("/dev/nvidiactl", "/dev/dxg", "/dev/nvhost-gpu", "/dev/nvidia0")  # of the drivers, WSL and Tegra
_PACKAGES = ("tiermoe", "torch", "transformers", "ray")


def usable_cores() -> int:
    """Cores that this process may use: by its affinity, and by the quota of the control group around it."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = _QUOTA.read_text(encoding="ascii").split()
        return max(1, min(cores, int(quota) // int(period)))
    except (OSError, ValueError):  # no such group, or "max"
        return cores


def thread_limits(threads: int) -> dict[str, str]:
    """Environment that bounds the threads of arithmetic libraries."""
    return dict.fromkeys(_THREAD_VARIABLES, str(threads))


def has_gpu() -> bool:
    """Whether a driver of a CUDA device is there; torch, which would know, takes seconds to load."""
    return any(map(os.path.exists, _GPU_FILES))


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
