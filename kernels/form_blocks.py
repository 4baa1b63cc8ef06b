"""GGUF's blocks in torch, on any device: bytes [N, bytes of a block] -> float32 [N, weights], as `gguf` has them.

A weight is a code of few bits times a scale, in some types less a minimum. The IQ types find eight or four weights at a
time in a grid, which is the package's, and have a sign for each, or an eighth for each eight of them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch

from .forms import E2M1

_IQ4 = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
_EIGHTH = 0.125


def dequantize_blocks(kind: str, blocks: torch.Tensor) -> torch.Tensor:
    """The weights of blocks. kind: one of `forms.BLOCKS`."""
    return _BLOCKS[kind](blocks).reshape(len(blocks), -1)


# --- parts of a block ----------------------------------------------------------------------------------------------


def _f16(blocks: torch.Tensor, at: int) -> torch.Tensor:
    return blocks[:, at : at + 2].contiguous().view(torch.float16).float()  # [N, 1]


def _words(blocks: torch.Tensor, first: int, last: int) -> torch.Tensor:
    """Bytes as words of 16 bits, int32 [N, (last - first) / 2]."""
    return blocks[:, first:last].contiguous().view(torch.int16).int() & 0xFFFF


def _double_words(blocks: torch.Tensor) -> torch.Tensor:
    """Bytes [.., 4 n] as words of 32 bits, int64 [.., n]."""
    return blocks.contiguous().view(torch.int32).long() & 0xFFFFFFFF


def _fields(codes: torch.Tensor, width: int, count: int, mask: int) -> torch.Tensor:
    """[.., n] -> [.., count, n]: bits 0, width, 2 width, .. of each code and above, under a mask."""
    places = torch.arange(0, width * count, width, dtype=codes.dtype, device=codes.device)
    return codes[..., None, :] >> places[:, None] & mask


def _runs(codes: torch.Tensor, width: int, count: int, mask: int) -> torch.Tensor:
    """[N, n] -> [N, n * count]: the fields of each code after another."""
    return _fields(codes, width, count, mask).transpose(-1, -2).flatten(1)


def _halves(codes: torch.Tensor) -> torch.Tensor:
    """[.., n] bytes -> [.., 2 n]: all low halves, then all high ones."""
    return _fields(codes, 4, 2, 15).flatten(-2)


def _two_bits(codes: torch.Tensor) -> torch.Tensor:
    """[N, 64] bytes -> [N, 256] codes: each 32 bytes hold four times 32."""
    return _fields(codes.reshape(-1, 2, 32), 2, 4, 3).flatten(1)


def _scaled(scales: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """[N, n] times [N, n * each], without their blocks' shape."""
    return scales[..., None] * weights.reshape(*scales.shape, -1)


def _values(table: torch.Tensor, codes: torch.Tensor) -> torch.Tensor:
    return table.to(codes.device)[codes.int()]


# --- blocks of 32 --------------------------------------------------------------------------------------------------


def _q8_0(blocks: torch.Tensor) -> torch.Tensor:
    return blocks[:, 2:].contiguous().view(torch.int8).float() * _f16(blocks, 0)


def _q4_0(blocks: torch.Tensor) -> torch.Tensor:
    return (_halves(blocks[:, 2:]).float() - 8) * _f16(blocks, 0)


def _q4_1(blocks: torch.Tensor) -> torch.Tensor:
    return _halves(blocks[:, 4:]) * _f16(blocks, 0) + _f16(blocks, 2)


def _fives(blocks: torch.Tensor, at: int) -> torch.Tensor:
    return _halves(blocks[:, at + 4 :]) | _runs(blocks[:, at : at + 4], 1, 8, 1) << 4


def _q5_0(blocks: torch.Tensor) -> torch.Tensor:
    return (_fives(blocks, 2).float() - 16) * _f16(blocks, 0)


def _q5_1(blocks: torch.Tensor) -> torch.Tensor:
    return _fives(blocks, 4) * _f16(blocks, 0) + _f16(blocks, 2)


def _iq4_nl(blocks: torch.Tensor) -> torch.Tensor:
    return _values(torch.tensor(_IQ4, dtype=torch.float32), _halves(blocks[:, 2:])) * _f16(blocks, 0)


def _mxfp4(blocks: torch.Tensor) -> torch.Tensor:
    bits = blocks[:, :1].int() << 23  # an exponent; 2**-127 is subnormal
    scales = torch.where(blocks[:, :1] == 0, 0x00400000, bits).view(torch.float32)
    return _values(torch.from_numpy(E2M1), _halves(blocks[:, 1:])) * scales


