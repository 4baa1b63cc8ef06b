"""Block shapes of the expert kernels: a few for each class of row counts, one of which is chosen at start.

All of a class accumulate over the same index in the same order on the same tensor-core instructions (M below 64 takes
the warp-level ones on every GPU, from 64 on Hopper's take warp groups), so that which is chosen changes no bit.
Shared memory is stages * (M*K + K*N') * bytes of an element, N' being 2N for gate_up: at most 96 KiB, so that two
programs fit on an SM of Hopper.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from ..row_class import RowClass

PAD = 128  # neurons: rows of activations are zero up to a multiple of it; every K of down divides it, and N of gate_up


@dataclass(frozen=True)
class Blocks:
    """Of one matrix product: N columns (neurons of gate_up, hidden of down), K summed over, warps, pipeline stages."""

    N: int
    K: int
    warps: int
    stages: int


@dataclass(frozen=True)
class Shape:
    """M rows of an expert for each program, and the blocks of its two products."""

    M: int
    gate_up: Blocks
    down: Blocks

    def __str__(self) -> str:
        (g, d) = (self.gate_up, self.down)
        return f"{self.M}/{g.N}x{g.K}w{g.warps}s{g.stages}/{d.N}x{d.K}w{d.warps}s{d.stages}"


_HALF: Mapping[RowClass, tuple[Shape, ...]] = {
    "decode": (
        Shape(16, Blocks(32, 128, 4, 4), Blocks(64, 64, 4, 5)),
        Shape(16, Blocks(16, 256, 4, 4), Blocks(32, 128, 4, 5)),
        Shape(16, Blocks(16, 128, 2, 5), Blocks(64, 128, 4, 4)),
    ),
    "short": (
        Shape(64, Blocks(32, 64, 4, 4), Blocks(64, 64, 4, 4)),
        Shape(64, Blocks(64, 64, 4, 4), Blocks(128, 64, 4, 4)),
    ),
    "prefill": (
        Shape(128, Blocks(64, 64, 8, 3), Blocks(128, 64, 8, 3)),
        Shape(64, Blocks(64, 64, 4, 4), Blocks(128, 64, 4, 4)),
    ),
}
# on CUDA cores, for tests: no tensor core multiplies float32 exactly
_FLOAT32: Mapping[RowClass, tuple[Shape, ...]] = {
    "decode": (Shape(16, Blocks(16, 64, 4, 3), Blocks(32, 64, 4, 3)),),
    "short": (Shape(32, Blocks(16, 32, 4, 3), Blocks(32, 32, 4, 3)),),
    "prefill": (Shape(64, Blocks(32, 32, 8, 3), Blocks(64, 32, 8, 3)),),
}


def shapes_for(dtype: torch.dtype) -> Mapping[RowClass, tuple[Shape, ...]]:
    """The candidates for operands of this dtype, by class, the first of each being the default."""
    return _FLOAT32 if dtype == torch.float32 else _HALF
