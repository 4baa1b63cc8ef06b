"""Copies between a GPU and pinned host memory by a kernel, without the copy engines.

A copy engine would queue a table behind whole experts on their way to the cache. A kernel on the compute stream reads
or writes pinned host memory in a few microseconds.
"""

# mypy: allow-untyped-defs
# the types of a kernel's arguments are those of its launch
from __future__ import annotations

import torch
import triton
import triton.language as tl

from .launch import Launch, ceil_div

_BLOCK = 1024


@triton.jit(do_not_specialize=["count"], do_not_specialize_on_alignment=["source", "target"])
def _copy(source, target, count, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(target + i, tl.load(source + i, mask=i < count, other=0), mask=i < count)


_launches: dict[int, Launch] = {}  # by GPU; -1: interpreted


def kernel_copy(dst: torch.Tensor, src: torch.Tensor) -> None:
    """dst <- src on the current stream; contiguous, of one dtype and number of elements. The host's are pinned."""
    count = dst.numel()
    if count:
        device = max(dst.get_device(), src.get_device())
        launch = _launches.get(device)
        if launch is None:
            launch = _launches[device] = Launch(_copy, BLOCK=_BLOCK, num_warps=4)
        launch((ceil_div(count, _BLOCK), 1, 1), src, dst, count)