# --- blocks of 256: K ----------------------------------------------------------------------------------------------


def _q2_k(blocks: torch.Tensor) -> torch.Tensor:
    scales, minima = blocks[:, :16] & 15, blocks[:, :16] >> 4
    return _scaled(_f16(blocks, 80) * scales, _two_bits(blocks[:, 16:80])) - (_f16(blocks, 82) * minima)[..., None]


def _q3_k(blocks: torch.Tensor) -> torch.Tensor:
    third = _fields(blocks[:, :32], 1, 8, 1).flatten(1)
    codes = (_two_bits(blocks[:, 32:96]) | third << 2).float() - 4
    high = _fields(blocks[:, 104:108], 2, 4, 3).flatten(1)
    scales = (_halves(blocks[:, 96:104]) | high << 4).float() - 32
    return _scaled(_f16(blocks, 108) * scales, codes)


def _k_codes(blocks: torch.Tensor, codes: torch.Tensor) -> torch.Tensor:
    """Codes [N, 8, 32] of Q4_K and Q5_K with the scales and minima in bytes 0 to 15 of a block."""
    first, second, rest = (blocks[:, at : at + 4] for at in (4, 8, 12))
    scales = torch.cat([first & 63, rest & 15 | first >> 2 & 48], 1)
    minima = torch.cat([second & 63, rest >> 4 | second >> 2 & 48], 1)
    return _scaled(_f16(blocks, 0) * scales, codes) - (_f16(blocks, 2) * minima)[:, :, None]


def _q4_k(blocks: torch.Tensor) -> torch.Tensor:
    return _k_codes(blocks, _halves(blocks[:, 16:].reshape(-1, 4, 32)))


def _q5_k(blocks: torch.Tensor) -> torch.Tensor:
    codes = _halves(blocks[:, 48:].reshape(-1, 4, 32)).view(-1, 8, 32)
    return _k_codes(blocks, codes | _fields(blocks[:, 16:48], 1, 8, 1) << 4)


def _q6_k(blocks: torch.Tensor) -> torch.Tensor:
    low = _halves(blocks[:, :128].reshape(-1, 2, 64)).flatten(1)
    codes = (low | _two_bits(blocks[:, 128:192]) << 4).float() - 32
    return _scaled(_f16(blocks, 208) * blocks[:, 192:208].contiguous().view(torch.int8), codes)


# --- blocks of 256: IQ and ternary ---------------------------------------------------------------------------------


@cache
def grid_of(kind: str, device: torch.device) -> torch.Tensor:
    """The grid of a type of the package, [entries, weights]."""
    from gguf import quants  # a tenth of a second, for the few that dequantize

    found = getattr(quants, kind)
    found.init_grid()
    return torch.from_numpy(found.grid.reshape(found.grid_shape).copy()).to(device)


def _found(kind: str, codes: torch.Tensor) -> torch.Tensor:
    return grid_of(kind, codes.device)[codes.long()].flatten(1)


def _signs(bits: torch.Tensor) -> torch.Tensor:
    """[N, n] bytes -> [N, 8 n] of 1 and -1."""
    return 1 - 2 * _runs(bits, 1, 8, 1).float()


def _even_signs(bits: torch.Tensor) -> torch.Tensor:
    """The same of seven bits and an eighth that makes the number of those that are set even."""
    odd = bits ^ bits >> 4
    odd = odd ^ odd >> 2
    return _signs(bits | ((odd ^ odd >> 1) & 1) << 7)


def _iq2_xxs(blocks: torch.Tensor) -> torch.Tensor:
    units = blocks[:, 2:].reshape(-1, 8, 8)
    words = _double_words(units[..., 4:]).flatten(1)  # [N, 8]
    scales = _f16(blocks, 0) * (0.5 + (words >> 28)) * 0.25
    return _scaled(scales, _found("IQ2_XXS", units[..., :4].flatten(1)) * _even_signs(_runs(words, 7, 4, 127)))


def _iq2_xs(blocks: torch.Tensor) -> torch.Tensor:
    codes = _words(blocks, 2, 66)
    scales = _f16(blocks, 0) * (0.5 + _runs(blocks[:, 66:], 4, 2, 15)) * 0.25
    return _scaled(scales, _found("IQ2_XS", codes & 511) * _even_signs(codes >> 9))


