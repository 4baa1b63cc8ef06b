"""Quantization of many matrices at once, at prepare time: group-wise affine codes, and round-to-nearest.

A matrix of O outputs and I inputs becomes w ~= scale * code + offset with `bits` bits a code and one scale and one
offset for each `group` consecutive inputs of an output. Both are rounded to float16 before codes are chosen, so what
is fitted is what is stored. `gptq.py` chooses better codes from the inputs that the matrix sees.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from .pack import BITS, GROUPS, PackError, Quantized

# Shares of the range of a group that are tried as the range of its codes; the full range comes first.
_CLIPS = {1: (0.8, 0.6, 0.5, 0.4, 0.3), 2: (1.0, 0.9, 0.8, 0.7, 0.6, 0.5), 3: (1.0, 0.95, 0.9, 0.8, 0.7)}
_CLIPS_4 = (1.0, 0.95, 0.9, 0.8)
_REFITS = {1: 4, 2: 3, 3: 2, 4: 2}  # least squares turns after the grid; none above 4 bits


@dataclass(frozen=True)
class QuantizedBatch:
    """B matrices as codes.

    Attributes:
        codes: uint8 [B, O, I].
        scales, offsets: float16 [B, O, ceil(I / group)].
    """

    codes: torch.Tensor
    scales: torch.Tensor
    offsets: torch.Tensor
    bits: int
    group: int

    def dequantized(self) -> torch.Tensor:
        """float32 [B, O, I]."""
        inputs = self.codes.shape[2]
        scales, offsets = (spread(t.float(), self.group, inputs) for t in (self.scales, self.offsets))
        return scales * self.codes + offsets

    def matrix(self, index: int, rows: slice = slice(None)) -> Quantized:
        """Matrix `index`, or some of its outputs, for packing.

        Raises:
            PackError: a scale or an offset is not finite.
        """
        arrays: list[np.ndarray] = [
            np.ascontiguousarray(t[index, rows].numpy()) for t in (self.codes, self.scales, self.offsets)
        ]
        return Quantized(arrays[0], arrays[1], arrays[2], self.bits, self.group)

    def replaced(self, where: torch.Tensor, other: QuantizedBatch) -> QuantizedBatch:
        """This batch with the matrices of `other` where `where` [B] is true."""
        mask = where.view(-1, 1, 1)
        return QuantizedBatch(
            torch.where(mask, other.codes, self.codes),
            torch.where(mask, other.scales, self.scales),
            torch.where(mask, other.offsets, self.offsets),
            self.bits,
            self.group,
        )


def check_width(bits: int, group: int) -> None:
    """Refuse what the packed format does not have.

    Raises:
        PackError: bits not in 1, 2, 3, 4, 8, or group not in 32, 64, 128.
    """
    if bits not in BITS or group not in GROUPS:
        raise PackError(f"no replicas of {bits} bits in groups of {group}: choose from {BITS} and {GROUPS}")


def round_to_nearest(weights: torch.Tensor, bits: int, group: int, *, search: bool = True) -> QuantizedBatch:
    """Each weight to its nearest code.

    Args:
        weights: float32 [B, O, I].
        search: fit range, scale and offset of each group by least squares (`fit_group`); False: plain minimum and
            maximum, the textbook's form.

    Raises:
        PackError: unknown bits or group.
    """
    check_width(bits, group)
    batch, outputs, inputs = weights.shape
    codes = torch.empty(weights.shape, dtype=torch.uint8)
    scales = torch.empty(batch, outputs, -(-inputs // group))
    offsets = torch.empty_like(scales)
    uniform = torch.ones(batch, inputs)
    for place, start in enumerate(range(0, inputs, group)):
        part = slice(start, min(start + group, inputs))
        w = weights[..., part]
        scale, offset = fit_group(w, uniform[:, part], bits) if search else _min_max(w, bits)
        scales[..., place], offsets[..., place] = scale, offset
        codes[..., part] = nearest(w, scale.unsqueeze(-1), offset.unsqueeze(-1), bits)
    return QuantizedBatch(codes, scales.half(), offsets.half(), bits, group)


def fit_group(w: torch.Tensor, importance: torch.Tensor, bits: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Scale and offset of one group for least importance-weighted squared error.

    A grid of clipped ranges around the group's mean; from each, turns of nearest codes and least squares for scale
    and offset (at 1 bit: Lloyd's 2-means). The best of all that were seen wins.

    Args:
        w: float32 [B, O, n], the group's weights.
        importance: [B, n], positive.

    Returns:
        float32 [B, O] each, representable in float16.
    """
    d = importance.unsqueeze(1)  # [B, 1, n]
    d = d / d.sum(dim=2, keepdim=True)
    low, high = w.amin(dim=2), w.amax(dim=2)
    mean = (d * w).sum(dim=2)
    levels = (1 << bits) - 1
    best_scale, best_offset = _min_max(w, bits)
    best = _error(w, d, best_scale, best_offset, bits)
    if bits > 4:
        return best_scale, best_offset
    for clip in _CLIPS.get(bits, _CLIPS_4):
        offset = mean + clip * (low - mean)
        scale = (mean + clip * (high - mean) - offset) / levels
        for _turn in range(1 + _REFITS[bits]):
            scale, offset = _half(scale), _half(offset)
            codes = nearest(w, scale.unsqueeze(-1), offset.unsqueeze(-1), bits)
            error = (d * (w - scale.unsqueeze(-1) * codes - offset.unsqueeze(-1)).square()).sum(dim=2)
            better = error < best
            best = torch.where(better, error, best)
            best_scale = torch.where(better, scale, best_scale)
            best_offset = torch.where(better, offset, best_offset)
            scale, offset = _least_squares(w, d, codes, mean, scale, offset)
    return best_scale, best_offset


