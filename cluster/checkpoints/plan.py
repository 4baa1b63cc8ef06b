"""Plans which checkpoint tensors make which parameters before any weight is read.

The model and its experts modules are built on the meta device. transformers describes each architecture's checkpoint
layout by renamings and converters. The plan applies them to the checkpoint's names, groups the tensors of each
conversion, and runs every conversion once on the meta device. So a missing or mis-shaped tensor, or a surplus expert,
is found in seconds. Later each group is converted alone, which bounds memory.
"""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from typing import Any, Literal, cast

import torch
from transformers import AutoConfig, PretrainedConfig, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Concatenate,
    MergeModulelist,
    WeightConverter,
    WeightRenaming,
    WeightTransform,
    dot_natural_key,
    rename_source_key,
)

from ...actors.engine.model.architecture import from_config
from ...actors.engine.model.model import TORCH_TYPES, quiet_logger
from ...actors.store.format import DTYPE_CODES, ExpertShape, first_problem
from ...errors import CheckpointError, UnsupportedModelError
from ..host import shown
from .checkpoint import Checkpoint
from .left_out import first_few, left_out, pattern_of, refuse_surplus_experts
from .matrices import Entry, Found, PublishedMatrix, join
from .quantization import KEYS
from .tensors import BLOCK_BYTES, read_blocks, read_rows, type_code
from .weight_files import INDEX, OTHER_CONFIG, TensorEntry

_LAYOUT_FLAGS = ("has_gate", "has_bias", "is_transposed", "is_concatenated")
_NO_EXPERTS = "serve it with transformers or vLLM: tiermoe offloads routed experts"


@dataclass(frozen=True)
class ExpertsModule:
    """One experts module and its layout.

    Attributes:
        path: in the model, such as `model.layers.3.mlp.experts`.
        transposed: weights are [in, out], not [out, in].
        concatenated: all gate rows, then all up rows; not interleaved.
        params: parameter path by stored name (`gate_up`, `down`, `gate_up_bias`, `down_bias`).
    """

    path: str
    shape: ExpertShape
    transposed: bool
    concatenated: bool
    params: dict[str, str]

    def neuron_major(self, name: str, block: torch.Tensor) -> torch.Tensor:
        """Some experts' weights [n, ...] of the module's parameter in the store's layout.

        Returns:
            By stored `name`, contiguous: [n, I, G, H], [n, I, H], [n, I, G] or [n, H].
        """
        if name.startswith("gate_up"):
            if name == "gate_up" and self.transposed:
                block = block.transpose(1, 2)  # [n, G*I, H]
            gates, rest = self.shape.gates, block.shape[2:]
            if self.concatenated:
                block = block.reshape(block.shape[0], gates, self.shape.intermediate, *rest).transpose(1, 2)
            else:
                block = block.reshape(block.shape[0], self.shape.intermediate, gates, *rest)
        elif name == "down" and not self.transposed:
            block = block.transpose(1, 2)  # [n, I, H]
        return block.contiguous()


def build_model(checkpoint: Checkpoint) -> PreTrainedModel:
    """The checkpoint's model on the meta device, in the checkpoint's type.

    Raises:
        UnsupportedModelError: of an architecture that transformers does not have.
        CheckpointError: the configuration is malformed.
    """
    config, dtype = _load_config(checkpoint)
    try:
        with torch.device("meta"), quiet_logger("transformers", logging.ERROR):  # no weight is used
            return cast(PreTrainedModel, from_config(config, dtype=dtype))
    except UnsupportedModelError:
        raise
    except Exception as error:  # transformers raises many kinds
        raise UnsupportedModelError(
            f"{shown(checkpoint.path)}: transformers cannot build a causal language model from config.json "
            f"({first_problem(error)})",
            "pass a text-generation checkpoint that transformers supports without remote code",
        ) from error


