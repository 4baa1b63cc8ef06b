"""Checkpoints of random weights in the shapes of real models, for benchmarks whose figures weights do not change."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

    from .quantizers import Quantize, Tensors

_HEAD = 64  # of attention, in models that are not Qwen3-30B-A3B


@dataclass(frozen=True)
class MoeShape:
    """A Mixtral-like model of `layers` layers; `experts` gated experts of hidden x intermediate each."""

    layers: int
    experts: int
    top_k: int
    hidden: int
    intermediate: int
    vocabulary: int = 512


def save_random_model(shape: MoeShape, folder: Path, seed: int = 0) -> Path:
    """Write a bfloat16 checkpoint; the folder."""
    import torch
    from transformers import AutoModelForCausalLM, MixtralConfig

    heads = max(1, shape.hidden // 64)
    config = MixtralConfig(
        hidden_size=shape.hidden, intermediate_size=shape.intermediate, num_hidden_layers=shape.layers,
        num_local_experts=shape.experts, num_experts_per_tok=shape.top_k, num_attention_heads=heads,
        num_key_value_heads=heads, vocab_size=shape.vocabulary, max_position_embeddings=1024,
    )  # fmt: skip
    torch.manual_seed(seed)
    return _save(AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16), folder)


def save_qwen3_layers(layers: int, folder: Path, seed: int = 0) -> Path:
    """Write some layers of Qwen3-30B-A3B's shape, with a vocabulary of 4,096, in bfloat16; the folder."""
    import torch
    from transformers import AutoModelForCausalLM, Qwen3MoeConfig

    config = Qwen3MoeConfig(
        hidden_size=2048, intermediate_size=6144, moe_intermediate_size=768, num_hidden_layers=layers, num_experts=128,
        num_experts_per_tok=8, num_attention_heads=32, num_key_value_heads=4, head_dim=128, vocab_size=4096,
        max_position_embeddings=4096, tie_word_embeddings=True, norm_topk_prob=True,
    )  # fmt: skip
    torch.manual_seed(seed)
    return _save(AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16), folder)


def _save(model: Any, folder: Path) -> Path:
    import torch

    with torch.no_grad():  # else the mean over the context dominates, and all tokens take the same experts
        model.get_input_embeddings().weight.normal_()
    model.save_pretrained(folder)
    return folder


# -- in the form in which it would be published ------------------------------------------------------------------------


class Form(StrEnum):
    """A published form of the experts: of which release, see `docs/checkpoints.md`."""

    BF16 = "bf16"
    FP8 = "fp8"
    INT4 = "int4"
    MXFP4 = "mxfp4"
    NVFP4 = "nvfp4"
    GPTQ = "gptq"
    GGUF = "gguf"


