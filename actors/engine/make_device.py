"""The device of an engine, and how its rows and numbers come to the host: the CPU's stand-in or a GPU's."""

from __future__ import annotations

import logging

import torch

from ...errors import ConfigError
from ..gpu_driver import TorchBuild, absent, has_gpu, number_by_bus, unusable
from ..numa import MemoryNode, keep_to, node_of, words
from ..settings import LinkSettings
from .cache.device import Activations, CpuDevice, Device, PlainActivations
from .cuda.activations import PinnedActivations
from .cuda.device import CudaDevice
from .cuda.runtime import runtime_of
from .host_view import Fetch, share
from .model.attention import steady_sdpa
from .pinned_fetch import PinnedFetch

_log = logging.getLogger(__name__)


def make_device(kind: str, link: LinkSettings, gpu: int | None = None) -> Device:
    """The device for `auto`, `cpu` or `cuda`.

    Args:
        gpu: number of the CUDA device to make current; None: the current one.

    Raises:
        ConfigError: a GPU is here, or asked for, and CUDA cannot use it; there are too few GPUs.
    """
    if kind == "cpu" or not cuda_usable(required=kind == "cuda"):
        return CpuDevice(link)
    if gpu is not None:
        if gpu >= torch.cuda.device_count():
            raise ConfigError(
                f"shard {gpu} needs GPU {gpu}, this machine shows {torch.cuda.device_count()}",
                "use fewer shards, or --device cpu (the CPU stands in for GPUs)",
            )
        torch.cuda.set_device(gpu)
    steady_sdpa()
    runtime = runtime_of(torch.device("cuda"))
    return CudaDevice(runtime, near=_kept_to(runtime.bus()))


def _kept_to(bus: str) -> MemoryNode | None:
    """The memory node of this GPU, to which this process keeps from now on; None: it is not bound."""
    node = node_of(bus)
    if node is None:
        return None
    if (problem := keep_to(node)) is not None:
        _log.warning("threads and pages are not bound to %s, which GPU %s is near: %s", words(node), bus, problem)
        return None
    return node


def cuda_usable(*, required: bool = False) -> bool:
    """Whether the GPU is used; without one the CPU stands in for it, unless it is required.

    Raises:
        ConfigError: a GPU is here, or required, and CUDA cannot use it.
    """
    number_by_bus()
    if torch.cuda.is_available():
        return True
    if has_gpu():
        raise unusable(TorchBuild(str(torch.__version__), torch.version.cuda), _why_no_cuda())
    if required:
        raise absent()
    return False


def _why_no_cuda() -> str:
    """In torch's words, of which the first sentence says it."""
    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as error:
        return str(error).partition(". ")[0].partition("\n")[0]
    return f"torch counts {torch.cuda.device_count()} GPUs"


def activations_of(device: torch.device) -> Activations:
    """The transfers for a compute device."""
    if device.type == "cpu":
        return PlainActivations(device)
    return PinnedActivations(runtime_of(device))


def fetch_from(device: torch.device) -> Fetch:
    """The `Fetch` of a device."""
    if device.type == "cpu":
        return share
    return PinnedFetch(runtime_of(device))