def find_experts(model: PreTrainedModel) -> list[ExpertsModule]:
    """The experts modules in layer order. Raises UnsupportedModelError: none, or of different shapes."""
    found = [
        _describe(path, module)
        for path, module in model.named_modules()
        if all(hasattr(module, flag) for flag in _LAYOUT_FLAGS) and hasattr(module, "down_proj")
    ]
    name = type(model).__name__
    if not found:
        outside = sorted({type(m).__name__ for m in model.modules() if type(m).__name__.endswith("Experts")})
        if outside:
            what = f"{name} computes its routed experts in {outside[0]}, outside transformers' experts interface"
            raise UnsupportedModelError(what, "serve it with transformers or vLLM: tiermoe needs that interface")
        raise UnsupportedModelError(f"{name} has no routed experts", _NO_EXPERTS)
    shapes = Counter(module.shape for module in found)
    if len(shapes) > 1:
        raise UnsupportedModelError(
            f"the experts of {name} have {len(shapes)} different shapes",
            "serve it without tiermoe: its slots need one shape",
        )
    return found


def expert_dtype(model: PreTrainedModel, experts: list[ExpertsModule]) -> str:
    """Name of the experts' type. Raises UnsupportedModelError: not one of bfloat16, float16 and float32."""
    dtypes = {model.get_parameter(path).dtype for module in experts for path in module.params.values()}
    names = sorted(str(dtype).removeprefix("torch.") for dtype in dtypes)
    if len(names) != 1 or names[0] not in DTYPE_CODES:
        raise UnsupportedModelError(
            f"the experts are of type {', '.join(names)}", f"convert the checkpoint to one of {', '.join(DTYPE_CODES)}"
        )
    return names[0]


def _describe(path: str, module: Any) -> ExpertsModule:
    up = "gate_up_proj" if module.has_gate else "up_proj"
    names = {"gate_up": up, "down": "down_proj"}
    if module.has_bias:
        names |= {"gate_up_bias": f"{up}_bias", "down_bias": "down_proj_bias"}
    try:
        shape = _expert_shape(module, {name: getattr(module, attribute) for name, attribute in names.items()})
    except (AttributeError, ValueError) as error:
        raise UnsupportedModelError(
            f"{path} has experts of an unknown layout ({first_problem(error)})",
            "check that the transformers release is one that tiermoe supports",
        ) from error
    return ExpertsModule(
        path=path,
        shape=shape,
        transposed=module.is_transposed,
        concatenated=module.is_concatenated,
        params={name: f"{path}.{attribute}" for name, attribute in names.items()},
    )


