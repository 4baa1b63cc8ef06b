"""Carry out a layer's plan: start loads, run what is resident, run what arrives, combine. Decides nothing."""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch

from ...kernels.expert_ffn import ExpertKernel
from ..policies.plan import LayerPlan
from .cache import ExpertCache


@dataclass(frozen=True, slots=True)
class Routing:
    """A layer's routing, with its (token, expert) pairs sorted by expert.

    experts: the distinct experts. starts: where each one's pairs start in `pairs`, and N at the end.
    pairs: pair numbers t*K + k, grouped by expert [N], on the compute device.
    """

    tokens: int
    top_k: int
    experts: list[int]
    starts: list[int]
    pairs: torch.Tensor

    @staticmethod
    def of(ids: torch.Tensor) -> Routing:
        """Sort the pairs of ids [T, K]; reads the ids on the host."""
        tokens, top_k = ids.shape
        if tokens == 1:
            experts = ids[0].tolist()
            if len(set(experts)) == top_k:
                return Routing(1, top_k, experts, *_in_order(top_k, ids.device))
        flat = ids.cpu().numpy().ravel()
        order = flat.argsort(kind="stable")
        counts = np.bincount(flat)
        used = counts.nonzero()[0]
        starts = [0, *counts[used].cumsum().tolist()]
        return Routing(tokens, top_k, used.tolist(), starts, torch.from_numpy(order).to(ids.device))


@cache
def _in_order(top_k: int, device: torch.device) -> tuple[list[int], torch.Tensor]:
    """Starts and pairs of one token whose experts all differ: as they come. Shared, so never written to."""
    return list(range(top_k + 1)), torch.arange(top_k, device=device)


class Dispatcher:
    """Runs plans of one cache.

    The result of a pair does not depend on when its expert arrived, and pairs are combined in
    routing order, so budgets, prefetch and timing change no bit of the output. That holds where the
    bytes of one slot in each tensor of the pool are a multiple of 64, as in every published model: all slots
    are then aligned alike, and a GEMM may sum in another order on operands that are aligned otherwise.
    """

    def __init__(self, cache: ExpertCache, experts_per_layer: int) -> None:
        self._cache = cache
        self._experts = experts_per_layer

    def run(
        self,
        layer: int,
        plan: LayerPlan,
        routing: Routing,
        hidden: torch.Tensor,
        weights: torch.Tensor,
        kernel: ExpertKernel,
        post: torch.nn.Module | None,
    ) -> torch.Tensor:
        """The layer's output [T, H] for hidden [T, H] and routing weights [T, K].

        Loads at `after = 0` are already issued. Raises RuntimeFailure if a copy failed; the caller abandons
        what is still pinned.
        """
        cache, base, starts = self._cache, layer * self._experts, routing.starts
        began_s = time.perf_counter() if cache.timeline.enabled else 0.0
        rows = {base + e: (starts[i], starts[i + 1]) for i, e in enumerate(routing.experts)}
        y = hidden.new_empty((starts[-1], hidden.shape[1]))  # [N, H]
        done = 0
        for stop, issue_next in self._steps(plan):
            keys = plan.run[done:stop]
            groups = [(*rows[key], cache.await_expert(key, layer)) for key in keys]
            kernel.run(hidden, routing.pairs, groups, routing.top_k, y)
            cache.ran(keys)
            done = stop
            if issue_next:
                cache.issue([load for load in plan.loads if load.after == stop])
        out = kernel.combine(y if post is None else post(y), weights)
        if cache.timeline.enabled:
            cache.timeline.span("compute", f"L{layer} experts", began_s, time.perf_counter())
        return out if out.dtype == hidden.dtype else out.to(hidden.dtype)

    @staticmethod
    def _steps(plan: LayerPlan) -> list[tuple[int, bool]]:
        """(run up to here, then issue loads): residents together, arrivals one by one as they land."""
        total = len(plan.run)
        if plan.resident == total:
            return [(total, False)]
        issue_at = {load.after for load in plan.loads if load.after}
        stops = issue_at | set(range(plan.resident + 1, total + 1)) | {plan.resident}
        return [(stop, stop in issue_at) for stop in sorted(stops - {0})]