def save_published(form: Form, shape: MoeShape, folder: Path, distinct: int | None = None, seed: int = 0) -> Path:
    """Write a Qwen3-MoE checkpoint whose experts have a published form, one file a layer; the folder.

    The random weights before quantization depend on shape and seed alone. `gguf` is one file of Q8_0 blocks.
    Holds one layer's experts in memory at a time; bytes are on disk when this returns.

    Args:
        distinct: so many experts are quantized and take turns; None: all are different.

    Raises:
        ConfigError: the package that writes the form is not installed. StoreError: the disk is full.
    """
    folder.mkdir(parents=True)
    config = _qwen3_config(shape)
    experts = _experts(shape, distinct, seed)
    if form is Form.GGUF:
        from .llama import save_gguf_blocks

        (folder / "config.json").write_text(json.dumps(config))
        dense = {name: tensor for part in _dense(shape, seed) for name, tensor in part.items()}
        save_gguf_blocks(config, dense, experts, folder / "model.gguf")
        return folder
    quantize, quantization = _quantizer(form)
    from ..prepare.plan import raw_bytes, type_code
    from ..prepare.writer import write_tensors

    quantized: dict[int, Tensors] = {}  # experts that come again
    index: dict[str, str] = {}
    for layer, dense in enumerate(_dense(shape, seed)):
        tensors = dict(dense)
        for expert in range(shape.experts if layer < shape.layers else 0):
            key, matrices = next(experts)
            if key not in quantized:
                quantized[key] = {
                    f"{name}{suffix}": part for name, matrix in matrices.items()
                    for suffix, part in quantize(matrix.float())[0].items()
                }  # fmt: skip
            found = quantized[key] if distinct is not None else quantized.pop(key)
            tensors |= {f"model.layers.{layer}.mlp.experts.{expert}.{name}": part for name, part in found.items()}
        file = f"model-{layer:05d}-of-{shape.layers + 1:05d}.safetensors"
        header = {name: (type_code(tensor.dtype), tuple(tensor.shape)) for name, tensor in tensors.items()}
        write_tensors(folder / file, header, (raw_bytes(tensor.contiguous()) for tensor in tensors.values()))
        index |= dict.fromkeys(tensors, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    (folder / "config.json").write_text(json.dumps(config | quantization))
    return folder


def _quantizer(form: Form) -> tuple[Quantize, dict[str, Any]]:
    """The function that quantizes a matrix, and what config.json says of it."""

    from .quantizers import FP8_CONFIG, compressed, fp8_block, gptq, gptq_config

    def plain(matrix: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        return {".weight": matrix.bfloat16()}, matrix

    def of(found: tuple[Quantize, dict[str, Any]]) -> tuple[Quantize, dict[str, Any]]:
        return found[0], {"quantization_config": found[1]}

    if form is Form.BF16:
        return plain, {}
    if form is Form.FP8:
        return of((fp8_block, FP8_CONFIG))
    if form is Form.GPTQ:
        return of((gptq(4, 128, False, True), gptq_config(4, 128, False, True)))
    floats = {"num_bits": 4, "type": "float"}
    if form is Form.MXFP4:
        return of(compressed("mxfp4-pack-quantized", strategy="group", group_size=32, **floats))
    if form is Form.NVFP4:
        return of(compressed("nvfp4-pack-quantized", strategy="tensor_group", group_size=16, **floats))
    return of(compressed("pack-quantized", num_bits=4, type="int", strategy="group", group_size=64))


def _qwen3_config(shape: MoeShape) -> dict[str, Any]:
    heads = shape.hidden // _HEAD
    return {
        "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "dtype": "bfloat16",
        "hidden_size": shape.hidden, "intermediate_size": 3 * shape.intermediate,
        "moe_intermediate_size": shape.intermediate, "num_hidden_layers": shape.layers, "num_experts": shape.experts,
        "num_experts_per_tok": shape.top_k, "num_attention_heads": heads, "num_key_value_heads": max(1, heads // 8),
        "head_dim": _HEAD, "vocab_size": shape.vocabulary, "max_position_embeddings": 4096,
        "tie_word_embeddings": False, "norm_topk_prob": True, "rms_norm_eps": 1e-6, "decoder_sparse_step": 1,
        "mlp_only_layers": [], "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    }  # fmt: skip


def _dense(shape: MoeShape, seed: int) -> Iterator[Tensors]:
    """What is not a routed expert: of each layer, then the rest."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    config = _qwen3_config(shape)
    queries = config["num_attention_heads"] * _HEAD
    keys = config["num_key_value_heads"] * _HEAD
    hidden = shape.hidden
    sizes = {
        "self_attn.q_proj": (queries, hidden), "self_attn.k_proj": (keys, hidden), "self_attn.v_proj": (keys, hidden),
        "self_attn.o_proj": (hidden, queries), "mlp.gate": (shape.experts, hidden),
        "self_attn.q_norm": (_HEAD,), "self_attn.k_norm": (_HEAD,),
        "input_layernorm": (hidden,), "post_attention_layernorm": (hidden,),
    }  # fmt: skip

    def made(size: tuple[int, ...], scale: float) -> torch.Tensor:
        if len(size) == 1:
            return torch.ones(size, dtype=torch.bfloat16)
        return (torch.randn(size, generator=generator) * scale).bfloat16()

    for layer in range(shape.layers):
        yield {f"model.layers.{layer}.{name}.weight": made(size, 0.02) for name, size in sizes.items()}
    yield {
        "model.embed_tokens.weight": made((shape.vocabulary, hidden), 1.0),  # else all tokens take the same experts
        "model.norm.weight": made((hidden,), 0), "lm_head.weight": made((shape.vocabulary, hidden), 0.02),
    }  # fmt: skip


def _experts(shape: MoeShape, distinct: int | None, seed: int) -> Iterator[tuple[int, Tensors]]:
    """Matrices of the experts in order, without end, and a number that is the same for the same expert."""
    import torch

    sizes = dict.fromkeys(("gate_proj", "up_proj"), (shape.intermediate, shape.hidden))
    sizes["down_proj"] = (shape.hidden, shape.intermediate)

    def expert(number: int) -> Tensors:
        generator = torch.Generator().manual_seed(seed * 1_000_003 + number + 1)
        return {name: (torch.randn(size, generator=generator) * 0.02).bfloat16() for name, size in sizes.items()}

    if distinct is None:
        yield from ((number, expert(number)) for number in itertools.count())
    else:
        yield from itertools.cycle([(number, expert(number)) for number in range(distinct)])
