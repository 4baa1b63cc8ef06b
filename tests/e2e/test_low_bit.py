"""Misses in low precision on the default model: what that costs in quality and saves on the link; refusals."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from fake_gpu import FakeGpu
from serving import greedy, prepared, serving, settings

from tiermoe.actors.engine.cache import device as devices
from tiermoe.actors.engine.cuda.device import CudaDevice
from tiermoe.actors.engine.serving.scoring import score_with
from tiermoe.actors.engine.stats import EngineStats
from tiermoe.actors.gpu_worker import GpuWorker
from tiermoe.actors.settings import KvSettings
from tiermoe.actors.store.files import ExpertStore
from tiermoe.cluster.config import default_model_dir, load_policy
from tiermoe.cluster.jobs.prepare.replicas import ReplicaOptions, add_replicas
from tiermoe.errors import ConfigError

pytestmark = pytest.mark.slow

PROMPTS, PROMPT_TOKENS, TOKENS = 2, 40, 8
KV = KvSettings(page_size=32, num_blocks=32)
BUDGET = 0.3


@pytest.fixture(scope="module")
def packed_store(tmp_path_factory: pytest.TempPathFactory) -> ExpertStore:
    bare = prepared(default_model_dir(), tmp_path_factory.mktemp("low-bit") / "store")
    with pytest.raises(ConfigError, match=r"needs replicas of 4 bits, the store has none.*--bits 4"):
        GpuWorker(settings(BUDGET, kv=KV, policy=load_policy("hobbit")), bare.describe()).start()
    text = tmp_path_factory.mktemp("text") / "text.txt"  # short: few experts see enough rows for more than rounding
    text.write_text("".join(f"def f{i}(x):\n    return x * {i} + {i * i}\n\n" for i in range(60)))
    add_replicas(Path(bare.describe().path), default_model_dir(), ReplicaOptions((4,), 64), text, progress=False)
    return bare


@contextmanager
def _served(store: ExpertStore, preset: str, bits: int | None = None) -> Iterator[GpuWorker]:
    policy = load_policy(preset)
    if bits is not None:
        policy = policy.model_copy(update={"on_miss": policy.on_miss.model_copy(update={"bits": bits})})
    with serving(store, settings(BUDGET, kv=KV, policy=policy)) as worker:
        yield worker


def _scored(worker: GpuWorker, prompts: list[tuple[int, ...]]) -> tuple[torch.Tensor, EngineStats]:
    """Log-probabilities of the first prompt, a token at a time, once the cache is warm by the second."""
    score_with(worker, prompts[1], 16, rows=1)
    worker.reset_stats()
    return score_with(worker, prompts[0], 16, rows=1), worker.stats()


def test_quality_and_bytes(packed_store: ExpertStore, prompts: list[tuple[int, ...]]) -> None:
    with _served(packed_store, "next-gate") as worker:
        exact, loading = _scored(worker, prompts)
        plain = greedy(worker, prompts[:1], TOKENS)
    assert worker.plan()["low_bit"] is None
    for preset in ("hobbit", "moe-apex"):
        with _served(packed_store, preset) as worker:  # with the cache's integrity checked after each layer
            plan = worker.plan()
            found, stats = _scored(worker, prompts)
            total = stats.total()
            tokens = greedy(worker, prompts, TOKENS)  # together, too
        kl = (exact.exp() * (exact - found)).sum(-1)
        assert kl.mean() < 0.02  # nats; four bits are good replicas
        assert (exact.argmax(-1) == found.argmax(-1)).float().mean() > 0.9
        assert sum(a == b for a, b in zip(tokens[0], plain[0], strict=True)) >= TOKENS // 2
        assert total.low_bit_pairs > 0
        assert total.low_bit_hits > 0
        assert 0 < total.bytes_loaded_low_bit < total.bytes_loaded < loading.total().bytes_loaded
        assert (total.bytes_written_back > 0) == (preset == "moe-apex")
        assert 0 < stats.expert_bytes_peak <= stats.expert_budget_bytes
        low = plan["low_bit"]
        assert low["kernel"] == "cpu"
        assert stats.expert_bytes_peak == plan["slots"] * plan["slot_bytes"] + low["slots"] * low["slot_bytes"]
        assert low["bytes"] <= 0.25 * stats.expert_budget_bytes


@pytest.mark.parametrize("preset", ["hobbit", "moe-apex"])
def test_replicas_go_through_a_gpus_streams(
    preset: str, packed_store: ExpertStore, prompts: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker on the streams of a fake GPU: replicas are pinned as experts are, and no host waits for them."""
    gpu = FakeGpu(pin_all=False)
    gpu.eager = True
    monkeypatch.setattr(devices, "make_device", lambda *_: CudaDevice(gpu, staging_bytes=1 << 16))
    with _served(packed_store, preset) as worker:
        plan, waits = worker.plan(), gpu.synchronized
        greedy(worker, prompts, TOKENS)
        total = worker.stats().total()
        assert gpu.synchronized == waits
        in_full = sum(sum(t.nbytes for t in layer.tensors) for layer in worker._sources.mapped)
        assert plan["pinned_bytes"] > in_full
        assert plan["staged_bytes"] == 0
        assert total.low_bit_pairs > 0
        assert total.link_s > 0
        assert 0 < total.bytes_loaded_low_bit < total.bytes_loaded
    assert not gpu.registered
    assert not gpu.hazards


def test_a_width_that_the_store_lacks(packed_store: ExpertStore) -> None:
    with pytest.raises(ConfigError, match=r"replicas of 2 bits, the store has those of 4 bits"), _served(
        packed_store, "hobbit", bits=2
    ):
        pass
