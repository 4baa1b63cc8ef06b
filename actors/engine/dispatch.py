"""Carry out a layer's plan: send, start loads, run residents, run arrivals, join, combine. Decides nothing."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..policies.plan import LayerPlan, LoadOnMiss, Remote
from .cache import ExpertCache
from .host_view import LayerView
from .routing import Routing
from .runner import ExpertRunner, Spans

if TYPE_CHECKING:
    import torch

    from ...kernels.expert_ffn import ExpertKernel
    from ...kernels.packed_slots import PackedKernel
    from .activations import Activations, Outgoing
    from .remote import RemoteCall, RemoteExperts


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
