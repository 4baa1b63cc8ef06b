"""The devices of this machine, and how fast bytes get there."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...limits import memory

_COPY_BYTES = 128 << 20  # larger than the caches
_REPEATS = 5


@dataclass(frozen=True)
class Device:
    """A device that can hold experts.

    Attributes:
        memory_bytes: all of it.
        free_bytes: what is free now.
        link_gbps: measured host-to-device copy speed in 1e9 bytes per second.
        link: how that was measured; None: there is no link, since experts run where the store maps them. Copies of a
            stand-in for a GPU are then copies within host memory, of this speed.
        memory_node: near which a GPU is, in words; None: the machine has one, or does not say.
    """

    name: str
    memory_bytes: int
    free_bytes: int
    link_gbps: float
    link: str | None
    memory_node: str | None = None


def host_copy_gbps() -> float:
    """Host memory copy with one thread: 1e9 bytes copied per second (each is read once and written once)."""
    source = np.ones(_COPY_BYTES, dtype=np.uint8)
    target = np.empty_like(source)
    np.copyto(target, source)  # touches the pages
    return _best_gbps(lambda: np.copyto(target, source))


def devices() -> list[Device]:
    """CUDA devices with their measured link; without one, the host. Imports torch.

    Raises:
        ConfigError: a GPU is here, and CUDA cannot use it.
    """
    import torch

    from ...actors.engine.cuda.runtime import runtime_of
    from ...actors.engine.make_device import cuda_usable
    from ...actors.numa import node_of, words

    if not cuda_usable():
        host = memory()
        return [Device("cpu", host.total, host.free, host_copy_gbps(), None)]
    found = []
    for index in range(torch.cuda.device_count()):
        free, total = torch.cuda.mem_get_info(index)
        source = torch.ones(min(_COPY_BYTES, free // 4), dtype=torch.uint8, pin_memory=True)
        target = torch.empty_like(source, device=f"cuda:{index}")

        def copy(source: Any = source, target: Any = target, index: int = index) -> None:
            target.copy_(source, non_blocking=True)
            torch.cuda.synchronize(index)

        copy()  # the first one pays for set-up
        speed = _best_gbps(copy, source.nbytes)
        node, name = node_of(runtime_of(torch.device("cuda", index)).bus()), torch.cuda.get_device_name(index)
        near = None if node is None else words(node)
        found.append(Device(name, total, free, speed, "pinned copy (measured)", near))
    return found


def _best_gbps(copy: Any, nbytes: int = _COPY_BYTES) -> float:
    best_s = float("inf")
    for _ in range(_REPEATS):
        begin = time.perf_counter()
        copy()
        best_s = min(best_s, time.perf_counter() - begin)
    return nbytes / best_s / 1e9
