"""Several kernels as one: each expert by the kernel of its own row count's class."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from .expert_ffn import ExpertKernel, Group
from .row_class import RowClass, row_class


class ByRows:
    """Hands the groups of each class to its kernel, a call for each kernel that has any.

    Args:
        kernels: one for each class, in whole or in part the same.
        combining: the kernel that sums.
    """

    def __init__(self, kernels: Mapping[RowClass, ExpertKernel], combining: ExpertKernel) -> None:
        self._kernels, self._combining = dict(kernels), combining

    def run(self, hidden: torch.Tensor, pairs: torch.Tensor, groups: list[Group], top_k: int, y: torch.Tensor) -> None:
        """See `ExpertKernel.run`. Both segments of an expert are of one class, so their order is kept."""
        parts: dict[int, tuple[ExpertKernel, list[Group]]] = {}
        for group in groups:
            kernel = self._kernels[row_class(group[1] - group[0])]
            parts.setdefault(id(kernel), (kernel, []))[1].append(group)
        for kernel, part in parts.values():
            kernel.run(hidden, pairs, part, top_k, y)

    def combine(self, y: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """See `ExpertKernel.combine`."""
        return self._combining.combine(y, weights)
