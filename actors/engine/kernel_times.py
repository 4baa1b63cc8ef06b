"""What the candidates for running experts take, on slots that hold nothing yet."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from ...kernels.expert_ffn import ExpertKernel, Group
from ...kernels.row_class import RowClass, row_class
from .pool import SlotPool


@dataclass(frozen=True)
class KernelTime:
    """One candidate at one shape of a call.

    kernel: its name. rows: of each expert. experts: of the call. us: microseconds from an idle device until the result
    is there, launches included, which is what a decode step waits for. device_us: microseconds on the device, of calls
    queued behind each other. gbps: gigabytes (1e9) of weights per second of `device_us`. chosen: it runs this class.
    """

    kernel: str
    row_class: RowClass
    rows: int
    experts: int
    us: float
    device_us: float
    gbps: float
    chosen: bool = False


def expert_kernel_times(
    pool: SlotPool, kernels: Mapping[str, ExpertKernel], rows: Sequence[int], experts: int = 4
) -> list[KernelTime]:
    """Median times of each kernel at each row count; writes random weights to the slots that it goes through.

    Args:
        rows: of one expert.
        experts: of one call, fewer where there are fewer slots. Calls go through the slots in turn, so that weights
            come from memory.
    """
    raise NotImplementedError
