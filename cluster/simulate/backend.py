"""A recorded forward as layers see it, and a GPU that runs it on a virtual clock.

`RecordedBackend` is a backend of `engine.layer.MoeLayer`: the trace gives routing and scores, and kernels advance the
clock by the machine's costs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import accumulate
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from ...actors.core import _core
from ...actors.core._core import Clock, Routing, VirtualLink
from ...actors.engine.cache.cache import ExpertCache
from ...actors.engine.hooks import Hooks
from ...actors.engine.host_view import Asked
from ...actors.engine.layer import Groups, MoeLayer, Pass, Placer, Replicas, report_passes
from ...actors.engine.prefetching import NATIVE, Prefetching
from ...actors.policies.prefetch import LayerSeen, Span
from .machine import Machine
from .peers import LeadHost, SimulatedNdp, SimulatedShards, join, send
from .trace import Iteration, scattered

Parts = Sequence[tuple[str, Iteration]]  # a forward's iterations with the names of their sequences
_AT_ONCE = 1 << 16  # scores that are scattered together


@dataclass(frozen=True)
class NoPool:
    """Slots without memory and experts without weights: a copy moves nothing."""

    bytes: int
    neurons: int = 1
    total_neurons: int = 1

    def slot(self, index: int, layer: int = 0) -> tuple[()]:
        return ()

    def neuron_range(self, first: int, count: int) -> tuple[()]:
        return ()

    def expert(self, index: int) -> tuple[()]:
        return ()


class NoDevice:
    """A device without streams: a copy is visible once the clock has reached its end."""

    executor = "simulated"

    def enter(self) -> None:
        return None

    def mark_use(self) -> None:
        return None


class Compute:
    """The compute of one simulated GPU: lets time pass while kernels run, slower while a copy shares their memory."""

    def __init__(self, clock: Clock, loader: VirtualLink, share: float) -> None:
        self._clock, self._loader, self._share = clock, loader, share

    def run(self, seconds: float) -> None:
        """Kernels that take so long without a copy beside them."""
        clock, share = self._clock, self._share
        if share < 1:
            while seconds > 0 and (end_s := self._loader.busy_until()) is not None:
                beside_s = min(seconds / share, end_s - clock.now_s)
                clock.now_s = end_s if beside_s < seconds / share else clock.now_s + beside_s
                seconds -= beside_s * share
        if seconds > 0:
            clock.now_s += seconds


class TimedKernel:
    """Lets the time of a kernel call pass (`ExpertKernel.run`); a segment takes its share of an expert."""

    def __init__(self, compute: Compute, machine: Machine, neurons: int) -> None:
        self._compute, self._neurons, self._experts = compute, neurons, cache(machine.experts)

    def run(
        self, hidden: Any, pairs: Any, groups: Sequence[tuple[int, int, int, int, bool]], top_k: int, y: Any
    ) -> None:
        whole = self._neurons
        if groups[0][3] == whole:  # a layer's experts are all split, or none
            seconds = self._experts(len(groups), sum([group[1] - group[0] for group in groups]))
        else:
            seconds = sum([self._experts(1, group[1] - group[0]) * (group[3] / whole) for group in groups])
        self._compute.run(seconds)


class TimedReplicas:
    """The same for low-bit replicas (`PackedKernel.run`)."""

    def __init__(self, compute: Compute, machine: Machine) -> None:
        self._compute, self._machine = compute, machine

    def run(self, hidden: Any, pairs: Any, groups: Sequence[tuple[int, int, int]], top_k: int, y: Any) -> None:
        self._compute.run(self._machine.experts(len(groups), sum(stop - start for start, stop, _ in groups)))


class RecordedForward:
    """The recorded rows of one forward, of all sequences together.

    Attributes:
        ids, weights: [L, T, K]. probabilities: [T, L, E].
    """

    def __init__(self, parts: Parts) -> None:
        names = "ids", "weights", "probabilities", "next_ids", "next_probabilities"
        ids, weights, probabilities, *self._next = [_joined([getattr(p, name) for _, p in parts]) for name in names]
        self.parts, self.probabilities, self.tokens = parts, probabilities, len(ids)
        self.ids = ids.transpose(1, 0, 2).astype(np.int64, "C")
        self.weights = weights.transpose(1, 0, 2).astype(np.float32, "C")
        self.top_k = ids.shape[2]
        self._ahead: dict[int, tuple[int, NDArray[np.float64]]] = {}  # by distance: a layer, scores [n, T, E] from it

    def next_scores(self) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """Experts that later routers pick on each layer's input, and their scores [T, L, D, K], as of `scattered`."""
        ids, probabilities = self._next
        scores = probabilities - 1e-10 * np.arange(ids.shape[-1])
        return ids.astype(np.int64, "C"), np.ascontiguousarray(scores, np.float64)

    def last_rows(self) -> list[int]:
        """The last row of each sequence, where the routers of the next forward's first layer were recorded."""
        _, parts = zip(*self.parts, strict=True)
        if not all(part.next_probabilities[0, -1, :1].any() for part in parts):
            return []
        return [stop - 1 for stop in accumulate(len(part.tokens) for part in parts)]

    def lookahead(self, layer: int, distance: int) -> NDArray[np.float64] | None:
        """`Iteration.lookahead` [T, E]; past the last layer of each sequence's last row [S, E]."""
        _, layers, experts = self.probabilities.shape
        if layer + distance >= layers:
            found = [part.lookahead(layer, distance) for _, part in self.parts]
            last = [scores[-1:] for scores in found if scores is not None]
            return _joined(last) if len(last) == len(found) else None
        if distance not in self._ahead or not 0 <= layer - self._ahead[distance][0] < len(self._ahead[distance][1]):
            if not 1 <= distance <= self._next[0].shape[2]:
                return None
            stop = min(layers - distance, layer + max(1, _AT_ONCE // (self.tokens * experts)))
            ids, probabilities = (recorded[:, layer:stop, distance - 1] for recorded in self._next)
            self._ahead[distance] = layer, scattered(ids, probabilities, experts)
        first, scores = self._ahead[distance]
        return scores[layer - first]


class RecordedLayer:
    """One layer of a recorded forward (`engine.hooks.View`)."""

    def __init__(self, index: int, forward: RecordedForward) -> None:
        self.index, self.forward, self.tokens = index, forward, forward.tokens
        self.picked = self.ids = forward.ids[index]
        self._weights: NDArray[np.float32] | None = None
        self._runs: NDArray[np.bool_] | None = None  # [T, K] pairs that run; None: all

    @property
    def weights(self) -> NDArray[np.float32]:
        """Of `ids` [T, K]."""
        return self.forward.weights[self.index] if self._weights is None else self._weights

    def scores(self, asked: Asked) -> NDArray[np.floating]:
        """The router's probabilities [T, E]; a trace has no others."""
        return self.forward.probabilities[:, self.index]

    def reroute(self, ids: NDArray[Any], weights: NDArray[np.floating], dropped: bool) -> None:
        """From now on the layer runs these; pairs whose weight became 0 do not run."""
        runs = (weights != 0) | (self.weights == 0)
        self._runs = runs if self._runs is None else runs & self._runs
        self.ids, self._weights = ids, weights.astype(np.float32)

    def routing(self, layer: int, experts: int) -> Routing:
        """The pairs that run, by expert; nothing computes them."""
        return Routing(layer, experts, self.ids, self._runs)


class RecordedBackend:
    """Runs plans of recorded layers on the virtual clock (`engine.layer.Backend`)."""

    def __init__(
        self, clock: Clock, machine: Machine, loader: VirtualLink, compute: Compute, slot_bytes: int,
        replicas: TimedReplicas | None = None,
    ) -> None:  # fmt: skip
        self._clock, self._machine, self._replicas = clock, machine, replicas
        self._loader, self._submitted, self._compute = loader, 0, compute
        self._load_byte_s, self._miss_s = machine.load_s / slot_bytes, machine.miss_s
        self.host = LeadHost(clock, machine.message_s)
        self.shards: SimulatedShards | None = None
        self.ndp: SimulatedNdp | None = None
        self.begin_forward(1, 0)

    def begin_forward(self, rows: int, context: int) -> None:
        """context: tokens whose keys and values each layer reads."""
        self.context, self.dense_s = context, self._machine.dense(rows, context)

    def look(self, step: MoeLayer, weighed: bool, forward: Any) -> Any:
        self._compute.run(self.dense_s)
        return RecordedLayer(step.index, forward)

    def send(self, of: Pass) -> Sequence[Any]:
        return send(of.remote, of.step.experts, of.routing, self.host, self.shards, self.ndp)

    def begin(self, of: Pass) -> None:
        submitted = self._loader.submitted_bytes
        host_s = (submitted - self._submitted) * self._load_byte_s  # of prefetches, too
        run, resident = of.step.cache.core.planned
        if resident < len(run):
            host_s += self._miss_s
        self._submitted = submitted
        if host_s:
            self._clock.advance(host_s)

    def run(self, of: Pass, groups: Groups, replicas: Replicas) -> None:
        nothing: Any = None
        if replicas and self._replicas is not None:
            self._replicas.run(nothing, nothing, replicas, of.routing.top_k, nothing)
        if groups:
            of.step.kernel.run(nothing, nothing, groups, of.routing.top_k, nothing)

    def join(self, of: Pass, call: Any) -> bool:
        join(call, self._clock, self.host, of.step.cache, of.step.index)
        return True

    def combine(self, of: Pass) -> None:
        return None


class RecordedRun:
    """Runs the layers of recorded forwards in one call (`core::VirtualRun`): all experts here, no routing changed.

    Prefetch by the next routers' recorded scores is part of it; other hooks are called at their place in each layer.
    """

    def __init__(
        self, cache: ExpertCache, clock: Clock, machine: Machine, neurons: int, hooks: Hooks, placer: Placer
    ) -> None:
        self._placer, self._hooks = placer, hooks
        # observers of passes are told once a forward, others in each layer
        told = [watcher.passed for watcher in hooks.watch if hasattr(watcher, "passed")]
        assert len(told) < 2
        self._told = told[0] if told else None
        self._watch = [watcher for watcher in hooks.watch if not hasattr(watcher, "passed")]
        self._prefetch = hooks.ahead[0] if len(hooks.ahead) == 1 and isinstance(hooks.ahead[0], Prefetching) else None
        self._run = _core.VirtualRun(
            cache.core, cast(VirtualLink, cache.link), clock, machine.expert_s, machine.expert_row_s,
            machine.kernel_share, machine.load_s / cache.residency.slot_bytes, machine.miss_s, neurons,
        )  # fmt: skip
        self._run.records = self._told is not None

    def forward(self, forward: RecordedForward, dense_s: float) -> None:
        """All layers; the clock advances. dense_s: of the dense part of each."""
        hooks, prefetch = self._hooks, self._prefetch
        scores = None if prefetch is None else prefetch.by_scores()
        views: list[RecordedLayer | None] = [None]  # of the present layer, once a hook has read it

        def view(layer: int) -> RecordedLayer:
            if (found := views[0]) is None or found.index != layer:
                found = views[0] = RecordedLayer(layer, forward)
            return found

        def routed(layer: int, experts: Sequence[int], counts: Sequence[int]) -> None:
            found = Routing.of_counts(layer, each, forward.tokens, experts, counts)
            for watcher in self._watch:
                watcher.routed(layer, found)

        def ahead(layer: int) -> None:
            self._tell()  # before what is predicted now
            for hook in hooks.ahead:
                hook.layer(layer, view(layer))

        def ran(layer: int) -> None:
            for watcher in self._watch:
                watcher.ran(layer)

        each = forward.probabilities.shape[2]
        calls_ahead = hooks.ahead and scores is None
        next_ids, next_scores = (None, None) if scores is None else forward.next_scores()
        last_rows = [] if scores is None or prefetch is None or not prefetch.policy.wraps else forward.last_rows()
        self._run.forward(
            forward.ids, dense_s, list(self._placer.keep), next_ids, next_scores, scores,
            routed if self._watch else None, ahead if calls_ahead else None, ran if self._watch else None, last_rows,
        )  # fmt: skip
        self._tell()

    def _tell(self) -> None:
        if self._told is not None:
            report_passes(self._run, self._told)


class ShardBackend(RecordedBackend):
    """A shard's part of a layer: a `Routing` of pairs, without a dense part."""

    def look(self, step: MoeLayer, weighed: bool, parts: Routing) -> ShardView:
        return ShardView(parts)


@dataclass(frozen=True)
class ShardView:
    part: Routing

    def routing(self, layer: int, experts: int) -> Routing:
        return self.part


def spans_of(parts: Parts) -> list[Span]:
    """The rows of each sequence in a forward."""
    spans, row = [], 0
    for name, part in parts:
        spans.append(Span(name, row, row + len(part.tokens), part.decode, part.embedding))
        row += len(part.tokens)
    return spans


def see(layer: int, spans: Sequence[Span], view: RecordedLayer) -> LayerSeen:
    """A recorded layer as a prefetch policy sees it."""
    forward = view.forward
    lookahead = partial(forward.lookahead, layer)
    return LayerSeen(layer, spans, view.picked, forward.probabilities[:, layer], lookahead, NATIVE)


def recorded_logits(layer: int, view: RecordedLayer) -> NDArray[np.floating] | None:
    """Logits [T, E] of a layer's router on the view's layer's input; None: not recorded."""
    found: NDArray[np.floating] | None
    if layer == view.index:
        found = view.forward.probabilities[:, layer].astype(np.float64)
    else:
        found = view.forward.lookahead(view.index, layer - view.index)
        if found is None:
            return None
        known = np.isfinite(found)
        found = np.where(known, np.maximum(found, 0.0), 0.0)
        rest = np.maximum(1.0 - found.sum(axis=1, keepdims=True), 0.0)
        found = np.where(known, found, rest / np.maximum((~known).sum(axis=1, keepdims=True), 1))
    logits: NDArray[np.floating] = np.log(np.maximum(found, 1e-12))
    return logits


def _joined(arrays: list[NDArray[Any]]) -> NDArray[Any]:
    return arrays[0] if len(arrays) == 1 else np.concatenate(arrays)
