"""Runs groups of rows through experts of one cache: residents together, arrivals as they land."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from ..policies.plan import LayerPlan, LoadOnMiss
from .cache import ExpertCache

if TYPE_CHECKING:  # torch: the simulator uses this module without it
    import torch

    from ...kernels.expert_ffn import ExpertKernel, Group
    from ...kernels.packed_slots import PackedKernel

Spans = Mapping[int, tuple[int, int]]  # key -> the pairs that go through it


class ExpertRunner:
    """What a lead's layer and a shard's have in common: a plan's local part, from its loads to its rows.

    The result of a pair does not depend on when its expert arrived, nor on which others run beside it. Of an expert
    cut in two, what runs first is written and what runs second is added to it: a sum of two, in either order the same.

    Args:
        low_bit: runs the low-bit replicas of plans that have some; None where none has.
    """

    def __init__(self, cache: ExpertCache, planner: LoadOnMiss, low_bit: PackedKernel | None = None) -> None:
        self._cache, self._planner, self._low_bit = cache, planner, low_bit

    def start(self, layer: int, keys: Sequence[int], keep: frozenset[int] = frozenset()) -> LayerPlan:
        """Plan these experts of a layer, count them, and issue their first loads.

        Args:
            keep: residents that should stay while any other can give way.
        """
        cache = self._cache
        plan = self._planner.plan(cache.segments(keys), cache.residency, cache.eviction, keep)
        cache.begin(layer, plan)
        if plan.loads:
            cache.issue([load for load in plan.loads if not load.after])
        return plan

    def run(
        self,
        layer: int,
        plan: LayerPlan,
        spans: Spans,
        hidden: torch.Tensor,
        pairs: torch.Tensor,
        top_k: int,
        kernel: ExpertKernel,
        y: torch.Tensor,
    ) -> None:
        """Rows of `y` for the pairs of the experts in `plan.run`; shapes as in `ExpertKernel.run`.

        Loads at `after = 0` are already issued. Raises RuntimeFailure if a copy failed; the caller abandons what
        is still pinned.
        """
        cache, done, whole = self._cache, 0, self._cache.neurons
        begun: set[int] = set()  # under a cut: experts of which y holds the rows of one segment
        for stop, issue_next in _steps(plan):
            keys = plan.run[done:stop]
            if cache.divided:
                groups = self._segment_groups(layer, keys, spans, begun)
            else:
                full: Sequence[int] = keys
                if self._low_bit is not None:
                    full = self._run_replicas(self._low_bit, layer, keys, spans, hidden, pairs, top_k, y)
                groups = [(*spans[key], cache.await_expert(key, layer) * whole, whole, False) for key in full]
            if groups:
                kernel.run(hidden, pairs, groups, top_k, y)
            cache.ran(keys)
            done = stop
            if issue_next:
                cache.issue([load for load in plan.loads if load.after == stop])

    def _run_replicas(
        self, kernel: PackedKernel, layer: int, segments: Sequence[int], spans: Spans, hidden: torch.Tensor,
        pairs: torch.Tensor, top_k: int, y: torch.Tensor,
    ) -> Sequence[int]:  # fmt: skip
        """Run those of the segments that are replicas; the others."""
        cache, experts = self._cache, len(self._cache.uses)
        groups = [(*spans[s % experts], cache.replica_slot(s, layer)) for s in segments if s >= experts]
        if not groups:
            return segments
        kernel.run(hidden, pairs, groups, top_k, y)
        return [segment for segment in segments if segment < experts]

    def _segment_groups(self, layer: int, segments: Sequence[int], spans: Spans, begun: set[int]) -> list[Group]:
        """As `run` makes them of whole experts; the experts are added to `begun`."""
        cache, experts = self._cache, len(self._cache.uses)
        groups: list[Group] = []
        for segment in segments:
            first, neurons = cache.place(segment, cache.await_expert(segment, layer))
            expert = segment % experts
            groups.append((*spans[expert], first, neurons, expert in begun))
            begun.add(expert)
        return groups


def _steps(plan: LayerPlan) -> list[tuple[int, bool]]:
    """(run up to here, then issue loads): residents together, arrivals one by one as they land."""
    total = len(plan.run)
    if plan.resident == total:
        return [(total, False)] if total else []
    issue_at = {load.after for load in plan.loads if load.after}
    stops = issue_at | set(range(plan.resident + 1, total + 1)) | {plan.resident}
    return [(stop, stop in issue_at) for stop in sorted(stops - {0})]
