"""Attention on a paged KV cache, read in place: no copy of a sequence's keys and values.

The rows of a forward are packed: sequence s has queries starts_q[s] to starts_q[s+1], and keys starts_k[s] to
starts_k[s+1] in `index`, of which the last ones are the forward's own. A key before those is in the cache at
`index[starts_k[s] + j]`, the others are `k_new`. Pages, rolling windows and shared pages are all in `index`.

Flash attention with split keys: a program takes up to M (query, head of a group) pairs of one sequence and one KV head,
and `SPLIT` keys; a second kernel adds the splits of a row in their order. Where there is one split, or the sums of all
take more than `_SUMS_BYTES` (a prompt of 8192 tokens: 2 GB), a program takes all splits of its pairs and adds them
itself, with the same operations in the same order. The splits of a sequence depend on its own length only, so its
result does not depend on the other sequences of the batch. Sums are in float32.

Bytes that must be read: 2 * keys * kv_heads * head_dim * item a sequence; for 4096 keys of 8 heads of 128 in bfloat16
16.8 MB, 5 us of an H100.
"""

# mypy: allow-untyped-defs
# the types of a kernel's arguments are those of its launch
from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from ..device import on_device
from .launch import Launch, ceil_div

SPLIT = 512  # keys of a program
_KEYS = 32  # of a step of it
_DECODE, _PROMPT = 16, 64  # pairs of a program, least and in prompts
_SUMS_BYTES = 32 << 20  # of all splits


@triton.jit
def _scales(top, other):
    """Maxima of two parts of a row's scores -> that of both, and what the sums of each are multiplied by."""
    higher = tl.maximum(top, other)
    base = tl.where(higher == float("-inf"), 0.0, higher)
    return higher, tl.exp(top - base), tl.exp(other - base)


@triton.jit
def _step(q, k, v, seen, scale, top, total, values):
    """The greatest score of each query [M], the sum of its shares [M] and of the values [M, D] with further keys'.

    q [M, D]; k, v [N, D]; seen: which keys a query sees [M, N].
    """
    scores = tl.where(seen, tl.dot(q, tl.trans(k), input_precision="ieee") * scale, float("-inf"))
    higher = tl.maximum(top, tl.max(scores, axis=1))
    base = tl.where(higher == float("-inf"), 0.0, higher)
    shrink = tl.exp(top - base)
    shares = tl.exp(scores - base[:, None])
    total = total * shrink + tl.sum(shares, axis=1)
    values = tl.dot(shares.to(v.dtype), v, values * shrink[:, None], input_precision="ieee")
    return higher, total, values


