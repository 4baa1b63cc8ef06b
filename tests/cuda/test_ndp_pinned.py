"""A lead on the GPU and an NDP worker in a process beside it: rows and sums through pinned memory and the rings."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from serving import greedy, prepared, settings
from tiny_models import save_tiny_checkpoint

from tiermoe.actors.engine import engine as engine_module
from tiermoe.actors.engine.cache.device import PlainActivations, activations_of
from tiermoe.actors.engine.cuda.activations import PinnedActivations
from tiermoe.actors.engine.cuda.runtime import TorchRuntime
from tiermoe.actors.gpu_worker import GpuWorker
from tiermoe.actors.policies.context_ndp import PlacementOptions
from tiermoe.actors.policy_settings import PolicySettings
from tiermoe.actors.settings import NdpSettings
from tiermoe.actors.store.files import ExpertStore
from tiermoe.cluster.config import load_hardware
from tiermoe.cluster.worker_process import Role, WorkerProcess
from tiermoe.proto.channel import open_channel
from tiermoe.proto.messages import ExpertBatch, ExpertResult, Message
from tiermoe.proto.options import ChannelOptions
from tiermoe.proto.server import ChannelServer

_PROMPTS = [[1, 2, 3, 4, 5, 6, 7, 8, 9], [9, 8, 7], [3, 1, 4, 1, 5]]
_NEW = 16
_NDP = NdpSettings(hardware=vars(load_hardware("paper-ndp")), threads=2)
_POLICY = PolicySettings(name="test", lossless=True, placement=PlacementOptions(kind="context", hot_per_layer=1))


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> ExpertStore:
    folder = tmp_path_factory.mktemp("pinned")
    return prepared(save_tiny_checkpoint("mixtral", folder / "checkpoint"), folder / "store")


@pytest.fixture(scope="module")
def ndp(store: ExpertStore) -> Iterator[WorkerProcess]:
    with WorkerProcess(Role.ndp(_NDP), Path(store.describe().path)) as process:
        yield process


def _tokens(store: ExpertStore, ndp: WorkerProcess) -> list[list[int]]:
    config = settings(0.5, policy=_POLICY, ndp=_NDP).model_copy(update={"device": "cuda"})
    worker = GpuWorker(config, store.describe(), [ndp.link])
    try:
        worker.start()
        # one after the other: when requests meet in a batch is a matter of time, and sums depend on the batch
        found = [tokens for prompt in _PROMPTS for tokens in greedy(worker, [prompt], _NEW)]
        total = worker.stats().total()
        assert total.ndp_experts > 0
        assert total.ndp_recomputed == 0
        assert worker.stats().ndp_losses == 0
        return found
    finally:
        worker.close()


def test_tokens_are_those_of_the_plain_way(
    store: ExpertStore, ndp: WorkerProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Any] = []

    def remembered(make: Callable[[torch.device], Any]) -> Callable[[torch.device], Any]:
        return lambda device: made.append(make(device)) or made[-1]

    found = []
    for make in (PlainActivations, activations_of):
        monkeypatch.setattr(engine_module, "activations_of", remembered(make))
        found.append(_tokens(store, ndp))
    assert found[0] == found[1]
    pinned = made[-1]
    assert isinstance(pinned, PinnedActivations)
    torch.cuda.synchronize()
    assert pinned.waited == 0
    assert pinned.pool.nbytes > 0
    assert pinned.pool.under_way == 0


@pytest.mark.parametrize("tokens", [1, 7, 900])
def test_rows_and_sums_arrive_whole(gpu: torch.device, tokens: int) -> None:
    """Back and forth many times over a channel, with compute that overwrites the rows right behind the copy."""
    width = 2048

    def twice(message: Message) -> Message:
        assert isinstance(message, ExpertBatch)
        return ExpertResult(2 * message.hidden, 0.0, 0.0, 0.0)

    way = PinnedActivations(TorchRuntime(gpu.index or 0))
    one = np.zeros(1, np.int32)
    numbers = np.arange(0, tokens, 2, dtype=np.int64)
    with ChannelServer(twice) as server, open_channel(server.address, ChannelOptions(supply=way.supply)) as channel:
        assert channel.transport == "shm"
        outs, wanted = [], []
        for i in range(30):
            hidden = torch.full((tokens, width), float(i), device=gpu).add_(torch.arange(tokens, device=gpu)[:, None])
            wanted.append(2 * hidden[::2])
            outgoing = way.begin(hidden)
            hidden_next = hidden.mul_(-1) if tokens * width * 4 <= 256 * 1024 else hidden  # behind the copy of few rows
            rows, used = outgoing.take(numbers)
            batch = ExpertBatch(
                0, one, np.zeros(1, np.uint8), np.array([0, 1], np.int32), one, np.ones(1, np.float32), rows
            )
            answer = channel.call(batch, 5.0)
            assert isinstance(answer, ExpertResult)
            outs.append(torch.zeros_like(hidden_next[::2]).add_(way.receive(answer.partial)))
            assert torch.equal(used.cpu(), torch.from_numpy(numbers))
            del answer, rows, batch
        for out, expected in zip(outs, wanted, strict=True):
            assert torch.equal(out, expected)
    torch.cuda.synchronize()
    assert way.waited == 0
    assert way.pool.under_way == 0


def test_few_rows_need_no_wait_of_their_own(gpu: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    way = PinnedActivations(TorchRuntime(gpu.index or 0))
    hidden = torch.randn(4, 1024, device=gpu)
    ids = torch.arange(4, device=gpu)
    hidden.sum().item()  # what starts with the first kernel is over
    outgoing = way.begin(hidden)
    ids.cpu()  # the wait for the routing
    waits: list[object] = []
    monkeypatch.setattr(torch.cuda.Event, "synchronize", lambda event: waits.append(event))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: waits.append(None))
    rows, _ = outgoing.take(np.arange(4))
    way.receive(np.zeros((4, 1024), np.float32))
    assert waits == []
    monkeypatch.undo()
    np.testing.assert_array_equal(rows, hidden.cpu().numpy())
