"""On a GPU a layer's policies wait for the stream once."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tiermoe.actors.engine.host_view import Asked, HostViews, fetch_from, upload


def test_one_wait_brings_everything(gpu: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[int] = []
    wait = torch.cuda.Event.synchronize
    monkeypatch.setattr(torch.cuda.Event, "synchronize", lambda event: (waits.append(1), wait(event))[1])
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
