"""A layer's routing as the mechanism uses it: (token, expert) pairs sorted by expert.

Runs groups of rows through experts of one cache: residents together, arrivals as they land.

Carry out a layer's plan: send, start loads, run residents, run arrivals, join, combine. Decides nothing.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from ..policies.plan import LayerPlan, LoadOnMiss, Remote
from .cache.cache import ExpertCache
from .host_view import LayerView, upload

if TYPE_CHECKING:
    import torch

    from ...kernels.expert_ffn import ExpertKernel, Group
    from ...kernels.packed_slots import PackedKernel
    from .cache.device import Activations, Outgoing
    from .peers.remote import RemoteCall, RemoteExperts

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


@dataclass(slots=True)
class Errand:
    """What one peer was asked to compute for a layer.

    call: under way; None where the peer was lost since the plan was made. blocked_s, link_s: seconds that a shard
    waited for copies and that its link was busy with those of this layer, once it has answered. recomputed: its
    experts were loaded and computed here instead.
    """

    peer: RemoteExperts
    keys: list[int]
    call: RemoteCall | None
    blocked_s: float = 0.0
    link_s: float = 0.0
    recomputed: bool = False


class Dispatcher:
    """Runs plans of one cache.

    The result of a pair does not depend on when its expert arrived, and pairs are combined in
    routing order, so budgets, prefetch and timing change no bit of the output. That holds where the
    bytes of one slot in each tensor of the pool are a multiple of 64, as in every published model: all slots
    are then aligned alike, and a GEMM may sum in another order on operands that are aligned otherwise. Where experts
    are split it holds where those of a row of H are such a multiple, since slots begin at any neuron; another cut sums
    in another order.
    Where peers compute, their sums are added in the order of the plan.

    Args:
        peer_named: finds the NDP worker or shard that `Remote.peer` names.
        activations: the way of rows to the peers and of their sums back.
        low_bit: runs the replicas of plans; None where the cache has no slots for them.
    """

    def __init__(
        self,
        cache: ExpertCache,
        experts_per_layer: int,
        planner: LoadOnMiss,
        peer_named: Callable[[str], RemoteExperts],
        activations: Activations,
        low_bit: PackedKernel | None = None,
    ) -> None:
        self._cache, self._experts, self._activations = cache, experts_per_layer, activations
        self._runner = ExpertRunner(cache, planner, low_bit)
        self._peer_named = peer_named

    def begin(self, hidden: torch.Tensor) -> Outgoing:
        """Some of the layer's experts may be elsewhere: its rows may start on their way before the plan is made."""
        return self._activations.begin(hidden)

    def send(
        self, layer: int, plan: LayerPlan, routing: Routing, outgoing: Outgoing, view: LayerView
    ) -> list[Errand]:
        """Hand the plan's remote experts to their peers, one batch each; waits for their rows, not for answers."""
        base = layer * self._experts
        place = {expert: i for i, expert in enumerate(routing.experts)}
        parts: dict[str, list[Remote]] = {}
        for remote in plan.remote:
            parts.setdefault(remote.peer, []).append(remote)
        errands = []
        for name, part in parts.items():
            peer = self._peer_named(name)
            wanted = [(place[r.key - base], r.bits) for r in part]
            call = peer.send(layer, routing, wanted, outgoing, view.weights, self._cache.decode_only)
            errands.append(Errand(peer, [r.key for r in part], call))
        return errands

    def run(
        self,
        layer: int,
        plan: LayerPlan,
        routing: Routing,
        hidden: torch.Tensor,
        weights: torch.Tensor,
        kernel: ExpertKernel,
        post: torch.nn.Module | None,
        errands: Sequence[Errand] = (),
    ) -> torch.Tensor:
        """The layer's output [T, H] for hidden [T, H] and routing weights [T, K].

        Loads at `after = 0` are already issued, and `errands` is what `send` gave. Raises RuntimeFailure if a copy
        failed; the caller abandons what is still pinned.
        """
        timeline, base = self._cache.timeline, layer * self._experts
        began_s = time.perf_counter() if timeline.enabled else 0.0
        size = (routing.starts[-1], hidden.shape[1])
        y = hidden.new_zeros(size) if errands else hidden.new_empty(size)  # [N, H]; zero where no kernel writes
        spans = {base + e: (routing.starts[i], routing.starts[i + 1]) for i, e in enumerate(routing.experts)}
        self._runner.run(layer, plan, spans, hidden, routing.pairs, routing.top_k, kernel, y)
        elsewhere: list[int] = []
        partials: list[tuple[torch.Tensor, torch.Tensor]] = []
        for errand in errands:
            partial = self._join(layer, errand)
            if partial is not None:
                elsewhere += [key - base for key in errand.keys]
                partials.append(partial)
            else:
                self._recompute(layer, errand, spans, routing, hidden, kernel, y)
        if post is not None:
            y = post(y)
            if elsewhere:
                y[routing.pairs_of(elsewhere)] = 0  # a norm of zeros need not be zero
        out = kernel.combine(y, weights)
        for rows, part in partials:
            out = out.index_add(0, rows, part.to(out.dtype))
        if timeline.enabled:
            timeline.span("compute", f"L{layer} experts", began_s, time.perf_counter())
        return out if out.dtype == hidden.dtype else out.to(hidden.dtype)

    def _join(self, layer: int, errand: Errand) -> tuple[torch.Tensor, torch.Tensor] | None:
        """A peer's rows [R] and its part of them [R, H], after waiting for its answer; None when there is none."""
        call, peer = errand.call, errand.peer
        if call is None:
            return None
        start_s = time.perf_counter()
        answer = call.result()
        waited_s = time.perf_counter() - start_s
        stats, timeline = self._cache.stats.layers[layer], self._cache.timeline
        if timeline.enabled:
            name = "NDP" if peer.kind == "ndp" else peer.label
            timeline.span("wait", f"L{layer} {name} wait", start_s, start_s + waited_s)
            if answer is not None:
                timeline.span("ndp", f"L{layer} {name}", call.sent_s, call.sent_s + answer.paced_s)
        if answer is not None and peer.kind == "shard":
            errand.blocked_s, errand.link_s = answer.paced_s - answer.measured_s, answer.modelled_s
        stats.count_answer(peer.kind, waited_s, call.experts, call.pairs, answer)
        if answer is not None and peer.kind == "ndp":
            self._cache.stats.count_worker(peer.name, call.experts, call.pairs)
        return None if answer is None else (call.rows, self._activations.receive(answer.partial))

    def _recompute(
        self,
        layer: int,
        errand: Errand,
        spans: Spans,
        routing: Routing,
        hidden: torch.Tensor,
        kernel: ExpertKernel,
        y: torch.Tensor,
    ) -> None:
        """The peer is lost or late: load its experts and run them here, in full precision."""
        errand.recomputed = True
        again = self._runner.start(layer, errand.keys)
        self._runner.run(layer, again, spans, hidden, routing.pairs, routing.top_k, kernel, y)
        pairs = sum(spans[key][1] - spans[key][0] for key in errand.keys)
        self._cache.stats.layers[layer].count_recomputed(errand.peer.kind, pairs)
