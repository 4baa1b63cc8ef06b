"""Converts a checkpoint into the files of a store, one tensor group at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path

import torch
import transformers
from transformers import PreTrainedModel

from ....actors.store.format import (
    DENSE_NAME,
    DTYPE_CODES,
    FORMAT_VERSION,
    MANIFEST_NAME,
    DenseFile,
    LayerFile,
    Manifest,
    TiedWeight,
    layer_name,
)
from ....errors import CheckpointError
from .checkpoint import REFETCH, Checkpoint, read_source
from .plan import (
    ExpertsModule,
    Plan,
    build_model,
    check_missing,
    expert_dtype,
    find_experts,
    is_finite,
    plan_conversion,
    raw_bytes,
    type_code,
)
from .writer import Journal, write_file, write_tensors

Advance = Callable[[int], None]  # called with newly written bytes


@dataclass(frozen=True)
class Conversion:
    """A planned conversion, checked as far as possible without weights.

    dtype: of the experts. dense: parameters of the dense file, in file order. tied: parameters that share storage.
    """

    checkpoint: Checkpoint
    model: PreTrainedModel
    experts: list[ExpertsModule]
    dtype: str
    plan: Plan
    dense: list[str]
    tied: tuple[TiedWeight, ...]

    def total_bytes(self) -> int:
        """Bytes of all tensors of the store."""
        return len(self.experts) * self.layer_bytes() + self.dense_bytes()

    def layer_bytes(self) -> int:
        """Bytes of the tensors of one layer file."""
        shape = self.experts[0].shape
        return shape.num_experts * shape.nbytes(getattr(torch, self.dtype).itemsize)

    def dense_bytes(self) -> int:
        """Bytes of the tensors of the dense file."""
        return sum(self.plan.makers[name].targets[name].nbytes for name in self.dense)


def plan_store(checkpoint: Checkpoint) -> Conversion:
    """Plan the conversion of a checkpoint.

    Raises:
        UnsupportedModelError: quantized, unknown, or without routed experts of one shape.
        CheckpointError: tensors are missing or mis-shaped, or experts are surplus.
    """
    model = build_model(checkpoint)
    experts = find_experts(model)
    dtype = expert_dtype(model, experts)
    plan = plan_conversion(model, checkpoint)
    expert_params = {path for module in experts for path in module.params.values()}
    aliases = _aliases(model, plan)
    check_missing(model, plan, satisfied=set(aliases))
    tied = tuple(TiedWeight(name=name, source=source) for name, source in sorted(aliases.items()))
    dense = [
        name for group in plan.groups for name in group.targets if name not in expert_params and name not in aliases
    ]
    for name in expert_params:
        if type_code(plan.makers[name].targets[name].dtype) != DTYPE_CODES[dtype]:
            raise CheckpointError(f"parameter {name} does not come out as {dtype}", REFETCH)
    return Conversion(checkpoint, model, experts, dtype, plan, dense, tied)


def write_store(conversion: Conversion, folder: Path, advance: Advance) -> None:
    """Write the files of a store into a work folder, the manifest last. Finished files of an earlier run count.

    Raises:
        CheckpointError: a tensor is not finite, or a file changed or ended early.
        StoreError: the disk is full or may not be written.
    """
    checkpoint = conversion.checkpoint
    journal = Journal(folder, checkpoint.source, transformers.__version__)
    layers = [_write_layer(conversion, i, folder, journal, advance) for i in range(len(conversion.experts))]
    dense = _write_dense(conversion, folder, journal, advance)
    extras = [write_file(folder / path.name, path.read_bytes()) for path in checkpoint.extras()]
    if read_source(checkpoint.path) != checkpoint.source:
        raise CheckpointError(f"{checkpoint.path} changed while it was read", "run the same command again")
    manifest = Manifest(
        format_version=FORMAT_VERSION,
        model=checkpoint.name,
        architecture=type(conversion.model).__name__,
        dtype=conversion.dtype,  # type: ignore[arg-type]  # one of DTYPE_CODES: `expert_dtype` checked it
        transformers_version=transformers.__version__,
        experts=conversion.experts[0].shape,
        layers=tuple(layers),
        dense=dense,
        extras=tuple(extras),
        source=checkpoint.source,
    )
    journal.remove()
    write_file(folder / MANIFEST_NAME, manifest.encode())


def _write_layer(conversion: Conversion, index: int, folder: Path, journal: Journal, advance: Advance) -> LayerFile:
    module, name, code = conversion.experts[index], layer_name(index), DTYPE_CODES[conversion.dtype]
    if journal.finished(name) is not None:
        advance(conversion.layer_bytes())
    header = {stored: (code, shape) for stored, shape in module.shape.stacked().items()}
    data = _counted(_layer_data(conversion, module), advance)
    record = journal.once(name, lambda: write_tensors(folder / name, header, data))
    return LayerFile(index=index, module=module.path, **record.model_dump())


def _layer_data(conversion: Conversion, module: ExpertsModule) -> Iterator[memoryview]:
    """The tensors of a layer file in order, some experts at a time."""
    for stored in module.shape.stacked():
        param = module.params[stored]
        for block in conversion.plan.makers[param].blocks(conversion.model, [param]):
            yield _checked_bytes(param, module.neuron_major(stored, block))


def _write_dense(conversion: Conversion, folder: Path, journal: Journal, advance: Advance) -> DenseFile:
    if journal.finished(DENSE_NAME) is not None:
        advance(conversion.dense_bytes())
    made = {name: conversion.plan.makers[name].targets[name] for name in conversion.dense}
    header = {name: (type_code(tensor.dtype), tuple(tensor.shape)) for name, tensor in made.items()}
    data = _counted(_dense_data(conversion), advance)
    record = journal.once(DENSE_NAME, lambda: write_tensors(folder / DENSE_NAME, header, data))
    return DenseFile(tied=conversion.tied, **record.model_dump())


def _dense_data(conversion: Conversion) -> Iterator[memoryview]:
    """The tensors of the dense file in order; each conversion runs once."""
    wanted = set(conversion.dense)
    for group in conversion.plan.groups:
        names = [name for name in group.targets if name in wanted]
        if names:
            for block in group.blocks(conversion.model, names):
                yield _checked_bytes(group.key, block)


def _counted(pieces: Iterator[memoryview], advance: Advance) -> Iterator[memoryview]:
    for piece in pieces:
        yield piece
        advance(len(piece))


def _checked_bytes(name: str, block: torch.Tensor) -> memoryview:
    if not is_finite(block):
        raise CheckpointError(f"the tensors of {name} hold NaN or infinity", REFETCH)
    return raw_bytes(block)


def _aliases(model: PreTrainedModel, plan: Plan) -> dict[str, str]:
    """Parameters without storage of their own, and whose they share.

    As in transformers, tied weights that the checkpoint holds twice with different values stay separate.
    """
    families: dict[str, list[str]] = {}
    for name, source in model.all_tied_weights_keys.items():
        families.setdefault(source, [source]).append(name)
    aliases: dict[str, str] = {}
    for family in families.values():
        present = [name for name in family if name in plan.makers]
        for name in family:
            if not present or name == present[0]:
                continue
            if name not in plan.makers or _equal(model, plan, name, present[0]):
                aliases[name] = present[0]
    return aliases


def _equal(model: PreTrainedModel, plan: Plan, one: str, other: str) -> bool:
    pairs = zip_longest(*(plan.makers[name].blocks(model, [name]) for name in (one, other)))
    return all(a is not None and b is not None and torch.equal(a, b) for a, b in pairs)
