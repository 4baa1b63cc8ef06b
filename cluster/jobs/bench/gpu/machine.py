"""Part `machine`: what the hardware gives at best, in this run: link, device memory, host memory."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ....host import usable_cores
from ...doctor import cpu
from .options import Context
from .record import Record

_PEAK_BYTES = 1 << 30
_TOY_BYTES = 8 << 20
_REPEATS = 7


@dataclass(frozen=True)
class Peaks:
    """1e9 bytes per second, the best of several: h2d, d2h over the link; hbm of a copy on the device, both ways."""

    h2d: float
    d2h: float
    hbm: float


def run(context: Context, record: Record) -> None:
    """Name the machine and measure its peaks."""
    record.row("machine", **describe(context))
    found = peaks(context)
    record.row("peaks", h2d_gbps=found.h2d, d2h_gbps=found.d2h, hbm_gbps=found.hbm)
    for threads in sorted({1, usable_cores()}):
        record.row("host read", threads=threads, gbps=host_read_gbps(threads, context.toy))


def describe(context: Context) -> dict[str, Any]:
    """GPU, driver, link and processor."""
    found: dict[str, Any] = {"cpu": cpu(), "torch_cuda": torch.version.cuda, "device": context.device.type}
    if context.device.type == "cuda":
        properties = torch.cuda.get_device_properties(context.device)
        found |= {
            "gpu": properties.name, "gpu_memory_bytes": properties.total_memory,
            "multiprocessors": properties.multi_processor_count,
            "capability": f"{properties.major}.{properties.minor}",
        } | _nvidia_smi()  # fmt: skip
    return found


def _nvidia_smi() -> dict[str, str]:
    """Driver and present PCIe link, where nvidia-smi tells; idle links may show a lower generation."""
    fields = ("driver_version", "pcie.link.gen.max", "pcie.link.gen.current", "pcie.link.width.current")
    command = ["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader"]
    try:
        said = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return {"driver": "nvidia-smi said nothing"}
    values = [value.strip() for value in said.splitlines()[0].split(",")]
    return dict(zip(("driver", "pcie_gen_max", "pcie_gen_now", "pcie_width"), values, strict=False))


def peaks(context: Context) -> Peaks:
    """The best of several large copies; on the stand-in all three are copies in host memory."""
    nbytes = _TOY_BYTES if context.toy else _PEAK_BYTES
    pinned = context.device.type == "cuda"
    host = torch.zeros(nbytes, dtype=torch.uint8, pin_memory=pinned)
    there = torch.empty(nbytes, dtype=torch.uint8, device=context.device)
    other = torch.empty_like(there)
    return Peaks(
        _best(context, lambda: there.copy_(host, non_blocking=True), nbytes),
        _best(context, lambda: host.copy_(there, non_blocking=True), nbytes),
        _best(context, lambda: other.copy_(there), 2 * nbytes),
    )


def _best(context: Context, copy: Callable[[], Any], nbytes: int) -> float:
    best_s = float("inf")
    for _ in range(_REPEATS):
        context.synchronize()
        begin_s = time.perf_counter()
        copy()
        context.synchronize()
        best_s = min(best_s, time.perf_counter() - begin_s)
    return nbytes / best_s / 1e9


def host_read_gbps(threads: int, toy: bool) -> float:
    """Host memory read by so many threads: a sum over 64-bit numbers, the best of several."""
    nbytes = _TOY_BYTES if toy else 4 * _PEAK_BYTES
    block = torch.ones(nbytes // 8, dtype=torch.int64)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        best_s = float("inf")
        for _ in range(3):
            begin_s = time.perf_counter()
            block.sum()
            best_s = min(best_s, time.perf_counter() - begin_s)
    finally:
        torch.set_num_threads(before)
    return nbytes / best_s / 1e9


def spread_of(values: list[float]) -> dict[str, float]:
    """Median and range."""
    return {"median": float(np.median(values)), "minimum": min(values), "maximum": max(values)}
