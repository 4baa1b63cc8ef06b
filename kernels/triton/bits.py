"""Bits of weights as numbers, in registers: integers of few bits to float32, exactly, and fields of packed words.

Bits are placed as a float32 of a small exponent and multiplied by a power of two: right for subnormal codes, too.
"""

# mypy: allow-untyped-defs
# the types of a kernel's arguments are those of its launch
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def e4m3(byte):
    """float8 e4m3fn; NaN is not kept."""
    bits = ((byte & 128) << 24) | ((byte & 127) << 20)
    return bits.to(tl.float32, bitcast=True) * 1.329227995784916e36  # 2**120


@triton.jit
def e2m1(code):
    bits = ((code & 8) << 28) | ((code & 7) << 22)
    return bits.to(tl.float32, bitcast=True) * 8.507059173023462e37  # 2**126


@triton.jit
def power(byte):
    """2**(byte - 127)."""
    return tl.where(byte == 0, 0x00400000, byte << 23).to(tl.float32, bitcast=True)


@triton.jit
def above(code, LESS: tl.constexpr):
    """code - LESS, of codes from 0 to 2**22: without the slow conversion of integers."""
    return (code | 0x4B000000).to(tl.float32, bitcast=True) - (8388608.0 + LESS)


@triton.jit
def half(word):
    """The float16 in the low bits of an int32."""
    return (word & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def fields(codes, WIDTH: tl.constexpr, COUNT: tl.constexpr, MASK: tl.constexpr):
    """[N, n] -> [N, COUNT n]: bits 0, WIDTH, 2 WIDTH, .. of all codes and above, under a mask."""
    found = codes[:, None, :] >> (WIDTH * tl.arange(0, COUNT))[None, :, None] & MASK
    return tl.reshape(found, (codes.shape[0], COUNT * codes.shape[1]))


@triton.jit
def runs(codes, WIDTH: tl.constexpr, COUNT: tl.constexpr, MASK: tl.constexpr):
    """[N, n] -> [N, n COUNT]: the fields of each code after another."""
    found = codes[:, :, None] >> (WIDTH * tl.arange(0, COUNT))[None, None, :] & MASK
    return tl.reshape(found, (codes.shape[0], codes.shape[1] * COUNT))


@triton.jit
def bytes_of(at, there, MASKED: tl.constexpr, WORD: tl.constexpr, N: tl.constexpr, COUNT: tl.constexpr):
    """[N, COUNT] bytes as int32, from pointers to words [N, COUNT / WORD]; those that are not `there` are 0."""
    word = tl.load(at, mask=there, other=0) if MASKED else tl.load(at)
    word = word.to(tl.int32)
    if WORD == 4:
        even, odd = tl.join(word & 255, (word >> 16) & 255), tl.join((word >> 8) & 255, (word >> 24) & 255)
        word = tl.join(even, odd)
    elif WORD == 2:
        word = tl.join(word & 255, (word >> 8) & 255)
    else:
        word = word & 255
    return tl.reshape(word, (N, COUNT))


@triton.jit
def in_turn(byte, N: tl.constexpr, COUNT: tl.constexpr):
    """[N, COUNT] codes of four bits from [N, COUNT / 2] bytes: of each the low, then the high one."""
    return tl.reshape(tl.join(byte & 15, byte >> 4), (N, COUNT))


@triton.jit
def low_then_high(byte, N: tl.constexpr, PARTS: tl.constexpr, SIZE: tl.constexpr):
    """[N, 2 PARTS, SIZE] codes of four bits: of each run of SIZE bytes all low, then all high ones."""
    both = tl.reshape(byte, (N, PARTS, SIZE))
    both = tl.permute(tl.join(both & 15, both >> 4), (0, 1, 3, 2))
    return tl.reshape(both, (N, 2 * PARTS, SIZE))
