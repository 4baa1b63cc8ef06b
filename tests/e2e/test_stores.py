"""A lead without store files: the default model's very tokens out of other processes' memory, whatever dies."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from serving import Reference, settings

from tiermoe.actors.gpu_worker import GpuWorker
from tiermoe.actors.requests import Generation, GenerationRequest, SamplingParams
from tiermoe.actors.settings import EngineSettings, KvSettings, ShardSettings, StoreSettings
from tiermoe.actors.shard_worker import ShardWorker
from tiermoe.actors.store.files import ExpertStore, StoreView
from tiermoe.cluster.worker_process import Role, WorkerProcess
from tiermoe.proto.options import ServerOptions
from tiermoe.proto.peers import LocalDirectory, PeerLink, StoreLink, shard_name, store_name

LAYERS = range(16)


def _elsewhere(store: ExpertStore) -> StoreView:
    """The view of a node that has none of the files."""
    view = store.describe()
    return replace(view, path="/nowhere", layers=(), dense=replace(view.dense, path="/nowhere/dense.safetensors"))


def _config(budget: float = 0.25, deadline_s: float = 10.0, **more: Any) -> EngineSettings:
    kv = KvSettings(page_size=32, num_blocks=64)
    return settings(budget, "next-gate", kv=kv, store=StoreSettings(deadline_s=deadline_s), **more)


class StoreProcess(WorkerProcess):
    """A store of these layers, read over gRPC as from another host."""

    def __init__(self, index: int, layers: Sequence[int], path: Path) -> None:
        options = ServerOptions(shared_memory=False)
        arguments = {"index": index, "layers": list(layers), "verify": "stamp", "options": options}
        worker = "actors.store.server:StoreWorker"
        super().__init__(Role(store_name(index), f"store {index}", worker, arguments, "path"), path)
        self.store_link = StoreLink(store_name(index), tuple(layers), self.link)


@contextmanager
def _stores(store: ExpertStore, *slices: Sequence[int], first: int = 0) -> Iterator[list[StoreProcess]]:
    """A process for each slice, numbered from `first`."""
    with ExitStack() as stack:
        path = store.describe().path
        processes = [
            stack.enter_context(closing(StoreProcess(i, layers, Path(path))))
            for i, layers in enumerate(slices, first)
        ]
        for process in processes:
            process.begin()
        for process in processes:
            process.wait_until_ready()
        yield processes


@pytest.fixture(scope="module")
def whole(store: ExpertStore) -> Iterator[StoreProcess]:
    """store/0 with all layers; a test that kills it starts it again."""
    with _stores(store, LAYERS) as (process,):
        yield process


@contextmanager
def _lead(view: StoreView, config: EngineSettings, stores: Sequence[StoreProcess], **more: Any) -> Iterator[GpuWorker]:
    with closing(GpuWorker(config, view, stores=[process.store_link for process in stores], **more)) as lead:
        lead.start()
        yield lead


def _error(lead: GpuWorker, prompt: Sequence[int]) -> str:
    generation = Generation("e")
    for event in lead.submit(GenerationRequest("e", tuple(prompt), SamplingParams(max_tokens=24))):
        generation.add(event)
    assert (generation.finish, event.error_type) == ("error", "StoreError")
    assert generation.error is not None
    return generation.error


def _fetched(remote: Any) -> int:
    """Experts that came from all stores."""
    return sum(read.messages_received for read in remote.reads.values())


def test_same_tokens_out_of_another_process(store: ExpertStore, whole: StoreProcess, reference: Reference) -> None:
    with _lead(_elsewhere(store), _config(), [whole]) as lead:
        reference.check(lead, 4)
        remote = lead._sources.remote
        assert remote.transports == {"store/0": "grpc"}
        total = lead.stats().total()
        loaded = total.bytes_loaded_demand + total.bytes_loaded_prefetch
        assert _fetched(remote) * lead.engine.slot_bytes >= loaded
        assert total.bytes_loaded_prefetch > 0
        assert remote.refetches == 0
        assert lead.health()["store/0"] == "connected"


@pytest.mark.slow
def test_two_slices_and_files_of_the_own_node(store: ExpertStore, reference: Reference) -> None:
    own = ExpertStore(store.describe().path, "stamp", layers=[2, 5])
    first, second = [0, 1, 3, 8, 9, 10, 11], [4, 6, 7, 12, 13, 14, 15]
    with _stores(store, first, second) as stores, _lead(own.describe(), _config(), stores) as lead:
        reference.check(lead, 4)
        assert [type(source).__name__ for source in lead._sources.weights].count("RemoteLayer") == 14
        assert lead.plan()["stores"] == [
            {"store": "store/0", "transport": "grpc", "layers": first, "spare_layers": []},
            {"store": "store/1", "transport": "grpc", "layers": second, "spare_layers": []},
        ]


@pytest.mark.slow
def test_a_replica_takes_over_midway(store: ExpertStore, reference: Reference) -> None:
    with _stores(store, LAYERS, LAYERS) as stores, _lead(_elsewhere(store), _config(), stores) as lead:
        remote = lead._sources.remote
        reference.check_struck(lead, 0, lambda: os.kill(stores[0].pid, signal.SIGKILL), 24)
        assert lead.health() | {"store/0": "lost", "store/1": "connected"} == lead.health()
        stores[0].restart()
        assert remote._holders["store/0"].wait(20.0)
        reference.check(lead, 4)
        assert lead.health()["store/0"] == "connected"


@pytest.mark.slow
def test_a_store_that_hangs_is_passed_over(store: ExpertStore, reference: Reference) -> None:
    with _stores(store, LAYERS, LAYERS) as stores, _lead(_elsewhere(store), _config(), stores) as lead:
        reference.check_struck(lead, 0, lambda: os.kill(stores[0].pid, signal.SIGSTOP), 24)
        os.kill(stores[0].pid, signal.SIGKILL)


def test_no_store_left_is_a_typed_error_and_passes(
    store: ExpertStore, whole: StoreProcess, reference: Reference
) -> None:
    with _lead(_elsewhere(store), _config(), [whole]) as lead:
        reference.check(lead, 1)
        remote = lead._sources.remote
        usual = remote._settings  # a busy machine's reads may take longer than the outage is to last
        remote._settings = StoreSettings(deadline_s=1.5)
        os.kill(whole.pid, signal.SIGKILL)
        error = _error(lead, reference.prompts[1])
        assert "MoE layers 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, ... cannot be read" in error
        assert "store/0" in error
        assert "cannot be read" in _error(lead, reference.prompts[2])
        assert lead.health() | {"state": "serving", "store/0": "lost"} == lead.health()
        lead.engine.cache.check_integrity()
        assert lead.engine.cache.residency.pins == 0
        remote._settings = usual
        whole.restart()
        assert remote._holders["store/0"].wait(20.0)
        reference.check(lead, 4)
        lead.engine.cache.check_integrity()


def test_a_request_outlives_the_restart_of_its_only_store(
    store: ExpertStore, whole: StoreProcess, reference: Reference
) -> None:
    with _lead(_elsewhere(store), _config(deadline_s=30.0), [whole]) as lead:

        def strike() -> None:
            os.kill(whole.pid, signal.SIGKILL)
            whole.restart()

        reference.check_struck(lead, 0, strike, 24)


def test_a_shard_without_files(store: ExpertStore, whole: StoreProcess, reference: Reference) -> None:
    """The lead maps all; its shard maps nothing, and asks for what it owns."""
    config = _config(0.125, shards=ShardSettings(count=2))
    board = LocalDirectory()
    with _stores(store, range(8), first=1) as (part,):
        links = [whole.store_link, part.store_link]
        with closing(ShardWorker(config, 1, "/nowhere", board, layers=(), stores=links)) as shard:
            with _lead(store.describe(), config, (), shards=[PeerLink(board, name=shard_name(1))]) as lead:
                reference.check(lead, 4)
                assert lead.stats().total().shard_recomputed == 0
            assert shard.health() | {"store/0": "connected", "store/1": "connected"} == shard.health()
            assert _fetched(shard.engine.sources.remote) > 0
