"""Executes a layer's plan: send to peers, run residents, run arrivals, join, combine."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..policies.plan import LayerPlan, Remote
from .cache.cache import ExpertCache
from .host_view import HostViews, LayerView, Routing

if TYPE_CHECKING:  # torch: the simulator uses this module without it
    import torch

    from ...kernels.expert_ffn import ExpertKernel, Group
    from ...kernels.packed_slots import PackedKernel
    from .cache.device import Activations
    from .layer import MoeLayer
    from .peers.remote import RemoteCall, RemoteExperts

_FEW_PAIRS = 64  # of a decode step
Spans = Mapping[int, tuple[int, int]]  # key -> first and end of its pairs


class ExpertRunner:
    """Runs groups of rows through experts of one cache: residents together, arrivals as they land.

    The result of a pair depends neither on when its expert arrived nor on the other pairs. The two segments of a split
    expert are summed, in either order with the same result.

    Args:
        low_bit: runs low-bit replicas; None: plans have none.
    """

    def __init__(self, cache: ExpertCache, low_bit: PackedKernel | None = None) -> None:
        self._cache, self.low_bit = cache, low_bit

    def run(
        self,
        plan: LayerPlan,
        spans: Spans,
        hidden: torch.Tensor,
        pairs: torch.Tensor,
        top_k: int,
        kernel: ExpertKernel,
        y: torch.Tensor,
    ) -> None:
        """Fill the rows of `y` of the experts in `plan.run`; shapes as in `ExpertKernel.run`.

        Loads at `after = 0` are already issued. Raises RuntimeFailure: a copy failed; the caller then calls
        `cache.abandon`.
        """
        cache, whole, run = self._cache, self._cache.neurons, plan.run
        begun: set[int] = set()  # split experts of which one segment has run
        layout = cache.layout if cache.is_split else None
        while True:
            first, stop = cache.next()
            if first == stop:
                return
            keys: Sequence[int] = run[first:stop]
            slots: Sequence[int] = cache.residency.slots_of(keys)
            if layout is not None:
                groups = self._segment_groups(keys, slots, spans, begun, *layout)
            else:
                if self.low_bit is not None:
                    keys, slots = self._run_replicas(self.low_bit, keys, slots, spans, hidden, pairs, top_k, y)
                groups = [(*spans[key], slot * whole, whole, False) for key, slot in zip(keys, slots, strict=True)]
            if groups:
                kernel.run(hidden, pairs, groups, top_k, y)

    def _run_replicas(
        self, kernel: PackedKernel, segments: Sequence[int], slots: Sequence[int], spans: Spans, hidden: torch.Tensor,
        pairs: torch.Tensor, top_k: int, y: torch.Tensor,
    ) -> tuple[list[int], list[int]]:  # fmt: skip
        """Run the segments that are replicas; returns the others and their slots."""
        experts, first = len(self._cache.uses), self._cache.where.whole_slots
        found = list(zip(segments, slots, strict=True))
        groups = [(*spans[s % experts], slot - first) for s, slot in found if s >= experts]
        if groups:
            kernel.run(hidden, pairs, groups, top_k, y)
        return [s for s, _ in found if s < experts], [slot for s, slot in found if s < experts]

    def _segment_groups(
        self, segments: Sequence[int], slots: Sequence[int], spans: Spans, begun: set[int], first: Sequence[int],
        neurons: Sequence[int],
    ) -> list[Group]:  # fmt: skip
        """The groups of split experts, which are added to `begun`. first, neurons: `ExpertCache.layout`."""
        experts = len(self._cache.uses)
        groups: list[Group] = []
        for segment, slot in zip(segments, slots, strict=True):
            expert = segment % experts
            groups.append((*spans[expert], first[slot], neurons[segment], expert in begun))
            begun.add(expert)
        return groups


@dataclass(slots=True)
class RemoteTask:
    """One peer's experts of a layer."""

    peer: RemoteExperts
    keys: list[int]
    call: RemoteCall | None  # None: the peer was lost after the plan was made
    blocked_s: float = 0.0  # a shard's wait for copies
    link_s: float = 0.0  # busy time of a shard's link for this layer
    recomputed: bool = False  # the experts were loaded and computed here instead


