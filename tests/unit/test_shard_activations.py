"""A shard's rows in and sums out through pinned memory: same sums, one wait for each answer, and nothing is leaked."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import closing

import numpy as np
import pytest
import torch
from fake_gpu import FakeCompute
from serving import Tiny, greedy, serving_group, settings

from tiermoe.actors.engine.cache.device import PlainActivations
from tiermoe.actors.engine.cuda.activations import PinnedActivations
from tiermoe.actors.engine.peers import shard as shard_module
from tiermoe.actors.settings import ShardSettings
from tiermoe.actors.shard_worker import ShardWorker
from tiermoe.actors.store.files import ExpertStore
from tiermoe.proto.messages import ExpertBatch, ExpertResult
from tiermoe.proto.peers import LocalDirectory

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="shared memory is Linux only")
_PROMPTS, _NEW = Tiny.PROMPTS, Tiny.TOKENS
_KIB = 1024


class _Shard(FakeCompute):
    """The CPU computes at once, so what arrives is there at once; sums are NaN on the host until waited for."""

    def copy(self, dst: torch.Tensor, src: torch.Tensor) -> None:
        super().copy(dst, src)
        if not self._is_pinned(dst):
            self.run()


@pytest.fixture(scope="module")
def store(tiny: Callable[[str], Tiny]) -> ExpertStore:
    return tiny("olmoe").store


@pytest.fixture(scope="module")
def expected(tiny: Callable[[str], Tiny]) -> list[list[int]]:
    return tiny("olmoe").expected


@pytest.mark.parametrize(
    ("most_bytes", "transport"),
    [(1 << 20, "grpc"), pytest.param(1 << 20, "shm", marks=pytest.mark.slow), (64 * _KIB, "shm"), (0, "shm")],
)
def test_tokens_are_those_of_the_plain_way(
    most_bytes: int, transport: str, store: ExpertStore, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu = _Shard()
    way = PinnedActivations(gpu, most_bytes)
    monkeypatch.setattr(shard_module, "activations_of", lambda _: way)
    config = settings(0.5, shards=ShardSettings(count=2, transport=transport))  # type: ignore[arg-type]
    with serving_group(store, config) as group:
        engine, pinned = group.shards[0].engine, list[bool]()
        run = engine.run

        def noted(batch: ExpertBatch) -> ExpertResult:
            pinned.append(way.pool.tensor(batch.hidden) is not None)
            return run(batch)

        monkeypatch.setattr(engine, "run", noted)
        assert greedy(group.lead, _PROMPTS, _NEW) == expected
        total = group.lead.stats()
        assert (total.shard_losses, total.shard_refusals) == (0, 0)
        assert engine.batches > _NEW
        if most_bytes == 1 << 20:
            # the answer's wait is the only one, and memory comes back: each batch's would fill it otherwise
            assert gpu.log.count("synchronize") == engine.batches
            assert (way.waited, way.pool.refused) == (0, 0)
            assert engine.batches * 64 * _KIB > 1 << 20
            # what comes out of a ring is put where the device can read it; what comes otherwise is copied there
            assert any(pinned) == (transport == "shm")
        else:
            assert way.waited > 0


def _batch(hidden: np.ndarray) -> ExpertBatch:
    count = len(hidden)
    return ExpertBatch(
        0, np.array([1, 3], np.int32), np.zeros(2, np.uint8), np.array([0, count, count + 1], np.int32),
        np.array([*range(count), 0], np.int32), np.linspace(0.1, 0.9, count + 1, dtype=np.float32), hidden,
    )  # fmt: skip


@pytest.mark.parametrize("kind", ["float32", "float16", "bfloat16"])
def test_rows_of_each_kind(kind: str, store: ExpertStore, monkeypatch: pytest.MonkeyPatch) -> None:
    numbers = torch.linspace(-1, 1, 3 * 32).reshape(3, 32).to(getattr(torch, kind))
    hidden = numbers.view(torch.uint16).numpy() if kind == "bfloat16" else numbers.numpy()
    hidden.setflags(write=False)  # as what arrives
    found = []
    for way in (PlainActivations(torch.device("cpu")), PinnedActivations(_Shard())):
        monkeypatch.setattr(shard_module, "activations_of", lambda _, way=way: way)
        config = settings(0.5, shards=ShardSettings(count=2))
        with closing(ShardWorker(config, 1, store.describe().path, LocalDirectory())) as shard:
            for rows in (hidden, hidden[:1]):
                answer = shard.handle(_batch(rows))
                assert isinstance(answer, ExpertResult)
                assert answer.partial.dtype == np.float32
                found.append(answer.partial.copy())
            assert shard.health()["activations"] == way.label
    for plain, pinned in zip(found[:2], found[2:], strict=True):
        np.testing.assert_array_equal(pinned, plain)
        assert np.any(plain)
