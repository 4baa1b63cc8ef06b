"""A tiny MoE stack without a transformers model: each layer is called as its block would call it, on random routing."""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from hypothesis import strategies as st
from torch import nn

from tiermoe.actors.budget import Budget
from tiermoe.actors.engine.cache.device import CpuDevice
from tiermoe.actors.engine.cache.form_slots import FormWeights
from tiermoe.actors.engine.cache.slots import LayerWeights
from tiermoe.actors.engine.cache.sources import host_tensor
from tiermoe.actors.engine.engine import ExpertEngine
from tiermoe.actors.engine.make_cache import ModelExperts
from tiermoe.actors.engine.model.model import MoeBlock
from tiermoe.actors.policy_settings import PolicySettings
from tiermoe.actors.settings import EngineSettings, LinkSettings
from tiermoe.actors.store.format import ExpertShape, Published
from tiermoe.actors.store.pages import FileStamp, map_file

HIDDEN = 16  # with it a slot's tensors start at multiples of 64 bytes, so that GEMMs see every slot alike


@dataclass
class Case:
    """A tiny MoE stack and what is asked of it."""

    layers: int
    experts: int
    top_k: int
    shape: ExpertShape
    dtype: torch.dtype
    weights: Sequence[LayerWeights | FormWeights]
    routers: list[torch.Tensor]
    native: bool  # an activation that the C++ kernel has
    published: Published | None = None

    @property
    def total_bytes(self) -> int:
        return self.layers * self.experts * self.shape.nbytes(self.dtype.itemsize)


def gate(x: torch.Tensor) -> torch.Tensor:
    pairs = x.view(x.shape[0], -1, 2)
    return nn.functional.silu(pairs[..., 0]) * pairs[..., 1]


def make_case(seed: int, layers: int, experts: int, top_k: int, native: bool, dtype: torch.dtype) -> Case:
    generator = torch.Generator().manual_seed(seed)
    shape = ExpertShape(num_experts=experts, hidden=HIDDEN, intermediate=16, gates=2, has_bias=not native)
    weights = [
        LayerWeights(tuple(torch.randn(s, generator=generator).bfloat16() for s in shape.stacked().values()))
        for _ in range(layers)
    ]
    routers = [torch.randn(experts, HIDDEN, generator=generator) for _ in range(layers)]
    return Case(layers, experts, top_k, shape, dtype, weights, routers, native)


def on_disk(case: Case, file: Path) -> Case:
    """The same experts in a file that is mapped, one after another from an odd page on."""
    tensors = [tensor.contiguous() for layer in case.weights for tensor in layer.tensors]
    head, sizes = 4096 + 64, [-(-tensor.nbytes // 64) * 64 for tensor in tensors]
    data = [t.view(-1).view(torch.uint8).numpy().tobytes().ljust(n) for t, n in zip(tensors, sizes, strict=True)]
    file.write_bytes(bytes(head) + b"".join(data))
    with open(file, "rb") as opened:
        pages = map_file(opened.fileno(), str(file), FileStamp.of(os.fstat(opened.fileno())))
    starts = itertools.accumulate(sizes, initial=head)
    mapped = iter([
        host_tensor(np.frombuffer(pages, np.uint8, t.nbytes, start), torch.uint8).view(t.dtype).view(t.shape)
        for t, start in zip(tensors, starts, strict=False)
    ])  # fmt: skip
    weights = [layer.moved(tuple(itertools.islice(mapped, len(layer.tensors)))) for layer in case.weights]
    return replace(case, weights=weights)


@contextlib.contextmanager
def engine_for(
    case: Case, budget: float | int | Literal["mapped"], prefetch: str = "none", distance: int = 1,
    lossless: bool = True, host_bytes: int | None = None, **options: Any,
) -> Iterator[ExpertEngine]:  # fmt: skip
    """host_bytes: as of `EngineSettings`, with budget "mapped"."""
    policy = PolicySettings(
        name="test", lossless=lossless, prefetch={"kind": prefetch, "distance": distance, "min_useful": 0.0},
        **options,
    )  # fmt: skip
    blocks = [
        MoeBlock(nn.Module(), gate, "silu" if case.native else None, None, lambda h, r=router: h.float() @ r.t())
        for router in case.routers
    ]
    mapped = budget == "mapped"
    given = Budget(mapped=True)
    if not isinstance(budget, str):
        given = Budget(share=budget) if isinstance(budget, float) else Budget(nbytes=budget)
    engine = ExpertEngine(
        EngineSettings(policy=policy, budget=given, host_bytes=host_bytes, device="cpu", integrity_checks=True),
        ModelExperts(case.shape, case.weights, case.dtype, case.top_k, case.published, mapped=mapped), blocks,
        CpuDevice(LinkSettings(), "real" if mapped else "emulated"),
    )  # fmt: skip
    try:
        yield engine
    finally:
        engine.close()


@dataclass
class Call:
    """One layer's input and what the adversary does before it: (key to load, by eviction) and prefetches."""

    layer: int
    hidden: torch.Tensor
    ids: torch.Tensor
    weights: torch.Tensor
    swaps: list[tuple[int, int]]
    prefetches: list[int]


def calls_of(case: Case, draw: st.DrawFn, forwards: int) -> list[Call]:
    calls = []
    key = st.integers(0, case.layers * case.experts - 1)
    generator = torch.Generator().manual_seed(draw(st.integers(0, 1000)))
    for _ in range(forwards):
        tokens = draw(st.sampled_from([1, 2, 5, 12, 17, 40]))
        hidden = torch.randn(tokens, HIDDEN, generator=generator).to(case.dtype)
        skew = draw(st.sampled_from([0.0, 3.0]))  # some experts get most tokens: both kernels in one layer
        for layer in range(case.layers):
            scores = torch.rand(tokens, case.experts, generator=generator)
            scores += skew * torch.rand(case.experts, generator=generator)
            ids = scores.topk(case.top_k).indices
            weights = torch.rand(tokens, case.top_k, generator=generator).to(case.dtype)
            swaps = draw(st.lists(st.tuples(key, key), max_size=3))
            prefetches = draw(st.lists(key, unique=True, max_size=4))
            calls.append(Call(layer, hidden, ids, weights, swaps, prefetches))
    return calls


def dense(case: Case, call: Call) -> torch.Tensor:
    """Every expert on every token, in float64, from the stored weights."""
    tensors = [tensor.double() for tensor in case.weights[call.layer].tensors]
    gate_up, down = tensors[:2]
    x = call.hidden.double()
    pre = torch.einsum("th,eigh->etig", x, gate_up)
    if len(tensors) == 4:
        pre += tensors[2].unsqueeze(1)
    each = torch.einsum("eti,eih->eth", nn.functional.silu(pre[..., 0]) * pre[..., 1], down)
    if len(tensors) == 4:
        each += tensors[3].unsqueeze(1)
    mix = torch.zeros(x.shape[0], case.experts, dtype=torch.float64).scatter_add(1, call.ids, call.weights.double())
    return torch.einsum("te,eth->th", mix, each)


def agrees(case: Case, calls: Sequence[Call], found: Sequence[torch.Tensor]) -> None:
    tolerance = 1e-4 if case.dtype == torch.float32 else 0.05
    for call, out in zip(calls, found, strict=True):
        expected = dense(case, call)
        assert out.dtype == case.dtype
        assert (out.double() - expected).abs().max() <= tolerance * max(1.0, expected.abs().max().item())