class DeviceBackend:
    """Runs the layers of one cache on a GPU, or on the CPU in its place, and sends peers their part.

    Pairs are combined in routing order, so budgets, prefetch and timing change no bit of the output. This needs slots
    with equal alignment, since the order of sums in a GEMM depends on it: the bytes of a slot in each tensor of the
    pool (of a row of H for split experts, whose slots begin at any neuron) are a multiple of 64, as in every published
    model. Another split sums in another order. Sums of peers are added in the order of the plan.

    Args:
        views: what the policies read on the host.
        activations: moves rows to the peers and sums back.
        peer_named: finds the peer that `Remote.peer` names; None: every expert runs here.
        low_bit: runs low-bit replicas; None: the cache has no slots for them.
    """

    def __init__(
        self,
        cache: ExpertCache,
        views: HostViews,
        activations: Activations,
        peer_named: Callable[[str], RemoteExperts] | None = None,
        low_bit: PackedKernel | None = None,
    ) -> None:
        self.cache, self.views, self.runner = cache, views, ExpertRunner(cache, low_bit)
        self._activations, self._peer_named = activations, peer_named
        self._kept: dict[tuple[int, int, int, torch.dtype], torch.Tensor] = {}
        self._stream: Callable[[], int] | None = None

    def look(
        self, layer: int, weighed: bool, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor
    ) -> LayerView:
        """The view of a layer: hidden [T, H], ids [T, K], weights [T, K]."""
        if self._peer_named is None:
            return self.views.look(layer, hidden, ids, weights, weighed)
        outgoing = self._activations.begin(hidden)  # before `look`, so that one wait serves both copies
        view = self.views.look(layer, hidden, ids, weights, weighed)
        view.outgoing = outgoing
        return view

    def send(self, step: MoeLayer, plan: LayerPlan, routing: Routing, view: LayerView) -> list[RemoteTask]:
        """Send the plan's remote experts to their peers, one batch each; waits for the rows, not for answers."""
        assert view.outgoing is not None  # of `look`
        assert self._peer_named is not None  # other plans have no peers
        base = step.index * step.experts
        index = {expert: i for i, expert in enumerate(routing.experts)}
        parts: dict[str, list[Remote]] = {}
        for remote in plan.remote:
            parts.setdefault(remote.peer, []).append(remote)
        tasks = []
        for name, part in parts.items():
            peer = self._peer_named(name)
            wanted = [(index[r.key - base], r.bits) for r in part]
            call = peer.send(step.index, routing, wanted, view.outgoing, view.weights, self.cache.decode_only)
            tasks.append(RemoteTask(peer, [r.key for r in part], call))
        return tasks

    def run(
        self, step: MoeLayer, plan: LayerPlan, spans: Spans, routing: Routing, view: LayerView,
        tasks: Sequence[RemoteTask],
    ) -> torch.Tensor:  # fmt: skip
        """The layer's output [T, H]. Raises RuntimeFailure: a copy failed."""
        hidden, kernel, timeline = view.hidden, step.kernel, self.cache.timeline
        began_s = time.perf_counter() if timeline.enabled else 0.0
        count = routing.starts[-1]
        # [N, H]; zero where no kernel writes
        y = hidden.new_zeros((count, hidden.shape[1])) if tasks else self._rows(hidden, count)
        self.runner.run(plan, spans, hidden, routing.pairs, routing.top_k, kernel, y)
        elsewhere: list[int] = []
        partials: list[tuple[torch.Tensor, torch.Tensor]] = []
        for task in tasks:
            partial = self._join(step.index, task)
            if partial is not None:
                elsewhere += [key - step.index * step.experts for key in task.keys]
                partials.append(partial)
            else:
                self._recompute(step, task, spans, routing, hidden, y)
        if step.post is not None:
            y = step.post(y)
            if elsewhere:
                y[routing.pairs_of(elsewhere)] = 0  # a norm of zeros need not be zero
        out = kernel.combine(y, view.device_weights)
        for rows, part in partials:
            out = out.index_add(0, rows, part.to(out.dtype))
        if timeline.enabled:
            timeline.span("compute", f"L{step.index} experts", began_s, time.perf_counter())
            if step.index == len(self.cache.stats.layers) - 1:
                timeline.end("forward")
        return out if out.dtype == hidden.dtype else out.to(hidden.dtype)

    def _rows(self, hidden: torch.Tensor, count: int) -> torch.Tensor:
        """[N, H] with any content. Layers of decode get the same memory: each reads it before the next one writes."""
        if count > _FEW_PAIRS:
            return hidden.new_empty((count, hidden.shape[1]))
        if self._stream is None:
            from ...kernels.device import stream_of

            self._stream = stream_of(hidden.device)
        width = hidden.shape[1]
        key = (count, width, self._stream(), hidden.dtype)  # of another stream nothing says which is first
        found = self._kept.get(key)
        if found is None:
            import torch

            with torch.inference_mode(False):  # a forward may make it, and others use it
                found = self._kept[key] = torch.empty((count, width), dtype=hidden.dtype, device=hidden.device)
        return found

    def _join(self, layer: int, task: RemoteTask) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Wait for a peer's answer: its rows [R] and their partial sums [R, H]; None: no answer."""
        call, peer = task.call, task.peer
        if call is None:
            return None
        start_s = time.perf_counter()
        answer = call.result()
        waited_s = time.perf_counter() - start_s
        stats, timeline = self.cache.stats.layers[layer], self.cache.timeline
        if timeline.enabled:
            name = "NDP" if peer.kind == "ndp" else peer.label
            timeline.span("wait", f"L{layer} {name} wait", start_s, start_s + waited_s)
            if answer is not None:
                args = {"experts": call.experts, "pairs": call.pairs, "kernel_us": round(answer.measured_s * 1e6, 1)}
                timeline.span(peer.name, f"L{layer} {name}", call.sent_s, call.sent_s + answer.paced_s, args)
        if answer is not None and peer.kind == "shard":
            task.blocked_s, task.link_s = answer.paced_s - answer.measured_s, answer.modelled_s
        stats.count_answer(peer.kind, waited_s, call.experts, call.pairs, answer)
        if answer is not None and peer.kind == "ndp":
            self.cache.stats.count_worker(peer.name, call.experts, call.pairs)
        return None if answer is None else (call.rows, self._activations.receive(answer.partial))

    def _recompute(
        self, step: MoeLayer, task: RemoteTask, spans: Spans, routing: Routing, hidden: torch.Tensor, y: torch.Tensor
    ) -> None:
        """The peer is lost or late: load its experts and run them here in full precision."""
        task.recomputed = True
        cache, layer = self.cache, step.index
        cache.core.arrive()  # background copies of these may have begun since the layer did
        again = cache.plan(cache.core.segments(task.keys))
        cache.begin()
        cache.load()
        self.runner.run(again, spans, hidden, routing.pairs, routing.top_k, step.kernel, y)
        pairs = sum(spans[key][1] - spans[key][0] for key in task.keys)
        cache.stats.layers[layer].count_recomputed(task.peer.kind, pairs)
