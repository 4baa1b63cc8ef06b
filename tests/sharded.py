"""A lead and its shards in this process, with real channels between them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from typing import Any

from tiermoe.actors.gpu_worker import GpuWorker
from tiermoe.actors.settings import EngineSettings
from tiermoe.actors.shard_worker import ShardWorker
from tiermoe.actors.store.files import ExpertStore
from tiermoe.proto.peers import LocalDirectory, PeerLink, shard_name


@dataclass
class Group:
    """The GPUs of one replica; `shards` are those besides the lead."""

    settings: EngineSettings
    store: str
    board: LocalDirectory = field(default_factory=LocalDirectory)
    shards: list[ShardWorker] = field(default_factory=list)
    lead: GpuWorker = field(init=False)

    def start_shard(self, index: int) -> ShardWorker:
        """A shard, in place of one that may have been closed."""
        return ShardWorker(self.settings, index, self.store, self.board)


@contextmanager
def serving_group(store: ExpertStore, config: EngineSettings, ndp: Sequence[Any] = ()) -> Iterator[Group]:
    """All shards of `config.shards` and a started lead.

    Args:
        ndp: links to NDP workers.
    """
    view = store.describe()
    group = Group(config, view.path)
    with ExitStack() as stack:
        for i in range(1, config.shards.count):
            group.shards.append(stack.enter_context(closing(group.start_shard(i))))
        links = [PeerLink(group.board, name=shard_name(i)) for i in range(1, config.shards.count)]
        group.lead = stack.enter_context(closing(GpuWorker(config, view, ndp, links)))
        group.lead.start()
        yield group
