"""Layers in native calls on tiny pools, and the same in Python."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import numpy as np
import torch
from cache_rigs import EXPERTS, KEYS, LAYERS, SHAPE

from tiermoe.actors.engine.cache.cache import ExpertCache
from tiermoe.actors.engine.cache.device import CpuDevice, PlainActivations
from tiermoe.actors.engine.cache.link_queue import LinkQueue
from tiermoe.actors.engine.cache.native_order import NativeOrder
from tiermoe.actors.engine.cache.slots import LayerWeights, SlotPool
from tiermoe.actors.engine.dispatch import DeviceBackend
from tiermoe.actors.engine.host_view import HostViews
from tiermoe.actors.engine.layer import Hooks, MoeLayer, Placer
from tiermoe.actors.engine.stats import EngineStats, LayerStats, Timeline
from tiermoe.actors.policies.prefetch import PrefetchGovernor
from tiermoe.actors.policies.registry import PolicyContext, make, options
from tiermoe.actors.policies.residency import Residency
from tiermoe.actors.settings import LinkSettings
from tiermoe.kernels import _cpu
from tiermoe.kernels.expert_ffn import CpuKernel, Operands, TorchKernel

TIMES = {"blocked_io_s", "total_io_s", "link_s", "io_path_s", "link_path_s"}
HOLD_S = 0.05  # for which a link is busy with a copy of the test's own
RATE_GBPS = 1e-3


def unhurried(compare: Callable[[float], None]) -> None:
    """Call it with the seconds for which links are held; where it fails, again with ten times as many.

    A busy machine may come to a layer when its link is no longer held. A difference in what is decided stays.
    """
    try:
        compare(HOLD_S)
    except AssertionError:
        compare(10 * HOLD_S)


def kernel_of(pool: SlotPool) -> CpuKernel:
    operands = Operands(pool.gate_up, pool.down, None, None)

    def gate(up: torch.Tensor) -> torch.Tensor:
        pairs = up.view(len(up), -1, 2)
        return torch.nn.functional.silu(pairs[..., 0]) * pairs[..., 1]

    return CpuKernel(operands, "silu", TorchKernel(operands, gate))


class Ahead:
    """Prefetches what the test says, at the layer that the test names."""

    always = True

    def native(self, index: int) -> None:
        return None

    def __init__(self, cache: ExpertCache) -> None:
        self._cache = cache
        self.wanted: list[int] = []
        self.queued: list[int] = []  # experts, by call

    def layer(self, index: int, view: Any) -> None:
        if self._cache.governor.allows() and self.wanted:
            self.queued.append(self._cache.prefetch(self.wanted, source="test"))

    def idle(self, index: int) -> bool:
        return not self.wanted

    def skip(self, index: int, view: Any) -> None:
        self._cache.governor.allows()


class Stack:
    """The layers of one tiny model on one cache."""

    def __init__(
        self, slots: int, policy: str, gbps: float | None = None, min_useful: float = 0.0,
        hooks: Callable[[ExpertCache], Hooks] | None = None, **context: Any,
    ) -> None:  # fmt: skip
        generator = torch.Generator().manual_seed(5)
        weights = [
            LayerWeights(tuple(torch.randn(s, generator=generator) for s in SHAPE.stacked().values()))
            for _ in range(LAYERS)
        ]
        pool, device = SlotPool.allocate(SHAPE, slots, torch.float32, torch.device("cpu")), CpuDevice(LinkSettings())
        self.stats = EngineStats(layers=[LayerStats() for _ in range(LAYERS)])
        self.queue = LinkQueue(LinkSettings(gbps=gbps, latency_us=0))
        self.governor = PrefetchGovernor(min_useful, window=8, rest=6)
        self.cache = ExpertCache(
            pool, weights, device, Residency(KEYS, slots, SHAPE.nbytes(4)),
            make("eviction", options("eviction", policy), PolicyContext(LAYERS, EXPERTS, **context)), self.governor,
            self.stats, Timeline(False), self.queue,
        )  # fmt: skip
        backend = DeviceBackend(self.cache, HostViews(), PlainActivations(torch.device("cpu")))
        self.policy = policy
        kernel, placer, self.ahead = kernel_of(pool), Placer(self.cache), Ahead(self.cache)
        made = Hooks(ahead=(self.ahead,)) if hooks is None else hooks(self.cache)
        self.layers = [
            MoeLayer(i, EXPERTS, self.cache, backend, placer, kernel, hooks=made) for i in range(LAYERS)
        ]
        self.planned = 0  # passes in native calls that Python's policies took part in
        for layer in self.layers:
            self._watch(layer.native)

    def _watch(self, native: Any) -> None:
        def counted(call: Callable[..., Any]) -> Callable[..., Any]:
            def run(*args: Any) -> Any:
                out = call(*args)
                self.planned += out is not None
                return out

            return run

        native.finish, native.step = counted(native.finish), counted(native.step)

    def in_python(self) -> Stack:
        for layer in self.layers:
            layer.native, layer._reroutes = None, bool(layer.hooks.reroute)
        self.cache.native = self.cache.loads.native = None
        if isinstance(self.cache.eviction, NativeOrder):
            reference = make("eviction", options("eviction", self.policy), PolicyContext(LAYERS, EXPERTS))
            self.cache.policy = self.cache.eviction = self.cache.loads._eviction = reference
        return self

    def settle(self) -> None:
        """Let all copies end."""
        while self.queue.pending:
            time.sleep(1e-4)

    def hold(self, seconds: float = HOLD_S) -> None:
        """Keep the link busy for a while: what is queued behind does not start."""
        self.settle()
        memory = np.zeros(int(seconds * RATE_GBPS * 1e9), np.uint8)
        self._held = memory, _cpu.link_submit(
            self.queue._link, [((memory.ctypes.data, memory.ctypes.data, memory.nbytes, False),)], False
        )
        time.sleep(1e-3)

    def known(self) -> dict[str, Any]:
        """What later decisions and counters depend on."""
        cache, residency = self.cache, self.cache.residency
        cache.check_integrity()
        return {
            "layers": [
                {name: value for name, value in asdict(layer).items() if name not in TIMES}
                for layer in self.stats.layers
            ],
            "sources": {name: asdict(one) for name, one in self.stats.prefetch_sources.items() if one.queued},
            "changed": (self.stats.substitutions, self.stats.dropped, bytes(cache.counters.vacant)),
            "uses": list(cache.uses),
            "pending": set(cache.counters.pending),
            "order": cache.eviction.victims(KEYS, lambda key: True),
            "states": residency.states(),
            "slots": [residency.slot(key) for key in residency.held()],
            "arrays": [bytes(array) for array in residency.arrays],
            "governor": vars(self.governor),
            "queued": self.ahead.queued,
        }


def routed(rng: np.random.Generator, most: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A layer's hidden rows, ids and weights, of at most so many tokens."""
    tokens, top = int(rng.choice([t for t in (1, 1, 1, 2, 5, 8, 24) if t <= most])), int(rng.integers(1, EXPERTS))
    ids = torch.from_numpy(np.argsort(rng.random((tokens, EXPERTS)), axis=1)[:, :top].copy())
    return torch.randn(tokens, SHAPE.hidden), ids, torch.rand(tokens, top)
