"""Which tensors of a GGUF file make each parameter of a model, by the names and layouts of llama.cpp's converter.

The `gguf` package maps a model's names to GGUF's. Routed experts are stacked, gate and up apart. What the converter
changed is undone: the rows of queries and keys of the Llama family, and DeepSeek's split of `kv_b_proj`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import torch
from gguf import MODEL_ARCH, MODEL_ARCH_NAMES, get_tensor_name_map
from transformers import PreTrainedModel

from ....errors import CheckpointError, UnsupportedModelError
from .checkpoint import REFETCH, Checkpoint, Entry
from .plan import ExpertsModule, Group, Plan, Transform, target_dtype

_PERMUTED = ("llama", "granitemoe")  # converters that put the halves of a head's rotation side by side
_KNOWN = (
    *_PERMUTED, "qwen2moe", "qwen3moe", "olmoe", "deepseek2", "gpt-oss", "minimax-m2", "glm4moe", "dots1", "phimoe",
)  # fmt: skip
_LAYER = re.compile(r"\.layers\.(\d+)\.")


def plan_gguf(model: PreTrainedModel, checkpoint: Checkpoint, experts: Sequence[ExpertsModule]) -> Plan:
    """Plan the conversion of GGUF files into the parameters of a model on the meta device.

    Raises:
        UnsupportedModelError: an architecture whose converter is not known. CheckpointError: a tensor is mis-shaped.
    """
    found = _Names(model, checkpoint)
    slots = dict(model.state_dict())
    groups: list[Group] = []
    of_experts = {path: (module, stored) for module in experts for stored, path in module.params.items()}
    for name, slot in slots.items():
        if name in of_experts:
            module, stored = of_experts[name]
            sources, transform = found.expert(module, stored), None
        else:
            sources, transform = found.dense(name, tuple(slot.shape))
        if not sources:
            continue
        group = Group(name, None, target_dtype(model, name, slot), [(n, n, e) for n, e in sources], transform=transform)
        shape = slot.shape
        if transform is None and name not in of_experts:
            shape = torch.Size(sources[0][1].spec.shape)
        if shape != slot.shape:
            raise CheckpointError(f"{sources[0][0]} is {list(shape)}, not {list(slot.shape)}", REFETCH)
        group.targets[name] = torch.empty(slot.shape, dtype=group.dtype, device="meta")
        groups.append(group)
    return Plan(groups, {name: group for group in groups for name in group.targets})


class _Names:
    """Finds the tensors of a file by a model's names."""

    def __init__(self, model: PreTrainedModel, checkpoint: Checkpoint) -> None:
        self._tensors, self._config = checkpoint.tensors, model.config.get_text_config()
        self._architecture = str(checkpoint.gguf)
        if self._architecture not in _KNOWN:
            raise UnsupportedModelError(
                f"GGUF files of architecture {self._architecture} are not supported",
                f"use one of {', '.join(_KNOWN)}, or the model's safetensors form",
            )
        arch = next(a for a, name in MODEL_ARCH_NAMES.items() if name == self._architecture)
        self._map = get_tensor_name_map(MODEL_ARCH(arch), self._config.num_hidden_layers)

    def dense(self, name: str, shape: tuple[int, ...]) -> tuple[list[tuple[str, Entry]], Transform | None]:
        """The tensors that make a parameter, with what makes it of them; none: the file does not have it."""
        base, _, suffix = name.rpartition(".")
        if suffix not in ("weight", "bias"):
            base, suffix = name, "weight"
            if name.endswith("e_score_correction_bias"):
                base, suffix = name.removesuffix("_bias"), "bias"
        found = self._map.get_name(base) or self._map.get_name(name)
        if base.endswith("kv_b_proj") and (split := self._split_kv(name)) is not None:
            return split
        full = f"{found}.{suffix}"
        if found is None or full not in self._tensors:
            if name.endswith("e_score_correction_bias") and (layer := _LAYER.search(name)) is not None:
                full = f"blk.{layer[1]}.exp_probs_b.bias"
            if full not in self._tensors:
                return [], None
        entry = self._tensors[full]
        if self._architecture in _PERMUTED and (".attn_q." in full or ".attn_k." in full):
            heads = self._config.num_attention_heads if ".attn_q." in full else self._config.num_key_value_heads
            return [(full, entry)], lambda tensors: _unpermuted(tensors[0], heads)
        if len(entry.spec.shape) + 1 == len(shape) and shape[0] == 1 and entry.spec.shape == shape[1:]:
            return [(full, entry)], lambda tensors: tensors[0].unsqueeze(0)
        return [(full, entry)], None

    def expert(self, module: ExpertsModule, stored: str) -> list[tuple[str, Entry]]:
        """The stacked tensors of a layer's experts: named "gate" and "up", or by their parameter."""
        layer = _LAYER.search(f".{module.path}.")
        if layer is None:
            return []
        prefix, suffix = f"blk.{layer[1]}.ffn_", "bias" if stored.endswith("_bias") else "weight"
        if stored.startswith("down"):
            names = {"down": f"{prefix}down_exps.{suffix}"}
        elif f"{prefix}gate_up_exps.{suffix}" in self._tensors:
            names = {"gate_up": f"{prefix}gate_up_exps.{suffix}"}
        else:
            names = {"gate": f"{prefix}gate_exps.{suffix}", "up": f"{prefix}up_exps.{suffix}"}
        if missing := [name for name in names.values() if name not in self._tensors]:
            raise CheckpointError(f"the GGUF file lacks {missing[0]}", REFETCH)
        return [(name, self._tensors[tensor]) for name, tensor in names.items()]

    def _split_kv(self, name: str) -> tuple[list[tuple[str, Entry]], Transform] | None:
        """DeepSeek's kv_b_proj of the two that the converter makes of it; None: the file has it whole."""
        layer = _LAYER.search(name)
        names = [f"blk.{layer[1]}.attn_{one}_b.weight" for one in "kv"] if layer else []
        if not names or any(n not in self._tensors for n in names):
            return None

        def joined(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
            k, v = tensors  # [heads, rank, nope], [heads, value, rank]
            both = torch.cat([k.transpose(1, 2), v], dim=1)
            return both.reshape(-1, both.shape[-1])

        return [(n, self._tensors[n]) for n in names], joined


def _unpermuted(tensor: torch.Tensor, heads: int) -> torch.Tensor:
    """The inverse of the converter's `LlamaModel.permute`: rows [heads, size / 2, 2] -> [heads, 2, size / 2]."""
    halves = tensor.reshape(heads, tensor.shape[0] // heads // 2, 2, *tensor.shape[1:])
    return halves.transpose(1, 2).reshape(tensor.shape).contiguous()

