"""On a GPU a layer's policies wait for the stream once."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tiermoe.actors.engine.cuda.activations import PinnedFetch
from tiermoe.actors.engine.host_view import Asked, HostViews, upload
from tiermoe.actors.engine.make_device import fetch_from


def test_one_wait_brings_everything(gpu: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[int] = []
    wait = PinnedFetch.wait
    monkeypatch.setattr(PinnedFetch, "wait", lambda fetch: (waits.append(1), wait(fetch))[1])
    weight = torch.randn(64, 32, device=gpu, dtype=torch.bfloat16)
    later = Asked(lambda hidden: hidden @ weight.T, softmax=True)
    last = Asked(lambda hidden: hidden @ weight.T, softmax=False, rows=(1, 4))
    views = HostViews(fetch_from(gpu), True, [lambda layer, tokens: [later, last]], weighed=True)
    kept = []
    for _ in range(3):  # the pinned buffer is used again; what was read before must stay
        hidden = torch.randn(5, 32, device=gpu, dtype=torch.bfloat16)
        weights, ids = torch.rand(5, 64, device=gpu).bfloat16().topk(4)
        view = views.look(0, hidden, ids, weights)
        kept.append((hidden, ids, weights, view))
    assert len(waits) == 3
    for hidden, ids, weights, view in kept:
        np.testing.assert_array_equal(view.ids, ids.cpu().numpy())
        np.testing.assert_array_equal(view.weights, weights.float().cpu().numpy())
        logits = (hidden @ weight.T).float()
        np.testing.assert_allclose(view.scores(later), torch.softmax(logits, -1).cpu().numpy(), rtol=1e-5)
        np.testing.assert_allclose(view.scores(last), logits[[1, 4]].cpu().numpy(), rtol=2e-2, atol=2e-2)
    assert len(waits) == 3


def test_a_fetch_larger_than_the_buffer(gpu: torch.device) -> None:
    fetch = fetch_from(gpu)
    tensors = [torch.arange(n, device=gpu) for n in (3, 40_000, 1)]
    for found, tensor in zip(fetch(tensors), tensors, strict=True):
        np.testing.assert_array_equal(found, tensor.cpu().numpy())


def test_upload_does_not_wait(gpu: torch.device) -> None:
    array = np.arange(1000)
    there = upload(array, gpu)
    array[:] = 0
    assert there.tolist() == list(range(1000))


def test_an_upload_does_not_queue_behind_experts(gpu: torch.device) -> None:
    """64 bytes while 64 MiB of prefetches are on their way: what the ring is for."""
    expert = torch.empty(64 << 20, dtype=torch.uint8, pin_memory=True)
    slot, prefetch = torch.empty_like(expert, device=gpu), torch.cuda.Stream(gpu)
    array, landed, there = np.arange(16, dtype=np.float32), torch.cuda.Event(), torch.cuda.Event()
    upload(array, gpu)  # compiled
    with torch.cuda.stream(prefetch):
        slot.copy_(expert, non_blocking=True)  # warm
    torch.cuda.synchronize(gpu)
    with torch.cuda.stream(prefetch):
        slot.copy_(expert, non_blocking=True)
        landed.record()
    upload(array, gpu)
    there.record()
    there.synchronize()
    assert not landed.query()
    torch.cuda.synchronize(gpu)
