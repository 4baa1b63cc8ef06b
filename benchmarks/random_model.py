"""Checkpoints of random weights in the shapes of real models, for benchmarks whose figures weights do not change."""

from __future__ import annotations

import itertools
import json
import os
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tiermoe.cluster.config import default_model_dir
from tiermoe.cluster.jobs.bench.random_model import LAYERS, MODELS, Form, MoeShape
from tiermoe.cluster.simulate.shapes import shape_named
from tiermoe.errors import ConfigError, size
from tiermoe.limits import host_free_bytes
from tiermoe.proto.private import user_cache

if TYPE_CHECKING:
    import torch

    Tensors = dict[str, torch.Tensor]

VOCABULARY = 4096  # of the default model, whose tokenizer and text random models share
NAMES = {"qwen3-30b-a3b": 128}  # random models by name: a shape of configs/shapes, and the size of its attention heads
_DISTINCT = 16  # experts of different weights of a random model by name
_HOST_SHARE = 0.9  # of free memory: the rest is of the processes themselves


# -- in a form ---------------------------------------------------------------------------------------------------------


def save_published(form: Form, shape: MoeShape, folder: Path, distinct: int | None = None) -> Path:
    """Write a Qwen3-MoE checkpoint whose experts have this form, in bfloat16 one file a layer; the folder.

    The random weights before quantization depend on shape and seed alone. Holds one layer's experts in memory at a
    time; bytes are on disk when this returns.

    Args:
        distinct: so many experts' weights take turns; None: all are different.

    Raises:
        StoreError: the disk is full.
    """
    folder.mkdir(parents=True)
    config = _qwen3_config(shape)
    experts = _experts(shape, distinct)
    if form in (Form.GGUF, Form.Q4_0):
        from .llama import save_gguf_blocks

        (folder / "config.json").write_text(json.dumps(config))
        dense = {name: tensor for part in _dense(shape) for name, tensor in part.items()}
        kind = "Q4_0" if form is Form.Q4_0 else "Q8_0"
        save_gguf_blocks(config, dense, experts, folder / "model.gguf", kind, "Q8_0")
        return folder
    from tiermoe.cluster.checkpoints.tensors import raw_bytes, type_code
    from tiermoe.cluster.jobs.prepare.writer import write_tensors

    index: dict[str, str] = {}
    for layer, dense in enumerate(_dense(shape)):
        tensors = dict(dense)
        for expert in range(shape.experts if layer < shape.layers else 0):
            _, matrices = next(experts)
            prefix = f"model.layers.{layer}.mlp.experts.{expert}"
            tensors |= {f"{prefix}.{name}.weight": matrix for name, matrix in matrices.items()}
        file = f"model-{layer:05d}-of-{shape.layers + 1:05d}.safetensors"
        header = {name: (type_code(tensor.dtype), tuple(tensor.shape)) for name, tensor in tensors.items()}
        write_tensors(folder / file, header, (raw_bytes(tensor.contiguous()) for tensor in tensors.values()))
        index |= dict.fromkeys(tensors, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    (folder / "config.json").write_text(json.dumps(config))
    return folder


# -- by name, kept in the user's cache folder --------------------------------------------------------------------------


@dataclass(frozen=True)
class NamedModel:
    """Layers of a published shape with random weights, such as `qwen3-30b-a3b`; 16 experts' weights take turns.

    Attributes:
        name: of `NAMES`.
    """

    name: str
    form: Form = Form.Q4_0
    layers: int = LAYERS

    @property
    def shape(self) -> MoeShape:
        found = shape_named(self.name)
        return MoeShape(
            self.layers, found.experts, found.top_k, found.hidden, found.intermediate, VOCABULARY, NAMES[self.name]
        )

    @property
    def expert_bytes(self) -> int:
        """Of all experts."""
        shape = self.shape
        return round(shape.layers * shape.experts * 3 * shape.hidden * shape.intermediate * self.form.bits / 8)

    @property
    def disk_bytes(self) -> int:
        """Of the checkpoint, and of a store where its bytes are not mapped as they lie."""
        return self.expert_bytes * (2 if self.form is Form.BF16 else 1)

    def require_memory(self, workers: int, share: float) -> None:
        """Refuse what host memory does not hold: the experts once, and each worker's slots, in the dtype of a CPU.

        Args:
            share: of the experts that each of the workers, which live together, has in its slots.

        Raises:
            ConfigError: with the numbers.
        """
        widened = 2 if self.form is Form.BF16 else 1
        slots, free = round(workers * share * widened * self.expert_bytes), round(_HOST_SHARE * host_free_bytes())
        if self.expert_bytes + slots > free:
            what = f"{self.name} in {self.form} with {self.layers} layers has {size(self.expert_bytes)} of experts, "
            what += f"and {workers} policies take {size(slots)} of slots; {size(free)} of host memory is free"
            raise ConfigError(what, "give smaller --budgets, fewer --policies or --layers, or --form q4_0")

    def made(self, cache: Path | None = None) -> Path:
        """The checkpoint's folder, with the default model's tokenizer; it is written where it is not there.

        Args:
            cache: of such folders; None: `random` in the user's cache folder.

        Raises:
            StoreError: the disk has too little space, with the numbers.
        """
        from tiermoe.cluster.jobs.prepare.writer import disk_errors, require_space

        cache = user_cache() / "random" if cache is None else cache
        folder = cache / f"{self.name}-{self.layers}-layers-{self.form}"
        if folder.is_dir():
            return folder
        with disk_errors(cache):
            cache.mkdir(parents=True, exist_ok=True)
        remedy = "free some space, set XDG_CACHE_HOME to a folder on another disk, or give fewer --layers"
        require_space(cache, self.disk_bytes, f"a random {folder.name}", cache, remedy, resumed=False)
        with tempfile.TemporaryDirectory(prefix=f"{folder.name}-", dir=cache) as scratch:  # never half a model
            written = save_published(self.form, self.shape, Path(scratch) / "model", _DISTINCT)
            for name in ("tokenizer.json", "tokenizer_config.json"):
                (written / name).write_bytes((default_model_dir() / name).read_bytes())
            if not folder.is_dir():  # another process may have made it
                os.rename(written, folder)
        return folder


MODELS |= {name: partial(NamedModel, name) for name in NAMES}


def _qwen3_config(shape: MoeShape) -> dict[str, Any]:
    heads = shape.hidden // 64
    return {
        "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "dtype": "bfloat16",
        "hidden_size": shape.hidden, "intermediate_size": 3 * shape.intermediate,
        "moe_intermediate_size": shape.intermediate, "num_hidden_layers": shape.layers, "num_experts": shape.experts,
        "num_experts_per_tok": shape.top_k, "num_attention_heads": heads, "num_key_value_heads": max(1, heads // 8),
        "head_dim": shape.head, "vocab_size": shape.vocabulary, "max_position_embeddings": 4096,
        "tie_word_embeddings": False, "norm_topk_prob": True, "rms_norm_eps": 1e-6, "decoder_sparse_step": 1,
        "mlp_only_layers": [], "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    }  # fmt: skip


def _dense(shape: MoeShape) -> Iterator[Tensors]:
    """What is not a routed expert, by transformers' names: of each layer, then the rest."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**_qwen3_config(shape)))
    sizes = {name: tensor.shape for name, tensor in model.state_dict().items() if ".experts." not in name}
    generator = torch.Generator().manual_seed(0)

    def made(name: str) -> torch.Tensor:
        if len(sizes[name]) == 1:
            return torch.ones(sizes[name], dtype=torch.bfloat16)
        scale = 1.0 if "embed_tokens" in name else 0.02  # else all tokens take the same experts
        return (torch.randn(sizes[name], generator=generator) * scale).bfloat16()

    layers = [f"model.layers.{layer}." for layer in range(shape.layers)]
    for prefix in layers:
        yield {name: made(name) for name in sizes if name.startswith(prefix)}
    yield {name: made(name) for name in sizes if not name.startswith(tuple(layers))}


def _experts(shape: MoeShape, distinct: int | None) -> Iterator[tuple[int, Tensors]]:
    """Matrices of the experts in order, without end, and a number that is the same for the same expert."""
    import torch

    sizes = dict.fromkeys(("gate_proj", "up_proj"), (shape.intermediate, shape.hidden))
    sizes["down_proj"] = (shape.hidden, shape.intermediate)

    def expert(number: int) -> Tensors:
        generator = torch.Generator().manual_seed(number + 1)
        return {name: (torch.randn(size, generator=generator) * 0.02).bfloat16() for name, size in sizes.items()}

    if distinct is None:
        yield from ((number, expert(number)) for number in itertools.count())
    else:
        yield from itertools.cycle([(number, expert(number)) for number in range(distinct)])
