"""The current device of launches, the time that calls take, and the threads of torch on the CPU."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch

from ..limits import usable_cores

_WARM_UP = 2  # the first compiles
_BACKLOG_CYCLES = 4_000_000  # device clock cycles: some milliseconds, in which the calls queue up


def on_device(device: torch.device) -> AbstractContextManager[Any]:
    """Make `device` the current GPU, to which Triton launches wherever its tensors are. Does nothing on the CPU."""
    elsewhere = device.type == "cuda" and torch.cuda.current_device() != device.index
    return torch.cuda.device(device) if elsewhere else nullcontext()


def stream_of(device: torch.device) -> Callable[[], int]:
    """A function that gives the address of the calling thread's current stream on a GPU (no index: the current one)."""
    if device.type != "cuda":
        return int
    index = torch.cuda.current_device() if device.index is None else device.index
    return partial(torch._C._cuda_getCurrentRawStream, index)


def seconds_of(device: torch.device, call: Callable[[int], None], repeats: int) -> tuple[float, float]:
    """Seconds of `call(i)`, i counting up: the median from an idle device to the result, and on the device alone.

    The second is the mean of queued calls; on the CPU it equals the first. Waits for the device.
    """
    wait = (lambda: None) if device.type == "cpu" else (lambda: torch.cuda.synchronize(device))
    for i in range(_WARM_UP):
        call(i)
    wait()
    waited = []
    for i in range(repeats):
        start_s = time.perf_counter()
        call(_WARM_UP + i)
        wait()
        waited.append(time.perf_counter() - start_s)
    median_s = statistics.median(waited)
    if device.type == "cpu":
        return median_s, median_s
    with torch.cuda.device(device):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        if hasattr(torch.cuda, "_sleep"):
            torch.cuda._sleep(_BACKLOG_CYCLES)
        begin.record()
        for i in range(repeats):
            call(i)
        end.record()
        end.synchronize()
    return median_s, begin.elapsed_time(end) * 1e-3 / repeats


def device_name(device: torch.device) -> str:
    """The name of the device in tables of measurements."""
    return "cpu" if device.type == "cpu" else torch.cuda.get_device_name(device)


def bound_torch_threads() -> None:
    """Let torch compute on the usable cores at most in this process: torch knows affinity, and no quota."""
    torch.set_num_threads(min(torch.get_num_threads(), usable_cores()))
