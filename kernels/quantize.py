"""Quantization of many matrices at once, at prepare time: group-wise affine codes, by rounding or by GPTQ.

A matrix of O outputs and I inputs becomes w ~= scale * code + offset, with one scale and one offset for each `group`
consecutive inputs of an output. Both are rounded to float16 before codes are chosen.

`round_to_nearest` takes each weight to its nearest code. `gptq` (Frantar et al., "GPTQ: Accurate Post-Training
Quantization", ICLR 2023) minimises the output error tr((W - Q) H (W - Q)^T) with the Hessian H = X^T X of inputs X: it
rounds input after input, and compensates in later inputs. The paper takes the rows of U, H^-1 = U^T U, for that
(section 3.3, steps 2 and 3 of Algorithm 1, with lazy updates block by block). We take the same recursion without the
inverse, in its equal form LDLQ (Chee et al., "QuIP", NeurIPS 2023, theorem 6): with H = V V^T, V upper triangular,
M = V diag(V)^-1 and pivots p = diag(V)^2 = 1 / diag(U)^2,

    w'_j = w_j + sum over i < j of M_ij (w_i - q_i),    q_j = round(w'_j)

State per batch of matrices: the compensated weights [B, I, O], M [B, I, I]. Cost: O I^2 / 2 for each matrix.

Beyond the paper: scale and offset of a group are fitted when the sweep reaches it, with inputs weighted by p, the cost
of an error after compensation; and all are fitted again to the final codes in the metric of H (`_refit`), for which the
sweep leaves F = p (w' - q): (W - Q) H = F M^T.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch

from . import _cpu
from .pack import Quantized, check_width
from .packed_ffn import Threads

DAMPING = 0.03  # of the mean diagonal; the paper takes 0.01, but this lowers held-out errors of small experts
_FEW_ROWS = 0.75  # damping where there are as many rows as inputs
_FEW_ROWS_MOST = 2.0
_MOST_DAMPING = 10.0
_ROWS_AT_ONCE = 256  # of a triangular matrix


@dataclass(frozen=True)
class QuantizedBatch:
    """B matrices as codes: codes uint8 [B, O, I], scales and offsets float16 [B, O, ceil(I / group)]."""

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
        """Matrix `index`, or some of its outputs, for packing; raises PackError if a scale or offset is not finite."""
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


def round_to_nearest(weights: torch.Tensor, bits: int, group: int) -> QuantizedBatch:
    """Take each weight float32 [B, O, I] to its nearest code, each group fitted by least squares.

    Raises:
        PackError: unknown bits or group.
    """
    check_width(bits, group)
    return _sweep(weights, None, bits, group).batch(bits, group)


def spread(groups: torch.Tensor, group: int, inputs: int) -> torch.Tensor:
    """[..., G] -> [..., I]: each group's value for each of its inputs."""
    return groups.repeat_interleave(group, dim=-1)[..., :inputs]


def _half(values: torch.Tensor) -> torch.Tensor:
    """Rounded to float16, as float32."""
    return values.half().float()


def gptq(
    weights: torch.Tensor,
    hessians: torch.Tensor,
    bits: int,
    group: int,
    *,
    damping: float | torch.Tensor = DAMPING,
) -> QuantizedBatch:
    """Quantize B matrices, each for its own inputs.

    Args:
        weights: float32 [B, O, I].
        hessians: float32 [B, I, I], X^T X up to a positive factor; may be singular or zero.
        damping: share of the mean diagonal to add, one for all or [B]; raised where a factorisation fails.

    Raises:
        PackError: unknown bits or group.
        ValueError: a Hessian is not finite, or no damping makes it positive definite.
    """
    check_width(bits, group)
    hessian = damped(hessians, damping)
    factor, pivots, hessian = _factor(hessian)
    swept = _sweep(weights, (factor, pivots), bits, group)
    if bits <= 4:
        _refit(swept, _upper_product(factor, swept.errors), hessian, group)
    return swept.batch(bits, group)


def damping_for(rows: torch.Tensor, inputs: int) -> torch.Tensor:
    """Damping [B] of Hessians from `rows` [B] rows.

    Damping in proportion to inputs / rows keeps GPTQ better than round-to-nearest on held-out text, down to an eighth
    as many rows as inputs (docs/replicas-notes.md).
    """
    return (_FEW_ROWS * inputs / rows.clamp(min=1)).clamp(DAMPING, _FEW_ROWS_MOST)


def damped(hessians: torch.Tensor, damping: float | torch.Tensor) -> torch.Tensor:
    """H + damping * mean(diag H) * I; an input that is always zero gets the mean on its diagonal."""
    result = hessians.clone()
    diagonal = result.diagonal(dim1=1, dim2=2)
    mean = diagonal.mean(dim=1, keepdim=True)
    mean = torch.where(mean > 0, mean, 1.0)
    share = torch.as_tensor(damping, dtype=torch.float32).reshape(-1, 1)
    diagonal += torch.where(diagonal <= 0, mean, 0.0) + share * mean
    return result


