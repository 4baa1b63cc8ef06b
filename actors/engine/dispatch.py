"""Executes Python's parts of a layer's pass (`layer.Pass`) on a device: send to peers, run groups, join, combine."""

from __future__ import annotations

import time
from collections.abc import Callable
from ctypes import c_float
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from .cache.cache import ExpertCache
from .host_view import HostViews, LayerView, pairs_of, upload

if TYPE_CHECKING:  # torch: the simulator uses this module without it
    import torch

    from ...kernels.packed_slots import PackedKernel
    from .cache.device import Activations
    from .calls import RemoteCall, RemoteExperts
    from .layer import Groups, MoeLayer, Pass, Replicas

_FEW_PAIRS = 64  # of a decode step


class _Rows(NamedTuple):
    """What a pass works on: hidden [T, H], pairs by expert [T * K], y [T * K, H]."""

    hidden: torch.Tensor
    pairs: torch.Tensor
    y: torch.Tensor


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
        weights, decode = of.view.weights, self.cache.core.decode_only
        return [
            peer_named(name).send(of.routing, keys, bits, outgoing, weights, decode) for name, keys, bits in of.remote
        ]

    def begin(self, of: Pass) -> _Rows:
        hidden = of.view.hidden
        pairs = pairs_of(of.routing, hidden.device)
        y = self._rows(hidden, len(pairs))
        if of.calls or of.routing.pairs < len(pairs):
            y.zero_()  # where no kernel writes
        return _Rows(hidden, pairs, y)

    def run(self, of: Pass, groups: Groups, replicas: Replicas) -> None:
        """The result of a pair depends neither on when its expert arrived nor on the other pairs. The two segments of a
        split expert are summed, in either order with the same result.
        """
        hidden, pairs, y = of.work
        if replicas and self.low_bit is not None:
            self.low_bit.run(hidden, pairs, replicas, of.routing.top_k, y)
        if groups:
            of.step.kernel.run(hidden, pairs, groups, of.routing.top_k, y)

    def run_into(self, of: Pass, y: int, groups: Groups, replicas: Replicas) -> None:
        """`run` in a pass of native kernels; y: the address of the pairs' rows."""
        if of.work is None:
            hidden = of.view.hidden.float().contiguous()  # as the native kernels take it
            pairs = pairs_of(of.routing, hidden.device)
            of.work = _Rows(hidden, pairs, _rows_at(y, len(pairs), hidden.shape[1]))
        self.run(of, groups, replicas)

    def join(self, of: Pass, call: RemoteCall) -> bool:
        sums = self._receive(of.step.index, call)
        if sums is not None:
            of.partials.append((call, sums))
        else:
            call.recomputed = True
            self.cache.stats.layers[of.step.index].count_recomputed(call.peer.kind, call.pairs)
        return sums is not None

    def combine(self, of: Pass) -> torch.Tensor:
        """The layer's output [T, H]."""
        hidden, _, y = of.work
        if of.step.post is not None:
            y = of.step.post(y)
            for call, _ in of.partials:
                y[upload(of.routing.pairs_of(call.keys), y.device)] = 0  # a norm of zeros need not be zero
        out = of.step.kernel.combine(y, of.view.device_weights)
        self.add(of, out)
        return out if out.dtype == hidden.dtype else out.to(hidden.dtype)

    def add(self, of: Pass, out: torch.Tensor) -> None:
        """Add the sums of peers."""
        for call, sums in of.partials:
            self._activations.add(out, call.rows, sums)

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

    def _receive(self, layer: int, call: RemoteCall) -> Any:
        """Wait for a peer's answer: the sums of its rows, of `Activations.sums`; None: no answer."""
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
        return self._activations.sums(answer.partial)


def _rows_at(address: int, rows: int, width: int) -> torch.Tensor:
    """Rows of float32 in memory that a pass of native kernels holds [rows, width]."""
    import torch

    memory: Any = (c_float * (rows * width)).from_address(address)
    return torch.from_numpy(np.frombuffer(memory, np.float32).reshape(rows, width))
