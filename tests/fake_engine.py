"""What an engine talks to, without process, channel or device: NDP workers, a cache, shards and routers."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from orders_reference import Lru

from tiermoe.actors.core import _core
from tiermoe.actors.core._core import Clock, Governor, VirtualLink
from tiermoe.actors.engine.cache.cache import ExpertCache
from tiermoe.actors.engine.cache.links import CacheLink
from tiermoe.actors.engine.cache.slot_map import SlotMap
from tiermoe.actors.engine.host_view import HostViews, LayerView
from tiermoe.actors.engine.prefetching import RouterPrefetching
from tiermoe.actors.engine.stats import EngineStats, LayerStats, Timeline
from tiermoe.actors.policies.eviction import EvictionPolicy
from tiermoe.actors.policies.prefetch import PrefetchPolicy
from tiermoe.actors.store.files import StoreView, open_views
from tiermoe.cluster.simulate.gpu import PoolSize
from tiermoe.errors import RemoteFailure, RuntimeFailure
from tiermoe.proto.messages import ExpertBatch, ExpertResult, HealthReport, HealthRequest, Message
from tiermoe.proto.peers import ndp_name


class _Answer:
    def __init__(self, result: Callable[[], Message]) -> None:
        self._result = result

    def result(self) -> Message:
        return self._result()


class FakeChannel:
    """Answers at once, on the caller's thread."""

    transport = "fake"

    def __init__(self, link: FakeLink) -> None:
        self._link, self.alive = link, True

    @property
    def closed_because(self) -> str | None:
        return None if self.alive else "the channel closed"

    def submit(self, message: Message, deadline_s: float) -> _Answer:
        if not self.alive:
            raise RuntimeFailure("the peer is lost", "none")
        return _Answer(lambda: self._answer(message))

    def call(self, message: Message, deadline_s: float) -> Message:
        return self._answer(message)

    def close(self) -> None:
        self.alive = False

    def _answer(self, message: Message) -> Message:
        if isinstance(message, HealthRequest):
            return HealthReport("ndp", {"index": self._link.index})
        assert isinstance(message, ExpertBatch)
        if self._link.dies_at is not None and len(self._link.batches) == self._link.dies_at:
            self.alive = False
            self._link.dies_at = None
            raise RuntimeFailure("the peer died", "none")
        if self._link.refuses_at is not None and len(self._link.batches) == self._link.refuses_at:
            self._link.refuses_at = None
            raise RemoteFailure("no such replica", "make it", "StoreError")
        self._link.batches.append(message)
        return ExpertResult(self._link.compute(message), 1e-5, 2e-5, 3e-5)


class FakeLink:
    """Leads to a `FakeChannel`; keeps every batch that was computed.

    Attributes:
        dies_at, refuses_at: number of the batch in place of which the channel dies, or it is refused; once.
        up: whether a new channel can be had.
    """

    def __init__(self, view: StoreView, index: int = 0) -> None:
        self.index, self.name = index, ndp_name(index)
        self._layers = open_views(view)
        self.batches: list[ExpertBatch] = []
        self.dies_at: int | None = None
        self.refuses_at: int | None = None
        self.up = threading.Event()
        self.up.set()

    def address(self) -> str | None:
        return "nowhere" if self.up.is_set() else None

    def connect(self, address: str, transport: str, supply: object = None, traffic: object = None) -> FakeChannel:
        return FakeChannel(self)

    def compute(self, batch: ExpertBatch) -> np.ndarray:
        """[T, H]: weighted sums of silu-gated experts; of coarse ones at 1 to 8 bits."""
        layer = self._layers[batch.layer]
        out = np.zeros(batch.hidden.shape)
        for i, expert in enumerate(batch.experts):
            span = slice(batch.starts[i], batch.starts[i + 1])
            gate_up, down = _float64(layer.gate_up[expert]), _float64(layer.down[expert])
            if batch.bits[i]:
                step = np.abs(gate_up).max() / 2.0 ** batch.bits[i]
                gate_up = np.round(gate_up / step) * step
            up = np.einsum("th,igh->tig", batch.hidden[batch.rows[span]].astype(np.float64), gate_up)
            act = up[..., 0] / (1.0 + np.exp(-up[..., 0])) * up[..., 1]
            np.add.at(out, batch.rows[span], batch.weights[span, None] * (act @ down))
        return out.astype(np.float32)


