"""`tiermoe::experts` as a torch operator: traceable, compilable, and gone once detached."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from tiermoe.actors.engine.model import model as operator
from tiermoe.actors.engine.model.model import attach, detach

HIDDEN, TOKENS, TOP_K = 8, 3, 2


class Layer:
    """Stands for an MoE layer; counts its calls."""

    def __init__(self, scale: float) -> None:
        self.scale, self.calls = scale, 0

    def forward(self, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.scale * hidden * (ids * weights).sum(dim=1, keepdim=True)


class Attached(nn.Module):
    """What transformers' interface calls with its experts module."""

    def __init__(self, layer: Layer) -> None:
        super().__init__()
        self.handle = attach(self, layer)

    def forward(self, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return operator._experts_forward(self, hidden, ids, weights)


@pytest.fixture
def module() -> Iterator[Attached]:
    module = Attached(Layer(2.0))
    yield module
    detach(module.handle)


@pytest.fixture
def inputs() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return (
        torch.randn(TOKENS, HIDDEN, generator=generator),
        torch.randint(0, 4, (TOKENS, TOP_K), generator=generator),
        torch.rand(TOKENS, TOP_K, generator=generator),
    )


def test_passes_torchs_own_checks(module: Attached, inputs: tuple[torch.Tensor, ...]) -> None:
    checks = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
    results = torch.library.opcheck(torch.ops.tiermoe.experts.default, (*inputs, module.handle), test_utils=checks)
    assert results == dict.fromkeys(checks, "SUCCESS")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_fake_has_shape_dtype_and_strides_of_the_result(module: Attached, dtype: torch.dtype) -> None:
    with FakeTensorMode():
        hidden = torch.empty(TOKENS, HIDDEN, dtype=dtype)
        ids, weights = torch.zeros(TOKENS, TOP_K, dtype=torch.long), torch.empty(TOKENS, TOP_K, dtype=dtype)
        out = torch.ops.tiermoe.experts(hidden, ids, weights, module.handle)
    assert (out.shape, out.dtype, out.stride()) == ((TOKENS, HIDDEN), dtype, (HIDDEN, 1))


def test_the_fake_is_contiguous_whatever_the_input(module: Attached) -> None:
    """Guards `empty_like`, which kept the strides of a transposed input: compiled code then read the wrong elements."""
    with FakeTensorMode():
        hidden = torch.empty(HIDDEN, TOKENS).t()
        ids, weights = torch.zeros(TOKENS, TOP_K, dtype=torch.long), torch.empty(TOKENS, TOP_K)
        assert torch.ops.tiermoe.experts(hidden, ids, weights, module.handle).stride() == (HIDDEN, 1)


def test_compiles_without_a_graph_break(module: Attached, inputs: tuple[torch.Tensor, ...]) -> None:
    def block(hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return hidden + module(hidden * 2, ids, weights.softmax(dim=-1)).tanh()

    expected = block(*inputs)
    compiled = torch.compile(block, fullgraph=True, backend="eager")
    assert torch.equal(compiled(*inputs), expected)


def test_each_module_runs_its_own_layer(inputs: tuple[torch.Tensor, ...]) -> None:
    layers = Layer(1.0), Layer(4.0)
    one, other = map(Attached, layers)
    assert one.handle != other.handle
    assert torch.equal(one(*inputs) * 4, other(*inputs))
    assert [layer.calls for layer in layers] == [1, 1]
    detach(one.handle)
    assert other(*inputs).shape == (TOKENS, HIDDEN)
    detach(other.handle)


def test_detach(inputs: tuple[torch.Tensor, ...]) -> None:
    module = Attached(Layer(1.0))
    module(*inputs)
    detach(module.handle)
    detach(module.handle)  # again is harmless
    assert module.handle not in operator._layers
    with pytest.raises(KeyError):
        module(*inputs)
    again = Attached(Layer(1.0))
    assert again.handle > module.handle  # a handle is never given twice
    detach(again.handle)


def test_transformers_knows_it() -> None:
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    assert ALL_EXPERTS_FUNCTIONS[operator.register_implementation()] is operator._experts_forward
