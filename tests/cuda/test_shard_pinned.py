"""A shard on the GPU: rows in and sums out through pinned memory are those of the plain way, with one wait each."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from serving import prepared, settings
from tiny_models import save_tiny_checkpoint

from tiermoe.actors.engine.cache.device import PlainActivations, activations_of
from tiermoe.actors.engine.cuda.activations import PinnedActivations
from tiermoe.actors.engine.peers import shard as shard_module
from tiermoe.actors.settings import EngineSettings, ShardSettings
from tiermoe.actors.shard_worker import ShardWorker
from tiermoe.proto.channel import open_channel
from tiermoe.proto.messages import ExpertBatch, ExpertResult
from tiermoe.proto.options import ChannelOptions
from tiermoe.proto.peers import LocalDirectory

_DEADLINE_S = 60.0  # of a first batch, for which kernels are compiled


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("shard")
    store = prepared(save_tiny_checkpoint("mixtral", made / "checkpoint"), made / "store")
    return Path(store.describe().path)


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


def test_sums_are_those_of_the_plain_way(gpu: torch.device, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[list[np.ndarray]] = []
    for make in (PlainActivations, activations_of):
        monkeypatch.setattr(shard_module, "activations_of", make)
        board = LocalDirectory()
        with closing(ShardWorker(_settings(), 1, str(folder), board)) as shard:
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
    assert isinstance(way, PinnedActivations)
    torch.cuda.synchronize(gpu)
    assert way.waited == 0
    assert way.pool.under_way == 0


def test_an_answer_is_the_only_wait(gpu: torch.device, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[str] = []
    synchronize = torch.cuda.Event.synchronize

    def waited(event: Any) -> None:
        waits.append("event")
        torch.cuda.set_sync_debug_mode("default")
        synchronize(event)
        torch.cuda.set_sync_debug_mode("error")

    with closing(ShardWorker(_settings(), 1, str(folder), LocalDirectory())) as shard:
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
