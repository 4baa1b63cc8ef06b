"""A router's scores, without top-k: for a layer's own input, or for the input of an earlier layer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from . import _cpu

MOST_ROWS = 64  # above, BLAS is as fast
MOST_GPU_ROWS = 16  # each reads the weights, from the L2 cache; above, a product of matrices is faster
_GPU_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class LinearRouter:
    """The linear part of a router, or of the routers of several layers on the same input.

    Args:
        weight: [D*E, H]. bias: [D*E], or None. layers: D.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, layers: int = 1) -> None:
        self._weight, self._bias, self.layers = weight, bias, layers
        tensors = [weight] if bias is None else [weight, bias]
        self._native = all(t.dtype == torch.float32 and t.device.type == "cpu" and t.is_contiguous() for t in tensors)
        plain = weight.dtype in _GPU_DTYPES and weight.is_contiguous()
        self._operands = (weight, bias, layers) if plain else None  # of a kernel on a GPU
        self._outputs, self._width = weight.shape
        self._experts = self._outputs // layers

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """Scores [T, E], of several layers [T, D, E], for hidden [T, H], in the weight's dtype, on its device."""
        found = nn.functional.linear(hidden.to(self._weight.dtype), self._weight, self._bias)
        return found if self.layers == 1 else found.view(-1, self.layers, self._experts)

    @property
    def operands(self) -> tuple[torch.Tensor, torch.Tensor | None] | None:
        """Weight and bias for native calls; None: they are of another dtype, on a GPU, or not contiguous."""
        return (self._weight, self._bias) if self._native else None

    def on_device(self, rows: int) -> tuple[torch.Tensor, torch.Tensor | None, int] | None:
        """Weight, bias and layers for a kernel that computes the scores of few rows. None: it cannot.

        Its scores are sums in float32, those of `__call__` rounded to the weight's dtype.
        """
        return self._operands if rows <= MOST_GPU_ROWS else None

    def on_host(self, hidden: torch.Tensor, softmax: bool) -> NDArray[np.float32] | None:
        """The scores of few rows in one native call; softmax: over the experts. None: a router or rows not for it."""
        rows, width = hidden.shape
        if width != self._width or hidden.dtype != torch.float32 or not hidden.is_contiguous():
            return None
        if not self._native or not 0 < rows <= MOST_ROWS:
            return None
        layers, experts = self.layers, self._experts
        out = np.empty((rows, experts) if layers == 1 else (rows, layers, experts), np.float32)
        weight, bias = self._weight.data_ptr(), 0 if self._bias is None else self._bias.data_ptr()
        _cpu.router_scores(
            hidden.data_ptr(), rows, weight, self._width, self._outputs, bias, experts if softmax else 0, out
        )
        return out


def windows(routers: Sequence[Any], ahead: int) -> list[LinearRouter | None]:
    """For each layer the routers of the `ahead` layers behind it in one, all on the same memory; None: of no layer.

    Without a window where a layer has no linear router.
    """
    linear = [router for router in routers if isinstance(router, LinearRouter)]
    if len(linear) != len(routers):
        return [None] * len(routers)
    weights, biases = [r._weight for r in linear], [r._bias for r in linear if r._bias is not None]
    weight, bias, experts = torch.cat(weights), torch.cat(biases) if biases else None, linear[0]._experts
    found: list[LinearRouter | None] = []
    for layer in range(1, len(routers)):
        stop = min(layer + ahead, len(routers))
        rows = slice(layer * experts, stop * experts)
        found.append(LinearRouter(weight[rows], None if bias is None else bias[rows], stop - layer))
    return [*found, None]