def _iq2_s(blocks: torch.Tensor) -> torch.Tensor:
    codes = blocks[:, 2:34].int() | _runs(blocks[:, 66:74], 2, 4, 3).int() << 8
    scales = _f16(blocks, 0) * (0.5 + _runs(blocks[:, 74:], 4, 2, 15)) * 0.25
    return _scaled(scales, _found("IQ2_S", codes) * _signs(blocks[:, 34:66]))


def _iq3_xxs(blocks: torch.Tensor) -> torch.Tensor:
    words = _double_words(blocks[:, 66:])
    scales = _f16(blocks, 0) * (0.5 + (words >> 28)) * 0.5
    return _scaled(scales, _found("IQ3_XXS", blocks[:, 2:66]) * _even_signs(_runs(words, 7, 4, 127)))


def _iq3_s(blocks: torch.Tensor) -> torch.Tensor:
    codes = blocks[:, 2:66].int() | _runs(blocks[:, 66:74], 1, 8, 1).int() << 8
    scales = _f16(blocks, 0) * (1 + 2 * _runs(blocks[:, 106:], 4, 2, 15))
    return _scaled(scales, _found("IQ3_S", codes) * _signs(blocks[:, 74:106]))


def _iq1_s(blocks: torch.Tensor) -> torch.Tensor:
    high = _words(blocks, 34, 50)
    codes = blocks[:, 2:34].int() | _runs(high, 3, 4, 7) << 8
    eighths = _EIGHTH - 2 * _EIGHTH * (high >> 15)
    weights = _found("IQ1_S", codes).view(-1, 8, 32) + eighths[..., None]
    return _scaled(_f16(blocks, 0) * (2 * (high >> 12 & 7) + 1), weights)


def _iq1_m(blocks: torch.Tensor) -> torch.Tensor:
    words, high = _words(blocks, 48, 56), _runs(blocks[:, 32:48], 4, 2, 15).int()
    places = torch.arange(0, 16, 4, device=blocks.device)
    bits = (words >> 12 << places).sum(1, keepdim=True).to(torch.int16)
    whole = bits.view(torch.float16).float()
    codes = blocks[:, :32].int() | (high & 7) << 8
    eighths = _EIGHTH - 2 * _EIGHTH * (high >> 3)
    weights = _found("IQ1_M", codes).view(-1, 32, 8) + eighths[..., None]
    return _scaled(whole * (2 * _runs(words, 3, 4, 7) + 1), weights)


def _iq4_xs(blocks: torch.Tensor) -> torch.Tensor:
    scales = _runs(blocks[:, 4:8], 4, 2, 15).int() | _runs(_words(blocks, 2, 4), 2, 8, 3) << 4
    codes = _halves(blocks[:, 8:].reshape(-1, 8, 16))
    return _scaled(_f16(blocks, 0) * (scales - 32), _values(torch.tensor(_IQ4, dtype=torch.float32), codes))


def _tq1_0(blocks: torch.Tensor) -> torch.Tensor:
    powers = torch.tensor([1, 3, 9, 27, 81], dtype=torch.uint8, device=blocks.device)[:, None]
    parts = (blocks[:, None, :32] * powers, blocks[:, None, 32:48] * powers, blocks[:, None, 48:52] * powers[:4])
    digits = torch.cat([part.flatten(1) for part in parts], 1)
    return ((digits.int() * 3 >> 8) - 1) * _f16(blocks, 52)


def _tq2_0(blocks: torch.Tensor) -> torch.Tensor:
    return (_two_bits(blocks[:, :64]).float() - 1) * _f16(blocks, 64)


_BLOCKS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "q8_0": _q8_0, "q4_0": _q4_0, "q4_1": _q4_1, "q5_0": _q5_0, "q5_1": _q5_1, "iq4_nl": _iq4_nl, "mxfp4_gguf": _mxfp4,
    "q2_k": _q2_k, "q3_k": _q3_k, "q4_k": _q4_k, "q5_k": _q5_k, "q6_k": _q6_k, "iq1_s": _iq1_s, "iq1_m": _iq1_m,
    "iq2_xxs": _iq2_xxs, "iq2_xs": _iq2_xs, "iq2_s": _iq2_s, "iq3_xxs": _iq3_xxs, "iq3_s": _iq3_s, "iq4_xs": _iq4_xs,
    "tq1_0": _tq1_0, "tq2_0": _tq2_0,
}  # fmt: skip
