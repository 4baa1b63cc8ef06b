"""Layers in native calls on tiny pools, and the same in Python."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from cache_rigs import EXPERTS, KEYS, LAYERS, NEURONS, SHAPE
from orders_reference import reference_of

from tiermoe.actors.engine.cache.cache import ExpertCache
from tiermoe.actors.engine.cache.device import PlainActivations
from tiermoe.actors.engine.cache.places import thread_link
from tiermoe.actors.engine.cache.slot_map import SlotMap
from tiermoe.actors.engine.cache.slots import LayerWeights, SlotPool
from tiermoe.actors.engine.dispatch import DeviceBackend
from tiermoe.actors.engine.executors import executor_of
from tiermoe.actors.engine.hooks import Hooks
from tiermoe.actors.engine.host_view import HostViews
from tiermoe.actors.engine.layer import MoeLayer, Shared
from tiermoe.actors.engine.placer import Placer
from tiermoe.actors.engine.prefetching import RouterPrefetching
from tiermoe.actors.engine.split import Configuring, Step
from tiermoe.actors.engine.stats import ConfiguratorStats, EngineStats, LayerStats, Timeline
from tiermoe.actors.policies.eviction import EvictionPolicy
from tiermoe.actors.policies.moepic import SpeculativePrefetch
from tiermoe.actors.policies.moepic.split import SplitLayout
from tiermoe.actors.policies.prefetch import NextGatePrefetch, RandomPrefetch
from tiermoe.actors.policies.registry import PolicyContext, make, options
from tiermoe.actors.policies.routing import SequenceRows
from tiermoe.actors.policies.slot_classes import SlotClasses, make_eviction
from tiermoe.kernels.expert_ffn import CpuKernel, ExpertKernel, Operands, TorchKernel
from tiermoe.kernels.router import LinearRouter

TIMES = {"blocked_io_s", "total_io_s", "link_s", "io_path_s", "link_path_s", "writeback_link_s", "writeback_blocked_s"}
HOLD_S = 0.05  # for which a link is busy with a copy of the test's own
RATE_GBPS = 1e-3


def kernel_of(pool: SlotPool) -> CpuKernel:
    operands = Operands(pool.gate_up, pool.down, None, None)

    def gate(up: torch.Tensor) -> torch.Tensor:
        pairs = up.view(len(up), -1, 2)
        return torch.nn.functional.silu(pairs[..., 0]) * pairs[..., 1]

    return CpuKernel(operands, "silu", TorchKernel(operands, gate))


class Ahead:
    """Prefetches what the test says, at the layer that the test names."""

    def native(self, index: int, to: Any) -> None:
        return None

    def __init__(self, cache: ExpertCache) -> None:
        self._cache = cache
        self.wanted: list[int] = []
        self.queued: list[int] = []  # experts, by call

    def layer(self, index: int, view: Any) -> None:
        if self._cache.governor.allows() and self.wanted:
            self.queued.append(self._cache.prefetch(self.wanted, source="test"))


class Stack:
    """The layers of one tiny model on one cache.

    Args:
        native: kernels and parts; else Python's, and the order of eviction is Python's, too.

    """

    def __init__(
        self, slots: int, policy: str, gbps: float | None = None, min_useful: float = 0.0,
        hooks: Callable[[ExpertCache], Hooks] | None = None, native: bool = True, writeback: bool = False,
        **context: Any,
    ) -> None:  # fmt: skip
        given = options("eviction", policy), PolicyContext(LAYERS, EXPERTS, **context)
        told = policy == "importance" or policy.startswith("expert-map")  # by prefetch, which knows the product's
        made = make_eviction(*given) if native or told else reference_of(*given)
        self._begin(slots, made, gbps, min_useful, writeback=writeback)
        self.ahead: Any = Ahead(self.cache)
        self._attach(Hooks(ahead=(self.ahead,)) if hooks is None else hooks(self.cache), native)

    def _begin(
        self, slots: int, eviction: EvictionPolicy, gbps: float | None, min_useful: float,
        split: SplitLayout | None = None, writeback: bool = False,
    ) -> None:  # fmt: skip
        nbytes = self._memory(slots)
        self.stats = EngineStats(layers=[LayerStats() for _ in range(LAYERS)])
        where = SlotMap(self.pool, self.weights, EXPERTS, slots, nbytes, split)
        link = thread_link(where, 0.0 if gbps is None else gbps * 1e9, 0.0)
        self.link: Any = link.core
        self.cache = ExpertCache(where, link, eviction, self.stats, Timeline(False), min_useful, writeback)

    def _memory(self, slots: int) -> int:
        """Weights and a pool; returns the bytes of an expert."""
        generator = torch.Generator().manual_seed(5)
        self.weights: Any = [
            LayerWeights(tuple(torch.randn(s, generator=generator) for s in SHAPE.stacked().values()))
            for _ in range(LAYERS)
        ]
        self.pool: Any = SlotPool.allocate(SHAPE, slots, torch.float32, torch.device("cpu"))
        return SHAPE.nbytes(4)

    make_kernel: Callable[[Any], ExpertKernel] = staticmethod(kernel_of)

    def _attach(self, hooks: Hooks, native: bool) -> None:
        backend = DeviceBackend(self.cache, HostViews(), PlainActivations(torch.device("cpu")))
        kernel, placer = self.make_kernel(self.pool), Placer(self.cache)
        self.layers = self.layers_of(backend, placer, kernel, hooks, native)

    def layers_of(
        self, backend: DeviceBackend, placer: Placer, kernel: ExpertKernel, hooks: Hooks, native: bool = True
    ) -> list[MoeLayer]:
        """Layers on this cache, with native kernels or Python's."""
        shared = Shared(self.cache, backend, placer, hooks, LAYERS - 1)
        shared.at_end += [hook.ended for hook in hooks.ahead if isinstance(hook, RouterPrefetching)]
        make = executor_of if native else None
        return [
            MoeLayer(i, EXPERTS, shared, kernel, make=make) for i in range(LAYERS)
        ]

    def settle(self) -> None:
        """Let all copies end."""
        while self.link.pending:
            time.sleep(1e-4)

    def hold(self, seconds: float = HOLD_S) -> None:
        """Keep the link busy for a while: what is queued behind does not start."""
        self.settle()
        self.link.hold(seconds)
        time.sleep(1e-3)

    def known(self) -> dict[str, Any]:
        """What later decisions and counters depend on."""
        cache, core = self.cache, self.cache.core
        cache.check_integrity()
        stats = cache.live_stats()
        return {
            "layers": [
                {name: value for name, value in asdict(layer).items() if name not in TIMES} for layer in stats.layers
            ],
            "sources": {name: asdict(one) for name, one in stats.prefetch_sources.items() if one.queued},
            "changed": (stats.substitutions, stats.dropped, stats.decode_hits, stats.decode_misses),
            "uses": cache.uses.tolist(),
            "order": cache.eviction.victims(KEYS, lambda key: True),
            "arrays": [array.tolist() for array in (core.states, core.evictable, core.slots, core.pins)],
            "governor": cache.governor.state,
            "queued": self.ahead.queued if isinstance(self.ahead, Ahead) else None,
        }


