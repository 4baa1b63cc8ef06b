"""What running and loading an expert costs on this device: measured at start, for planners that weigh the two."""

from __future__ import annotations

import statistics
import time

import torch

from ...kernels.expert_ffn import ExpertKernel
from ..policies.cost import Link, load_s
from ..settings import LinkSettings
from .pool import SlotPool

_REPEATS = 5
_ROWS = 16
_COPY_GBPS = 10.0  # of an emulated link without throttle: what a copy within memory takes


def expert_seconds(kernel: ExpertKernel, pool: SlotPool) -> tuple[float, float]:
    """Median seconds of one expert at one row, and of each further row; runs the first slot, zeroed.

    Call it before the pool holds anything.
    """
    for tensor in pool.slot(0):
        tensor.zero_()
    one, many = _seconds(kernel, pool, 1), _seconds(kernel, pool, _ROWS)
    return one, max(0.0, (many - one) / (_ROWS - 1))


def link_seconds(link: LinkSettings, slot_bytes: int, emulated: bool, device_gbps: float) -> float:
    """Seconds to load one expert.

    Args:
        device_gbps: of the real link, where it is not emulated.
    """
    if not emulated:
        return load_s(slot_bytes, Link(device_gbps))
    return load_s(slot_bytes, Link(link.gbps or _COPY_GBPS, link.latency_us))


def _seconds(kernel: ExpertKernel, pool: SlotPool, rows: int) -> float:
    gate_up = pool.gate_up
    hidden = torch.zeros((rows, gate_up.shape[-1]), dtype=gate_up.dtype, device=gate_up.device)
    pairs = torch.arange(rows, device=gate_up.device)
    y = torch.empty_like(hidden)
    times = []
    for _ in range(_REPEATS + 1):
        start_s = time.perf_counter()
        kernel.run(hidden, pairs, [(0, rows, 0, gate_up.shape[1], False)], 1, y)
        if gate_up.is_cuda:
            torch.cuda.synchronize(gate_up.device)  # before serving: the forward path never waits so
        times.append(time.perf_counter() - start_s)
    return statistics.median(times[1:])