def _expert_shape(module: Any, params: dict[str, Any]) -> ExpertShape:
    """The shape of one expert. Raises ValueError: the parameters disagree."""
    order = -1 if module.is_transposed else 1
    count, rows, hidden = params["gate_up"].shape[:1] + params["gate_up"].shape[1:][::order]
    gates: Literal[1, 2] = 2 if module.has_gate else 1
    shape = ExpertShape(
        num_experts=count, hidden=hidden, intermediate=rows // gates, gates=gates, has_bias=module.has_bias
    )
    expected = {
        "gate_up": (rows, hidden)[::order],
        "down": (hidden, rows // gates)[::order],
        "gate_up_bias": (rows,),
        "down_bias": (hidden,),
    }
    for name, param in params.items():
        if tuple(param.shape) != (count, *expected[name]) or rows % gates:
            raise ValueError(f"{name} is {list(param.shape)}")
    return shape


def _load_config(checkpoint: Checkpoint) -> tuple[PretrainedConfig, torch.dtype]:
    try:
        config = AutoConfig.from_pretrained(checkpoint.path, local_files_only=True, trust_remote_code=False)
        for part in (config, config.get_text_config()):  # the model of the dequantized weights
            for key in KEYS:
                part.__dict__.pop(key, None)
        depth = getattr(config.get_text_config(), "num_hidden_layers", 1)
        # more layers than tensors are wrong, and would take long to build
        if not isinstance(depth, int) or not 1 <= depth <= len(checkpoint.tensors):
            raise ValueError(f"{depth} layers, but the files have {len(checkpoint.tensors)} tensors")
        return config, _checkpoint_dtype(config, checkpoint)
    except Exception as error:  # transformers raises many kinds for a bad configuration
        if "custom code" in str(error):
            raise UnsupportedModelError(
                f"{shown(checkpoint.path)}: transformers has no model of the type "
                f"'{checkpoint.config.get('model_type')}', and Python code of a checkpoint is not run",
                "pass a release that is converted to a class of transformers, or a GGUF file of the model",
            ) from error
        raise CheckpointError(
            f"{shown(checkpoint.path)}: config.json is not usable ({first_problem(error)})",
            "check that the transformers release knows this architecture, and correct what it names in config.json",
        ) from error


def _checkpoint_dtype(config: PretrainedConfig, checkpoint: Checkpoint) -> torch.dtype:
    """The type that transformers' `dtype="auto"` loads: the configuration's, else the weights'."""
    dtype = config.dtype if config.dtype is not None else config.get_text_config().dtype
    if isinstance(dtype, str):
        dtype = getattr(torch, dtype, None)
    if dtype is None:
        nbytes: Counter[str] = Counter()
        for entry in checkpoint.tensors.values():
            if checkpoint.quantization is None or entry.spec.dtype in DTYPE_CODES.values():
                nbytes[entry.spec.dtype] += entry.spec.nbytes
        code = next(iter(nbytes.most_common(1)), ("", 0))[0]
        name = next((name for name, known in DTYPE_CODES.items() if known == code), None)
        dtype = getattr(torch, name) if name else None
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise ValueError("it does not give the type of the weights")
    return dtype


Transform = Callable[[Sequence[torch.Tensor]], torch.Tensor]


@dataclass(frozen=True)
class RowTransform:
    """Takes whole rows of one tensor, whatever a row is: numbers, or the blocks of a published form.

    first, count: the rows that it takes; count 0: all. heads: whose halves the converter interleaved row by row, which
    is undone; 0: it did not.
    """

    first: int = 0
    count: int = 0
    heads: int = 0

    def __call__(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        own = tensors[0][self.first : self.first + self.count] if self.count else tensors[0]
        if self.heads:  # the inverse of `LlamaModel.permute`: rows [heads, size / 2, 2] -> [heads, 2, size / 2]
            halves = own.reshape(self.heads, own.shape[0] // self.heads // 2, 2, *own.shape[1:])
            own = halves.transpose(1, 2).reshape(own.shape)
        return own.contiguous()


@dataclass(frozen=True)
class Group:
    """The checkpoint tensors of one conversion.

    Attributes:
        key: the first parameter that it makes.
        converter: None for a renamed tensor.
        dtype: that the tensors are cast to first.
        sources: (source pattern, checkpoint name, tensor) in the converter's order.
        targets: shape and type of the parameters that it makes, by name.
        transform: makes the parameter of the tensors of a GGUF file; None: it is the one tensor.
    """

    key: str
    converter: WeightConverter | None
    dtype: torch.dtype
    sources: list[tuple[str, str, Entry]]
    targets: dict[str, torch.Tensor] = field(default_factory=dict)
    transform: Transform | None = None

    def convert(
        self, model: PreTrainedModel, read: Callable[[Entry], torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        """Make the parameters; tensors are read on use. Raises CheckpointError: unreadable, or not convertible."""
        if self.converter is None:
            read_all = [read(entry) for _, _, entry in self.sources]
            made = read_all[0] if self.transform is None else self.transform(read_all)
            return {self.key: made.to(self.dtype)}  # at the end: what a file has may be 1 more than the parameter
        converter: WeightTransform = deepcopy(self.converter)
        for pattern, name, entry in self.sources:
            converter.add_tensor(self.key, name, pattern, lambda entry=entry: read(entry).to(self.dtype))
        try:
            converted = converter.convert(self.key, model=model, config=model.config)
        except CheckpointError:
            raise
        except Exception as error:  # a conversion that does not fit the tensors fails in many ways
            what = f"the tensors of {self.key} do not fit together ({first_problem(error)})"
            raise CheckpointError(what, OTHER_CONFIG) from error
        return {name: param[0] if isinstance(param, list) else param for name, param in converted.items()}

    def blocks(self, model: PreTrainedModel, names: Sequence[str]) -> Iterator[torch.Tensor]:
        """Parameters in contiguous runs along their first dimension, one after the other. Raises as `convert`.

        A renamed tensor is streamed from its file, and experts with separate tensors are stacked some at a time.
        What else is converted is made as a whole first.
        """
        if self.converter is None and self.transform is None:
            for block in read_blocks(self.sources[0][2]):
                yield block.to(self.dtype)
            return
        for part in self._expert_chunks():
            yield from part._converted(model, names)

    def _expert_chunks(self) -> Iterator[Group]:
        """The conversion in chunks of experts if it stacks them; else this one."""
        operations = [] if self.converter is None else self.converter.operations
        merge, *rest = operations or [None]
        by_pattern: dict[str, list[tuple[str, str, Entry]]] = {}
        for source in self.sources:
            by_pattern.setdefault(source[0], []).append(source)
        target, *others = self.targets.values()
        counts = {len(sources) for sources in by_pattern.values()}
        within = all(isinstance(operation, Concatenate) and operation.dim > 0 for operation in rest)
        stacks = isinstance(merge, MergeModulelist) and merge.dim == 0 and within and not others
        if not stacks or not target.dim() or counts != {len(target)}:
            yield self
            return
        step = max(1, BLOCK_BYTES * len(target) // max(1, target.nbytes))
        for first in range(0, len(target), step):
            sources = [source for each in by_pattern.values() for source in each[first : first + step]]
            yield replace(self, sources=sources)

    def _converted(self, model: PreTrainedModel, names: Sequence[str]) -> Iterator[torch.Tensor]:
        made = self.convert(model, lambda entry: read_rows(entry, 0, entry.rows))
        for name in names:
            tensor = made.pop(name)
            rows = max(1, BLOCK_BYTES * len(tensor) // max(1, tensor.nbytes)) if tensor.dim() else 1
            for block in tensor.split(rows) if tensor.dim() else [tensor]:
                yield block.contiguous()


@dataclass(frozen=True)
class Plan:
    """All conversions of a checkpoint, in the order of its names; and the group that makes each parameter.

    left_out: tensors that the model does not have, which transformers reports and does not load, either.
    """

    groups: list[Group]
    makers: dict[str, Group]
    left_out: tuple[str, ...] = ()


def plan_conversion(
    model: PreTrainedModel, checkpoint: Checkpoint, mapping: Sequence[WeightTransform] | None = None
) -> Plan:
    """Plan the conversion of a checkpoint into the parameters of a model on the meta device.

    Args:
        mapping: of the checkpoint's names; None: transformers' for this model.

    Follows `transformers.core_model_loading.convert_and_load_state_dict_in_model` in naming, casting and order, but
    never initialises a parameter at random.

    Raises:
        CheckpointError: tensors are mis-shaped, experts are surplus, or two tensors make one parameter.
    """
    slots = dict(model.state_dict())
    found = get_model_conversion_mapping(model) if mapping is None else mapping
    found = [*found, *_of_single_experts(model, checkpoint, found)]
    groups, unexpected = _group(model, checkpoint, slots, found)
    makers: dict[str, Group] = {}
    problems: list[str] = []
    for group in groups:
        _check_numbering(group)
        for name, made in group.convert(model, _meta).items():
            slot = slots.get(name)
            if slot is None:
                unexpected[name] = None
            elif slot.shape != made.shape:
                problems.append(f"{name} is {list(made.shape)}, not {list(slot.shape)}")
            elif name in makers:
                raise CheckpointError(f"two tensors of the checkpoint make parameter {name}", _ONE_OF_EACH)
            else:
                makers[name] = group
                group.targets[name] = made
    if problems:
        raise CheckpointError(f"{first_few(problems)} in {checkpoint.path}", OTHER_CONFIG)
    surplus = left_out(model, unexpected)
    refuse_surplus_experts(model, surplus)
    return Plan(groups, makers, tuple(surplus))


_SINGLE_EXPERT = re.compile(r"\.experts\.\d+\.(gate|up|down)_proj\.")


def _of_single_experts(
    model: PreTrainedModel, checkpoint: Checkpoint, mapping: Sequence[WeightTransform]
) -> list[WeightConverter]:
    """What stacks experts that have a tensor each, where transformers' mapping knows stacks alone.

    So quantized releases have them (Gemma 4, Qwen3-VL): tools quantize linear layers, and take stacks apart before.
    """
    known = any("experts.*" in pattern for entry in mapping for pattern in entry.source_patterns)
    stacked = [m for m in model.modules() if all(hasattr(m, flag) for flag in _LAYOUT_FLAGS)]
    usual = all(m.has_gate and m.is_concatenated and not (m.has_bias or m.is_transposed) for m in stacked)
    if known or not stacked or not usual or not any(map(_SINGLE_EXPERT.search, checkpoint.tensors)):
        return []
    gate, up, down = (f".experts.*.{name}_proj.weight" for name in ("gate", "up", "down"))
    merged = MergeModulelist(dim=0)
    return [
        WeightConverter([gate, up], ".experts.gate_up_proj", operations=[merged, Concatenate(dim=1)]),
        WeightConverter(down, ".experts.down_proj", operations=[merged]),
    ]


def _dequantized_tensors(checkpoint: Checkpoint) -> dict[str, Found]:
    """The checkpoint's tensors, quantized matrices as one each, which is not checked yet. Raises as `join`."""
    tensors = cast(dict[str, TensorEntry], checkpoint.tensors)
    return {**tensors} if checkpoint.quantization is None else {**join(tensors, checkpoint.quantization)}


def check_missing(model: PreTrainedModel, plan: Plan, satisfied: set[str]) -> None:
    """Check that the checkpoint has every parameter and persistent buffer but `satisfied`, which share another's.

    Raises:
        CheckpointError: some are missing.
    """
    optional = pattern_of(model._keys_to_ignore_on_load_missing)
    missing = [
        name
        for name in model.state_dict()
        if name not in plan.makers and name not in satisfied and not (optional and optional.search(name))
    ]
    if missing:
        remedy = "pass a whole checkpoint, with the config.json that belongs to its weights"
        raise CheckpointError(f"the checkpoint lacks {first_few(missing)}", remedy)


_ONE_OF_EACH = "pass a release that has one tensor for each parameter"


def _group(
    model: PreTrainedModel, checkpoint: Checkpoint, slots: dict[str, torch.Tensor], mapping: Sequence[WeightTransform]
) -> tuple[list[Group], dict[str, Found | None]]:
    """The groups of the checkpoint's tensors, and those that the model does not have, by their names there.

    What the model does not have is not checked: neither quantized matrices nor what the index says of them.
    """
    tensors = _dequantized_tensors(checkpoint)
    renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
    by_pattern = {pattern: entry for entry in converters for pattern in entry.source_patterns}
    groups: dict[str, Group] = {}
    unexpected: dict[str, Found | None] = {}
    # one pass in this order: some renamings depend on the names before
    for name in sorted({**tensors, **checkpoint.absent}, key=dot_natural_key):
        try:
            key, pattern = rename_source_key(name, renamings, converters, model.base_model_prefix, slots)
        except ValueError as error:  # a renaming expects a number
            raise CheckpointError(f"tensor {name!r} has an unknown name ({error})", OTHER_CONFIG) from error
        if key not in slots and name in slots:
            key, pattern = name, None
        if key not in slots:
            unexpected[key] = tensors.get(name)
            continue
        if name not in tensors:
            what = f"tensor {name!r} is missing from {checkpoint.absent[name]}, though {INDEX} lists it there"
            raise CheckpointError(what, "pass files and an index of one release")
        found = tensors[name]
        entry = found.entry(type_code(model.dtype)) if isinstance(found, PublishedMatrix) else found
        group = groups.get(key)
        if group is None:
            converter = deepcopy(by_pattern[pattern]) if pattern is not None else None
            group = groups[key] = Group(key, converter, target_dtype(model, key, slots[key]), [])
        elif group.converter is None:
            other = group.sources[0][1]
            raise CheckpointError(f"tensors {other!r} and {name!r} both make parameter {key}", _ONE_OF_EACH)
        if group.dtype.is_floating_point and entry.spec.dtype not in ("BF16", "F16", "F32", "F64"):
            # a damaged header, or an unmarked quantization
            raise CheckpointError(
                f"tensor {name!r} is of type {entry.spec.dtype}, not floating point", "pass the unquantized checkpoint"
            )
        group.sources.append((pattern or name, name, entry))
    return list(groups.values()), unexpected


def target_dtype(model: PreTrainedModel, key: str, slot: torch.Tensor) -> torch.dtype:
    """The type that transformers gives a parameter: some are float32 in every model."""
    for glob, dtype in model._get_dtype_plan(model.config.dtype).items():
        if re.search(glob.replace("*", ".*"), key):
            return dtype
    return slot.dtype


def _check_numbering(group: Group) -> None:
    """Stacked experts must be numbered 0, 1, 2, ...: a gap would shift the later ones."""
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
            raise CheckpointError(
                f"the tensors of {group.key} are not numbered 0..n-1: {first_few(shown)}", OTHER_CONFIG
            )


def _meta(entry: Entry) -> torch.Tensor:
    return torch.empty(entry.spec.shape, dtype=TORCH_TYPES[entry.spec.dtype], device="meta")
