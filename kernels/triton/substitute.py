"""Algorithm 1 of BuddyMoE as a Triton kernel, one program for each token.

The paper gives each slot a thread, which claims its buddy by compare-and-swap, so chance decides contested buddies.
Here a program takes its token's slots in rank order, which gives the result of the sequential algorithm. Rounding is
that of the reference: no fused products, constants from a table of doubles (a literal would be a float), divisions of
doubles only. A scalar condition becomes a bound on slots before it meets a vector: the interpreter broadcasts booleans
badly.

With TRITON_INTERPRET=1 in the environment before triton is imported it runs on tensors of the CPU.
"""

# mypy: allow-untyped-defs
# the types of a kernel's arguments are those of its launch
from __future__ import annotations

import math
from functools import cache

import torch
import triton
import triton.language as tl

from ..device import on_device
from ..substitute import EXP_TERMS, LOG_TERMS, BuddyTensors, Options, ReplacedTensors, require_probabilities

# table: log terms from 0, exp terms from 8, then these
_LN2, _INVERSE_LN2, _HALF_ROOT, _TAU, _GAMMA = (tl.constexpr(20 + i) for i in range(5))
_TEMPERATURE, _LOG_K, _ETA, _REUSE = (tl.constexpr(25 + i) for i in range(4))


@cache
def _table(
    tau: float, gamma: float, temperature: float, top_k: int, eta: float, reuse: float, device: str
) -> torch.Tensor:
    ln2 = math.log(2.0)
    options = (tau, gamma, temperature, math.log(top_k), eta, reuse)
    values = (*LOG_TERMS, *EXP_TERMS, ln2, 1.0 / ln2, math.sqrt(0.5), *options)
    return torch.tensor(values, dtype=torch.float64, device=device)


@triton.jit
def _log(x, table):
    bits = x.to(tl.int64, bitcast=True)
    exponent = ((bits >> 52) & 0x7FF) - 1022
    mantissa = ((bits & 0x000FFFFFFFFFFFFF) | 0x3FE0000000000000).to(tl.float64, bitcast=True)  # in [0.5, 1)
    low = mantissa < tl.load(table + _HALF_ROOT)
    mantissa = tl.where(low, mantissa + mantissa, mantissa)
    exponent = tl.where(low, exponent - 1, exponent)
    ratio = (mantissa - 1.0) / (mantissa + 1.0)
    square = ratio * ratio
    series = square * 0.0 + tl.load(table + 7)
    for i in tl.static_range(7):
        series = series * square + tl.load(table + 6 - i)
    return exponent.to(tl.float64) * tl.load(table + _LN2) + (ratio + ratio) * series


@triton.jit
def _exp(x, table):
    power = tl.floor(x * tl.load(table + _INVERSE_LN2) + 0.5)
    power = tl.where(power > -1000.0, power, power * 0.0 - 1000.0)
    rest = x - power * tl.load(table + _LN2)
    rest = tl.where(rest > -1.0, rest, rest * 0.0 - 1.0)
    series = rest * 0.0 + tl.load(table + 19)
    for i in tl.static_range(11):
        series = series * rest + tl.load(table + 18 - i)
    return series * ((power.to(tl.int64) + 1023) << 52).to(tl.float64, bitcast=True)


@triton.jit
def _at(values, slots, k):
    """values[k]"""
    return tl.sum(tl.where(slots == k, values, values * 0), axis=0)


@triton.jit
def _summed(values, slots, K: tl.constexpr):
    """The sum of the K values, one after another."""
    total = _at(values, slots, 0) * 0
    for k in tl.static_range(K):
        total = total + _at(values, slots, k)
    return total


