"""Rows to a peer and sums back through pinned memory: what waits for what, and what is kept until when."""

from __future__ import annotations

import gc
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fake_gpu import FakeCompute
from serving import greedy, prepared, settings
from tiny_models import save_tiny_checkpoint

from tiermoe.actors.core import _core
from tiermoe.actors.engine import engine as engine_module
from tiermoe.actors.engine.cache.device import PlainActivations
from tiermoe.actors.engine.calls import RemoteCall, RemoteExperts
from tiermoe.actors.engine.cuda.activations import PinnedActivations, PinnedPool
from tiermoe.actors.engine.stats import EngineStats
from tiermoe.actors.gpu_worker import GpuWorker
from tiermoe.actors.ndp_worker import NdpWorker
from tiermoe.actors.policies.context_ndp import PlacementOptions
from tiermoe.actors.policy_settings import PolicySettings
from tiermoe.actors.settings import NdpSettings
from tiermoe.cluster.config import load_hardware
from tiermoe.proto.channel import open_channel
from tiermoe.proto.messages import ExpertBatch, ExpertResult, HealthReport, HealthRequest, Message
from tiermoe.proto.options import ChannelOptions
from tiermoe.proto.peers import LocalDirectory, PeerLink
from tiermoe.proto.server import ChannelServer

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="shared memory is Linux only")
_WIDTH = 512  # a row of float32 is more than a short frame
_SOON_S = 5.0
_KIB = 1024


class _Peer:
    """Answers a batch with twice its rows, once it may; `gpu` is the lead's."""

    def __init__(self, gpu: FakeCompute) -> None:
        self._gpu = gpu
        self.may_answer, self.got_one = threading.Event(), threading.Event()
        self.may_answer.set()
        self.rows: list[np.ndarray] = []
        self.board = LocalDirectory()
        self.server = ChannelServer(self._handle)
        self.board.register("ndp/0", self.server.address)

    def _handle(self, message: Message) -> Message:
        if isinstance(message, HealthRequest):
            return HealthReport("ndp", {})
        assert isinstance(message, ExpertBatch)
        self._gpu.log.append("received")
        self.rows.append(np.array(message.hidden))
        self.got_one.set()
        assert self.may_answer.wait(_SOON_S)
        return ExpertResult(2 * message.hidden, 0.1, 0.2, 0.3)

    def connect(self, way: PinnedActivations) -> RemoteExperts:
        class Link(PeerLink):
            def connect(self, address: str, transport: Any, supply: Any = None, traffic: Any = None) -> Any:
                return open_channel(address, ChannelOptions(transport="shm", supply=supply))

        link = Link(self.board, name="ndp/0")
        remote = RemoteExperts("ndp", "NDP worker 0", link, NdpSettings(), "silu", EngineStats(), None, way.supply)
        remote.begin()
        remote.wait_for_the_first(_SOON_S)
        return remote


@pytest.fixture
def gpu() -> FakeCompute:
    return FakeCompute()


@pytest.fixture
def way(gpu: FakeCompute) -> PinnedActivations:
    return PinnedActivations(gpu)


@pytest.fixture
def peer(gpu: FakeCompute) -> Iterator[_Peer]:
    found = _Peer(gpu)
    yield found
    found.may_answer.set()
    found.server.close()


@pytest.fixture
def remote(peer: _Peer, way: PinnedActivations) -> Iterator[RemoteExperts]:
    found = peer.connect(way)
    yield found
    found.close()


def _layer(tokens: int) -> tuple[torch.Tensor, np.ndarray, _core.Routing]:
    """hidden [T, H], weights [T, 1] and a routing of two experts that take turns."""
    hidden = torch.arange(tokens * _WIDTH, dtype=torch.float32).reshape(tokens, _WIDTH)
    weights = np.linspace(0.5, 1.0, tokens, dtype=np.float32)[:, None]
    return hidden, weights, _core.Routing(0, 2, np.arange(tokens)[:, None] % 2)


