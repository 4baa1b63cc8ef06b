"""A layer's routing as the mechanism uses it: (token, expert) pairs sorted by expert."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from .host_view import upload

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class Routing:
    """A layer's routing, with its (token, expert) pairs sorted by expert.

    experts: the distinct experts. starts: where each one's pairs start in `pairs`, and N at the end.
    pairs: pair numbers t*K + k, grouped by expert [N], on the compute device. order: the same on the host.
    """

    tokens: int
    top_k: int
    experts: list[int]
    starts: list[int]
    pairs: torch.Tensor
    order: NDArray[np.int64]

    @property
    def counts(self) -> list[int]:
        """Pairs of each expert: the tokens that picked it."""
        starts = self.starts
        return [stop - start for start, stop in itertools.pairwise(starts)]

    @staticmethod
    def of(ids: NDArray[np.integer], device: torch.device) -> Routing:
        """Sort the pairs of ids [T, K], for compute on `device`."""
        tokens, top_k = ids.shape
        if tokens == 1:
            experts = ids[0].tolist()
            if len(set(experts)) == top_k:
                return Routing(1, top_k, experts, *_in_order(top_k, device))
        flat = ids.ravel()
        order = flat.argsort(kind="stable")
        counts = np.bincount(flat)
        used = counts.nonzero()[0]
        starts = [0, *counts[used].cumsum().tolist()]
        return Routing(tokens, top_k, used.tolist(), starts, upload(order, device), order)

    def pairs_of(self, experts: Sequence[int]) -> torch.Tensor:
        """The pairs of some of the layer's experts, in the order given [n]."""
        import torch

        place = {expert: i for i, expert in enumerate(self.experts)}
        spans = [(self.starts[place[e]], self.starts[place[e] + 1]) for e in experts]
        return torch.cat([self.pairs[start:stop] for start, stop in spans])


@cache
def _in_order(top_k: int, device: torch.device) -> tuple[list[int], torch.Tensor, NDArray[np.int64]]:
    """Starts and pairs of one token whose experts all differ: as they come. Shared, so never written to."""
    import torch

    return list(range(top_k + 1)), torch.arange(top_k, device=device), np.arange(top_k)
