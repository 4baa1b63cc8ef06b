"""Copies between a GPU and pinned host memory by a kernel, without the copy engines.

A copy engine would queue a table behind whole experts on their way to the cache. A kernel on the compute stream reads
or writes pinned host memory in a few microseconds.

`_read` writes all that the host reads of a layer in one launch: tensors, and the scores of linear routers on the
layer's input, which it computes on the way.
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


SCORES, _WIDTH = 2, 1024  # of a router's weights, in a program and at a time: a model's router takes some 64 programs
_COUNTS = ["firsts", "seconds", "thirds", "wides", "first_at", "second_at", "third_at", "wide_at", "copying", "rows"]
_COUNTS += ["outputs", "next_outputs", "scores_at", "next_scores_at", "biased", "next_biased"]
# ids and weights begin at any item, a router's weights and the layer's input at a multiple of 16 bytes in every model
_ANYWHERE = ["target", "first", "second", "third", "wide", "bias", "next_bias"]


@triton.jit
def _words(target, source, count, i):
    tl.store(target + i, tl.load(source + i, mask=i < count, other=0), mask=i < count)


@triton.jit
def _scores(target, hidden, router, bias, biased, program, outputs, H, N: tl.constexpr, K: tl.constexpr):
    """float32 bits of N scores of one row: sums over blocks of K, each of which is summed last."""
    blocks = tl.cdiv(outputs, N)
    row = (program // blocks).to(tl.int64)
    e = program % blocks * N + tl.arange(0, N)
    k = tl.arange(0, K)
    there = e < outputs
    total = tl.zeros((N, K), dtype=tl.float32)
    for done in range(0, H, K):
        left = k < H - done
        x = tl.load(hidden + row * H + done + k, mask=left, other=0.0)
        weights = router + e.to(tl.int64)[:, None] * H + (done + k)[None, :]
        w = tl.load(weights, mask=there[:, None] & left[None, :], other=0.0)
        total += x.to(w.dtype).to(tl.float32)[None, :] * w.to(tl.float32)
    score = tl.sum(total, axis=1) + tl.load(bias + e, mask=there & (biased != 0), other=0).to(tl.float32)
    tl.store(target + row * outputs + e, score.to(tl.int32, bitcast=True), mask=there)


@triton.jit(do_not_specialize=_COUNTS, do_not_specialize_on_alignment=_ANYWHERE)
def _read(
    target, first, second, third, wide, hidden, router, bias, next_router, next_bias,
    firsts, seconds, thirds, wides, first_at, second_at, third_at, wide_at, copying, rows,
    outputs, next_outputs, scores_at, next_scores_at, biased, next_biased, H,
    PRODUCTS: tl.constexpr, BLOCK: tl.constexpr, N: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    """Fill parts of `target`, int32 words: words, numbers that become float32, scores of routers."""
    program = tl.program_id(0)
    if program < copying:
        i = program * BLOCK + tl.arange(0, BLOCK)
        _words(target + first_at, first, firsts, i)
        _words(target + second_at, second, seconds, i)
        _words(target + third_at, third, thirds, i)
        values = tl.load(wide + i, mask=i < wides, other=0).to(tl.float32)
        tl.store(target + wide_at + i, values.to(tl.int32, bitcast=True), mask=i < wides)
    elif PRODUCTS > 0:
        program -= copying
        own = rows * tl.cdiv(outputs, N)
        if program < own:
            _scores(target + scores_at, hidden, router, bias, biased, program, outputs, H, N, K)
        elif PRODUCTS > 1:
            _scores(
                target + next_scores_at, hidden, next_router, next_bias, next_biased, program - own, next_outputs,
                H, N, K,
            )  # fmt: skip


class Copier(NamedTuple):
    """Kernels of small copies for native code (`_launch.Ring`, `_launch.Fetch`).

    launch: takes source, target and the number of items, of which a program copies `block`. stream: gives the address
    of the current one. reads: `_read` with 0, 1 and 2 routers, of whose scores a program computes `scores`.
    """

    launch: Launch
    block: int
    stream: Callable[[], int]
    reads: tuple[Launch, ...]
    scores: int


@cache
def copying(device: int = -1) -> Launch:
    """The launch of a copy (source, target, count), a GPU's; -1: interpreted."""
    return Launch(_copy, BLOCK=BLOCK, num_warps=4)


def copier_of(device: torch.device, copy: Launch | None = None, stream: Callable[[], int] | None = None) -> Copier:
    """Of a GPU. copy, stream: in the place of its own."""
    copy = copying(device.index) if copy is None else copy
    reads = [Launch(_read, PRODUCTS=n, BLOCK=BLOCK, N=SCORES, K=_WIDTH, num_warps=4) for n in range(3)]
    return Copier(copy, BLOCK, stream_of(device) if stream is None else stream, tuple(reads), SCORES)


def kernel_copy(dst: torch.Tensor, src: torch.Tensor) -> None:
    """dst <- src on the current stream; contiguous, of one dtype and number of elements. The host's are pinned."""
    count = dst.numel()
    if count:
        copying(max(dst.get_device(), src.get_device()))((ceil_div(count, BLOCK), 1, 1), src, dst, count)