@triton.jit(do_not_specialize=["heads", "rows", "kv_heads", "window"])
def _attend(
    query, k_new, v_new, k_cache, v_cache, index, starts_q, starts_k, sinks, partial, maxima, sums, heads, rows,
    kv_heads, window, scale,
    GROUP: tl.constexpr, M: tl.constexpr, N: tl.constexpr, D: tl.constexpr, WIDTH: tl.constexpr, KEYS: tl.constexpr,
    SINKS: tl.constexpr, WIDEN: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """WHOLE: all splits, whose result goes to `partial`; else one, whose sums go to the three."""
    sequence = tl.program_id(1) // kv_heads
    head = tl.program_id(1) % kv_heads
    first = tl.load(starts_q + sequence)
    queries = tl.load(starts_q + sequence + 1) - first
    first_key = tl.load(starts_k + sequence)
    keys = tl.load(starts_k + sequence + 1) - first_key
    past = keys - queries
    m = tl.program_id(0) * M + tl.arange(0, M)
    i = m // GROUP  # query
    used = i < queries
    if tl.program_id(0) * M < queries * GROUP:
        d = tl.arange(0, D)
        wide = d < WIDTH
        of_head = head * GROUP + m % GROUP
        row = (first + i).to(tl.int64) * heads + of_head  # of a query's head
        q = tl.load(query + row[:, None] * WIDTH + d[None, :], mask=used[:, None] & wide[None, :], other=0.0)
        if WIDEN:
            q = q.to(tl.float32)
        last = past + (tl.program_id(0) * M + M - 1) // GROUP + 1
        stop = tl.minimum(keys, last)
        # no key before the first query's window
        least = (past + tl.program_id(0) * M // GROUP - window + 1) // N * N
        all_top = tl.full((M,), float("-inf"), dtype=tl.float32)
        all_total = tl.zeros((M,), dtype=tl.float32)
        all_values = tl.zeros((M, D), dtype=tl.float32)
        from_split = tl.program_id(2)
        to_split = from_split + 1
        if WHOLE:
            to_split = tl.maximum(tl.cdiv(stop, KEYS), 1)
        for split in range(from_split, to_split):
            top = tl.full((M,), float("-inf"), dtype=tl.float32)
            total = tl.zeros((M,), dtype=tl.float32)
            if SINKS:  # a learnt score without a value, counted once
                top = tl.where(split == 0, tl.load(sinks + of_head).to(tl.float32), top)
                total = tl.where(split == 0, total + 1.0, total)
            values = tl.zeros((M, D), dtype=tl.float32)
            begin = tl.maximum(split * KEYS, least)
            end = tl.minimum(split * KEYS + KEYS, stop)
            for start in range(begin, end, N):
                j = start + tl.arange(0, N)
                there = (j >= 0) & (j < end)
                cached = there & (j < past)
                at = tl.load(index + first_key + j, mask=cached, other=0).to(tl.int64)
                at = (at * kv_heads + head)[:, None] * WIDTH + d[None, :]
                fresh = ((first + j - past).to(tl.int64) * kv_heads + head)[:, None] * WIDTH + d[None, :]
                # one load from either place: half the shared memory and registers of a load from each
                wanted = there[:, None] & wide[None, :]
                k = tl.load(tl.where(cached[:, None], k_cache + at, k_new + fresh), mask=wanted, other=0.0)
                v = tl.load(tl.where(cached[:, None], v_cache + at, v_new + fresh), mask=wanted, other=0.0)
                if WIDEN:  # the interpreter does not multiply bfloat16
                    k = k.to(tl.float32)
                    v = v.to(tl.float32)
                distance = (past + i)[:, None] - j[None, :]
                seen = there[None, :] & (distance >= 0) & (distance < window)
                top, total, values = _step(q, k, v, seen, scale, top, total, values)
            if WHOLE:  # as `_join`
                all_top, kept, added = _scales(all_top, top)
                all_total = tl.fma(all_total, kept, total * added)
                all_values = tl.fma(all_values, kept[:, None], values * added[:, None])
            else:
                all_top, all_total, all_values = top, total, values
        if WHOLE:
            out = (all_values / all_total[:, None]).to(partial.dtype.element_ty)
            tl.store(partial + row[:, None] * WIDTH + d[None, :], out, mask=used[:, None] & wide[None, :])
        else:
            place = from_split.to(tl.int64) * rows + row
            tl.store(maxima + place, all_top, mask=used)
            tl.store(sums + place, all_total, mask=used)
            tl.store(partial + place[:, None] * WIDTH + d[None, :], all_values, mask=used[:, None] & wide[None, :])


@triton.jit(do_not_specialize=["rows", "splits"])
def _join(partial, maxima, sums, out, rows, splits, D: tl.constexpr, WIDTH: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, D)
    wide = d < WIDTH
    top = tl.full((), float("-inf"), dtype=tl.float32)
    total = tl.zeros((), dtype=tl.float32)
    values = tl.zeros((D,), dtype=tl.float32)
    for split in range(splits):
        place = split * rows + row
        top, kept, added = _scales(top, tl.load(maxima + place))  # nothing is added of a split without keys
        total = tl.fma(total, kept, tl.load(sums + place) * added)
        part = tl.load(partial + place * WIDTH + d, mask=wide, other=0.0)
        values = tl.fma(values, kept, part * added)
    tl.store(out + row * WIDTH + d, (values / total).to(out.dtype.element_ty), mask=wide)


class Packed(NamedTuple):
    """Where the rows of a forward and their keys are.

    starts_q, starts_k: of each sequence and the end [S + 1], int32 or int64 on the device. index: place in the cache
    of each key [keys], or empty where no key is cached. most_q, most_k: the longest sequence's queries and keys.
    """

    starts_q: torch.Tensor
    starts_k: torch.Tensor
    index: torch.Tensor
    most_q: int
    most_k: int


_launches: dict[tuple[int, ...], tuple[Launch, Launch]] = {}


def attend(
    query: torch.Tensor, k_new: torch.Tensor, v_new: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor,
    packed: Packed, scale: float, window: int | None = None, sinks: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """Causal attention of packed rows; asynchronous. A query sees its own key and the `window - 1` before.

    Args:
        query: [T, heads, D]. k_new, v_new: of the same rows [T, kv_heads, D].
        k_cache, v_cache: [places, kv_heads, D]; the new keys may be there or not, they are not read there.
        sinks: learnt scores [heads].

    Returns:
        [T, heads, D].

    Raises:
        ValueError: shapes or types do not fit together.
    """
    count, heads, width = query.shape
    kv_heads = k_new.shape[1]
    if k_new.shape != v_new.shape or k_new.shape[::2] != (count, width) or heads % kv_heads:
        raise ValueError(f"query {tuple(query.shape)}, keys {tuple(k_new.shape)} and values {tuple(v_new.shape)}")
    if k_cache.shape[1:] != k_new.shape[1:] or not (k_cache.is_contiguous() and v_cache.is_contiguous()):
        raise ValueError(f"a cache {tuple(k_cache.shape)} for keys {tuple(k_new.shape)}")
    if len({t.dtype for t in (query, k_new, v_new, k_cache, v_cache)}) > 1:
        raise ValueError("query, keys, values and cache differ in type")
    query, k_new, v_new = query.contiguous(), k_new.contiguous(), v_new.contiguous()
    group, device = heads // kv_heads, query.device
    pairs = max(_DECODE, triton.next_power_of_2(group)) if packed.most_q == 1 else max(_PROMPT, group)
    splits, rows = ceil_div(packed.most_k, SPLIT), count * heads
    whole = splits == 1 or 4 * splits * rows * width > _SUMS_BYTES
    out = torch.empty_like(query)
    key = (group, pairs, packed.most_q == 1, width, sinks is not None, whole, query.get_device())
    if key not in _launches:
        widen = device.type == "cpu" and query.dtype == torch.bfloat16
        d = max(16, triton.next_power_of_2(width))
        _launches[key] = (
            Launch(
                _attend, GROUP=group, M=pairs, N=_KEYS, D=d, WIDTH=width, KEYS=SPLIT, SINKS=sinks is not None,
                WIDEN=widen, WHOLE=whole, num_warps=4 if packed.most_q == 1 else 8, num_stages=2,
            ),
            Launch(_join, D=d, WIDTH=width, num_warps=2),
        )  # fmt: skip
    first, second = _launches[key]
    partial = maxima = sums = out
    if not whole:
        partial = torch.empty((splits, rows, width), dtype=torch.float32, device=device)
        # a program of a prompt's first rows has no keys in later splits, and writes there all the same
        maxima = torch.full((splits, rows), float("-inf"), dtype=torch.float32, device=device)
        sums = torch.zeros((splits, rows), dtype=torch.float32, device=device)
    with on_device(device):
        first(
            (ceil_div(packed.most_q * group, pairs), (len(packed.starts_q) - 1) * kv_heads, 1 if whole else splits),
            query, k_new, v_new, k_cache, v_cache, packed.index, packed.starts_q, packed.starts_k,
            query if sinks is None else sinks, partial, maxima, sums, heads, rows, kv_heads,
            (1 << 30) if window is None else window, scale,
        )  # fmt: skip
        if not whole:
            second((rows, 1, 1), partial, maxima, sums, out, rows, splits)
    return out
