"""No single message lost, late or repeated hangs a request or changes its tokens; on both transports, both ways."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
from channel_peer import DROP, REPEAT, Fault, FaultInjector
from serving import greedy, prepared, settings
from tiny_models import save_tiny_checkpoint

from tiermoe.actors.gpu_worker import GpuWorker
from tiermoe.actors.ndp_worker import NdpWorker
from tiermoe.actors.policies.context_ndp import PlacementOptions
from tiermoe.actors.policy_settings import PolicySettings
from tiermoe.actors.settings import NdpSettings
from tiermoe.actors.store.files import ExpertStore
from tiermoe.cluster.config import load_hardware
from tiermoe.proto.channel import open_channel
from tiermoe.proto.options import ChannelOptions, ServerOptions
from tiermoe.proto.peers import LocalDirectory, PeerLink

_PROMPT, _NEW = [5, 9, 2, 7, 1, 3], 10
_LATE = Fault(delay_s=0.6)
_NDP = NdpSettings(hardware=vars(load_hardware("paper-ndp")), deadline_s=5.0)


@dataclass(frozen=True)
class _FaultyLink(PeerLink):
    """Reaches the worker over a channel with faults."""

    transport: str = "shm"
    faults: FaultInjector | None = field(default=None, compare=False)

    def connect(self, address: str, transport: str, supply: object = None) -> Any:
        return open_channel(address, ChannelOptions(transport=self.transport, faults=self.faults))  # type: ignore


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> ExpertStore:
    folder = tmp_path_factory.mktemp("faults")
    return prepared(save_tiny_checkpoint("mixtral", folder / "checkpoint"), folder / "store")


@contextmanager
def _serving(store: ExpertStore, link: PeerLink) -> Iterator[GpuWorker]:
    policy = PolicySettings(name="test", lossless=True, placement=PlacementOptions(kind="context", hot_per_layer=1))
    worker = GpuWorker(settings(0.5, policy=policy, ndp=_NDP), store.describe(), [link])
    try:
        worker.start()
        yield worker
    finally:
        worker.close()


@pytest.fixture(scope="module")
def expected(store: ExpertStore) -> list[list[int]]:
    board = LocalDirectory()
    ndp = NdpWorker(_NDP, store.describe().path, board)
    try:
        with _serving(store, PeerLink(board, name="ndp/0")) as worker:
            return greedy(worker, [_PROMPT], _NEW)
    finally:
        ndp.close()


@pytest.mark.parametrize("transport", ["shm", "grpc"])
@pytest.mark.parametrize("side", ["request", "reply"])
@pytest.mark.parametrize("fault", [DROP, _LATE, REPEAT], ids=["lost", "late", "repeated"])
def test_one_bad_message(
    transport: str, side: str, fault: Fault, store: ExpertStore, expected: list[list[int]]
) -> None:
    injector = FaultInjector({3: fault})
    board = LocalDirectory()
    server = ServerOptions(faults=injector if side == "reply" else None)
    ndp = NdpWorker(_NDP, store.describe().path, board, options=server)
    try:
        link = _FaultyLink(
            board, name="ndp/0", transport=transport, faults=injector if side == "request" else None
        )
        with _serving(store, link) as worker:
            assert greedy(worker, [_PROMPT], _NEW) == expected
            assert injector.sent > 4  # the fault was met
            stats = worker.stats()
            assert stats.ndp_losses == 0
            assert stats.total().ndp_recomputed == 0
    finally:
        ndp.close()