def routed(rng: np.random.Generator, most: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A layer's hidden rows, ids and weights, of at most so many tokens."""
    tokens, top = int(rng.choice([t for t in (1, 1, 1, 2, 5, 8, 24) if t <= most])), int(rng.integers(1, EXPERTS))
    ids = torch.from_numpy(np.argsort(rng.random((tokens, EXPERTS)), axis=1)[:, :top].copy())
    return torch.randn(tokens, SHAPE.hidden), ids, torch.rand(tokens, top)


RHO, OMEGA = 0.25, 8
CUTS = {
    "halves": SplitLayout(NEURONS, (2, 2, 2), (2, 3, 2), 6),
    "uneven": SplitLayout(NEURONS, (4, 0, 3), (2, 0, 3), 3),
    "no bottoms": SplitLayout(NEURONS, (4, 4, 4), (3, 2, 2), 0),
    "no tops": SplitLayout(NEURONS, (0, 0, 0), (0, 0, 0), 7),
    "tight": SplitLayout(NEURONS, (2, 2, 2), (1, 1, 1), 2),
}


class SplitStack(Stack):
    """The layers of one tiny model on a cache of split experts, with MoEpic's policies."""

    def __init__(
        self, cut: SplitLayout, native: bool, gbps: float | None = None, prefetch: str = "speculative",
        min_useful: float = 0.0, configured: bool = True, by_use: bool = False,
    ) -> None:  # fmt: skip
        chosen = options("eviction", "lru" if by_use else {"kind": "lcp", "rho": RHO, "omega": OMEGA})
        one = PolicyContext(1, EXPERTS, one_layer=True)
        tops = [make("eviction", chosen, one) if native else reference_of(chosen, one) for _ in range(LAYERS)]
        self._begin(9, SlotClasses(tops, LAYERS, EXPERTS, split=True), gbps, min_useful, cut)
        generator = torch.Generator().manual_seed(6)
        self.steps: list[Step] = []
        configurator = SimpleNamespace(
            layers=LAYERS, stats=ConfiguratorStats(), add=self.steps.extend, due=False,
        )  # fmt: skip
        self.configuring = Configuring(configurator, self.cache, 1, threaded=False)  # type: ignore[arg-type]
        blocks: Any = [
            SimpleNamespace(router=LinearRouter(torch.randn(EXPERTS, SHAPE.hidden, generator=generator), None))
            for _ in range(LAYERS)
        ]
        policies = {
            "speculative": SpeculativePrefetch(LAYERS, EXPERTS, 2),
            "next-gate": NextGatePrefetch(LAYERS, EXPERTS, 2),
            "random": RandomPrefetch(LAYERS, EXPERTS, 2, seed=3),
        }
        self.ahead = None
        if prefetch != "none":
            self.ahead = RouterPrefetching(policies[prefetch], self.cache, blocks, EXPERTS)
            if configured:
                self.ahead.on_predicted = self.configuring.predicted
        ahead = () if self.ahead is None else (self.ahead,)
        self._attach(Hooks(ahead=ahead, passed=self.configuring.passed if configured else None), native)

    def forward(self, passes: list[tuple[torch.Tensor, ...]], spans: list[SequenceRows]) -> list[torch.Tensor]:
        self.cache.core.decode_only = all(span.decode for span in spans)
        if self.ahead is not None:
            self.ahead.begin_forward(spans)
        found = []
        for layer, inputs in zip(self.layers, passes, strict=True):
            found.append(layer.forward(*inputs))
            if self.link.pending and not self.held:
                self.settle()
        return found

    held = False

    def known(self) -> dict[str, Any]:
        known, eviction = super().known(), self.cache.eviction
        known["order"] = eviction.victims(2 * KEYS, lambda key: True)
        known["ranked"] = eviction.ranked(range(KEYS))
        known["steps"] = [
            (step.decode, step.tokens, step.head_s is None,
             [np.nan_to_num(table, nan=-1).tolist() for table in step.tables(LAYERS, EXPERTS)])
            for step in self.steps
        ]  # fmt: skip
        return known


def forwards(seed: int, count: int, most: int) -> list[tuple[list[tuple[torch.Tensor, ...]], list[SequenceRows]]]:
    rng, found = np.random.default_rng(seed), []
    torch.manual_seed(seed)
    for _ in range(count):
        first = routed(rng, most)
        tokens, top = first[1].shape
        passes = [first]
        while len(passes) < LAYERS:
            ids = torch.from_numpy(np.argsort(rng.random((tokens, EXPERTS)), axis=1)[:, :top].copy())
            passes.append((torch.randn(tokens, SHAPE.hidden), ids, torch.rand(tokens, top)))
        decode = bool(rng.integers(4))
        stops = list(range(1, tokens + 1)) if decode else [tokens]
        spans = [SequenceRows(f"s{i}", i if decode else 0, stop, decode) for i, stop in enumerate(stops)]
        found.append((passes, spans))
    return found


TOP = 3  # of the routings that rules change
