"""A lead with an NDP worker in a process beside it, and a shard: rows and sums go through pinned memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from serving import greedy, prepared, settings
from tiny_models import save_tiny_checkpoint

from tiermoe.actors.engine import engine as engine_module
from tiermoe.actors.engine.cache.device import PlainActivations
from tiermoe.actors.engine.cuda.activations import PinnedActivations
from tiermoe.actors.engine.cuda.runtime import GpuRuntime
from tiermoe.actors.engine.make_device import activations_of
from tiermoe.actors.engine.peers import shard as shard_module
from tiermoe.actors.gpu_worker import GpuWorker
from tiermoe.actors.policies.context_ndp import PlacementOptions
from tiermoe.actors.policy_settings import PolicySettings
from tiermoe.actors.settings import EngineSettings, NdpSettings, ShardSettings
from tiermoe.actors.shard_worker import ShardWorker
from tiermoe.actors.store.files import ExpertStore
from tiermoe.cluster.config import load_hardware
from tiermoe.cluster.worker_process import Role, WorkerProcess
from tiermoe.proto.channel import open_channel
from tiermoe.proto.messages import ExpertBatch, ExpertResult, Message
from tiermoe.proto.options import ChannelOptions
from tiermoe.proto.peers import LocalDirectory
from tiermoe.proto.server import ChannelServer

_PROMPTS = [[1, 2, 3, 4, 5, 6, 7, 8, 9], [9, 8, 7], [3, 1, 4, 1, 5]]
_NDP = NdpSettings(hardware=vars(load_hardware("paper-ndp")), threads=2)
_POLICY = PolicySettings(name="test", lossless=True, placement=PlacementOptions(kind="context", hot_per_layer=1))
_DEADLINE_S = 60.0  # of a first batch, for which kernels are compiled


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> ExpertStore:
    folder = tmp_path_factory.mktemp("pinned")
    return prepared(save_tiny_checkpoint("mixtral", folder / "checkpoint"), folder / "store")


def _check_unwaited(way: Any) -> None:
    torch.cuda.synchronize()
    assert isinstance(way, PinnedActivations)
    assert way.waited == 0
    assert way.pool.under_way == 0


# -- an NDP worker -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def ndp(store: ExpertStore) -> Iterator[WorkerProcess]:
    with WorkerProcess(Role.ndp(_NDP), Path(store.describe().path)) as process:
        yield process


def _tokens(store: ExpertStore, ndp: WorkerProcess) -> list[list[int]]:
    config = settings(0.5, policy=_POLICY, ndp=_NDP).model_copy(update={"device": "cuda"})
    with closing(GpuWorker(config, store.describe(), [ndp.link])) as worker:
        worker.start()
        # one after the other: when requests meet in a batch is a matter of time, and sums depend on the batch
        found = [tokens for prompt in _PROMPTS for tokens in greedy(worker, [prompt], 16)]
        total = worker.stats().total()
        assert total.ndp_experts > 0
        assert total.ndp_recomputed == 0
        assert worker.stats().ndp_losses == 0
        return found


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
    _check_unwaited(made[-1])
    assert made[-1].pool.nbytes > 0


@pytest.mark.parametrize("tokens", [1, 7, 900])
def test_rows_and_sums_arrive_whole(gpu: torch.device, tokens: int) -> None:
    """Back and forth many times over a channel, with compute that overwrites the rows right behind the copy."""
    width = 2048

    def twice(message: Message) -> Message:
        assert isinstance(message, ExpertBatch)
        return ExpertResult(2 * message.hidden, 0.0, 0.0, 0.0)

    way = PinnedActivations(GpuRuntime(gpu.index or 0))
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
    _check_unwaited(way)


def test_few_rows_need_no_wait_of_their_own(gpu: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    way = PinnedActivations(GpuRuntime(gpu.index or 0))
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


# -- a shard -------------------------------------------------------------------------------------------------------


def _settings() -> EngineSettings:
    # a check waits for the GPU, as it should; kernels that are chosen by time differ from one worker to the next
    changed = {"device": "cuda", "integrity_checks": False, "expert_kernel": "loop"}
    return settings(1.0, shards=ShardSettings(count=2)).model_copy(update=changed)


def _batch(hidden: np.ndarray) -> ExpertBatch:
    """Every row through experts 1 and 3 of layer 0, which belong to shard 1."""
    count = len(hidden)
    rows = np.arange(count, dtype=np.int32)
    return ExpertBatch(
        0, np.array([1, 3], np.int32), np.zeros(2, np.uint8), np.array([0, count, 2 * count], np.int32),
        np.concatenate((rows, rows)), np.linspace(0.1, 0.9, 2 * count, dtype=np.float32), hidden,
    )  # fmt: skip


def test_a_shards_sums_are_those_of_the_plain_way(store: ExpertStore, monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[list[np.ndarray]] = []
    for make in (PlainActivations, activations_of):
        monkeypatch.setattr(shard_module, "activations_of", make)
        with closing(ShardWorker(_settings(), 1, store.describe().path, LocalDirectory())) as shard:
            width, way = shard.engine._hidden, shard.engine.activations
            with open_channel(shard.address, ChannelOptions()) as channel:
                assert channel.transport == "shm"
                answers = []
                for tokens in (1, 4, 64, 1, 4, 64):
                    hidden = np.random.default_rng(tokens).standard_normal((tokens, width)).astype(np.float32)
                    answer = channel.call(_batch(hidden), _DEADLINE_S)
                    assert isinstance(answer, ExpertResult)
                    answers.append(np.array(answer.partial))
        found.append(answers)
    for plain, pinned in zip(*found, strict=True):
        np.testing.assert_array_equal(pinned, plain)
        assert np.isfinite(plain).all()
        assert np.any(plain)
    _check_unwaited(way)


def test_a_shards_answer_is_the_only_wait(
    gpu: torch.device, store: ExpertStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[str] = []
    synchronize = torch.cuda.Event.synchronize

    def waited(event: Any) -> None:
        waits.append("event")
        torch.cuda.set_sync_debug_mode("default")
        synchronize(event)
        torch.cuda.set_sync_debug_mode("error")

    with closing(ShardWorker(_settings(), 1, store.describe().path, LocalDirectory())) as shard:
        batches = [_batch(np.ones((tokens, shard.engine._hidden), np.float32)) for tokens in (1, 4)]
        for batch in batches * 2:  # experts are loaded, kernels compiled, pinned memory allocated
            shard.handle(batch)
        torch.cuda.synchronize(gpu)
        monkeypatch.setattr(torch.cuda.Event, "synchronize", waited)
        monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: waits.append("device"))
        monkeypatch.setattr(torch.cuda.Stream, "synchronize", lambda *_: waits.append("stream"))
        torch.cuda.set_sync_debug_mode("error")
        try:
            for batch in batches * 5:
                shard.handle(batch)
        finally:
            torch.cuda.set_sync_debug_mode("default")
            monkeypatch.undo()
        assert set(waits) <= {"event"}
        assert len(waits) <= 10
