"""Measures the host's time in a step and in its layers by part, and the calls given to the device. For benchmarks.

Off it costs nothing. On, each part takes two clock readings, whose measured cost is subtracted; what they disturb is
not, so totals come from a run with `KERNEL_PARTS` alone. Parts are exclusive: time in a nested part counts there only.
"""

from __future__ import annotations

import bisect
import functools
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

import torch
from torch.autograd import DeviceType

from .dense.native import Joined, NativeDense
from .dispatch import DeviceBackend
from .engine import ExpertEngine
from .executors import CpuExecutor, NativeExecutor
from .layer import MoeLayer
from .prefetching import RouterPrefetching

PARTS = (
    "read", "wait", "reroute", "place", "copies", "send", "prefetch", "pre_evict", "run",
    "join", "peers", "native", "kernels", "combine", "other",  # what is left: the core, sorting the routing, counters
)  # fmt: skip
MESSAGES = ("send", "join")  # to peers: sending, and taking answers
KERNEL_PARTS = ("kernels", "combine", *MESSAGES)
STEP_PARTS = ("schedule", "announce", "dense", "sample", "deliver", "manager")  # manager: what is left of the loop
Clock = Callable[[], float]  # seconds: time.perf_counter, or time.thread_time for the thread's CPU time
_EMPTYCALLS = 256  # by which the cost of a clock reading is measured
_LAYER = "tiermoe.layer"

