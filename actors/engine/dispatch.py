"""Carry out a layer's plan: send, start loads, run residents, run arrivals, join, combine. Decides nothing."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch

from ...kernels.expert_ffn import ExpertKernel
from ..policies.plan import LayerPlan, LoadOnMiss
from .cache import ExpertCache
from .remote import RemoteCall, RemoteExperts


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

    def pairs_of(self, experts: Sequence[int]) -> torch.Tensor:
        """The pairs of some of the layer's experts, in the order given [n]."""
        place = {expert: i for i, expert in enumerate(self.experts)}
        spans = [(self.starts[place[e]], self.starts[place[e] + 1]) for e in experts]
        return torch.cat([self.pairs[start:stop] for start, stop in spans])


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

    def __init__(
        self, cache: ExpertCache, experts_per_layer: int, planner: LoadOnMiss, remote: RemoteExperts | None = None
    ) -> None:
        self._cache, self._experts = cache, experts_per_layer
        self._planner, self._remote = planner, remote

    def send(
        self, layer: int, plan: LayerPlan, routing: Routing, hidden: torch.Tensor, weights: torch.Tensor
    ) -> RemoteCall | None:
        """Hand the plan's remote experts to the NDP worker; None when it was lost since the plan was made."""
        assert self._remote is not None  # a plan names remote experts only where there is a worker
        base = layer * self._experts
        place = {expert: i for i, expert in enumerate(routing.experts)}
        ranges = [(place[r.key - base], r.bits) for r in plan.remote]
        return self._remote.send(layer, routing, ranges, hidden, weights)

    def run(
        self,
        layer: int,
        plan: LayerPlan,
        routing: Routing,
        hidden: torch.Tensor,
        weights: torch.Tensor,
        kernel: ExpertKernel,
        post: torch.nn.Module | None,
        call: RemoteCall | None = None,
    ) -> torch.Tensor:
        """The layer's output [T, H] for hidden [T, H] and routing weights [T, K].

        Loads at `after = 0` are already issued, and `call` is what `send` gave. Raises RuntimeFailure if a copy
        failed; the caller abandons what is still pinned.
        """
        cache, starts = self._cache, routing.starts
        began_s = time.perf_counter() if cache.timeline.enabled else 0.0
        y = hidden.new_empty((starts[-1], hidden.shape[1]))  # [N, H]
        self._run_here(layer, plan, routing, hidden, kernel, y)
        if plan.remote:
            partial = self._join(layer, call)
            if partial is None:
                self._recompute(layer, plan, routing, hidden, kernel, y)
            else:
                base = layer * self._experts
                elsewhere = routing.pairs_of([r.key - base for r in plan.remote])
                y[elsewhere] = 0
        out = kernel.combine(y if post is None else post(y), weights)
        if plan.remote and partial is not None:
            assert call is not None
            out = out.index_add(0, call.rows, partial.to(device=out.device, dtype=out.dtype))
        if cache.timeline.enabled:
            cache.timeline.span("compute", f"L{layer} experts", began_s, time.perf_counter())
        return out if out.dtype == hidden.dtype else out.to(hidden.dtype)

    def _run_here(
        self,
        layer: int,
        plan: LayerPlan,
        routing: Routing,
        hidden: torch.Tensor,
        kernel: ExpertKernel,
        y: torch.Tensor,
    ) -> None:
        """Rows of `y` for the pairs of the experts in `plan.run`."""
        cache, base, starts = self._cache, layer * self._experts, routing.starts
        rows = {base + e: (starts[i], starts[i + 1]) for i, e in enumerate(routing.experts)}
        done = 0
        for stop, issue_next in self._steps(plan):
            keys = plan.run[done:stop]
            groups = [(*rows[key], cache.await_expert(key, layer)) for key in keys]
            kernel.run(hidden, routing.pairs, groups, routing.top_k, y)
            cache.ran(keys)
            done = stop
            if issue_next:
                cache.issue([load for load in plan.loads if load.after == stop])

    def _join(self, layer: int, call: RemoteCall | None) -> torch.Tensor | None:
        """The NDP worker's part [rows, H], after waiting for it; None when there will be none."""
        if call is None:
            return None
        stats, start_s = self._cache.stats.layers[layer], time.perf_counter()
        answer = call.result()
        end_s = time.perf_counter()
        stats.ndp_wait_s += end_s - start_s
        timeline = self._cache.timeline
        if timeline.enabled:
            timeline.span("wait", f"L{layer} NDP wait", start_s, end_s)
        if answer is None:
            return None
        if timeline.enabled:
            timeline.span("ndp", f"L{layer} NDP", call.sent_s, call.sent_s + answer.paced_s)
        stats.ndp_calls += 1
        stats.ndp_experts += call.experts
        stats.ndp_tokens += call.pairs
        stats.ndp_measured_s += answer.measured_s
        stats.ndp_modelled_s += answer.modelled_s
        return torch.tensor(answer.partial)  # a copy: what arrived is read-only

    def _recompute(
        self,
        layer: int,
        plan: LayerPlan,
        routing: Routing,
        hidden: torch.Tensor,
        kernel: ExpertKernel,
        y: torch.Tensor,
    ) -> None:
        """The worker is lost or late: load its experts and run them here, in full precision."""
        cache, keys = self._cache, [r.key for r in plan.remote]
        again = self._planner.plan(keys, cache.residency, cache.eviction)
        cache.begin(layer, again)
        cache.issue([load for load in again.loads if not load.after])
        self._run_here(layer, again, routing, hidden, kernel, y)
        base = layer * self._experts
        cache.stats.layers[layer].ndp_recomputed += len(routing.pairs_of([key - base for key in keys]))

    @staticmethod
    def _steps(plan: LayerPlan) -> list[tuple[int, bool]]:
        """(run up to here, then issue loads): residents together, arrivals one by one as they land."""
        total = len(plan.run)
        if plan.resident == total:
            return [(total, False)] if total else []
        issue_at = {load.after for load in plan.loads if load.after}
        stops = issue_at | set(range(plan.resident + 1, total + 1)) | {plan.resident}
        return [(stop, stop in issue_at) for stop in sorted(stops - {0})]
