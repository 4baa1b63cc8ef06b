"""Executes the parts of a layer's pass (`layer.Pass`) on a device: send to peers, run groups, join, combine."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from ..policies.plan import Remote
from .cache.cache import ExpertCache
from .host_view import HostViews, LayerView, pairs_of, upload

if TYPE_CHECKING:  # torch: the simulator uses this module without it
    import torch

    from ...kernels.packed_slots import PackedKernel
    from .cache.device import Activations
    from .layer import Groups, MoeLayer, Pass, Replicas
    from .peers.remote import RemoteCall, RemoteExperts

_FEW_PAIRS = 64  # of a decode step


class _Rows(NamedTuple):
    """What a pass works on: hidden [T, H], pairs [N], y [N, H], when it began, and the sums of peers."""

    hidden: torch.Tensor
    pairs: torch.Tensor
    y: torch.Tensor
    began_s: float
    partials: list[tuple[RemoteCall, torch.Tensor]]


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
        self.cache, self.views, self.low_bit = cache, views, low_bit
        self._activations, self._peer_named = activations, peer_named
        self._kept: dict[tuple[int, int, int, torch.dtype], torch.Tensor] = {}
        self._stream: Callable[[], int] | None = None

    def look(
        self, step: MoeLayer, weighed: bool, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor
    ) -> LayerView:
        """The view of a layer: hidden [T, H], ids [T, K], weights [T, K]."""
        if self._peer_named is None or step.placer.local:
            return self.views.look(step.index, hidden, ids, weights, weighed)
        outgoing = self._activations.begin(hidden)  # before `look`, so that one wait serves both copies
        view = self.views.look(step.index, hidden, ids, weights, weighed)
        view.outgoing = outgoing
        return view

    def send(self, of: Pass) -> list[RemoteCall]:
        """Send the remote experts to their peers, one batch each; waits for the rows, not for answers."""
        outgoing, peer_named = of.view.outgoing, self._peer_named
        assert outgoing is not None  # of `look`
        assert peer_named is not None  # other passes have no peers
        parts: dict[str, list[Remote]] = {}
        for remote in of.remote:
            parts.setdefault(remote.peer, []).append(remote)
        weights, decode = of.view.weights, self.cache.core.decode_only
        return [peer_named(name).send(of.routing, part, outgoing, weights, decode) for name, part in parts.items()]

    def begin(self, of: Pass) -> _Rows:
        hidden, began_s = of.view.hidden, time.perf_counter() if self.cache.timeline.enabled else 0.0
        pairs, y = pairs_of(of.routing, hidden.device), self._rows(hidden, of.routing.pairs)  # [N], [N, H]
        if of.calls:
            y.zero_()  # where no kernel writes
        return _Rows(hidden, pairs, y, began_s, [])

    def run(self, of: Pass, groups: Groups, replicas: Replicas) -> None:
        """The result of a pair depends neither on when its expert arrived nor on the other pairs. The two segments of a
        split expert are summed, in either order with the same result.
        """
        hidden, pairs, y, *_ = of.work
        if replicas and self.low_bit is not None:
            self.low_bit.run(hidden, pairs, replicas, of.routing.top_k, y)
        if groups:
            of.step.kernel.run(hidden, pairs, groups, of.routing.top_k, y)

    def join(self, of: Pass, call: RemoteCall) -> bool:
        partial = self._receive(of.step.index, call)
        if partial is not None:
            of.work.partials.append((call, partial))
        else:
            call.recomputed = True
            self.cache.stats.layers[of.step.index].count_recomputed(call.peer.kind, call.pairs)
        return partial is not None

    def combine(self, of: Pass) -> torch.Tensor:
        """The layer's output [T, H]."""
        hidden, _, y, began_s, partials = of.work
        step, timeline = of.step, self.cache.timeline
        if step.post is not None:
            y = step.post(y)
            for call, _ in partials:
                y[upload(of.routing.pairs_of(call.keys), y.device)] = 0  # a norm of zeros need not be zero
        out = step.kernel.combine(y, of.view.device_weights)
        for call, partial in partials:
            sums = partial.to(out.dtype)
            out = out.add_(sums) if call.rows is None else out.index_add_(0, call.rows, sums)
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

    def _receive(self, layer: int, call: RemoteCall) -> torch.Tensor | None:
        """Wait for a peer's answer: the partial sums [R, H] of its rows; None: no answer."""
        if not call.sent:
            return None
        peer, start_s = call.peer, time.perf_counter()
        answer = call.result()
        waited_s = time.perf_counter() - start_s
        stats, timeline, experts = self.cache.stats, self.cache.timeline, len(call.keys)
        if timeline.enabled:
            name = "NDP" if peer.kind == "ndp" else peer.label
            timeline.span("wait", f"L{layer} {name} wait", start_s, start_s + waited_s)
            if answer is not None:
                args = {"experts": experts, "pairs": call.pairs, "kernel_us": round(answer.measured_s * 1e6, 1)}
                timeline.span(peer.name, f"L{layer} {name}", call.sent_s, call.sent_s + answer.paced_s, args)
        stats.count_answer(layer, peer.kind, waited_s, experts, call.pairs, answer, self.cache.core.decode_only)
        if answer is None:
            return None
        if peer.kind == "ndp":
            stats.count_worker(peer.name, experts, call.pairs)
        else:
            call.blocked_s, call.link_s = answer.paced_s - answer.measured_s, answer.modelled_s
        return self._activations.receive(answer.partial)
