"""Which checkpoint tensors make which parameters, worked out before any weight is read.

transformers knows each architecture's checkpoint layout as a list of renamings and converters. The
plan applies them to the names of the checkpoint, groups the tensors that one conversion takes
together, and runs every conversion once on the meta device. So a missing or mis-shaped tensor,
or a surplus expert, is found in seconds, and each group can later be converted alone: one group at a time is what
keeps memory bounded.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    WeightTransform,
    dot_natural_key,
    rename_source_key,
)

from ....actors.checksummed import first_problem
from ....errors import CheckpointError
from .checkpoint import REFETCH, Checkpoint, TensorEntry
from .tensors import BLOCK_BYTES, loader, meta_tensor, read_blocks

_SHOWN = 3


@dataclass(frozen=True)
class Group:
    """Checkpoint tensors that one conversion takes together.

    Attributes:
        key: the first parameter that it makes.
        converter: what makes the parameters; None where the tensor is only renamed.
        dtype: that the tensors are cast to first.
        sources: (source pattern, checkpoint name, tensor) in the order that the converter needs.
        targets: shape and type of the parameters that it makes, by name.
    """

    key: str
    converter: WeightConverter | None
    dtype: torch.dtype
    sources: list[tuple[str, str, TensorEntry]]
    targets: dict[str, torch.Tensor] = field(default_factory=dict)

    def convert(self, model: PreTrainedModel) -> dict[str, torch.Tensor]:
        """Read the tensors and make the parameters.

        Raises:
            CheckpointError: a file cannot be read, or the conversion fails.
        """
        return _run(self, model, [loader(entry, self.dtype) for _, _, entry in self.sources])

    def blocks(self, model: PreTrainedModel, names: Sequence[str]) -> Iterator[torch.Tensor]:
        """Parameters in runs along their first dimension, one after the other; contiguous.

        A renamed tensor is streamed from its file, a converted one is made as a whole first.

        Raises:
            CheckpointError: as `convert`.
        """
        if self.converter is None:
            for block in read_blocks(self.sources[0][2]):
                yield block.to(self.dtype)
            return
        made = self.convert(model)
        for name in names:
            tensor = made.pop(name)
            rows = max(1, BLOCK_BYTES * len(tensor) // max(1, tensor.nbytes)) if tensor.dim() else 1
            for block in tensor.split(rows) if tensor.dim() else [tensor]:
                yield block.contiguous()


@dataclass(frozen=True)
class Plan:
    """All conversions of a checkpoint.

    Attributes:
        groups: in the order of the checkpoint's names.
        makers: the group that makes each parameter.
        unexpected: checkpoint tensors that the model has no place for, and tolerates.
    """

    groups: list[Group]
    makers: dict[str, Group]
    unexpected: list[str]


def plan_conversion(model: PreTrainedModel, checkpoint: Checkpoint) -> Plan:
    """Plan the conversion of a checkpoint into the parameters of a model.

    Follows `transformers.core_model_loading.convert_and_load_state_dict_in_model` in naming, casting
    and order, and is stricter: nothing is ever initialised at random.

    Args:
        model: on the meta device.

    Raises:
        CheckpointError: tensors are mis-shaped, experts are surplus, or two tensors make one parameter.
    """
    slots = dict(model.state_dict())
    groups, unexpected = _group(model, checkpoint, slots)
    makers: dict[str, Group] = {}
    problems: list[str] = []
    for group in groups:
        _check_numbering(group)
        for name, made in _dry_run(group, model).items():
            slot = slots.get(name)
            if slot is None:
                unexpected.append(name)
            elif slot.shape != made.shape:
                problems.append(f"{name} is {list(made.shape)}, not {list(slot.shape)}")
            elif name in makers:
                raise CheckpointError(f"two tensors of the checkpoint make parameter {name}", REFETCH)
            else:
                makers[name] = group
                group.targets[name] = made
    if problems:
        raise CheckpointError(f"{_some(problems)} in {checkpoint.path}", REFETCH)
    return Plan(groups=groups, makers=makers, unexpected=_tolerated(model, unexpected))


def check_missing(model: PreTrainedModel, plan: Plan, satisfied: set[str]) -> None:
    """Every parameter and persistent buffer must come from the checkpoint.

    Args:
        satisfied: names that need no tensor because they share another one's.

    Raises:
        CheckpointError: some do not.
    """
    optional = _pattern(model._keys_to_ignore_on_load_missing)
    missing = [
        name
        for name in model.state_dict()
        if name not in plan.makers and name not in satisfied and not (optional and optional.search(name))
    ]
    if missing:
        raise CheckpointError(f"the checkpoint lacks {_some(missing)}", REFETCH)


def _group(
    model: PreTrainedModel, checkpoint: Checkpoint, slots: dict[str, torch.Tensor]
) -> tuple[list[Group], list[str]]:
    """Sort the checkpoint's tensors into groups; the second result has no place in the model."""
    mapping = get_model_conversion_mapping(model)
    renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
    by_pattern = {pattern: entry for entry in converters for pattern in entry.source_patterns}
    groups: dict[str, Group] = {}
    unexpected: list[str] = []
    # In one pass and in this order: some renamings remember which names they have seen.
    for name in sorted(checkpoint.tensors, key=dot_natural_key):
        try:
            key, pattern = rename_source_key(name, renamings, converters, model.base_model_prefix, slots)
        except ValueError as error:  # a renaming that reads a number where there is none
            raise CheckpointError(f"tensor {name!r} has an unknown name ({error})", REFETCH) from error
        if key not in slots and name in slots:
            key, pattern = name, None
        if key not in slots:
            unexpected.append(key)
            continue
        entry = checkpoint.tensors[name]
        group = groups.get(key)
        if group is None:
            converter = deepcopy(by_pattern[pattern]) if pattern is not None else None
            group = groups[key] = Group(key, converter, _target_dtype(model, key, slots[key]), [])
        elif group.converter is None:
            other = group.sources[0][1]
            raise CheckpointError(f"tensors {other!r} and {name!r} both make parameter {key}", REFETCH)
        _check_kind(name, entry, group.dtype)
        group.sources.append((pattern or name, name, entry))
    return list(groups.values()), unexpected


