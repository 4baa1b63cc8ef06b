"""Expert parallelism as the lead sees it: who owns which expert, and what the owners are told.

Every expert belongs to one GPU by a rule that all processes know (`policies.sharding`). A layer's experts go to their
owners first, then the lead loads and computes its own, then it joins the sums. Hidden states and sums cross
processes through host memory (the channel's rings on one host, gRPC between hosts), on CUDA too: a decode batch is
a few rows, and a copy of them costs less than mapping device memory of another process.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from ...errors import ConfigError
from ...proto.messages import PrefetchCommand
from ..links import PeerLink, shard_name
from ..policies.plan import LayerPlan, LoadOnMiss, Remote
from ..policies.sharding import shard_of
from ..settings import ShardSettings
from .cache import ExpertCache
from .placer import Placer
from .remote import RemoteExperts
from .routing import Routing
from .stats import EngineStats

_START_S = 30.0  # seconds to reach a shard, which is started before the lead
_REPORT_S = 5.0


def owners(layers: int, experts: int, settings: ShardSettings) -> list[int]:
    """The shard of each key [L * E]."""
    count, rule = settings.count, settings.ownership
    return [shard_of(layer, e, experts, count, rule) for layer in range(layers) for e in range(experts)]


def terms(layers: int, experts: int, hidden: int, settings: ShardSettings, index: int) -> dict[str, str | int]:
    """What lead and shard must agree on; the shard reports it, the lead compares."""
    return {
        "index": index, "count": settings.count, "ownership": settings.ownership,
        "moe_layers": layers, "experts_per_layer": experts, "hidden": hidden,
    }  # fmt: skip


def account(stats: EngineStats) -> dict[str, str | int | float | bool]:
    """Counters of one GPU as flat totals, small enough for a health report."""
    record = stats.as_dict()
    return {name: value for name, value in record.items() if isinstance(value, str | int | float)}


class Shards:
    """The other shards, 1..G-1, and the lead's calls to them.

    Args:
        settings: how many, by which rule, over which transport.
        links: of the shards 1..G-1, in this order.
        layers, experts, hidden: MoE layers, experts of a layer, width of a row.
        stats: told of losses.

    Raises:
        ConfigError: links and settings disagree.
    """

    def __init__(
        self,
        settings: ShardSettings,
        links: Sequence[PeerLink],
        layers: int,
        experts: int,
        hidden: int,
        stats: EngineStats,
    ) -> None:
        if len(links) != settings.count - 1:
            raise ConfigError(
                f"there are to be {settings.count} shards, but {len(links)} besides the lead can be reached",
                "start a ShardWorker for each, or lower the number of shards",
            )
        self.peers = {
            shard_name(i): RemoteExperts(
                "shard", f"shard {i}", link, settings, "", stats, terms(layers, experts, hidden, settings, i)
            )
            for i, link in enumerate(links, start=1)
        }
        by_index = [None, *self.peers.items()]
        self._owner = [by_index[i] for i in owners(layers, experts, settings)]
        self._iteration, self._layer = 0, -1

    def start(self) -> None:
        """Connect to all.

        Raises:
            RuntimeFailure: one was not reached.
        """
        for peer in self.peers.values():
            peer.start(_START_S)

    def at(self, layer: int) -> None:
        """The forward is at this layer; layers rise within a forward, so a lower one begins the next iteration."""
        if layer <= self._layer:
            self._iteration += 1
        self._layer = layer

    def peer_of(self, key: int) -> tuple[str, RemoteExperts] | None:
        """The shard that computes an expert; None: the lead, as its owner or because its owner is lost."""
        owner = self._owner[key]
        return owner if owner is not None and owner[1].available else None

    def prefetch(self, layer: int, keys: Sequence[int]) -> None:
        """Tell the owners to load experts ahead, most wanted first, decided while `layer` runs; never waits."""
        by_peer: dict[str, tuple[RemoteExperts, list[int]]] = {}
        for key in keys:
            found = self.peer_of(key)
            if found is not None:
                by_peer.setdefault(found[0], (found[1], []))[1].append(key)
        for peer, wanted in by_peer.values():
            priorities = np.arange(len(wanted), 0, -1, dtype=np.float32)
            peer.post(PrefetchCommand(self._iteration, layer, np.array(wanted, np.int32), priorities))

    def reports(self) -> list[dict[str, Any]]:
        """Each shard's account of itself and its counters; of one that is lost or late only its name and that."""
        out = []
        for name, peer in self.peers.items():
            report = peer.report(_REPORT_S)
            found = {"state": "late" if peer.available else "lost"} if report is None else dict(report.details)
            out.append({"shard": name} | found)
        return out

    def close(self) -> None:
        """Hang up. Safe to call twice."""
        for peer in self.peers.values():
            peer.close()


class ShardPlacer(Placer):
    """Every expert to its owner; those of a lost shard to the lead, until it is back."""

    def __init__(self, cache: ExpertCache, planner: LoadOnMiss, experts: int, shards: Shards) -> None:
        super().__init__(cache, planner, experts, lambda: True)
        self._shards = shards

    def plan(
        self, layer: int, needed: Sequence[int], routing: Routing, ids: torch.Tensor, weights: torch.Tensor
    ) -> LayerPlan:
        self._shards.at(layer)
        found = [(key, self._shards.peer_of(key)) for key in needed]
        return self._split(needed, [Remote(key, 0, peer[0]) for key, peer in found if peer is not None])