def _experts(*numbers: int) -> tuple[list[int], list[int]]:
    """Keys, and the bits of each."""
    return list(numbers), [0] * len(numbers)


def _send(remote: RemoteExperts, way: PinnedActivations, tokens: int, places: tuple[int, ...] = (0,)) -> RemoteCall:
    hidden, weights, routing = _layer(tokens)
    call = remote.send(routing, *_experts(*places), way.begin(hidden), weights, True)
    assert call.sent
    return call


def _idle_bytes(pool: PinnedPool) -> int:
    """Of blocks that nobody leases."""
    return sum(size * len(blocks) for size, blocks in pool._free.items())


def _idle(way: PinnedActivations) -> bool:
    """Whether nothing is kept."""
    gc.collect()
    return way.pool.under_way == 0 and _idle_bytes(way.pool) == way.pool.nbytes


@pytest.mark.parametrize(("tokens", "places"), [(1, (0,)), (4, (0,)), (4, (0, 1)), (300, (0,)), (300, (0, 1))])
def test_rows_are_sent_when_they_are_there(
    tokens: int, places: tuple[int, ...], peer: _Peer, remote: RemoteExperts, way: PinnedActivations, gpu: FakeCompute
) -> None:
    call = _send(remote, way, tokens, places)
    answer = call.result()
    hidden, _, _ = _layer(tokens)
    rows = hidden if len(places) == 2 or tokens == 1 else hidden[::2]
    # the fake holds NaN in pinned memory until a copy is done
    np.testing.assert_array_equal(peer.rows[0], rows.numpy())
    assert gpu.log.index("received") > gpu.log.index("synchronize")
    assert way.waited == 0
    out = way.receive(answer.partial)
    gpu.run()
    assert torch.equal(out, 2 * rows)
    assert call.rows is None if len(rows) == tokens else call.rows.tolist() == list(range(0, tokens, 2))


def test_an_answer_is_kept_until_the_gpu_has_read_it(
    peer: _Peer, remote: RemoteExperts, way: PinnedActivations, gpu: FakeCompute
) -> None:
    answer = _send(remote, way, 1).result()
    assert way.pool.tensor(answer.partial) is not None  # it came out of the ring to where the GPU can read it
    copies = gpu.log.count("copy")
    out = way.receive(answer.partial)
    assert gpu.log.count("copy") == copies + 1
    del answer
    assert not _idle(way)
    for _ in range(3):  # what is leased meanwhile is other memory
        memory = way.pool.lease(8 * _KIB)
        memory[:] = 255
    gpu.run()
    assert torch.equal(out, 2 * _layer(1)[0])
    del memory
    assert _idle(way)


@pytest.mark.parametrize("moment", ["before it is sent", "before it is answered"])
def test_a_lost_peer_leaves_nothing(
    moment: str, peer: _Peer, remote: RemoteExperts, way: PinnedActivations, gpu: FakeCompute
) -> None:
    hidden, weights, routing = _layer(2)
    outgoing = way.begin(hidden)
    peer.may_answer.clear()
    if moment == "before it is sent":
        remote.close()
        assert not remote.send(routing, *_experts(0), outgoing, weights, True).sent
        del outgoing
        assert not _idle(way)  # the copy is under way: nobody may have that memory yet
    else:
        call = remote.send(routing, *_experts(0), outgoing, weights, True)
        assert call.sent
        assert peer.got_one.wait(_SOON_S)
        peer.may_answer.set()
        remote.close()
        call.result()
        del outgoing, call
    gpu.run()
    assert _idle(way)