def _factor(hessians: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """M and the pivots [B, I] of H = V V^T, V upper triangular, and that H, damped further where needed.

    With P the reversal of order and P H P = L L^T: V = P L P.
    """
    if not bool(torch.isfinite(hessians).all()):
        raise ValueError("a Hessian is not finite")
    extra = DAMPING
    while True:
        lower, info = torch.linalg.cholesky_ex(hessians.flip(1, 2))
        failed = info != 0
        if not bool(failed.any()):
            upper = lower.flip(1, 2)
            diagonal = upper.diagonal(dim1=1, dim2=2).clone()
            return upper.div_(diagonal.unsqueeze(1)).contiguous(), diagonal.square_(), hessians
        if extra > _MOST_DAMPING:
            raise ValueError("a Hessian is not positive semi-definite")
        extra *= 10
        hessians = hessians.clone()
        diagonal = hessians.diagonal(dim1=1, dim2=2)
        diagonal += extra * diagonal.mean(dim=1, keepdim=True) * failed.unsqueeze(1)


@dataclass(frozen=True)
class _Swept:
    """Codes as float32 [B, I, O], scales and offsets [B, G, O], and `errors`, F^T [B, I, O]."""

    codes: torch.Tensor
    scales: torch.Tensor
    offsets: torch.Tensor
    errors: torch.Tensor

    def batch(self, bits: int, group: int) -> QuantizedBatch:
        parts = (self.codes.to(torch.uint8), self.scales.half(), self.offsets.half())
        codes, scales, offsets = (t.transpose(1, 2).contiguous() for t in parts)
        return QuantizedBatch(codes, scales, offsets, bits, group)


def _sweep(
    weights: torch.Tensor, factored: tuple[torch.Tensor, torch.Tensor] | None, bits: int, group: int
) -> _Swept:
    """A block is a group, in C++ (`kernels/cpu/fit.hpp`).

    factored: M and the pivots; None: no error is compensated, as with H = I.
    """
    if not bool(torch.isfinite(weights).all()):
        raise ValueError("a weight is not finite")
    batch, outputs, inputs = weights.shape
    given = weights.transpose(1, 2).contiguous()  # [B, I, O]
    left = given.clone()
    rest, codes = torch.empty_like(left), torch.empty_like(left)
    scales, offsets = torch.empty(2, batch, -(-inputs // group), outputs)
    unit, ones, threads = torch.eye(group), torch.ones(group), _threads(torch.get_num_threads())
    for place, start in enumerate(range(0, inputs, group)):
        stop = min(start + group, inputs)
        for b in range(batch):
            corner, pivots = unit, ones
            if factored is not None:
                corner, pivots = factored[0][b, start:, start:], factored[1][b, start:]
            _cpu.gptq_block(
                *threads.handle, outputs, stop - start, bits, left[b, start].data_ptr(), given[b, start].data_ptr(),
                corner.data_ptr(), corner.stride(0), pivots.data_ptr(), codes[b, start].data_ptr(),
                rest[b, start].data_ptr(), scales[b, place].data_ptr(), offsets[b, place].data_ptr(),
            )  # fmt: skip
        if stop < inputs and factored is not None:
            left[:, stop:].baddbmm_(factored[0][:, start:stop, stop:].transpose(1, 2), rest[:, start:stop])
    return _Swept(codes, scales, offsets, left)


def _upper_product(upper: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """[B, I, I] upper triangular times [B, I, O], without most of the zeros."""
    found = torch.empty_like(right)
    for start in range(0, right.shape[1], _ROWS_AT_ONCE):
        stop = start + _ROWS_AT_ONCE
        torch.bmm(upper[:, start:stop, start:], right[:, start:], out=found[:, start:stop])
    return found


@lru_cache(maxsize=1)
def _threads(count: int) -> Threads:
    return Threads(count)


def _refit(swept: _Swept, slope: torch.Tensor, hessian: torch.Tensor, group: int) -> None:
    """Change scales and offsets to those with the least tr(R H R^T), R = W - Q, for these codes; group after group.

    A group's two numbers solve a 2x2 system with its block of H. A row keeps its old ones where rounding to float16
    would increase the error. Cost: O I^2 / 2. slope: H R^T [B, I, O], which changes.
    """
    inputs = swept.codes.shape[1]
    for place, start in enumerate(range(0, inputs, group)):
        part = slice(start, min(start + group, inputs))
        c, g, block = swept.codes[:, part], slope[:, part], hessian[:, part, part]  # [B, n, O], [B, n, n]
        old_scale, old_offset = swept.scales[:, place], swept.offsets[:, place]  # [B, O]
        sums = block.sum(dim=1, keepdim=True)  # [B, 1, n]
        cc, c1 = ((block @ c).mul_(c)).sum(dim=1), (sums @ c).squeeze(1)
        ones = sums.sum(dim=2)
        gc, g1 = (g * c).sum(dim=1), g.sum(dim=1)
        determinant = cc * ones - c1.square()
        usable = determinant > 1e-6 * cc * ones
        safe = torch.where(usable, determinant, 1.0)
        ds = _half(old_scale + (gc * ones - g1 * c1) / safe) - old_scale
        do = _half(old_offset + (g1 * cc - gc * c1) / safe) - old_offset
        # change of the error: delta^T A delta - 2 g^T delta
        change = ds.square() * cc + 2 * ds * do * c1 + do.square() * ones - 2 * (ds * gc + do * g1)
        usable &= (change < 0) & torch.isfinite(change)
        ds, do = torch.where(usable, ds, 0.0), torch.where(usable, do, 0.0)
        old_scale += ds
        old_offset += do
        if part.stop < inputs:
            step = ds.unsqueeze(1) * c + do.unsqueeze(1)  # [B, n, O]
            slope[:, part.stop :].baddbmm_(hessian[:, part.stop :, part], step, alpha=-1)
