"""What a machine is and how fast it moves bytes: the measurements behind `tiermoe doctor`."""

from __future__ import annotations

import platform
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from ..cores import usable_cores

_COPY_BYTES = 128 << 20  # larger than the caches
_REPEATS = 5
# What our kernels can make use of, by the kernel's names for it (x86, then Arm).
_FEATURES = (
    "sse4_2", "avx", "f16c", "fma", "avx2", "avx_vnni", "avx512f", "avx512bw", "avx512_vnni", "avx512_bf16",
    "avx512_fp16", "amx_tile", "amx_int8", "amx_bf16", "asimd", "asimddp", "i8mm", "bf16", "sve", "sve2",
)  # fmt: skip


@dataclass(frozen=True)
class Device:
    """A device that can hold experts.

    Attributes:
        memory_bytes: all of it.
        free_bytes: what is free now.
        link_gbps: measured host-to-device copy speed in 1e9 bytes per second.
        link: how that was measured.
    """

    name: str
    memory_bytes: int
    free_bytes: int
    link_gbps: float
    link: str


def cpu() -> dict[str, Any]:
    """Model, cores that this process may use, and the instruction sets that matter here."""
    model, flags = _cpuinfo()
    usable = usable_cores()
    return {
        "model": model or platform.processor() or platform.machine(),
        "architecture": platform.machine(),
        "cores": usable,
        "physical_cores": psutil.cpu_count(logical=False) or usable,
        "instruction_sets": [name for name in _FEATURES if name in flags],
    }


def host_copy_gbps() -> float:
    """Host memory copy with one thread: 1e9 bytes copied per second (each is read once and written once)."""
    source = np.ones(_COPY_BYTES, dtype=np.uint8)
    target = np.empty_like(source)
    np.copyto(target, source)  # touches the pages
    return _best_gbps(lambda: np.copyto(target, source))


def devices() -> list[Device]:
    """CUDA devices with their measured link; without one, the host as their stand-in. Imports torch."""
    import torch

    if not torch.cuda.is_available():
        memory = psutil.virtual_memory()
        name = "cpu (stands in for a GPU)"
        return [Device(name, memory.total, memory.available, host_copy_gbps(), "memcpy (emulated)")]
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
        found.append(Device(torch.cuda.get_device_name(index), total, free, speed, "pinned copy (measured)"))
    return found


def _best_gbps(copy: Any, nbytes: int = _COPY_BYTES) -> float:
    best_s = float("inf")
    for _ in range(_REPEATS):
        begin = time.perf_counter()
        copy()
        best_s = min(best_s, time.perf_counter() - begin)
    return nbytes / best_s / 1e9


def _cpuinfo() -> tuple[str, set[str]]:
    """Model name and feature flags as Linux tells them; empty elsewhere."""
    model, flags = "", set[str]()
    path = Path("/proc/cpuinfo")
    for line in path.read_text().splitlines() if path.is_file() else ():
        key, _, value = line.partition(":")
        if key.strip() == "model name":
            model = value.strip()
        elif key.strip() in ("flags", "Features"):
            flags = set(value.split())
        if model and flags:
            break
    return model, flags