def test_a_driver_that_refuses_is_done_without(monkeypatch: pytest.MonkeyPatch, gpu: FakeCompute) -> None:
    def refuse(nbytes: int) -> torch.Tensor:
        raise RuntimeError("CUDA error: out of memory\nmore that nobody reads")

    assert PinnedActivations(gpu).label == "pinned"
    monkeypatch.setattr(gpu, "pinned", refuse)
    way = PinnedActivations(gpu)
    assert way.label == "not pinned: CUDA error: out of memory"
    assert way.supply(1 << 20) is None
    rows, _ = way.begin(torch.full((2, 16), 3.0)).take(np.arange(2))
    assert (rows == 3).all()
    assert bool((way.receive(rows) == 3).all())
    assert gpu.log == []
    assert way.waited == 2


def test_rows_in_half_precision_travel_as_float32(
    peer: _Peer, remote: RemoteExperts, way: PinnedActivations, gpu: FakeCompute
) -> None:
    hidden, weights, routing = _layer(2)
    half = (hidden / 1000).bfloat16()
    call = remote.send(routing, *_experts(0, 1), way.begin(half), weights, True)
    assert call.result() is not None
    np.testing.assert_array_equal(peer.rows[0], half.float().numpy())


def test_memory_first_used_in_inference_mode_serves_outside(gpu: FakeCompute, way: PinnedActivations) -> None:
    for mode in (True, False):
        with torch.inference_mode(mode), torch.no_grad():
            rows, _ = way.begin(torch.full((1, 16), 3.0)).take(np.zeros(1, np.int64))
            assert (rows == 3).all()
            sums = way.receive(rows)
            gpu.run()
            assert bool((sums == 3).all())
        del rows, sums
    assert way.pool.nbytes == 64 * _KIB  # the same memory both times


def test_views_keep_their_memory() -> None:
    pool = PinnedPool(FakeCompute(), 256 * _KIB)
    memory = pool.lease(100)
    assert memory.nbytes == 100
    assert memory.__array_interface__["data"][0] % 64 == 0
    view = memory[16:80].view(np.float32).reshape(4, 4)
    same = pool.tensor(view)
    assert same.shape == (4, 4)
    view[:] = 7
    assert bool((same == 7).all())
    del memory, same
    assert _idle_bytes(pool) == 0
    del view
    assert _idle_bytes(pool) == pool.nbytes == 64 * _KIB
    assert pool.tensor(np.zeros(4, np.float32)) is None
    larger, *small = [pool.lease(128 * _KIB), *(pool.lease(1) for _ in range(2))]
    assert larger is not None
    assert None not in small
    assert pool.nbytes == 256 * _KIB
    assert pool.lease(1) is None
    assert pool.lease(1 << 30) is None
    assert pool.refused == 2
    del larger
    assert pool.lease(1) is not None  # a larger one that lies idle


def test_tokens_are_those_of_the_plain_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine whose rows and sums take the pinned way: prompts together, then decode, to a real worker."""
    near = NdpSettings(hardware=vars(load_hardware("paper-ndp")))
    policy = PolicySettings(name="test", lossless=True, placement=PlacementOptions(kind="context", hot_per_layer=1))
    store = prepared(save_tiny_checkpoint("mixtral", tmp_path / "checkpoint"), tmp_path / "store")
    board = LocalDirectory()
    ndp = NdpWorker(near, store.describe().path, board)
    way = PinnedActivations(FakeCompute(lazy=False))
    found: list[list[list[int]]] = []
    try:
        ways: list[Callable[[torch.device], Any]] = [PlainActivations, lambda _: way]
        for make in ways:
            monkeypatch.setattr(engine_module, "activations_of", make)
            link = PeerLink(board, name="ndp/0")
            worker = GpuWorker(settings(0.5, policy=policy, ndp=near), store.describe(), [link])
            try:
                worker.start()
                found.append(greedy(worker, [[1, 2, 3, 4, 5, 6, 7], [9, 8, 7]], 8))
                assert worker.stats().total().ndp_experts > 0
                assert worker.stats().total().ndp_recomputed == 0
            finally:
                worker.close()
    finally:
        ndp.close()
    assert found[0] == found[1]
    assert way.waited == 0
    assert way.pool.nbytes > 0
    assert _idle(way)
