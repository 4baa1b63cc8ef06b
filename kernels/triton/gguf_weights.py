"""GGUF's blocks in Triton, as `form_blocks` has them in torch: the same numbers, to the bit.

A block's words are of 4 bytes where its size allows, else of 2, and of MXFP4 of 1. The IQ types look weights up in a
grid, four at a time in one word, which stays in the cache next to the core.
"""

# mypy: allow-untyped-defs
# the types of a kernel's arguments are those of its launch
from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl

from ..form_blocks import grid_of
from .bits import above, bytes_of, e2m1, fields, half, low_then_high, power, runs

# of blocks of 32: bytes before the codes
HEADS = {"q8_0": 2, "q4_0": 2, "q4_1": 4, "q5_0": 6, "q5_1": 8, "iq4_nl": 2, "mxfp4_gguf": 1}
GRIDS = ("iq1_s", "iq1_m", "iq2_xxs", "iq2_xs", "iq2_s", "iq3_xxs", "iq3_s")  # types that have one


@cache
def grid_words(kind: str, device: torch.device) -> torch.Tensor:
    """The grid of a type of `GRIDS`: four signed bytes a word, int32."""
    return grid_of(kind.upper(), device).to(torch.int8).contiguous().view(torch.int32).view(-1)


# --- parts of a block ----------------------------------------------------------------------------------------------


@triton.jit
def _part(weight, at, FIRST: tl.constexpr, COUNT: tl.constexpr, WORD: tl.constexpr):
    """[N, COUNT] bytes from byte FIRST of a block on."""
    word = at[:, None] + FIRST // WORD + tl.arange(0, COUNT // WORD)[None, :]
    return bytes_of(weight + word, True, False, WORD, at.shape[0], COUNT)


