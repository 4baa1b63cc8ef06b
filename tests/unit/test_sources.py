"""Experts of other nodes as the loader gets them: which store is asked, what is under way, what is waited for."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from channel_peer import wait_until
from handmade_store import EXPERTS, layer_values, write_store

from tiermoe.actors.engine.cache.device import CpuDevice
from tiermoe.actors.engine.cache.loader import DEMAND, Loader, LoadJob
from tiermoe.actors.engine.cache.slots import LayerWeights, SlotPool
from tiermoe.actors.engine.cache.sources import RemoteStores, host_weights, open_sources
from tiermoe.actors.settings import LinkSettings, StoreSettings
from tiermoe.actors.store.files import ExpertStore
from tiermoe.actors.store.format import DType, ExpertShape
from tiermoe.actors.store.server import StoreWorker
from tiermoe.errors import StoreError
from tiermoe.proto.options import ServerOptions
from tiermoe.proto.peers import LocalDirectory, PeerLink, StoreLink, store_name

LAYERS = 4
FAST = StoreSettings(deadline_s=0.3)
LONG = StoreSettings(deadline_s=30.0)
WAIT_S = 20.0


class Stores:
    """Stores in this process that can be closed and started again."""

    def __init__(self, folder: Path, slices: Sequence[Sequence[int]], shared_memory: bool) -> None:
        self.folder, self.slices = folder, slices
        self.board = LocalDirectory()
        self.options = ServerOptions(shared_memory=shared_memory)
        self.workers = [self._new(i) for i in range(len(slices))]
        self.manifest = self.workers[0].describe().manifest

    def _new(self, index: int) -> StoreWorker:
        return StoreWorker(str(self.folder), index, self.slices[index], "stamp", self.board, options=self.options)

    def restart(self, index: int) -> None:
        self.workers[index] = self._new(index)

    @property
    def links(self) -> list[StoreLink]:
        return [
            StoreLink(store_name(i), tuple(layers), PeerLink(self.board, name=store_name(i)))
            for i, layers in enumerate(self.slices)
        ]

    @contextmanager
    def reader(self, settings: StoreSettings = LONG, layers: Sequence[int] = range(LAYERS)) -> Iterator[RemoteStores]:
        with closing(RemoteStores(self.manifest, layers, self.links, settings)) as reader:
            for holder in reader._holders.values():
                assert holder.wait(WAIT_S)
            yield reader

    def asked(self) -> list[int]:
        """Experts that each store gave."""
        return [worker.health()["experts_sent"] for worker in self.workers]


Make = Callable[..., Stores]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    with ExitStack() as stack:

        def made(*slices: Sequence[int], shared_memory: bool = False, **store: Any) -> Stores:
            folder = write_store(tmp_path / "store", LAYERS, **store)
            stores = Stores(folder, slices or [range(LAYERS)], shared_memory)
            stack.callback(lambda: [worker.close() for worker in stores.workers])
            return stores

        yield made


def take(reader: RemoteStores, layer: int, expert: int) -> tuple[torch.Tensor, ...]:
    promise = reader.layer(layer).expert(expert)
    promise.ask([])
    return promise.tensors()


def assert_right(
    found: Sequence[torch.Tensor], layer: int, expert: int, dtype: DType = "float32", **shape: ExpertShape
) -> None:
    values = layer_values(layer, dtype, **shape)
    assert len(found) == len(values)
    for tensor, array in zip(found, values.values(), strict=True):
        bits = tensor.view(torch.int16).numpy().view(np.uint16) if dtype == "bfloat16" else tensor.numpy()
        np.testing.assert_array_equal(bits, array[expert])


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("gates", [1, 2])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("part", [1, 150, 1 << 20])
def test_the_very_bytes(make: Make, monkeypatch: Any, dtype: DType, gates: int, bias: bool, part: int) -> None:
    """In one message, or an expert in several, of one neuron in the worst case."""
    monkeypatch.setattr("tiermoe.actors.store.remote.PART_BYTES", part)
    shape = ExpertShape(num_experts=EXPERTS, hidden=8, intermediate=5, gates=gates, has_bias=bias)  # type: ignore[arg-type]
    stores = make(dtype=dtype, shape=shape)
    with stores.reader() as reader:
        for layer, expert in [(0, 0), (3, 2), (1, 1)]:
            found = take(reader, layer, expert)
            assert {tensor.dtype for tensor in found} == {getattr(torch, dtype)}
            assert_right(found, layer, expert, dtype, shape=shape)
        assert reader.transports == {"store/0": "grpc"}


def test_shared_memory_on_one_host(make: Make) -> None:
    stores = make(shared_memory=True)
    with stores.reader() as reader:
        assert_right(take(reader, 2, 1), 2, 1)
        assert reader.transports == {"store/0": "shm"}


def test_mapped_layers_and_others(make: Make) -> None:
    stores = make([0, 3], [1])
    own = ExpertStore(stores.folder, "stamp", layers=[2])
    with closing(open_sources(own.describe(), stores.links, LONG)) as sources:
        assert [isinstance(source, LayerWeights) for source in sources.weights] == [False, False, True, False]
        assert len(sources.mapped) == 1
        for layer, source in enumerate(sources.weights):
            found = source.expert(1)
            assert_right(found if isinstance(found, tuple) else found.tensors(), layer, 1)
        assert sources.peers() == {"store/0": "connected", "store/1": "connected"}
    whole = ExpertStore(stores.folder, "stamp")
    with closing(open_sources(whole.describe(), stores.links, LONG)) as sources:
        assert sources.remote is None
        assert sources.peers() == {}


def test_a_layer_of_no_store_is_refused_at_once(make: Make) -> None:
    stores = make([0], [2])
    with pytest.raises(StoreError, match="no store holds MoE layers 1, 3"):
        RemoteStores(stores.manifest, range(LAYERS), stores.links, LONG)


def test_layers_spread_over_replicas(make: Make) -> None:
    stores = make(range(LAYERS), range(LAYERS))
    with stores.reader() as reader:
        for layer in range(LAYERS):
            for expert in range(EXPERTS):
                take(reader, layer, expert)
    assert stores.asked() == [2 * EXPERTS, 2 * EXPERTS]
    for name, worker in zip(("store/0", "store/1"), stores.workers, strict=True):
        read, given = reader.reads[name], worker.sample().counters
        assert (read.messages_received, read.bytes_received) == (given["experts_sent"], given["expert_bytes_sent"])
        assert read.waited_s > 0
        assert given["bytes_sent"] > read.bytes_received


def test_the_next_replica_takes_over_and_the_first_comes_back(make: Make) -> None:
    stores = make(range(LAYERS), range(LAYERS))
    with stores.reader() as reader:
        under_way = reader.layer(0).expert(0)
        under_way.ask([])
        stores.workers[0].close()
        assert_right(under_way.tensors(), 0, 0)
        assert_right(take(reader, 2, 1), 2, 1)
        assert reader.peers() == {"store/0": "lost", "store/1": "connected"}
        stores.restart(0)
        assert reader._holders["store/0"].wait(WAIT_S)
        assert_right(take(reader, 0, 2), 0, 2)
        assert stores.asked()[0] == 1


def test_a_store_that_refuses_is_passed_over(make: Make, monkeypatch: Any) -> None:
    stores = make(range(LAYERS), range(LAYERS))

    def refuse(request: Any) -> Any:
        raise StoreError("the disk is gone", "replace it")

    with stores.reader() as reader:
        monkeypatch.setattr(stores.workers[0], "_experts", refuse)
        assert_right(take(reader, 0, 1), 0, 1)
        assert reader.refetches == 1
        monkeypatch.setattr(stores.workers[1], "_experts", refuse)
        with pytest.raises(StoreError, match=r"MoE layers? 0.* cannot be read: .*store/0: the disk is gone"):
            take(reader, 0, 2)  # at once, for all of them said so


def test_wrong_arrays_of_any_source_are_refused(make: Make, monkeypatch: Any) -> None:
    stores = make(range(LAYERS), range(LAYERS))
    right = stores.workers[0]._experts

    def wrong(request: Any) -> Any:
        reply = right(request)
        object.__setattr__(reply, "tensors", {n: a.astype(np.float16) for n, a in reply.tensors.items()})
        return reply

    def other(request: Any) -> Any:
        reply = right(request)
        object.__setattr__(reply, "experts", (reply.experts + 1) % EXPERTS)
        return reply

    with stores.reader() as reader:
        for trick in (wrong, other):
            assert reader._holders["store/0"].wait(WAIT_S)
            monkeypatch.setattr(stores.workers[0], "_experts", trick)
            assert_right(take(reader, 0, 1), 0, 1)
        assert reader.refetches == 2


def test_a_store_of_another_model_is_not_connected_to(make: Make, tmp_path: Path) -> None:
    stores = make()
    write_store(tmp_path / "other", LAYERS, model="another")
    other = ExpertStore(tmp_path / "other").describe().manifest
    with closing(RemoteStores(other, [0], stores.links, FAST)) as reader:
        with pytest.raises(StoreError, match="MoE layer 0 cannot be read"):
            reader.start(0.5)
        (holder,) = reader._holders.values()
        wait_until(lambda: "another model" in holder.problem, WAIT_S)  # half a second is short on a busy machine


def test_a_store_whose_file_does_not_verify_is_named_until_it_serves(make: Make) -> None:
    """Its process ended with the change; what keeps it from its start is known by its name."""
    stores = make()
    (link,) = stores.links
    with stores.reader() as reader:
        refusal = StoreError("layer-000.safetensors changed", "put it back")
        known = link.link.address()
        with mock.patch.object(type(stores.board), "lookup", side_effect=refusal):
            stores.workers[0].close()
            wait_until(lambda: reader.refusal() is not None, WAIT_S)
            assert "layer-000.safetensors changed" in str(reader.refusal())
        stores.restart(0)
        assert link.link.address() != known
        assert reader._holders["store/0"].wait(WAIT_S)
        assert reader.refusal() is None
        assert_right(take(reader, 0, 1), 0, 1)


def test_an_outage_is_waited_for_once(make: Make, monkeypatch: Any) -> None:
    stores = make([0, 1], [2, 3])
    waits: list[float] = []
    with stores.reader(FAST) as reader:
        wait = reader._await_one
        monkeypatch.setattr(reader, "_await_one", lambda holders, s: waits.append(s) or wait(holders, s))
        stores.workers[1].close()
        with pytest.raises(StoreError, match=r"MoE layers 2, 3 cannot be read: no store gave an expert of layer 3"):
            take(reader, 3, 0)
        assert waits
        waits.clear()
        for _ in range(3):
            with pytest.raises(StoreError, match="bring back store/1"):
                take(reader, 2, 1)
        assert sum(waits) < FAST.deadline_s / 10  # a rest of the first wait, at most
        reader._settings = LONG  # of a store that is there; a busy machine may take longer than `FAST` allows
        assert_right(take(reader, 1, 0), 1, 0)  # the other store serves on
        stores.restart(1)
        assert reader._holders["store/1"].wait(WAIT_S)
        assert_right(take(reader, 2, 1), 2, 1)


def test_a_store_that_comes_back_in_time_is_waited_for(make: Make) -> None:
    stores = make()
    with stores.reader() as reader:
        waiting = threading.Event()
        wait = reader._await_one

        def noted(holders: Any, timeout_s: float) -> None:
            waiting.set()
            wait(holders, timeout_s)

        reader._await_one = noted  # type: ignore[method-assign]
        stores.workers[0].close()
        found: list[Any] = []
        thread = threading.Thread(target=lambda: found.append(take(reader, 1, 2)))
        thread.start()
        assert waiting.wait(WAIT_S)
        stores.restart(0)
        thread.join(WAIT_S)
        assert_right(found[0], 1, 2)


def test_closing_ends_what_waits(make: Make) -> None:
    stores = make()
    with stores.reader() as reader:
        waiting = threading.Event()
        wait = reader._await_one
        reader._await_one = lambda holders, s: waiting.set() or wait(holders, s)  # type: ignore
        stores.workers[0].close()
        errors: list[BaseException] = []

        def run() -> None:
            try:
                take(reader, 1, 2)
            except StoreError as error:
                errors.append(error)

        thread = threading.Thread(target=run)
        thread.start()
        assert waiting.wait(WAIT_S)
        reader.close()
        thread.join(WAIT_S)
        assert len(errors) == 1


def test_the_loader_takes_promises_and_tensors_in_order(make: Make) -> None:
    stores = make([0, 1])
    own = ExpertStore(stores.folder, "stamp", layers=[2])
    mapped = host_weights(own.layers)[0]
    with stores.reader(layers=[0, 1]) as reader, closing(Loader(CpuDevice(LinkSettings()))) as loader:
        shape = stores.manifest.experts
        pool = SlotPool.allocate(shape, 5, torch.float32, torch.device("cpu"))
        wanted = [(0, 1), (2, 0), (1, 2), (0, 0)]
        jobs = [
            LoadJob(
                0, i, dst=pool.slot(i), after=None, layer=layer, cause="demand",
                src=mapped.expert(e) if layer == 2 else reader.layer(layer).expert(e),
            )
            for i, (layer, e) in enumerate(wanted)
        ]  # fmt: skip
        loader.submit(jobs, DEMAND)
        for job, (layer, e) in zip(jobs, wanted, strict=True):
            assert job.done.wait(WAIT_S)
            assert job.copied is not None
            assert_right(job.dst, layer, e)
        stores.workers[0].close()
        reader._settings = FAST
        failing = LoadJob(0, 4, dst=pool.slot(4), after=None, layer=0, cause="demand", src=reader.layer(0).expert(2))
        loader.submit([failing], DEMAND)
        assert failing.done.wait(WAIT_S)
        assert isinstance(failing.error, StoreError)
