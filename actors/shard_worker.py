"""A shard of the expert cache: one more GPU, which loads and computes its own experts.

    ExpertBatch (rows, expert ids, weights) -> loads, kernels -> ExpertResult (a sum per row)
    PrefetchCommand (posted)                -> loads behind its own demand
    PlacementCommand (keys)                 -> loads its hot experts

A plain class; `cluster` makes it a process. It serves as soon as it is constructed, because Ray restarts a killed actor
by its constructor alone. `engine/peers/shard.py` runs a batch.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ..errors import ConfigError
from ..proto.messages import ExpertBatch, HealthReport, HealthRequest, Message, PlacementCommand, PrefetchCommand
from ..proto.options import ServerOptions
from ..proto.peers import Directory, StoreLink, shard_name
from ..proto.server import ChannelServer
from .combinations import check_combination
from .sample import ProcessSample, take_sample
from .settings import EngineSettings
from .store.dense import view_here
from .store.pages import FileWatch

if TYPE_CHECKING:
    from .engine.stats import LayerResidency


class ShardWorker:
    """Owns the slot pool, the loader and the budget of one device.

    Args:
        settings: of the lead; the budget is per GPU.
        index: 1..G-1.
        store: folder of the expert store on this node, memory-mapped.
        directory: gives the host to listen on and registers the address.
        token: required of clients; None: only this machine may connect.
        gpu: number of the CUDA device; None: the first visible one.
        layers: mapped from `store`; None: all. Without layers, `store` need not exist.
        stores: of other nodes, for the other layers.

    Raises:
        StoreError: the store is unusable, or no store has a layer. ConfigError: there is no such shard or GPU, or the
            budget is too small.
    """

    def __init__(
        self,
        settings: EngineSettings,
        index: int,
        store: str,
        directory: Directory,
        token: str | None = None,
        gpu: int | None = None,
        layers: Sequence[int] | None = None,
        stores: Sequence[StoreLink] = (),
    ) -> None:
        if not 0 < index < settings.shards.count:
            raise ConfigError(
                f"there is no shard worker {index} of {settings.shards.count} shards", "the lead is shard 0"
            )
        from .engine.peers.shard import open_shard
        from .engine.peers.shards import terms

        view = view_here(store, "stamp", layers, stores, settings.store)
        check_combination(settings, view.manifest.expert_form)
        shape = view.manifest.experts
        self._terms = terms(len(view.manifest.layers), shape.num_experts, shape.hidden, settings.shards, index)
        self.engine = open_shard(settings, index, view, gpu, stores)
        options = ServerOptions(
            host=directory.host(), token=token, tls=directory.tls, supply=self.engine.activations.supply
        )
        try:
            self._server = ChannelServer(self.handle, options)
            directory.register(shard_name(index), self._server.address)
        except BaseException:
            self.engine.close()
            raise
        self._watch = FileWatch()

    @property
    def address(self) -> str:
        """HOST:PORT of the channel server."""
        return self._server.address

    def handle(self, message: Message) -> Message | None:
        """Answer one message of the channel.

        Raises:
            TierMoeError: the shard cannot do it; the channel carries the error back.
        """
        if isinstance(message, ExpertBatch):
            return self.engine.run(message)
        if isinstance(message, PrefetchCommand):
            self.engine.prefetch(message)
            return None
        if isinstance(message, PlacementCommand):
            self.engine.place(message)
            return None
        if isinstance(message, HealthRequest):
            self.engine.greet()
            return HealthReport("shard", self.health())
        raise ConfigError(f"a shard does not answer {type(message).__name__}", "send it expert batches")

    def health(self) -> dict[str, Any]:
        """Counters since the start, and the terms that lead and shard agree on."""
        from .engine.peers.shards import account

        engine = self.engine
        return {
            "state": "serving",
            "address": self.address,
            "pid": os.getpid(),
            "device": str(engine.cache.pool.device),
            "activations": engine.activations.label,
            "batches": engine.batches,
            "pairs": engine.pairs,
            "late_commands": engine.late_commands,
            "resting_commands": engine.resting_commands,
        } | dict(engine.sources.peers()) | account(engine.stats()) | self._terms

    def sample(self) -> ProcessSample:
        """Counters of its GPU and of its channel, and what it read from each store of other nodes."""
        engine = self.engine
        own = {"batches": engine.batches, "rows": engine.rows, "pairs": engine.pairs, "busy_s": engine.busy_s}
        return take_sample(
            engine.stats().counters() | own | self._server.traffic.of_server(), engine.sources.reads()
        )

    def residency(self) -> list[LayerResidency]:
        """The residency of each layer on this device now; experts of other shards are absent."""
        return self.engine.residency()

    def close(self) -> None:
        """Stop serving and free the pool. Safe to call twice."""
        self._watch.close()
        self._server.close()
        self.engine.close()
