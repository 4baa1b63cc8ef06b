"""Profiles the host's time in a decode step by part of a layer, and the calls given to the device. For benchmarks.

Off it costs nothing; on, each part takes two clock readings (about 0.3 us together), so totals come from a run with
`KERNEL_PARTS` alone. Parts are exclusive: time in a nested part counts there only.
"""

from __future__ import annotations

import bisect
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch.autograd import DeviceType

from ..dispatch import DeviceBackend
from ..engine import ExpertEngine
from ..layer import MoeLayer
from ..prefetching import RouterPrefetching

PARTS = (
    "read", "wait", "reroute", "plan", "begin", "issue", "await", "send", "prefetch", "pre_evict", "run", "kernels",
    "combine", "other",  # what is left: sorting the routing, segments, eviction's bookkeeping, counters
)  # fmt: skip
KERNEL_PARTS = ("kernels", "combine")
_LAYER = "tiermoe.layer"

_LAUNCHES = (
    "cudaLaunchKernel", "cudaLaunchKernelExC", "cudaLaunchCooperativeKernel", "cuLaunchKernel", "cuLaunchKernelEx",
)  # fmt: skip
_CALLS = dict.fromkeys(_LAUNCHES, "launches") | {
    "cudaGraphLaunch": "graphs", "cuGraphLaunch": "graphs",
    "cudaMemcpyAsync": "copies", "cuMemcpyHtoDAsync_v2": "copies", "cuMemcpyDtoHAsync_v2": "copies",
    "cudaMemsetAsync": "copies",
    "cudaStreamSynchronize": "waits", "cudaEventSynchronize": "waits", "cudaDeviceSynchronize": "waits",
    "cuStreamSynchronize": "waits", "cuEventSynchronize": "waits",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class HostPass:
    """One pass of one MoE layer: tokens in the batch, seconds of the host by part (of `PARTS`).

    On CUDA `kernels` and `combine` are the seconds of launching them.
    """

    layer: int
    tokens: int
    parts: dict[str, float]

    @property
    def total_s(self) -> float:
        return sum(self.parts.values())

    @property
    def kernel_s(self) -> float:
        return self.parts["kernels"] + self.parts["combine"]

    @property
    def outside_s(self) -> float:
        """Seconds of the host outside kernels and waits."""
        return self.total_s - self.kernel_s - self.parts["wait"]


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
    """Adds up exclusive seconds by part."""

    def __init__(self) -> None:
        self.spent_s: dict[str, float] = dict.fromkeys(PARTS, 0.0)
        self._open: list[str] = []
        self._since_s = 0.0

    def enter(self, part: str) -> None:
        now_s = time.perf_counter()
        if self._open:
            self.spent_s[self._open[-1]] += now_s - self._since_s
        self._open.append(part)
        self._since_s = now_s

    def leave(self) -> None:
        now_s = time.perf_counter()
        self.spent_s[self._open.pop()] += now_s - self._since_s
        self._since_s = now_s

    def take(self) -> dict[str, float]:
        found, self.spent_s = self.spent_s, dict.fromkeys(PARTS, 0.0)
        return found


@contextmanager
def host_passes(engine: ExpertEngine, parts: Sequence[str] = PARTS) -> Iterator[list[HostPass]]:
    """Collect every layer pass inside the `with` block; no request may be in flight.

    Args:
        parts: to be timed; all other time is `other`. On CUDA a kernel call returns before the kernel has run.
    """
    passes: list[HostPass] = []
    clock, replaced, wrapped = _Clock(), _Replaced(), set[tuple[int, str]]()
    with replaced:
        for layer in engine.layers:
            for part, owner, method in _parts_of(layer):
                if part in parts and hasattr(owner, method) and (id(owner), method) not in wrapped:
                    wrapped.add((id(owner), method))
                    replaced.set(owner, method, _timed(clock, part, getattr(owner, method)))
            replaced.set(layer, "forward", _timed_pass(clock, layer.index, layer.forward, passes))
        yield passes


def _parts_of(layer: MoeLayer) -> Iterator[tuple[str, Any, str]]:
    """The methods of a layer's step by part, as (part, owner, method); an owner may lack the method."""
    cache, backend, kernel = layer.cache, cast(DeviceBackend, layer.backend), layer.kernel
    yield "read", backend.views, "look"
    yield "wait", backend.views.fetch, "wait"  # for the device to have computed what is read
    for rule in layer.hooks.reroute:
        yield "reroute", rule, "layer"
    yield "plan", layer.placer, "plan"
    yield "begin", cache, "begin"
    yield "issue", cache, "issue"
    yield "await", cache, "await_experts"
    yield "send", backend, "send"
    for hook in layer.hooks.ahead:
        yield "prefetch" if isinstance(hook, RouterPrefetching) else "pre_evict", hook, "layer"
    yield "run", backend, "run"
    yield from (("kernels", kernel, "run"), ("kernels", backend.runner.low_bit, "run"), ("combine", kernel, "combine"))


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
        elif name in _CALLS:
            calls.append((start, _CALLS[name]))
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
        self._set: list[tuple[object, str]] = []

    def set(self, owner: object, name: str, value: Callable[..., Any]) -> None:
        setattr(owner, name, value)
        self._set.append((owner, name))

    def __enter__(self) -> _Replaced:
        return self

    def __exit__(self, *exception: object) -> None:
        for owner, name in self._set:
            delattr(owner, name)  # the class's own again


def _timed(clock: _Clock, part: str, method: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        clock.enter(part)
        try:
            return method(*args, **kwargs)
        finally:
            clock.leave()

    return run


def _timed_pass(
    clock: _Clock, index: int, forward: Callable[..., torch.Tensor], passes: list[HostPass]
) -> Callable[..., torch.Tensor]:
    def run(hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        clock.enter("other")
        try:
            return forward(hidden, ids, weights)
        finally:
            clock.leave()
            passes.append(HostPass(index, len(hidden), clock.take()))

    return run
