"""A stepped link (`LinkSettings.layer_us`): the engine computes for real, on a clock that advances by a stated time a
layer. What has arrived when a layer runs is the same on every machine.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ..core import _core

if TYPE_CHECKING:
    from ...kernels.expert_ffn import ExpertKernel


class SteppedKernel:
    """A kernel that advances the clock by `layer_s` after each layer, whatever the number of rows."""

    def __init__(self, kernel: ExpertKernel, clock: _core.Clock, layer_s: float) -> None:
        self.run, self._combine, self._clock, self._layer_s = kernel.run, kernel.combine, clock, layer_s

    def combine(self, y: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        out = self._combine(y, weights)
        self._clock.advance(self._layer_s)
        return out
