"""A router's scores, without top-k: for a layer's own input, or for the input of an earlier layer."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from . import _cpu

_MOST_ROWS = 64  # above, BLAS is as fast


class LinearRouter:
    """The linear part of a router.

    Args:
        weight: [E, H]. bias: [E], or None.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self._weight, self._bias = weight, bias
        plain = [weight] if bias is None else [weight, bias]
        self._native = all(t.dtype == torch.float32 and t.device.type == "cpu" and t.is_contiguous() for t in plain)
        self._experts, self._width = weight.shape

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """Scores [T, E] for hidden [T, H], in the weight's dtype, on its device."""
        return nn.functional.linear(hidden.to(self._weight.dtype), self._weight, self._bias)

    def on_host(self, hidden: torch.Tensor, softmax: bool) -> NDArray[np.float32] | None:
        """The scores of few rows in one native call; softmax: over the experts. None: a router or rows not for it."""
        weight, (rows, width) = self._weight, hidden.shape
        fits = self._native and 0 < rows <= _MOST_ROWS and width == self._width
        if not (fits and hidden.dtype == torch.float32 and hidden.is_contiguous()):
            return None
        out = np.empty((rows, self._experts), np.float32)
        bias: Any = 0 if self._bias is None else self._bias.data_ptr()
        _cpu.router_scores(hidden.data_ptr(), rows, weight.data_ptr(), width, self._experts, bias, softmax, out)
        return out
