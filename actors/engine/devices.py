"""What a process computes on, as its settings say, and how activations get there and back."""

from __future__ import annotations

import torch

from ...errors import ConfigError
from ..settings import LinkSettings
from .activations import Activations, PlainActivations
from .cpu_device import CpuDevice
from .device import Device


def make_device(kind: str, link: LinkSettings, gpu: int | None = None) -> Device:
    """The device for `auto`, `cpu` or `cuda`.

    Args:
        gpu: number of the CUDA device, which becomes this process's current one; None: the current one.

    Raises:
        ConfigError: CUDA is asked for and not there, or there are too few GPUs.
    """
    if kind == "auto":
        kind = "cuda" if torch.cuda.is_available() else "cpu"
    if kind == "cpu":
        return CpuDevice(link)
    if not torch.cuda.is_available():
        raise ConfigError("device cuda is not available", "use --device cpu (the CPU stands in for a GPU)")
    if gpu is not None:
        if gpu >= torch.cuda.device_count():
            raise ConfigError(
                f"shard {gpu} needs GPU {gpu}, this machine shows {torch.cuda.device_count()}",
                "use fewer shards, or --device cpu (the CPU stands in for GPUs)",
            )
        torch.cuda.set_device(gpu)
    from .cuda.device import CudaDevice
    from .cuda.runtime import TorchRuntime

    return CudaDevice(TorchRuntime(torch.cuda.current_device()))


def activations_of(device: torch.device) -> Activations:
    """The way from and to a compute device."""
    if device.type == "cpu":
        return PlainActivations(device)
    from .cuda.activations import PinnedActivations
    from .cuda.runtime import TorchRuntime

    return PinnedActivations(TorchRuntime(device.index or 0))