@triton.jit
def _permitted(
    weights, slots, table,
    K: tl.constexpr, ENTROPY: tl.constexpr, MARGIN: tl.constexpr, TEMPER: tl.constexpr,
):  # fmt: skip
    p = weights
    if TEMPER:
        positive = p > 0
        logs = tl.where(positive, _log(p, table), p * 0 - float("inf"))
        top = tl.max(logs, axis=0)
        scaled = tl.where(positive, logs - top, p * 0) / tl.load(table + _TEMPERATURE)
        p = tl.where(positive, _exp(scaled, table), p * 0)
    total = _summed(p, slots, K)
    p = p / tl.where(total > 0, total, total * 0 + 1.0)
    allowed = total == total
    if ENTROPY:
        terms = tl.where(p > 0, p * _log(p, table), p * 0)
        entropy = (0.0 - _summed(terms, slots, K)) / tl.load(table + _LOG_K)
        allowed = allowed & (entropy > tl.load(table + _TAU))
    if MARGIN:
        first = tl.max(p, axis=0)
        where_first = tl.argmax(tl.where(slots < K, p, p * 0 - 1.0), axis=0, tie_break_left=True)
        second = tl.max(tl.where((slots == where_first) | (slots >= K), p * 0 - 1.0, p), axis=0)
        allowed = allowed & (first - second < tl.load(table + _GAMMA))
    return allowed


@triton.jit
def _by_buddy(values, row, ids, picked, replaced, used):
    """values [SLOTS], in replaced slots times the probability of the buddy over that of the picked expert."""
    theirs = tl.load(row + ids, mask=used, other=0.0).to(tl.float64)
    own = tl.load(row + picked, mask=used, other=0.0).to(tl.float64)
    ratio = values * theirs / tl.where(own > 0, own, own * 0 + 1.0)
    return tl.where(replaced & (own > 0), ratio, values)


@triton.jit
def _renormalised(values, weights, changed, slots, K: tl.constexpr):
    """values [SLOTS], scaled to the sum of weights [SLOTS] if anything changed."""
    before = _summed(weights, slots, K)
    after = _summed(values, slots, K)
    scaled = values * before / tl.where(after > 0, after, after * 0 + 1.0)
    return tl.where(slots < tl.where(changed & (after > 0), K, 0), scaled, values)


@triton.jit
def _kernel(
    ids_in, weights_in, probabilities, replace, reach, buddies, similarity, table, ids_out, weights_out, counts,
    rho, E, R, search,
    K: tl.constexpr, SLOTS: tl.constexpr, RANKS: tl.constexpr, ENTROPY: tl.constexpr, MARGIN: tl.constexpr,
    TEMPER: tl.constexpr, COMPATIBILITY: tl.constexpr, REUSE: tl.constexpr, DROP: tl.constexpr,
    BY_BUDDY: tl.constexpr, RENORMALISE: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0).to(tl.int64)
    slots = tl.arange(0, SLOTS)
    used = slots < K
    picked = tl.load(ids_in + t * K + slots, mask=used, other=0)
    weights = tl.load(weights_in + t * K + slots, mask=used, other=0.0).to(tl.float64)
    allowed = t >= 0
    if ENTROPY or MARGIN:
        allowed = _permitted(weights, slots, table, K, ENTROPY, MARGIN, TEMPER)
    ranks = tl.arange(0, RANKS)
    reuse = tl.load(table + _REUSE).to(tl.float32)
    ids = picked
    taken = picked * 0 - 1  # the buddy of each slot, below 0: none
    left_out = slots < 0
    count = 0
    left = 0
    for k in tl.static_range(K):
        expert = tl.sum(tl.where(slots == k, picked, 0), axis=0)
        wanted = allowed & (tl.load(replace + expert) != 0) & (count < rho)
        if wanted:
            looked = ranks < search
            candidates = tl.load(buddies + expert * R + ranks, mask=looked, other=0).to(tl.int64)
            score = tl.load(similarity + expert * R + ranks, mask=looked, other=0.0)
            if COMPATIBILITY:
                eta = tl.load(table + _ETA).to(tl.float32)
                score = score * (1.0 + eta * tl.load(probabilities + t * E + candidates, mask=looked, other=0.0))
            score = score * tl.load(reach + candidates, mask=looked, other=0.0)
            own = tl.max(((candidates[:, None] == picked[None, :]) & used[None, :]).to(tl.int32), axis=1)
            times = tl.sum((candidates[:, None] == taken[None, :]).to(tl.int32), axis=1)
            if REUSE:
                claim = score * 0.0 + 1.0
                for n in tl.static_range(k):
                    claim = tl.where(times > n, claim * reuse, claim)
                score = tl.where(own > 0, score * 0.0, score * claim)
            else:
                score = tl.where(own + times > 0, score * 0.0, score)
            best, rank = tl.max(score, axis=0, return_indices=True, return_indices_tie_break_left=True)
            buddy = tl.sum(tl.where(ranks == rank, candidates, candidates * 0), axis=0)
            here = slots == tl.where(best > 0, k, SLOTS)
            ids = tl.where(here, buddy, ids)
            taken = tl.where(here, buddy, taken)
            count += (best > 0).to(tl.int32)
            if DROP:
                left_out = left_out | (slots == tl.where(best > 0, SLOTS, k))
                left += (best <= 0).to(tl.int32)
    replaced = taken >= 0
    if DROP:
        left_out = left_out & (slots >= tl.where(left < K, 0, 1))
        left = tl.where(left < K, left, K - 1)
        remaining = tl.argmax(tl.where(left_out | (slots >= K), 0, 1), axis=0, tie_break_left=True)
        ids = tl.where(left_out, _at(ids, slots, remaining), ids)
    values = tl.where(left_out, weights * 0, weights)
    if BY_BUDDY:
        values = _by_buddy(values, probabilities + t * E, ids, picked, replaced, used)
    if RENORMALISE:
        changed = left > 0
        if BY_BUDDY:
            changed = changed | (count > 0)
        values = _renormalised(values, weights, changed, slots, K)
    tl.store(ids_out + t * K + slots, ids, mask=used)
    tl.store(weights_out + t * K + slots, values.to(tl.float32), mask=used)
    tl.store(counts + 2 * t, count)
    tl.store(counts + 2 * t + 1, left)


