"""A model in a real shape with random weights: dense part and reference experts on the device, ours in host memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from .....actors.engine.model.model import MoeBlock, assign_dense, attention_for, blocks_at, register_implementation
from .....errors import UnsupportedModelError
from .recording import experts_modules
from .shapes import RealShape


@dataclass(frozen=True)
class RandomModel:
    """One transformers model, run by us or by its own experts implementations.

    Attributes:
        modules: its experts modules.
        blocks: what an engine needs of them.
        dense_bytes: parameters but the routed experts, of which a decode step reads all but the embeddings.
        read_bytes: of those the ones that a decode step reads.
    """

    model: Any
    modules: list[Any]
    blocks: list[MoeBlock]
    dense_bytes: int
    read_bytes: int

    def use(self, implementation: str) -> None:
        """Run the experts by "tiermoe" or by one of transformers' own implementations."""
        self.model.set_experts_implementation(implementation)

    def router_weights(self) -> list[torch.Tensor]:
        """[E, H] of each layer's router."""
        found = []
        for module, name in zip(self.modules, self._names(), strict=True):
            parent = self.model.get_submodule(name.rpartition(".")[0])
            experts = module.gate_up_proj.shape[0]
            weights = [
                p for n, p in parent.named_parameters()
                if p.dim() == 2 and p.shape[0] == experts and not n.startswith("experts.")
            ]  # fmt: skip
            if not weights:
                raise UnsupportedModelError(f"{name} has no router with a weight for each expert", "report the model")
            found.append(weights[0].detach())
        return found

    def _names(self) -> list[str]:
        return experts_modules(self.model)


def build_random_model(
    shape: RealShape, moe_layers: int, dtype: torch.dtype, device: torch.device, seed: int = 0
) -> RandomModel:
    """The model of a shape with its experts on meta and everything else random on `device`.

    Raises:
        UnsupportedModelError: transformers' model is not what the shape says.
    """
    from transformers import AutoModelForCausalLM

    config = shape.config(moe_layers)
    ours = register_implementation()
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=attention_for(config, "auto"))
    names = experts_modules(model)
    if len(names) != moe_layers:
        raise UnsupportedModelError(
            f"{shape.name} has {len(names)} MoE layers in this transformers, not {moe_layers}", "report the version"
        )
    generator = torch.Generator(device).manual_seed(seed)

    def random(like: torch.Tensor) -> torch.Tensor:
        made = torch.empty(like.shape, dtype=like.dtype, device=device)
        if like.dim() < 2:
            return made.fill_(1.0)  # norms; biases of attention, which no time depends on
        return made.normal_(0, 0.02, generator=generator)

    inside = set(names)
    dense = {
        name: random(tensor)
        for name, tensor in model.state_dict().items()
        if name.rpartition(".")[0] not in inside and tensor.is_floating_point()
    }
    left = assign_dense(model, dense, inside, device)
    if left:
        raise UnsupportedModelError(f"{shape.name}: {left[0]} could not be filled", "report the transformers version")
    model.set_experts_implementation(ours)
    model.eval()
    parts = {name: p.nbytes for name, p in model.named_parameters() if not p.is_meta}
    embedding = model.get_input_embeddings().weight.nbytes
    blocks = blocks_at(model, names, shape.experts)
    modules = [model.get_submodule(name) for name in names]
    return RandomModel(model, modules, blocks, sum(parts.values()), sum(parts.values()) - embedding)


@contextmanager
def own_experts(built: RandomModel, device: torch.device, seed: int = 1) -> Iterator[None]:
    """Give the experts modules random parameters on `device`: the model with all experts resident, without us."""
    generator = torch.Generator(device).manual_seed(seed)
    for module in built.modules:
        for name, parameter in list(module.named_parameters(recurse=False)):
            value = torch.empty(parameter.shape, dtype=parameter.dtype, device=device)
            setattr(module, name, nn.Parameter(value.normal_(0, 0.02, generator=generator), requires_grad=False))
    try:
        yield
    finally:
        without_experts(built)


def without_experts(built: RandomModel) -> None:
    """Put the expert parameters back on meta."""
    for module in built.modules:
        for name, parameter in list(module.named_parameters(recurse=False)):
            value = torch.empty(parameter.shape, dtype=parameter.dtype, device="meta")
            setattr(module, name, nn.Parameter(value, requires_grad=False))
