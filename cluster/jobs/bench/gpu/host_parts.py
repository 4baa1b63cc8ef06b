"""Host time of MoE layers by what it consists of, and launches: wraps the calls of a layer's page while it is entered.

    forward = wait for routing + bookkeeping + prefetch + launches of kernels + the rest

The wait for routing is the host waiting for the device (on the CPU: nothing); launching kernels is inside the kernels'
calls (on the CPU: the kernels themselves). Host time outside kernels is all but these two. Each wrapper adds a third of
a microsecond.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from .....actors.engine.engine import ExpertEngine

WAIT, KERNELS = "wait for routing", "kernel calls"


@dataclass
class HostParts:
    """Seconds of each pass, by part; `whole` are the passes themselves."""

    whole: list[float] = field(default_factory=list)
    parts: dict[str, list[float]] = field(default_factory=dict)
    _spent: dict[str, float] = field(default_factory=dict)

    def add(self, name: str, seconds: float) -> None:
        """To the pass under way."""
        self._spent[name] = self._spent.get(name, 0.0) + seconds

    def end_pass(self, seconds: float) -> None:
        """A pass of a layer is over."""
        self.whole.append(seconds)
        for name in self._spent.keys() | self.parts.keys():
            values = self.parts.setdefault(name, [0.0] * (len(self.whole) - 1))
            values.append(self._spent.get(name, 0.0))
        self._spent = {}

    def outside_us(self) -> float:
        """Median host microseconds of a pass outside kernels and waits for the device."""
        waits, kernels = (self.parts.get(name, [0.0] * len(self.whole)) for name in (WAIT, KERNELS))
        rest = [whole - wait - kernel for whole, wait, kernel in zip(self.whole, waits, kernels, strict=True)]
        return 1e6 * sorted(rest)[len(rest) // 2] if rest else 0.0

    def medians_us(self) -> dict[str, float]:
        """Of each part; "other" is what no part has."""
        out = {name: 1e6 * sorted(values)[len(values) // 2] for name, values in sorted(self.parts.items())}
        other = sorted(whole - sum(values[i] for values in self.parts.values()) for i, whole in enumerate(self.whole))
        return out | {"other": 1e6 * other[len(other) // 2] if other else 0.0}


@contextmanager
def host_parts(engine: ExpertEngine) -> Iterator[HostParts]:
    """Collect every pass inside the `with` block; enter it while no forward runs."""
    found = HostParts()
    wrapped: list[tuple[Any, str]] = []

    def wrap(owner: Any, method: str, name: str, inside: str | None = None) -> None:
        """Time a method of one object; what `inside` adds meanwhile is not counted twice."""
        if owner is None or (owner, method) in wrapped:
            return
        original = getattr(owner, method)

        def timed(*args: Any, **kwargs: Any) -> Any:
            before = found._spent.get(inside, 0.0) if inside is not None else 0.0
            begin_s = time.perf_counter()
            try:
                return original(*args, **kwargs)
            finally:
                mine_s = time.perf_counter() - begin_s
                if inside is not None:
                    mine_s -= found._spent.get(inside, 0.0) - before
                found.add(name, mine_s)

        setattr(owner, method, timed)
        wrapped.append((owner, method))

    kernels = [layer.kernel for layer in engine.layers]
    stand_ins = {id(kernel): _Timed(kernel, found.add) for kernel in kernels}
    for layer in engine.layers:
        layer.kernel = stand_ins[id(layer.kernel)]
        wrap(layer._views, "look", WAIT)
        wrap(layer._placer, "plan", "plan")
        wrap(layer._prefetching, "layer", "prefetch")
        wrap(layer._pre_evicting, "layer", "pre-eviction")
        wrap(layer._dispatcher, "send", "send to peers")
        wrap(layer._dispatcher, "run", "run", inside=KERNELS)
        layer.forward = _timed_pass(layer.forward, found)  # type: ignore[method-assign]
    for method, name in (("poll", "cache view"), ("begin", "cache begin"), ("issue", "issue loads")):
        wrap(engine.cache, method, name)
    try:
        yield found
    finally:
        for owner, method in wrapped:
            delattr(owner, method)
        for layer, kernel in zip(engine.layers, kernels, strict=True):
            layer.kernel = kernel
            del layer.forward  # the class's own again


class _Timed:
    """A kernel whose calls are timed; it has whatever else the kernel has."""

    def __init__(self, kernel: Any, add: Callable[[str, float], None]) -> None:
        self._kernel, self._add = kernel, add

    def __getattr__(self, name: str) -> Any:
        return getattr(self._kernel, name)

    def run(self, *args: Any, **kwargs: Any) -> Any:
        return self._call(self._kernel.run, args, kwargs)

    def combine(self, *args: Any, **kwargs: Any) -> Any:
        return self._call(self._kernel.combine, args, kwargs)

    def _call(self, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        begin_s = time.perf_counter()
        try:
            return call(*args, **kwargs)
        finally:
            self._add(KERNELS, time.perf_counter() - begin_s)


def _timed_pass(forward: Callable[..., torch.Tensor], found: HostParts) -> Callable[..., torch.Tensor]:
    def run(hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        begin_s = time.perf_counter()
        out = forward(hidden, ids, weights)
        found.end_pass(time.perf_counter() - begin_s)
        return out

    return run


def launches(run: Callable[[], Any], device: torch.device) -> float | None:
    """Kernels and copies that a GPU ran for `run`; None on a CPU, or where the profiler cannot tell."""
    if device.type != "cuda":
        return None
    from torch.profiler import ProfilerActivity, profile

    try:
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as seen:
            run()
            torch.cuda.synchronize(device)
        count = sum(event.count for event in seen.key_averages() if event.device_type == torch.autograd.DeviceType.CUDA)
    except (RuntimeError, AttributeError):
        return None
    return float(count) or None