def _target_dtype(model: PreTrainedModel, key: str, slot: torch.Tensor) -> torch.dtype:
    """The type that transformers gives a parameter: some stay in float32 whatever the model's type."""
    for glob, dtype in model._get_dtype_plan(model.config.dtype).items():
        if re.search(glob.replace("*", ".*"), key):
            return dtype
    return slot.dtype


def _check_kind(name: str, entry: TensorEntry, dtype: torch.dtype) -> None:
    """Integers in the place of weights are a damaged header or an unmarked quantization."""
    floating = entry.spec.dtype in ("BF16", "F16", "F32", "F64")
    if dtype.is_floating_point and not floating:
        raise CheckpointError(
            f"tensor {name!r} is of type {entry.spec.dtype}, not floating point", "pass the unquantized checkpoint"
        )


def _check_numbering(group: Group) -> None:
    """Experts that are stacked must be numbered 0, 1, 2, ...: a gap would shift the ones behind it."""
    by_pattern: dict[str, list[list[str]]] = {}
    for pattern, name, _ in group.sources:
        by_pattern.setdefault(pattern, []).append(name.split("."))
    for names in by_pattern.values():
        if len(names) < 2:
            continue
        columns = [set(column) for column in zip(*names, strict=False)]
        varying = [column for column in columns if len(column) > 1]
        numbers = {str(number) for number in range(len(names))}
        if len({len(name) for name in names}) > 1 or varying != [numbers]:
            shown = [".".join(name) for name in names]
            raise CheckpointError(f"the tensors of {group.key} are not numbered 0..n-1: {_some(shown)}", REFETCH)


def _dry_run(group: Group, model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """The conversion on the meta device: names, shapes and types of what it makes."""
    tensors = [meta_tensor(entry).to(group.dtype) for _, _, entry in group.sources]
    return _run(group, model, [lambda tensor=tensor: tensor for tensor in tensors])


def _run(group: Group, model: PreTrainedModel, loaders: list[Any]) -> dict[str, torch.Tensor]:
    """Convert what the loaders give."""
    if group.converter is None:
        return {group.key: loaders[0]()}
    converter: WeightTransform = deepcopy(group.converter)
    for (pattern, name, _), load in zip(group.sources, loaders, strict=True):
        converter.add_tensor(group.key, name, pattern, load)
    try:
        made = converter.convert(group.key, model=model, config=model.config)
    except CheckpointError:
        raise
    except Exception as error:  # a conversion that does not fit the tensors fails in many ways
        raise CheckpointError(
            f"the tensors of {group.key} do not fit together ({first_problem(error)})", REFETCH
        ) from error
    return {name: param[0] if isinstance(param, list) else param for name, param in made.items()}


def _tolerated(model: PreTrainedModel, unexpected: list[str]) -> list[str]:
    """Tensors without a place are tolerated, as transformers does, unless they look like experts of ours.

    Raises:
        CheckpointError: one lies in an experts module of the model.
    """
    ignored = _pattern(model._keys_to_ignore_on_load_unexpected)
    rest = [name for name in unexpected if not (ignored and ignored.search(name))]
    paths = [path + "." for path, module in model.named_modules() if hasattr(module, "is_concatenated")]
    strangers = [name for name in rest if any(path in name for path in paths)]
    if strangers:
        raise CheckpointError(f"the checkpoint has experts' tensors that the model lacks: {_some(strangers)}", REFETCH)
    return rest


def _pattern(patterns: Any) -> re.Pattern[str] | None:
    return re.compile("|".join(f"({pattern})" for pattern in patterns)) if patterns else None


def _some(names: list[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more
