"""On a GPU a layer's policies wait for the stream once."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import pytest
import torch

from tiermoe.actors.engine.host_times import CALLS
from tiermoe.actors.engine.host_view import Asked, HostViews, scores_of, upload
from tiermoe.actors.engine.make_device import fetch_from
from tiermoe.actors.engine.pinned_fetch import PinnedFetch
from tiermoe.kernels.router import LinearRouter
from tiermoe.kernels.triton import tables


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


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16])
@pytest.mark.parametrize(("rows", "experts", "width"), [(1, 128, 2048), (5, 60, 72), (16, 8, 4096)])
def test_a_layers_routing_and_scores_take_one_launch(
    rows: int, experts: int, width: int, dtype: torch.dtype, gpu: torch.device,
    forbid_waits: Callable[[], AbstractContextManager[list[str]]],
) -> None:  # fmt: skip
    """Ids, weights, the layer's own router in float32 and the two later ones in one; nothing else is launched."""
    own = LinearRouter(torch.randn(experts, width, device=gpu), None)
    later = LinearRouter(
        torch.randn(2 * experts, width, device=gpu, dtype=dtype), torch.randn(2 * experts, device=gpu, dtype=dtype), 2
    )
    asked, top_k = [Asked(own, softmax=True), Asked(later, softmax=False)], 3
    views = HostViews(fetch_from(gpu), True, [lambda layer, tokens: asked], weighed=True)
    layers = []
    for i in range(4):  # of a batch's rows, so that ids and weights begin at any item
        hidden = torch.randn(rows, width, device=gpu, dtype=dtype)
        weights, ids = torch.rand(rows + 3, experts, device=gpu).to(dtype).topk(top_k)
        layers.append((hidden, ids[i : i + rows], weights[i : i + rows]))
    with torch.inference_mode():
        views.look(0, *layers[0])  # compiled, and each kind of alignment known
        for layer in layers:
            views.look(0, *layer)
        torch.cuda.synchronize(gpu)
        with (
            torch.profiler.profile(activities=list(torch.profiler.supported_activities())) as profile, forbid_waits()
        ):  # fmt: skip
            found = [views.look(0, *layer) for layer in layers]
    on_host = [event.name for event in profile.events() if event.device_type == torch.autograd.DeviceType.CPU]
    calls = [CALLS[name] for name in on_host if name in CALLS and name != "cudaDeviceSynchronize"]  # the profiler's own
    assert set(calls) <= {"launches"}
    assert len(calls) in (0, len(layers))  # 0: this machine's profiler sees no launches of the driver
    for (hidden, ids, weights), view in zip(layers, found, strict=True):
        np.testing.assert_array_equal(view.ids, ids.cpu().numpy())
        np.testing.assert_array_equal(view.weights, weights.float().cpu().numpy())
        for one in asked:
            weight, bias, count = one.probe.on_device(len(hidden))  # type: ignore[attr-defined]
            logits = hidden.double() @ weight.double().T + (0.0 if bias is None else bias.double())
            logits = logits.view(rows, count, experts)[:, 0] if count == 1 else logits.view(rows, count, experts)
            expected = torch.softmax(logits, -1) if one.softmax else logits
            np.testing.assert_allclose(view.scores(one), expected.cpu().numpy(), rtol=1e-4, atol=2e-3)
            torch_own = scores_of(one, hidden)  # rounded to the router's type
            np.testing.assert_allclose(view.scores(one), torch_own.cpu().numpy(), rtol=2e-2, atol=5e-1)
    again = [views.look(0, *layer) for layer in layers]
    for one, other in zip(found, again, strict=True):
        for scores in asked:  # the order of sums is fixed
            np.testing.assert_array_equal(one.scores(scores), other.scores(scores))


def test_other_kinds_of_alignment_compile_nothing(gpu: torch.device) -> None:
    """Guards against a second of compilation in a request: ids of 8 bytes and weights of 2 begin anywhere."""
    fetch = fetch_from(gpu)
    ids, weights = torch.arange(64, device=gpu), torch.rand(64, device=gpu).bfloat16()
    fetch((ids, weights))
    before = [len(kernels) for kernels in _compiled()]
    for start in range(9):
        found = fetch((ids[start : start + 8], weights[start : start + 8]))
        np.testing.assert_array_equal(found[0], ids[start : start + 8].cpu().numpy())
        np.testing.assert_array_equal(found[1], weights[start : start + 8].float().cpu().numpy())
    assert [len(kernels) for kernels in _compiled()] == before


def _compiled() -> list[dict[Any, Any]]:
    """The compiled forms of the kernel, for each device."""
    return [caches[0] for caches in tables._read.device_caches.values()]


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