_LAUNCHES = (
    "cudaLaunchKernel", "cudaLaunchKernelExC", "cudaLaunchCooperativeKernel", "cuLaunchKernel", "cuLaunchKernelEx",
)  # fmt: skip
CALLS = dict.fromkeys(_LAUNCHES, "launches") | {
    "cudaGraphLaunch": "graphs", "cuGraphLaunch": "graphs",
    "cudaMemcpyAsync": "copies", "cuMemcpyHtoDAsync_v2": "copies", "cuMemcpyDtoHAsync_v2": "copies",
    "cudaMemsetAsync": "copies",
    "cudaStreamSynchronize": "waits", "cudaEventSynchronize": "waits", "cudaDeviceSynchronize": "waits",
    "cuStreamSynchronize": "waits", "cuEventSynchronize": "waits",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class HostPass:
    """One pass of one MoE layer: tokens in the batch, seconds of the host by part (of `PARTS`), experts that it missed
    (0 unless they are asked for).

    copies: waits for copies where the host waits for them itself. peers: waits for peers' answers; by the thread's CPU
    time they are within `join`, the taking of answers. On CUDA `kernels` and `combine` are the seconds of launching.
    """

    layer: int
    tokens: int
    parts: dict[str, float]
    missing: int = 0

    @property
    def total_s(self) -> float:
        return sum(self.parts.values())

    @property
    def kernel_s(self) -> float:
        return self.parts["kernels"] + self.parts["combine"]

    @property
    def messages_s(self) -> float:
        """Seconds of sending to peers and of taking their answers."""
        return sum(self.parts[part] for part in MESSAGES)

    @property
    def host_s(self) -> float:
        """Seconds of the host, launching kernels included, without messages and waits."""
        return self.total_s - self.messages_s - self.parts["wait"] - self.parts["peers"]

    @property
    def outside_s(self) -> float:
        """Seconds of the host outside kernels, messages and waits."""
        return self.host_s - self.kernel_s - self.parts["copies"]


@dataclass(frozen=True, slots=True)
class HostStep:
    """One step of the batching loop: rows of the forward, seconds outside the layers by part (of `STEP_PARTS`).

    schedule: choosing requests and making the inputs. announce: telling the engine whose rows the forward carries.
    dense: the model outside its MoE layers. sample: log-probabilities and the next tokens. deliver: tokens to the
    requests' streams.
    """

    rows: int
    parts: dict[str, float]
    layers: tuple[HostPass, ...]

    @property
    def total_s(self) -> float:
        return sum(self.parts.values()) + sum(layer.total_s for layer in self.layers)


@dataclass
class Calls:
    """Calls to the device: kernel launches, graph launches, copies, and waits of the host."""

    launches: float = 0
    graphs: float = 0
    copies: float = 0
    waits: float = 0

    def per(self, n: int) -> Calls:
        return Calls(self.launches / n, self.graphs / n, self.copies / n, self.waits / n)


@dataclass(frozen=True)
class DeviceCalls:
    """Calls of one decode step, per layer: inside the experts, and in the dense part before them."""

    layers: int
    experts: Calls
    dense: Calls


class _Clock:
    """Adds up exclusive seconds by part, less the cost of the readings."""

    def __init__(self, now: Clock) -> None:
        self.counts_waits = now is not time.thread_time  # the thread's CPU time stands still
        self.spent_s: dict[str, float] = {}
        self._now, self._cost_s = now, 0.0
        self._open: list[str] = []
        self._since_s = 0.0
        empty = _timed(self, "empty", lambda: None)
        taken = []
        for _ in range(_EMPTYCALLS):  # within an open part, as all parts are
            self.enter("around")
            empty()
            self.leave()
            taken.append(sum(self.take(("around", "empty")).values()) / 3)  # intervals between the four readings
        self._cost_s = statistics.median(taken)

    def enter(self, part: str) -> None:
        now_s = self._now()
        if self._open:
            self._count(now_s)
        self._open.append(part)
        self._since_s = now_s

    def leave(self) -> None:
        now_s = self._now()
        self._count(now_s)
        self._open.pop()
        self._since_s = now_s

    def take_out(self, seconds: float) -> None:
        """They do not belong to the open part."""
        if self._open:
            part = self._open[-1]
            self.spent_s[part] = self.spent_s.get(part, 0.0) - seconds

    def _count(self, now_s: float) -> None:
        part = self._open[-1]
        self.spent_s[part] = self.spent_s.get(part, 0.0) + now_s - self._since_s - self._cost_s

    def take(self, parts: Sequence[str]) -> dict[str, float]:
        """The seconds of these parts since they were taken last."""
        return {part: max(0.0, self.spent_s.pop(part, 0.0)) for part in parts}


@contextmanager
def host_passes(
    engine: ExpertEngine, parts: Sequence[str] = PARTS, now: Clock = time.perf_counter
) -> Iterator[list[HostPass]]:
    """Collect every layer pass inside the `with` block; no request may be in flight.

    Args:
        parts: to be timed; all other time is `other`. On CUDA a kernel call returns before the kernel has run.
    """
    passes: list[HostPass] = []
    with _Replaced() as replaced:
        _time_layers(engine, parts, _Clock(now), replaced, passes)
        yield passes


@contextmanager
def host_steps(
    engine: ExpertEngine, model: Any, batcher: Any, parts: Sequence[str] = KERNEL_PARTS,
    now: Clock = time.perf_counter, misses: bool = False,
) -> Iterator[list[HostStep]]:  # fmt: skip
    """Collect every step of the batching loop that begins inside the `with` block; no request may be in flight.

    Args:
        model: that the loop runs. batcher: a `ContinuousBatcher`.
        parts: of the layers, as for `host_passes`. With `KERNEL_PARTS` native code times layers that run together.
        misses: count those of each pass, which costs time between passes.
    """
    steps: list[HostStep] = []
    passes: list[HostPass] = []
    clock = _Clock(now)
    dense = getattr(model.base_model.forward, "__self__", None)
    joined = None
    within = engine.peers or engine.cache.low_bit is not None  # waits and kernels of Python within the call
    if isinstance(dense, NativeDense) and parts == KERNEL_PARTS and not within:
        joined = dense.joined
    with _Replaced() as replaced:
        _time_layers(engine, parts, clock, replaced, passes, joined, misses)
        if joined is not None:
            replaced.set(joined, "run", _timed_joined(clock, joined, passes, misses))
        replaced.set(model, "forward", _timed(clock, "dense", model.forward))
        replaced.set(engine, "begin_forward", _timed(clock, "announce", engine.begin_forward))
        for part, owner, method in batcher.parts():
            timed = _timed(clock, part, getattr(owner, method))
            replaced.set(owner, method, _timed_step(clock, timed, passes, steps) if part == "manager" else timed)
        yield steps


def _time_layers(
    engine: ExpertEngine, parts: Sequence[str], clock: _Clock, replaced: _Replaced, passes: list[HostPass],
    joined: Joined | None = None, misses: bool = False,
) -> None:  # fmt: skip
    """joined: its passes are timed elsewhere; else each layer runs by itself."""
    wrapped = set[tuple[int, str]]()
    for layer in engine.layers:
        for part, owner, method in _parts_of(layer):
            if part in parts and hasattr(owner, method) and (id(owner), method) not in wrapped:
                wrapped.add((id(owner), method))
                replaced.set(owner, method, _timed(clock, part, getattr(owner, method)))
        if isinstance(layer.executor, NativeExecutor) and parts:
            layer.executor.time(not clock.counts_waits)
            replaced.at_end(partial(layer.executor.time, None))
        if joined is not None and isinstance(layer.executor, CpuExecutor):
            continue
        host_waits = engine.device.executor != "real"  # a GPU's stream waits for copies, the host does not
        replaced.set(layer, "forward", _timed_pass(clock, engine, layer, host_waits, passes, misses))


def _parts_of(layer: MoeLayer) -> Iterator[tuple[str, Any, str]]:
    """The methods of a layer's step by part, as (part, owner, method); an owner may lack the method."""
    backend, kernel = cast(DeviceBackend, layer.backend), layer.kernel
    yield "read", backend.views, "look"
    yield "wait", backend.views.fetch, "wait"  # for the device to have computed what is read
    for rule in layer.hooks.reroute:
        yield "reroute", rule, "layer"
    yield "place", layer.placer, "where"
    yield "send", backend, "send"
    for hook in layer.hooks.ahead:
        yield "prefetch" if isinstance(hook, RouterPrefetching) else "pre_evict", hook, "layer"
    for method in ("begin", "run", "run_into"):
        yield "run", backend, method
    yield "join", backend, "join"
    if isinstance(layer.executor, NativeExecutor):
        yield "native", layer.executor, "run"  # less its reading, kernels and waits
    yield from (("kernels", kernel, "run"), ("kernels", backend.low_bit, "run"), ("combine", kernel, "combine"))


def device_calls(engine: ExpertEngine, serve: Callable[[], object], tokens: int, skip: int = 8) -> DeviceCalls:
    """Count the device calls of one decode step while `serve` runs; no request may be in flight.

    The first layer is left out: embeddings and sampling come before it.

    Args:
        serve: runs requests of more than `skip` decode steps of `tokens` rows.

    Raises:
        ValueError: it ran fewer.
    """
    watch = _Watch(len(engine.layers) - 1, tokens, skip)
    with _Replaced() as replaced:
        for layer in engine.layers:
            replaced.set(layer, "forward", watch.watched(layer.index, layer.forward))
        serve()
    if watch.found is None:
        raise ValueError(f"fewer than {skip} decode steps of {tokens} rows")
    host = [e for e in watch.found if e.device_type == DeviceType.CPU]  # the device has spans of the same names
    return count_calls((e.name, e.time_range.start, e.time_range.end) for e in host)


def count_calls(events: Iterable[tuple[str, float, float]]) -> DeviceCalls:
    """Sort a profile's events (name, start, end) into layers' experts and the dense part before them.

    Raises:
        ValueError: no event is a layer.
    """
    spans: list[tuple[float, float]] = []
    calls: list[tuple[float, str]] = []
    for name, start, end in events:
        if name == _LAYER:
            spans.append((start, end))
        elif name in CALLS:
            calls.append((start, CALLS[name]))
    if not spans:
        raise ValueError("the profile holds no layer")
    spans.sort()
    starts = [start for start, _ in spans]
    found = {"experts": Calls(), "dense": Calls()}
    for at, kind in calls:
        place = bisect.bisect_right(starts, at) - 1
        inside = place >= 0 and at <= spans[place][1]
        if inside or at < starts[-1]:
            counts = found["experts" if inside else "dense"]
            setattr(counts, kind, getattr(counts, kind) + 1)
    return DeviceCalls(len(spans), found["experts"].per(len(spans)), found["dense"].per(len(spans)))


@dataclass
class _Watch:
    """Profiles one forward, on its own thread, from the end of its first layer to the end of its last."""

    last: int
    tokens: int
    skip: int
    found: Any = None
    _seen: int = 0
    _profile: Any = field(default=None)

    def watched(self, index: int, forward: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def run(hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
            if self._profile is None:
                out = forward(hidden, ids, weights)
            else:
                with torch.profiler.record_function(_LAYER):
                    out = forward(hidden, ids, weights)
            if index == 0 and self.found is None and self._profile is None and len(hidden) == self.tokens:
                self._seen += 1
                if self._seen > self.skip:
                    activities = [torch.profiler.ProfilerActivity.CPU]
                    if torch.cuda.is_available():
                        activities.append(torch.profiler.ProfilerActivity.CUDA)
                    self._profile = torch.profiler.profile(activities=activities)
                    self._profile.__enter__()
            elif index == self.last and self._profile is not None:
                self._profile.__exit__(None, None, None)
                self.found, self._profile = self._profile.events(), None
            return out

        return run


class _Replaced:
    """Replaces methods of objects until the context ends."""

    def __init__(self) -> None:
        self._set: list[tuple[object, str, Any]] = []
        self._ends: list[Callable[[], object]] = []

    def at_end(self, call: Callable[[], object]) -> None:
        """Call it, too, when the context ends."""
        self._ends.append(call)

    def set(self, owner: object, name: str, value: Callable[..., Any]) -> None:
        self._set.append((owner, name, vars(owner).get(name)))
        setattr(owner, name, value)

    def __enter__(self) -> _Replaced:
        return self

    def __exit__(self, *exception: object) -> None:
        for call in self._ends:
            call()
        for owner, name, before in reversed(self._set):
            if before is None:
                delattr(owner, name)  # the class's own again
            else:
                setattr(owner, name, before)


def _timed(clock: _Clock, part: str, method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)  # the batching loop asks for the signature of a model's forward
    def run(*args: Any, **kwargs: Any) -> Any:
        clock.enter(part)
        try:
            return method(*args, **kwargs)
        finally:
            clock.leave()

    return run


def _timed_pass(
    clock: _Clock, engine: ExpertEngine, layer: MoeLayer, host_waits: bool, passes: list[HostPass], misses: bool
) -> Callable[..., torch.Tensor]:
    forward = layer.forward

    def answers_s() -> float:
        """Seconds of waits for peers so far."""
        return sum(peer.waited_s for peer in engine.peers.values())

    def run(hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        waited_s, awaited_s, executor, missed = _waited_s(layer), answers_s(), layer.executor, _missed(layer)
        clock.enter("other")
        try:
            return forward(hidden, ids, weights)
        finally:
            clock.leave()
            spent_s = clock.take(PARTS)
            waiting = "native" if spent_s["native"] > 0 else "other"  # which has kernels and waits of native code
            if isinstance(executor, NativeExecutor):
                for part, inside_s in executor.parts_s().items():
                    inside_s = min(inside_s, spent_s[waiting])
                    spent_s[waiting] -= inside_s
                    spent_s[part] += inside_s
            if host_waits and clock.counts_waits:
                spent_s["copies"] = min(_waited_s(layer) - waited_s, spent_s[waiting])
                spent_s[waiting] -= spent_s["copies"]
            if clock.counts_waits:
                spent_s["peers"] = min(answers_s() - awaited_s, spent_s["join"])
                spent_s["join"] -= spent_s["peers"]
            passes.append(HostPass(layer.index, len(hidden), spent_s, _missed(layer) - missed if misses else 0))

    return run


def _missed(layer: MoeLayer) -> int:
    """Experts so far."""
    counts = layer.cache.core.counts(layer.index)
    return counts.misses + counts.low_bit_misses


def _waited_s(layer: MoeLayer) -> float:
    """Seconds of waits for copies so far."""
    return layer.cache.core.counts(layer.index).blocked_io_s


def _timed_joined(clock: _Clock, joined: Joined, passes: list[HostPass], misses: bool) -> Callable[..., int]:
    """Of a call of many layers the layers' passes, by the native clock; they are not part of what is open."""
    run = joined.run

    def timed(at: int, inputs: Sequence[torch.Tensor], *more: torch.Tensor) -> int:
        layers = joined.layers[at:]
        missed = list(map(_missed, layers)) if misses else [0] * len(layers)
        joined.by_cpu = not clock.counts_waits
        ran = run(at, inputs, *more)
        for place, layer in enumerate(layers[:ran], at):
            waited_s, kernel_s, whole_s = joined.spent[place].tolist()
            copies_s = waited_s if clock.counts_waits else 0.0
            parts = {"kernels": kernel_s, "copies": copies_s, "native": whole_s - kernel_s - copies_s}
            missing = _missed(layer) - missed[place - at] if misses else 0
            passes.append(HostPass(place, len(inputs[0]), dict.fromkeys(PARTS, 0.0) | parts, missing))
            clock.take_out(whole_s)
        return ran

    return timed


def _timed_step(
    clock: _Clock, body: Callable[..., Any], passes: list[HostPass], steps: list[HostStep]
) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        try:
            return body(*args, **kwargs)
        finally:
            spent_s, layers = clock.take(STEP_PARTS), tuple(passes)
            passes.clear()
            if layers:  # else the loop waited for requests
                steps.append(HostStep(layers[0].tokens, spent_s, layers))

    return run
