"""A worker whose copies go through the streams of a fake GPU: the wiring, the plan, and the same tokens."""

from __future__ import annotations

import pytest
from fake_gpu import FakeGpu
from serving import greedy, serving, settings

from tiermoe.actors.engine.cache import device as devices
from tiermoe.actors.engine.cuda.device import CudaDevice
from tiermoe.actors.engine.cuda.stream_queue import StreamQueue
from tiermoe.actors.settings import CopySettings, KvSettings
from tiermoe.actors.store.files import ExpertStore

KV = KvSettings(page_size=32, num_blocks=128)
PROMPTS, PROMPT_TOKENS, TOKENS = 2, 16, 8


@pytest.mark.parametrize(
    ("budget", "prefetch", "copies"),
    [
        (0.25, "next-gate", CopySettings()),
        (0.1, "next-gate", CopySettings(pinned_gib=0.025)),  # about half of the store: the rest is staged
    ],
)
def test_same_tokens_through_streams(
    budget: float, prefetch: str, copies: CopySettings, store: ExpertStore, prompts: list[tuple[int, ...]],
    expected: list[list[int]], monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    gpu = FakeGpu(pin_all=False)
    gpu.eager = True
    monkeypatch.setattr(devices, "make_device", lambda *_: CudaDevice(gpu, staging_bytes=1 << 16))
    with serving(store, settings(budget, prefetch, kv=KV, copies=copies)) as worker:
        plan, cache = worker.plan(), worker.engine.cache
        waits = gpu.synchronized
        assert greedy(worker, prompts, TOKENS) == expected
        stats = worker.stats().total()
        assert isinstance(cache.loads.queue, StreamQueue)
        assert plan["executor"] == "real"
        everything = sum(sum(t.nbytes for t in layer.tensors) for layer in worker._sources.mapped)
        assert plan["pinned_bytes"] + plan["staged_bytes"] == everything
        assert plan["pinned"] == (plan["staged_bytes"] == 0) == (copies.pinned_gib is None)
        assert any("pinned" in note for note in plan["notes"]) == (not plan["pinned"])
        assert stats.bytes_loaded_demand > 0
        assert stats.link_s > 0
        if plan["pinned"]:
            assert gpu.synchronized == waits  # no wait of the host from the first to the last token
        assert gpu.registered
    assert not gpu.registered
    assert not gpu.hazards