def substitute_triton(
    ids: torch.Tensor,
    weights: torch.Tensor,
    probabilities: torch.Tensor | None,
    replace: torch.Tensor,
    reach: torch.Tensor,
    buddies: BuddyTensors,
    options: Options,
    tau: float | None = None,
) -> ReplacedTensors:
    """As `kernels.substitute.substitute_tensors`, on contiguous tensors of a GPU (or of the CPU, interpreted).

    Waits for the GPU only to copy a table of constants, once for each set of options and tau.

    Raises:
        ValueError: the router's probabilities are needed and missing.
    """
    by_buddy = options.weights == "buddy"
    require_probabilities(probabilities, options)
    (tokens, top_k), (experts, ranks) = ids.shape, buddies.ids.shape
    if top_k < 2 and (tau is not None or options.gamma is not None):
        # the entropy of one choice is 0 and its margin 1
        if (tau is not None and tau >= 0) or (options.gamma is not None and options.gamma <= 1):
            return ReplacedTensors.untouched(ids, weights)
        tau = None
    gamma = options.gamma if top_k > 1 else None
    search = ranks if options.search is None else min(options.search, ranks)
    table = _table(
        tau or 0.0, gamma or 0.0, options.temperature, top_k, options.eta, options.reuse, str(ids.device)
    )  # fmt: skip
    out_ids, out_weights = torch.empty_like(ids), torch.empty_like(weights)
    counts = torch.empty(tokens, 2, dtype=torch.int32, device=ids.device)
    gated = tau is not None or gamma is not None
    with on_device(ids.device):
        _kernel[(tokens,)](
            ids, weights, weights if probabilities is None else probabilities, replace.view(torch.uint8), reach,
            buddies.ids, buddies.similarity, table, out_ids, out_weights, counts,
            top_k if options.rho is None else min(options.rho, top_k), experts, ranks, search,
            K=top_k, SLOTS=triton.next_power_of_2(top_k), RANKS=triton.next_power_of_2(search),
            ENTROPY=tau is not None, MARGIN=gamma is not None, TEMPER=gated and options.temperature != 1.0,
            COMPATIBILITY=options.eta > 0, REUSE=options.reuse > 0, DROP=options.fallback == "drop", BY_BUDDY=by_buddy,
            RENORMALISE=options.renormalise, num_warps=1, enable_fp_fusion=False,
        )  # fmt: skip
    return ReplacedTensors(out_ids, out_weights, counts.sum(dim=0))
