"""Whether this machine has a GPU, without asking torch, which takes seconds to load."""

from __future__ import annotations

import os

_FILES = ("/dev/nvidiactl", "/dev/dxg", "/dev/nvhost-gpu", "/dev/nvidia0")  # of the drivers, WSL and Tegra


def has_gpu() -> bool:
    """Whether a driver of a CUDA device is there."""
    return any(map(os.path.exists, _FILES))
