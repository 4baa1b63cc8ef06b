"""Checkpoints of random weights, for measurements whose figures weights do not change."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Protocol

LAYERS = 4  # of a random model by name


@dataclass(frozen=True)
class MoeShape:
    """A model of `layers` layers; `experts` gated experts of hidden x intermediate each. head: of attention."""

    layers: int
    experts: int
    top_k: int
    hidden: int
    intermediate: int
    vocabulary: int = 512
    head: int = 64


def save_random_model(shape: MoeShape, folder: Path) -> Path:
    """Write a Mixtral-like bfloat16 checkpoint; the folder."""
    import torch
    from transformers import AutoModelForCausalLM, MixtralConfig

    heads = max(1, shape.hidden // shape.head)
    config = MixtralConfig(
        hidden_size=shape.hidden, intermediate_size=shape.intermediate, num_hidden_layers=shape.layers,
        num_local_experts=shape.experts, num_experts_per_tok=shape.top_k, num_attention_heads=heads,
        num_key_value_heads=heads, vocab_size=shape.vocabulary, max_position_embeddings=1024,
    )  # fmt: skip
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    with torch.no_grad():  # else the mean over the context dominates, and all tokens take the same experts
        model.get_input_embeddings().weight.normal_()
    model.save_pretrained(folder)
    return folder


class Form(StrEnum):
    """The form of the experts: bfloat16, or one GGUF file of Q8_0 or Q4_0 blocks."""

    BF16 = "bf16"
    GGUF = "gguf"
    Q4_0 = "q4_0"

    @property
    def bits(self) -> float:
        """Of a weight, with its share of the scales."""
        return {Form.BF16: 16, Form.GGUF: 8.5, Form.Q4_0: 4.5}[self]


class NamedModel(Protocol):
    """Layers of a published shape with random weights; `benchmarks/random_model.py` of a clone makes them."""

    @property
    def name(self) -> str: ...
    @property
    def form(self) -> Form: ...
    @property
    def layers(self) -> int: ...
    @property
    def expert_bytes(self) -> int:
        """Of all experts."""
        ...

    def require_memory(self, workers: int, share: float) -> None:
        """Raise ConfigError where host memory does not hold the experts, and such a share of them in each worker."""

    def made(self) -> Path:
        """The folder of the checkpoint, which is written if it is absent."""
        ...


MODELS: dict[str, Callable[[Form, int], NamedModel]] = {}  # by name: of the form and the number of layers