def nearest(w: torch.Tensor, scale: torch.Tensor, offset: torch.Tensor, bits: int) -> torch.Tensor:
    """The nearest code of each weight, as float32; code 0 where the scale is 0."""
    divisor = torch.where(scale == 0, torch.inf, scale)
    return ((w - offset) / divisor).round_().clamp_(0, (1 << bits) - 1)


def spread(groups: torch.Tensor, group: int, inputs: int) -> torch.Tensor:
    """[..., G] -> [..., I]: each group's value for each of its inputs."""
    return groups.repeat_interleave(group, dim=-1)[..., :inputs]


def _min_max(w: torch.Tensor, bits: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes 0 and 2**bits - 1 on the smallest and the largest weight."""
    offset = _half(w.amin(dim=2))
    return _half((w.amax(dim=2) - offset) / ((1 << bits) - 1)), offset


def _error(
    w: torch.Tensor, d: torch.Tensor, scale: torch.Tensor, offset: torch.Tensor, bits: int
) -> torch.Tensor:
    scale, offset = scale.unsqueeze(-1), offset.unsqueeze(-1)
    return (d * (w - scale * nearest(w, scale, offset, bits) - offset).square()).sum(dim=2)


def _least_squares(
    w: torch.Tensor, d: torch.Tensor, codes: torch.Tensor, mean: torch.Tensor, scale: torch.Tensor, offset: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The line through (code, weight) with least error; as it was where all codes are equal."""
    centre = (d * codes).sum(dim=2)
    spread_codes = (d * codes.square()).sum(dim=2) - centre.square()
    fitted = ((d * codes * w).sum(dim=2) - centre * mean) / spread_codes
    usable = (spread_codes > 1e-6) & (fitted > 0)
    scale = torch.where(usable, fitted, scale)
    return scale, torch.where(usable, mean - scale * centre, offset)


def _half(values: torch.Tensor) -> torch.Tensor:
    """Rounded to float16, as float32."""
    return values.half().float()
