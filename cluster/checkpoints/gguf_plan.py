"""Which tensors of a GGUF file make each parameter of a model, by the names and layouts of llama.cpp's converter.

Routed experts are stacked, gate and up apart or together; or one tensor each, as converters before April 2024 wrote
them. What the converter changed is undone: `gguf_layouts`, norms with one added, the rows of queries and keys of the
Llama family, queries, keys and values in one. Every tensor of the file is used, or refused.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import torch
from transformers import PreTrainedModel

from ...actors.store.format import first_problem
from ...errors import CheckpointError, UnsupportedModelError
from .checkpoint import Checkpoint
from .gguf_check import check_config, check_rope, head_size
from .gguf_header import REWRITE, Header
from .gguf_keys import architecture_of
from .gguf_layouts import layouts
from .gguf_names import layer_of, tensor_names
from .matrices import Entry
from .plan import ExpertsModule, Group, Plan, RowTransform, Transform, target_dtype


def plan_gguf(model: PreTrainedModel, checkpoint: Checkpoint, experts: Sequence[ExpertsModule]) -> Plan:
    """Plan the conversion of GGUF files into the parameters of a model on the meta device.

    Raises:
        UnsupportedModelError: an architecture, key or tensor that is not supported.
        CheckpointError: a tensor is mis-shaped, or config.json contradicts the file.
    """
    assert checkpoint.gguf is not None
    found = _Names(model, checkpoint.gguf, checkpoint)
    check_config(model.config.get_text_config(), checkpoint.gguf)
    check_rope(model, checkpoint.gguf)
    slots = dict(model.state_dict())
    groups: list[Group] = []
    of_experts = {path: (module, stored) for module in experts for stored, path in module.params.items()}
    for name, slot in slots.items():
        if name in of_experts:
            module, stored = of_experts[name]
            sources, transform = found.expert(module, stored), None
        else:
            sources, transform = found.dense(name, tuple(slot.shape))
        if not sources and transform is None:
            continue
        group = Group(name, None, target_dtype(model, name, slot), [(n, n, e) for n, e in sources], transform=transform)
        shape = slot.shape
        if name not in of_experts:
            shape = _made_shape(sources, transform)
        if shape != slot.shape:
            made_of = sources[0][1].spec.name if sources else name
            what = f"{made_of} is {list(shape)}, where the configuration says {list(slot.shape)}"
            raise CheckpointError(f"{checkpoint.gguf.name}: {what}", REWRITE)
        group.targets[name] = torch.empty(slot.shape, dtype=group.dtype, device="meta")
        groups.append(group)
    found.refuse_unused()
    return Plan(groups, {name: group for group in groups for name in group.targets})


def _made_shape(sources: Sequence[tuple[str, Entry]], transform: Transform | None) -> torch.Size:
    """The shape of what the tensors make. Raises CheckpointError: they do not fit together."""
    found = [torch.empty(entry.spec.shape, device="meta") for _, entry in sources]
    try:
        return found[0].shape if transform is None else transform(found).shape
    except RuntimeError as error:
        shapes = ", ".join(f"{name!r} {list(entry.spec.shape)}" for name, entry in sources)
        raise CheckpointError(f"the tensors {shapes} do not fit together ({first_problem(error)})", REWRITE) from error


class _Names:
    """Finds the tensors of a file by a model's names."""

    def __init__(self, model: PreTrainedModel, header: Header, checkpoint: Checkpoint) -> None:
        self._tensors, self._config, self._header = checkpoint.tensors, model.config.get_text_config(), header
        self._architecture, self._used = header.architecture, set[str]()
        self._known = architecture_of(header)
        self._layouts = layouts(self._architecture, self._config)

    def refuse_unused(self) -> None:
        """Raise UnsupportedModelError: a tensor is not used; but those of further layers for drafts, as elsewhere."""
        for name in sorted(self._tensors.keys() - self._used - set(self._known.rope)):
            if not self._header.is_draft(name):
                raise UnsupportedModelError(
                    f"{self._header.name} has the tensor {name!r}, which the model does not have",
                    "use another GGUF file of the model, or its safetensors form",
                )

    def _take(self, *names: str) -> list[tuple[str, Entry]]:
        self._used.update(names)
        return [(name, self._tensors[name]) for name in names]

    def dense(self, name: str, shape: tuple[int, ...]) -> tuple[list[tuple[str, Entry]], Transform | None]:
        """The tensors that make a parameter, with what makes it of them; neither: the file does not have it."""
        layer = layer_of(name)
        if layer is not None and (key := self._known.numbers.get(layer[1])) is not None:
            numbers = self._header.get(key)
            return [], None if numbers is None else lambda tensors: torch.tensor(numbers)
        if layer is not None and (made := self._layouts.get(layer[1])) is not None:
            tensors = [f"blk.{layer[0]}.{own}" for own in made[0]]
            plain = tensor_names(self._architecture, name)
            if tensors[0] in self._tensors or not any(one in self._tensors for one in plain):
                return self._made(tensors), made[1]
        found = tensor_names(self._architecture, name)
        full = next((one for one in found if one in self._tensors), None)
        if full is None:
            return (found and self._of_one(found[0], shape)) or ([], None)
        entry = self._tensors[full]
        if (heads := self._permuted(full)) and entry.spec.shape == shape:
            return self._take(full), RowTransform(heads=heads)
        if self._known.plus_one(name if layer is None else layer[1]):
            return self._take(full), lambda tensors: tensors[0].float() - 1
        if entry.spec.shape != shape and _wide(entry.spec.shape) == _wide(shape):
            return self._take(full), lambda tensors: tensors[0].reshape(shape)
        return self._take(full), None

    def _made(self, tensors: Sequence[str]) -> list[tuple[str, Entry]]:
        """The tensors of a layout. Raises CheckpointError: one is missing."""
        if missing := [name for name in tensors if name not in self._tensors]:
            raise CheckpointError(f"{self._header.name} lacks the tensor {missing[0]!r}", REWRITE)
        return self._take(*tensors)

    def _permuted(self, full: str) -> int:
        """Heads whose rows the converter put in another order; 0: it did not."""
        match = re.search(r"\.attn_([qk])\.", full) if self._known.permuted else None
        if match is None:
            return 0
        return int(self._config.num_attention_heads if match[1] == "q" else self._config.num_key_value_heads)

    def _of_one(self, full: str, shape: tuple[int, ...]) -> tuple[list[tuple[str, Entry]], Transform] | None:
        """Queries, keys or values as rows of the one tensor that a converter may make of them; None: there is none."""
        match = re.fullmatch(r"(blk\.\d+\.attn_)([qkv])\.(weight|bias)", full)
        joined = "" if match is None else f"{match[1]}qkv.{match[3]}"
        if match is None or joined not in self._tensors:
            return None
        config, head = self._config, head_size(self._config)
        rows = {"q": config.num_attention_heads * head, **dict.fromkeys("kv", config.num_key_value_heads * head)}
        first = sum(rows[part] for part in "qkv"[: "qkv".index(match[2])])
        if self._tensors[joined].spec.shape != (sum(rows.values()), *shape[1:]):
            raise CheckpointError(f"{self._header.name}: {joined} does not have {sum(rows.values())} rows", REWRITE)
        return self._take(joined), RowTransform(first, shape[0], self._permuted(full))

    def expert(self, module: ExpertsModule, stored: str) -> list[tuple[str, Entry]]:
        """The stacked tensors of a layer's experts: named "gate" and "up", or by their parameter."""
        layer = layer_of(module.path)
        if layer is None:
            return []
        prefix, suffix = f"blk.{layer[0]}.ffn_", "bias" if stored.endswith("_bias") else "weight"
        if module.shape.gates == 1 and not stored.startswith("down"):
            names = {"up": f"{prefix}up_exps.{suffix}"}
        elif stored.startswith("down"):
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


def _wide(shape: Sequence[int]) -> list[int]:
    """A shape without its axes of one."""
    return [size for size in shape if size != 1]
