"""On which GPU a kernel is launched: Triton takes the thread's current one, whatever its tensors are on."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch


def on_device(device: torch.device) -> AbstractContextManager[Any]:
    """Launches inside go to `device`; of a thread the current one may be another. Does nothing on the CPU."""
    elsewhere = device.type == "cuda" and torch.cuda.current_device() != device.index
    return torch.cuda.device(device) if elsewhere else nullcontext()
