"""Copies between a GPU and pinned host memory by a kernel, without the copy engines.

A copy engine would queue a table behind whole experts on their way to the cache. A kernel on the compute stream reads
or writes pinned host memory in a few microseconds.
"""

# mypy: allow-untyped-defs
# the types of a kernel's arguments are those of its launch
from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from ..device import stream_of
from .launch import Launch, ceil_div

BLOCK = 1024


@triton.jit(do_not_specialize=["count"], do_not_specialize_on_alignment=["source", "target"])
def _copy(source, target, count, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(target + i, tl.load(source + i, mask=i < count, other=0), mask=i < count)


class Copier(NamedTuple):
    """The kernel of `kernel_copy` for native code (`_launch.Ring`).

    launch: takes source, target and the number of items, of which a program copies `block`. stream: gives the address
    of the current one.
    """

    launch: Launch
    block: int
    stream: Callable[[], int]


@cache
def copying(device: int = -1) -> Launch:
    """The launch of a copy (source, target, count), a GPU's; -1: interpreted."""
    return Launch(_copy, BLOCK=BLOCK, num_warps=4)


def copier_of(device: torch.device) -> Copier:
    """Of a GPU."""
    return Copier(copying(device.index), BLOCK, stream_of(device))


def kernel_copy(dst: torch.Tensor, src: torch.Tensor) -> None:
    """dst <- src on the current stream; contiguous, of one dtype and number of elements. The host's are pinned."""
    count = dst.numel()
    if count:
        copying(max(dst.get_device(), src.get_device()))((ceil_div(count, BLOCK), 1, 1), src, dst, count)
