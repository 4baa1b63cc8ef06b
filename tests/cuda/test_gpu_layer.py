"""On a GPU native launches give what Python's kernels give, to the bit, and waits for its routing alone."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

import numpy as np
import pytest
import torch
from cache_rigs import EXPERTS, KEYS, SHAPE
from kernel_cases import Forbidden
from native_rigs import Stack

from tiermoe.actors.engine.cache.device import PlainActivations
from tiermoe.actors.engine.dispatch import DeviceBackend
from tiermoe.actors.engine.hooks import Hooks
from tiermoe.actors.engine.host_view import HostViews
from tiermoe.actors.engine.make_device import fetch_from
from tiermoe.kernels.expert_ffn import Operands

pytest.importorskip("triton")
from tiermoe.kernels.triton.expert_ffn import DECODE_PAIRS, TritonKernel


def stack_on(gpu: torch.device, dtype: torch.dtype, native: bool) -> Stack:
    """All experts are resident; slots of the host are copied to the GPU once."""
    stack = Stack(KEYS, "lru", native=False)
    stack.cache.core.preload(range(KEYS))
    pool, tables = stack.pool, None
    if gpu.type == "cuda":
        from tiermoe.actors.engine.cuda.runtime import GpuRuntime
        from tiermoe.actors.engine.cuda.tables import TableRing

        tables = TableRing(GpuRuntime(gpu.index or 0))
    operands = Operands(pool.gate_up.to(gpu, dtype), pool.down.to(gpu, dtype), None, None)
    kernel = TritonKernel(operands, "silu", Forbidden(), tables)
    backend = DeviceBackend(stack.cache, HostViews(fetch_from(gpu), True), PlainActivations(gpu))
    stack.layers = stack.layers_of(backend, stack.layers[0].placer, kernel, Hooks(), native)
    return stack


def inputs_of(tokens: int, gpu: torch.device, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    ids = np.argsort(np.random.default_rng(tokens).random((tokens, EXPERTS)), axis=1)[:, :2].copy()
    hidden, weights = torch.randn(tokens, SHAPE.hidden), torch.rand(tokens, 2)
    return hidden.to(gpu, dtype), torch.from_numpy(ids).to(gpu), weights.to(gpu, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_native_call_gives_what_the_page_gives(gpu: torch.device, dtype: torch.dtype) -> None:
    """Of one row, of as many pairs as are kept, and of prompts; twice, so that kept memory is used again."""
    native, page = stack_on(gpu, dtype, True), stack_on(gpu, dtype, False)
    sizes = [1, 7, 1, DECODE_PAIRS // 2, DECODE_PAIRS // 2 + 1, 300, 1]
    for tokens in sizes if gpu.type == "cuda" else sizes[:3]:
        inputs = inputs_of(tokens, gpu, dtype)
        for mine, reference in zip(native.layers, page.layers, strict=True):
            assert torch.equal(mine.forward(*inputs), reference.forward(*inputs)), tokens
    assert native.known() == page.known()
    native.cache.close(), page.cache.close()


def test_on_another_stream(gpu: torch.device) -> None:
    """Each stream has memory of its own: layers on two of them do not disturb each other."""
    if gpu.type != "cuda":
        pytest.skip("the stand-in has one stream")
    stack, page = stack_on(gpu, torch.bfloat16, True), stack_on(gpu, torch.bfloat16, False)
    given = [inputs_of(tokens, gpu, torch.bfloat16) for tokens in (3, 5)]
    expected = [page.layers[0].forward(*inputs) for inputs in given]
    streams = [torch.cuda.Stream(gpu) for _ in given]
    torch.cuda.synchronize(gpu)
    found = []
    for _ in range(20):
        for stream, inputs in zip(streams, given, strict=True):
            with torch.cuda.stream(stream):
                found.append(stack.layers[0].forward(*inputs))
    torch.cuda.synchronize(gpu)
    for i, out in enumerate(found):
        assert torch.equal(out, expected[i % 2])
    stack.cache.close(), page.cache.close()


def test_the_call_itself_waits_for_nothing(
    gpu: torch.device, forbid_waits: Callable[[], AbstractContextManager[list[str]]]
) -> None:
    if gpu.type != "cuda":
        pytest.skip("the stand-in has no stream to wait for")
    stack = stack_on(gpu, torch.float32, True)
    layer, inputs = stack.layers[0], inputs_of(4, gpu, torch.float32)
    layer.forward(*inputs)  # compiles
    with forbid_waits() as waits:
        layer.forward(*inputs)
    assert len(waits) <= 1  # for the routing
    stack.cache.close()