def _float64(array: np.ndarray) -> np.ndarray:
    if array.dtype == np.uint16:
        array = (array.astype(np.uint32) << 16).view(np.float32)
    return array.astype(np.float64)


LAYERS, EXPERTS, HIDDEN = 4, 6, 5


class FakeCore(_core.Core):
    """Waits for no prefetch, and notes it."""

    finished: list[tuple[list[int], int]]

    def finish_prefetch(self, keys: Sequence[int], layer: int) -> None:
        self.finished.append((list(keys), layer))


@dataclass
class FakeCache:
    """Notes what is asked of it: (keys, keep, source). held: experts that are in slots of its core."""

    governor: Governor = field(default_factory=Governor)
    asked: list[tuple[list[int], set[int], str]] = field(default_factory=list)
    finished: list[tuple[list[int], int]] = field(default_factory=list)
    held: set[int] = field(default_factory=set)
    sources: list[str] = field(default_factory=list)
    core: FakeCore = field(init=False)
    split: None = None

    def __post_init__(self) -> None:
        keys = LAYERS * EXPERTS
        layout = _core.Layout(LAYERS, EXPERTS, 1, [], [keys], [], [1] * keys, False)
        link = VirtualLink(Clock(), lambda nbytes: 0.0, 0.0)
        self.core = FakeCore(layout, link, _core.PythonOrder(Lru(), keys), self.governor)
        self.core.finished = self.finished
        self.core.preload(sorted(self.held))

    def number_of(self, source: str) -> int:
        self.sources.append(source)
        return len(self.sources)

    def prefetch(self, keys: Sequence[int], keep: AbstractSet[int], source: str) -> int:
        self.asked.append((list(keys), set(keep), source))
        return len(keys)


def at_rest() -> Governor:
    found = Governor()
    found.pause(1 << 30)
    return found


def virtual_cache(layers: int, experts: int, slots: int, eviction: EvictionPolicy | None = None) -> ExpertCache:
    """Of experts of a byte that move nothing, each copy in a second of `clock`."""
    clock, pool, nowhere = Clock(), PoolSize(slots, 1, slots), None
    stats = EngineStats(layers=[LayerStats() for _ in range(layers)])
    where = SlotMap(pool, [nowhere] * layers, experts, slots, 1)
    link = CacheLink(VirtualLink(clock, float, 0.0), clock)
    return ExpertCache(where, link, Lru() if eviction is None else eviction, stats, Timeline(False))


class FakeShards:
    """Odd keys are theirs."""

    def __init__(self) -> None:
        self.told: list[tuple[int, list[int]]] = []

    def peer_of(self, key: int) -> Any:
        return ("shard/1", None) if key % 2 else None

    def prefetch(self, layer: int, keys: list[int]) -> None:
        self.told.append((layer, keys))


@dataclass(frozen=True)
class Block:
    router: Any


def make_routers() -> list[torch.Tensor]:
    """Weights [E, H] of each layer's router."""
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(EXPERTS, HIDDEN, generator=generator) for _ in range(LAYERS)]


def blocks_of(routers: Sequence[torch.Tensor | None]) -> Any:
    return [Block(None if w is None else lambda h, w=w: h @ w.T) for w in routers]


def prefetching(
    policy: PrefetchPolicy, cache: FakeCache, routers: Sequence[Any], shards: Any = None
) -> RouterPrefetching:
    cached: Any = cache
    return RouterPrefetching(policy, cached, blocks_of(routers), EXPERTS, shards)


def view_of(hidden: torch.Tensor, ids: torch.Tensor) -> LayerView:
    """What a layer of this input [T, H] and routing [T, K] shows."""
    return HostViews().look(0, hidden, ids, torch.ones(ids.shape))


def hidden_rows(tokens: int) -> torch.Tensor:
    return torch.randn(tokens, HIDDEN, generator=torch.Generator().manual_seed(tokens))
