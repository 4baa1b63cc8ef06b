"""Which tensors of a GGUF file make each parameter of a model, by the names and layouts of llama.cpp's converter.

The `gguf` package maps a model's names to GGUF's. Routed experts are stacked, gate and up apart; or one tensor each, as
converters before April 2024 wrote them. What the converter changed is undone: the rows of queries and keys of the Llama
family, DeepSeek's split of `kv_b_proj`, queries, keys and values in one. Every tensor of the file is used, or refused.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np
import torch
from gguf import MODEL_ARCH, MODEL_ARCH_NAMES, get_tensor_name_map
from transformers import PreTrainedModel

from ...errors import CheckpointError, UnsupportedModelError
from .checkpoint import Checkpoint
from .gguf_config import KNOWN, SHORT_AND_LONG, Rope, check_config, contradiction, floats, rope_of, rope_tensors
from .gguf_delta_net import is_zero_centered, linear_attention
from .gguf_header import REWRITE, Header
from .matrices import Entry
from .plan import ExpertsModule, Group, Plan, RowTransform, Transform, target_dtype

_PERMUTED = ("llama", "granitemoe")  # converters that put the halves of a head's rotation side by side
_LAYER = re.compile(r"\.layers\.(\d+)\.")


def plan_gguf(model: PreTrainedModel, checkpoint: Checkpoint, experts: Sequence[ExpertsModule]) -> Plan:
    """Plan the conversion of GGUF files into the parameters of a model on the meta device.

    Raises:
        UnsupportedModelError: an architecture, key or tensor that is not supported.
        CheckpointError: a tensor is mis-shaped, or config.json contradicts the file.
    """
    assert checkpoint.gguf is not None
    found = _Names(model, checkpoint.gguf, checkpoint)
    check_config(model.config.get_text_config(), checkpoint.gguf)
    _check_rope(model, checkpoint.gguf)
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
            what = f"{sources[0][1].spec.name} is {list(shape)}, where the configuration says {list(slot.shape)}"
            raise CheckpointError(f"{checkpoint.gguf.name}: {what}", REWRITE)
        group.targets[name] = torch.empty(slot.shape, dtype=group.dtype, device="meta")
        groups.append(group)
    found.refuse_unused()
    return Plan(groups, {name: group for group in groups for name in group.targets})


def _check_rope(model: PreTrainedModel, header: Header) -> None:
    """Refuse a model that turns queries and keys by other frequencies than llama.cpp.

    Raises:
        CheckpointError: config.json has another rotary embedding. UnsupportedModelError: it is not known.
    """
    config = model.config.get_text_config()
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    rope, kinds = rope_of(header, head), {type(m) for m in model.modules() if hasattr(m, "inv_freq")}
    parameters = config.rope_parameters or {}
    for tensor, name in SHORT_AND_LONG.items():
        if tensor in header.tensors:
            values, own = floats(header.tensors[tensor]), np.array(parameters.get(name) or [])
            if values.shape != own.shape or not np.allclose(values, own, rtol=1e-4):
                raise contradiction(header, f"has {tensor}, which are not the configuration's {name}")
    for kind in kinds:
        turned = kind(config)
        frequencies, scale = rope.frequencies(truncate=parameters.get("truncate", True))
        if rope.kind == "longrope":  # short or long ones by the length
            continue
        own = turned.inv_freq.double().numpy()
        same = own.shape == frequencies.shape and np.allclose(own, frequencies, rtol=1e-4, atol=0)
        # DeepSeek's own factor is in the scale of its attention
        if not same or (header.architecture != "deepseek2" and abs(turned.attention_scaling - scale) > 1e-4):
            raise contradiction(header, f"says {_shown(rope)}, where the configuration has {parameters}")


def _shown(rope: Rope) -> str:
    parts = {"dimension_count": rope.dimensions, "freq_base": rope.base, "scaling.type": rope.kind,
             "scaling.factor": rope.factor, "scaling.original_context_length": rope.original,
             "scaling.attn_factor": rope.attention}  # fmt: skip
    own = ", rope_freqs.weight" if rope.factors else ""
    return ", ".join(f"rope.{name} = {value}" for name, value in parts.items()) + own


class _Names:
    """Finds the tensors of a file by a model's names."""

    def __init__(self, model: PreTrainedModel, header: Header, checkpoint: Checkpoint) -> None:
        self._tensors, self._config, self._header = checkpoint.tensors, model.config.get_text_config(), header
        self._architecture, self._used = header.architecture, set[str]()
        if self._architecture not in KNOWN:
            raise UnsupportedModelError(
                f"GGUF files of architecture {self._architecture} are not supported",
                f"use one of {', '.join(KNOWN)}, or the model's safetensors form",
            )
        arch = next(a for a, name in MODEL_ARCH_NAMES.items() if name == self._architecture)
        self._map = get_tensor_name_map(MODEL_ARCH(arch), self._config.num_hidden_layers)

    def refuse_unused(self) -> None:
        """Raise UnsupportedModelError: a tensor is not used; but those of further layers for drafts, as elsewhere."""
        for name in sorted(self._tensors.keys() - self._used - set(rope_tensors(self._header))):
            if not self._header.is_draft(name):
                raise UnsupportedModelError(
                    f"{self._header.name} has the tensor {name!r}, which the model does not have",
                    "use another GGUF file of the model, or its safetensors form",
                )

    def _take(self, *names: str) -> list[tuple[str, Entry]]:
        self._used.update(names)
        return [(name, self._tensors[name]) for name in names]

    def dense(self, name: str, shape: tuple[int, ...]) -> tuple[list[tuple[str, Entry]], Transform | None]:
        """The tensors that make a parameter, with what makes it of them; none: the file does not have it."""
        if ".linear_attn." in name:
            return self._linear_attention(name)
        base, _, suffix = name.rpartition(".")
        if suffix not in ("weight", "bias"):
            base, suffix = name, "weight"
            if name.endswith(("e_score_correction_bias", "expert_bias")):
                base, suffix = name.removesuffix("_bias"), "bias"
        # Granite publishes its router as a layer in a separate module
        found = self._map.get_name(base) or self._map.get_name(name) or self._map.get_name(f"{base}.layer")
        if base.endswith("kv_b_proj") and (split := self._split_kv(name)) is not None:
            return split
        full = f"{found}.{suffix}"
        if found is None or full not in self._tensors:
            if (part := self._of_one(full, shape)) is not None:
                return part
            if name.endswith("e_score_correction_bias") and (layer := _LAYER.search(name)) is not None:
                full = f"blk.{layer[1]}.exp_probs_b.bias"
            if full not in self._tensors:
                return [], None
        entry = self._tensors[full]
        if (heads := self._permuted(full)) and entry.spec.shape == shape:
            return self._take(full), RowTransform(heads=heads)
        if is_zero_centered(self._architecture, name) and entry.spec.shape == shape:
            return self._take(full), lambda tensors: tensors[0].float() - 1
        if entry.spec.shape != shape and entry.spec.shape == tuple(size for size in shape if size != 1):
            return self._take(full), lambda tensors: tensors[0].reshape(shape)
        return self._take(full), None

    def _linear_attention(self, name: str) -> tuple[list[tuple[str, Entry]], Transform]:
        """The tensors that make a parameter of a linear attention. Raises CheckpointError: missing, or mis-shaped."""
        layer = _LAYER.search(name)
        assert layer is not None
        part = name.partition(".linear_attn.")[2]
        shapes, make = linear_attention(self._architecture, self._config)[part]
        for own, shape in shapes.items():
            full = f"blk.{layer[1]}.{own}"
            found = self._tensors[full].spec.shape if full in self._tensors else None
            if found != shape:
                what = "lacks" if found is None else f"has {list(found)}, not {list(shape)}, for"
                raise CheckpointError(f"{self._header.name} {what} the tensor {full!r}", REWRITE)
        return self._take(*(f"blk.{layer[1]}.{own}" for own in shapes)), make

    def _permuted(self, full: str) -> int:
        """Heads whose rows the converter put in another order; 0: it did not."""
        match = re.search(r"\.attn_([qk])\.", full) if self._architecture in _PERMUTED else None
        if match is None:
            return 0
        return int(self._config.num_attention_heads if match[1] == "q" else self._config.num_key_value_heads)

    def _of_one(self, full: str, shape: tuple[int, ...]) -> tuple[list[tuple[str, Entry]], Transform] | None:
        """Queries, keys or values as rows of the one tensor that a converter may make of them; None: there is none."""
        match = re.fullmatch(r"(blk\.\d+\.attn_)([qkv])\.(weight|bias)", full)
        joined = "" if match is None else f"{match[1]}qkv.{match[3]}"
        if match is None or joined not in self._tensors:
            return None
        config = self._config
        head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        rows = {"q": config.num_attention_heads * head, **dict.fromkeys("kv", config.num_key_value_heads * head)}
        first = sum(rows[part] for part in "qkv"[: "qkv".index(match[2])])
        if self._tensors[joined].spec.shape != (sum(rows.values()), *shape[1:]):
            raise CheckpointError(f"{self._header.name}: {joined} does not have {sum(rows.values())} rows", REWRITE)
        return self._take(joined), RowTransform(first, shape[0], self._permuted(full))

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
        found: list[tuple[str, Entry]] = []
        for name, tensor in names.items():
            each = [tensor] if tensor in self._tensors else self._apart(tensor, module.shape.num_experts)
            found += [(name, entry) for _, entry in self._take(*each)]
        return found

    def _apart(self, stack: str, experts: int) -> list[str]:
        """The tensors of each expert, if they are not stacked. Raises CheckpointError: one is missing."""
        names = [stack.replace("_exps.", f".{expert}.") for expert in range(experts)]
        if missing := [name for name in names if name not in self._tensors]:
            lacking = missing[0] if len(missing) < len(names) else stack
            raise CheckpointError(f"{self._header.name} lacks the tensor {lacking!r}", REWRITE)
        return names

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

        return self._take(*names), joined