@triton.jit
def _float(weight, at, FIRST: tl.constexpr, WORD: tl.constexpr):
    """The float16 at byte FIRST of a block: [N, 1]."""
    word = tl.load(weight + at + FIRST // WORD).to(tl.int32)
    if FIRST % WORD == 2:
        word = word >> 16
    return half(word)[:, None]


@triton.jit
def _spread(
    weight, at, FIRST: tl.constexpr, WIDTH: tl.constexpr, COUNT: tl.constexpr, TIMES: tl.constexpr,
    WORD: tl.constexpr = 2,
):  # fmt: skip
    """[N, COUNT] fields of WIDTH bits from byte FIRST on, each TIMES times.

    Every field loads its word: a load with fewer items than threads would be repeated by each thread for its weights.
    """
    bit = tl.arange(0, COUNT) // TIMES * WIDTH
    word = tl.load(weight + at[:, None] + FIRST // WORD + (bit // (8 * WORD))[None, :]).to(tl.int32)
    return word >> (bit % (8 * WORD))[None, :] & ((1 << WIDTH) - 1)


@triton.jit
def _pairs(weight, at, FIRST: tl.constexpr, STEP: tl.constexpr):
    """[N, 8, 2] words of 2 bytes: pairs that begin STEP bytes apart."""
    word = (tl.arange(0, 8) * (STEP // 2))[None, :, None] + tl.arange(0, 2)[None, None, :]
    return tl.load(weight + at[:, None, None] + FIRST // 2 + word).to(tl.int32) & 0xFFFF


@triton.jit
def _double_words(pairs):
    """[N, 8] words of 32 bits."""
    return tl.sum(pairs << (16 * tl.arange(0, 2))[None, None, :], axis=2)


@triton.jit
def _two_bits(byte):
    """[N, 64] bytes -> [N, 256] codes: each 32 bytes hold four times 32."""
    N: tl.constexpr = byte.shape[0]
    both = tl.reshape(byte, (N, 2, 1, 32)) >> (2 * tl.arange(0, 4))[None, None, :, None] & 3
    return tl.reshape(both, (N, 256))


@triton.jit
def _iq4(code):
    """The numbers of IQ4_NL and IQ4_XS, which are bytes of four words, above -128."""
    low = tl.where(code < 4, 0x3F2D1801, 0x766A5D4F)
    high = tl.where(code < 12, 0xA6998D81 - 0x100000000, 0xF1D9C5B5 - 0x100000000)
    return above((tl.where(code < 8, low, high) >> (code & 3) * 8) & 255, 128)


@triton.jit
def _times(factor, weights):
    """[N, n] times [N, 256], each for 256 / n of them."""
    N: tl.constexpr = factor.shape[0]
    SIZE: tl.constexpr = weights.shape[1] // factor.shape[1]
    return tl.reshape(factor[:, :, None] * tl.reshape(weights, (N, factor.shape[1], SIZE)), (N, weights.shape[1]))


@triton.jit
def _less(factor, codes, least):
    """As `_times`, less [N, n]."""
    N: tl.constexpr = factor.shape[0]
    SIZE: tl.constexpr = codes.shape[1] // factor.shape[1]
    values = factor[:, :, None] * tl.reshape(above(codes, 0), (N, factor.shape[1], SIZE)) - least[:, :, None]
    return tl.reshape(values, (N, codes.shape[1]))


@triton.jit
def _found(grid, codes, EACH: tl.constexpr):
    """[N, n] codes -> [N, n EACH] numbers of a grid."""
    WORDS: tl.constexpr = EACH // 4
    word = tl.load(grid + codes[:, :, None] * WORDS + tl.arange(0, WORDS)[None, None, :])
    word = tl.reshape(word, (codes.shape[0], codes.shape[1] * WORDS))
    return above(runs(word, 8, 4, 255) ^ 128, 128)


@triton.jit
def _signed(values, bits):
    """[N, 8 n] with the signs in [N, n] bytes."""
    return tl.where(runs(bits, 1, 8, 1) != 0, -values, values)


@triton.jit
def _even(bits):
    """Seven bits and an eighth that makes the number of those that are set even."""
    odd = bits ^ bits >> 4
    odd = odd ^ odd >> 2
    return bits | ((odd ^ odd >> 1) & 1) << 7


# --- blocks of 32 --------------------------------------------------------------------------------------------------


@triton.jit
def small_blocks(weight, at, start, FORM: tl.constexpr, N: tl.constexpr, K: tl.constexpr):
    """[N, K] weights of blocks of 32 inputs, of rows whose first words are `at` [N]."""
    WORD: tl.constexpr = FORM.word
    EVEN: tl.constexpr = FORM.inputs % K == 0
    BLOCKS: tl.constexpr = K // 32
    PER: tl.constexpr = (32 if FORM.codes == "q8_0" else 16) // WORD  # words of the codes of a block
    HEAD: tl.constexpr = FORM.head // WORD
    first = start // 32
    block = first + tl.arange(0, BLOCKS)
    inside = (block * 32 < FORM.inputs)[None, :]
    begin = weight + at[:, None] + (block * (PER + HEAD))[None, :]
    head = tl.load(begin, mask=inside, other=0).to(tl.int32)  # [N, K / 32]
    c = tl.arange(0, PER * BLOCKS)
    word = (first + c // PER) * (PER + HEAD) + HEAD + c % PER
    there = (first + c // PER)[None, :] * 32 < FORM.inputs
    codes = bytes_of(weight + at[:, None] + word[None, :], there, not EVEN, WORD, N, PER * WORD * BLOCKS)
    if FORM.codes != "q8_0":
        codes = low_then_high(codes, N, BLOCKS, 16)
    codes = tl.reshape(codes, (N, BLOCKS, 32))
    if FORM.codes == "q5_0" or FORM.codes == "q5_1":
        if WORD == 2:
            fifth = (tl.load(begin + 1, mask=inside, other=0).to(tl.int32) & 0xFFFF) | (
                tl.load(begin + 2, mask=inside, other=0).to(tl.int32) << 16
            )
        else:
            fifth = tl.load(begin + 1, mask=inside, other=0)
        codes |= (fifth[:, :, None] >> tl.arange(0, 32)[None, None, :] & 1) << 4
    if FORM.codes == "mxfp4_gguf":
        value = e2m1(codes) * power(head & 255)[:, :, None]
    elif FORM.codes == "q8_0":
        value = above(codes ^ 128, 128) * half(head)[:, :, None]
    elif FORM.codes == "q4_0":
        value = above(codes, 8) * half(head)[:, :, None]
    elif FORM.codes == "q5_0":
        value = above(codes, 16) * half(head)[:, :, None]
    elif FORM.codes == "iq4_nl":
        value = _iq4(codes) * half(head)[:, :, None]
    else:  # q4_1, q5_1
        value = above(codes, 0) * half(head)[:, :, None] + half(head >> 16)[:, :, None]
    return tl.reshape(value, (N, K))


# --- blocks of 256 -------------------------------------------------------------------------------------------------


@triton.jit
def large_block(weight, grid, at, KIND: tl.constexpr):
    """[N, 256] weights of one block a row, from the words `at` [N] on."""
    if KIND == "q2_k":
        return _q2_k(weight, at)
    elif KIND == "q3_k":
        return _q3_k(weight, at)
    elif KIND == "q4_k" or KIND == "q5_k":
        return _k_quants(weight, at, KIND == "q5_k")
    elif KIND == "q6_k":
        return _q6_k(weight, at)
    elif KIND == "iq4_xs":
        return _iq4_xs(weight, at)
    elif KIND == "tq1_0" or KIND == "tq2_0":
        return _ternary(weight, at, KIND == "tq1_0")
    elif KIND == "iq1_s" or KIND == "iq1_m":
        return _iq1(weight, grid, at, KIND == "iq1_m")
    elif KIND == "iq2_xxs":
        return _iq2_xxs(weight, grid, at)
    elif KIND == "iq2_xs":
        return _iq2_xs(weight, grid, at)
    elif KIND == "iq2_s":
        return _iq2_s(weight, grid, at)
    elif KIND == "iq3_xxs":
        return _iq3_xxs(weight, grid, at)
    else:
        return _iq3_s(weight, grid, at)


@triton.jit
def _q2_k(weight, at):
    scales = _part(weight, at, 0, 16, 4)
    factor = _float(weight, at, 80, 4) * above(scales & 15, 0)
    least = _float(weight, at, 82, 4) * above(scales >> 4, 0)
    return _less(factor, _two_bits(_part(weight, at, 16, 64, 4)), least)


@triton.jit
def _q3_k(weight, at):
    third = fields(_part(weight, at, 0, 32, 2), 1, 8, 1)
    codes = _two_bits(_part(weight, at, 32, 64, 2)) | third << 2
    scales = fields(_part(weight, at, 96, 8, 2), 4, 2, 15) | fields(_part(weight, at, 104, 4, 2), 2, 4, 3) << 4
    return _times(_float(weight, at, 108, 2) * above(scales, 32), above(codes, 4))


@triton.jit
def _k_quants(weight, at, Q5: tl.constexpr):
    N: tl.constexpr = at.shape[0]
    scales = tl.load(weight + at)
    first, second, rest = tl.load(weight + at + 1), tl.load(weight + at + 2), tl.load(weight + at + 3)
    j = tl.arange(0, 8)[None, :]
    shift = (j & 3) * 8
    first, second, rest = first[:, None] >> shift & 255, second[:, None] >> shift & 255, rest[:, None] >> shift & 255
    factor = tl.where(j < 4, first & 63, rest & 15 | first >> 6 << 4)  # [N, 8]
    least = tl.where(j < 4, second & 63, rest >> 4 | second >> 6 << 4)
    factor = half(scales)[:, None] * above(factor, 0)
    least = half(scales >> 16)[:, None] * above(least, 0)
    codes = low_then_high(_part(weight, at, 48 if Q5 else 16, 128, 4), N, 4, 32)
    if Q5:
        codes |= ((_part(weight, at, 16, 32, 4)[:, None, :] >> j[:, :, None]) & 1) << 4
    return _less(factor, tl.reshape(codes, (N, 256)), least)


@triton.jit
def _q6_k(weight, at):
    N: tl.constexpr = at.shape[0]
    low = low_then_high(_part(weight, at, 0, 128, 2), N, 2, 64)
    codes = tl.reshape(low, (N, 256)) | _two_bits(_part(weight, at, 128, 64, 2)) << 4
    scale = _part(weight, at, 192, 16, 2)
    return _times(_float(weight, at, 208, 2) * above(scale ^ 128, 128), above(codes, 32))  # scales are signed


@triton.jit
def _iq4_xs(weight, at):
    N: tl.constexpr = at.shape[0]
    head = tl.load(weight + at)[:, None]
    scales = runs(_part(weight, at, 4, 4, 4), 4, 2, 15) | runs(head >> 16 & 0xFFFF, 2, 8, 3) << 4
    codes = tl.reshape(low_then_high(_part(weight, at, 8, 128, 4), N, 8, 16), (N, 256))
    return _times(half(head) * above(scales, 32), _iq4(codes))


@triton.jit
def _ternary(weight, at, THIRDS: tl.constexpr):
    N: tl.constexpr = at.shape[0]
    if THIRDS:  # five digits of base three a byte, the first weights' first; four in the last four bytes
        k = tl.arange(0, 256)
        byte = tl.where(k < 160, k % 32, tl.where(k < 240, 32 + (k - 160) % 16, 48 + (k & 3)))
        digit = tl.where(k < 160, k // 32, tl.where(k < 240, (k - 160) // 16, (k - 240) // 4))
        whole = tl.arange(0, 32)[None, :]
        octets = bytes_of(weight + at[:, None] + whole, whole < 27, True, 2, N, 64)
        word = tl.gather(octets, tl.broadcast_to(byte[None, :], (N, 256)), 1)
        shift = tl.where(digit == 0, 1, tl.where(digit == 1, 3, tl.where(digit == 2, 9, tl.where(digit == 3, 27, 81))))
        codes = (word * shift[None, :] & 255) * 3 >> 8
    else:
        codes = _two_bits(_part(weight, at, 0, 64, 2))
    return above(codes, 1) * _float(weight, at, 52 if THIRDS else 64, 2)


@triton.jit
def _iq1(weight, grid, at, M: tl.constexpr):
    if M:  # the float16 is the upper four bits of four words, whose others are scales
        first, second = tl.load(weight + at + 12), tl.load(weight + at + 13)
        first, second = first >> 12 & 15 | first >> 24 & 240, second >> 12 & 15 | second >> 24 & 240
        whole = half(first | second << 8)[:, None]
        high = _spread(weight, at, 32, 4, 32, 1, 4)
        codes = _part(weight, at, 0, 32, 4) | (high & 7) << 8
        s = tl.arange(0, 16)
        scales = tl.load(weight + at[:, None] + (12 + s // 8)[None, :]) >> (s // 4 % 2 * 16 + s % 4 * 3)[None, :] & 7
        eighths = high >> 3
    else:
        whole = _float(weight, at, 0, 2)
        high = _spread(weight, at, 34, 16, 32, 4)
        codes = _part(weight, at, 2, 32, 2) | (high >> (tl.arange(0, 32) % 4 * 3)[None, :] & 7) << 8
        scales, eighths = high >> 12 & 7, high >> 15
    # an eighth less than three, or one more: of the sum of a grid's number and it
    N: tl.constexpr = at.shape[0]
    SIZE: tl.constexpr = 256 // eighths.shape[1]
    found = tl.reshape(_found(grid, codes, 8), (N, eighths.shape[1], SIZE))
    weights = tl.reshape(found + (0.125 - 0.25 * above(eighths, 0))[:, :, None], (N, 256))
    return _times(whole * (2 * above(scales, 0) + 1), weights)


@triton.jit
def _iq2_xxs(weight, grid, at):
    codes = runs(tl.reshape(_pairs(weight, at, 2, 8), (at.shape[0], 16)), 8, 2, 255)  # [N, 32]
    words = _double_words(_pairs(weight, at, 6, 8))
    factor = _float(weight, at, 0, 2) * (0.5 + above(words >> 28 & 15, 0)) * 0.25
    return _times(factor, _signed(_found(grid, codes, 8), _even(runs(words, 7, 4, 127))))


@triton.jit
def _iq2_xs(weight, grid, at):
    codes = tl.load(weight + at[:, None] + 1 + tl.arange(0, 32)[None, :]).to(tl.int32) & 0xFFFF
    factor = _float(weight, at, 0, 2) * (0.5 + above(_spread(weight, at, 66, 4, 16, 1), 0)) * 0.25
    return _times(factor, _signed(_found(grid, codes & 511, 8), _even(codes >> 9)))


@triton.jit
def _iq2_s(weight, grid, at):
    codes = _part(weight, at, 2, 32, 2) | _spread(weight, at, 66, 2, 32, 1) << 8
    factor = _float(weight, at, 0, 2) * (0.5 + above(_spread(weight, at, 74, 4, 16, 1), 0)) * 0.25
    return _times(factor, _signed(_found(grid, codes, 8), _part(weight, at, 34, 32, 2)))


@triton.jit
def _iq3_xxs(weight, grid, at):
    words = _double_words(_pairs(weight, at, 66, 4))
    factor = _float(weight, at, 0, 2) * (0.5 + above(words >> 28 & 15, 0)) * 0.5
    return _times(factor, _signed(_found(grid, _part(weight, at, 2, 64, 2), 4), _even(runs(words, 7, 4, 127))))


@triton.jit
def _iq3_s(weight, grid, at):
    codes = _part(weight, at, 2, 64, 2) | _spread(weight, at, 66, 1, 64, 1) << 8
    factor = _float(weight, at, 0, 2) * (1 + 2 * above(_spread(weight, at, 106, 4, 16, 2), 0))
    return _times(factor, _signed(_found(grid, codes, 4), _part(weight, at, 74, 32, 2)))
