"""Converts a checkpoint into the files of a store, one tensor group at a time."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import zip_longest
from pathlib import Path

import numpy as np
import torch
import transformers
from transformers import PreTrainedModel

from ....actors.engine.model import mtp
from ....actors.store.format import (
    DENSE_NAME,
    DTYPE_CODES,
    FORMAT_VERSION,
    MANIFEST_NAME,
    DenseFile,
    FileRecord,
    LayerFile,
    Manifest,
    Published,
    TiedWeight,
    layer_name,
    part_bytes,
    part_tensor,
)
from ....actors.store.published import map_name
from ....errors import CheckpointError, UnsupportedModelError
from ....kernels.device import bound_torch_threads
from ...checkpoints.checkpoint import Checkpoint, read_source
from ...checkpoints.dense_forms import DenseMatrix, dense_matrices
from ...checkpoints.experts import LayerExperts, in_order, is_published, layer_experts
from ...checkpoints.matrices import QuantizedEntry
from ...checkpoints.plan import (
    ExpertsModule,
    Group,
    Plan,
    build_model,
    check_missing,
    expert_dtype,
    find_experts,
    plan_conversion,
)
from ...checkpoints.quantization import quantization_dict, without_quantization
from ...checkpoints.tensors import is_finite, raw_bytes, type_code
from ...checkpoints.weight_files import CONFIG, OTHER_CONFIG, compare_hash
from ...host import shown
from .writer import Journal, write_file, write_tensors

_AHEAD_BYTES = 64 << 20  # a larger tensor is streamed

Advance = Callable[[int], None]  # called with newly written bytes


@dataclass(frozen=True)
class Conversion:
    """A planned conversion, checked as far as possible without weights.

    dtype: of the experts; with `published`, of the dequantized model. dense: parameters of the dense file, in file
    order. matrices: those of them that keep their form. tied: parameters that share storage. published: the experts of
    each layer that keep their form. head: the model's own head for drafts, with its plan; None: there is none.
    left_out: tensors of the checkpoint that are neither of the model nor of the head.
    """

    checkpoint: Checkpoint
    model: PreTrainedModel
    experts: list[ExpertsModule]
    dtype: str
    plan: Plan
    dense: list[str]
    matrices: dict[str, DenseMatrix]
    tied: tuple[TiedWeight, ...]
    published: tuple[LayerExperts, ...] | None = None
    head: tuple[PreTrainedModel, Plan] | None = None
    left_out: tuple[str, ...] = ()

    def total_bytes(self) -> int:
        """Bytes of tensors to be read and checked, or written."""
        return sum(self.layer_bytes(i) for i in range(len(self.experts))) + self.dense_bytes() + self.head_bytes()

    def written_bytes(self) -> int:
        """Bytes of the store's tensors: mapped experts stay in the checkpoint."""
        mapped = [] if self.published is None else [layer.nbytes for layer in self.published if layer.mapped]
        return self.total_bytes() - sum(mapped)

    def layer_bytes(self, index: int) -> int:
        """Bytes of the experts of one layer."""
        if self.published is not None:
            return self.published[index].nbytes
        shape = self.experts[index].shape
        return shape.num_experts * shape.nbytes(getattr(torch, self.dtype).itemsize)

    def head_bytes(self) -> int:
        """Bytes of the tensors of the head's file."""
        return 0 if self.head is None else sum(t.nbytes for g in self.head[1].groups for t in g.targets.values())

    def dense_bytes(self) -> int:
        """Bytes of the tensors of the dense file."""
        plain = (name for name in self.dense if name not in self.matrices)
        published = sum(matrix.form.nbytes() for matrix in self.matrices.values())
        return published + sum(self.plan.makers[name].targets[name].nbytes for name in plain)


def plan_store(checkpoint: Checkpoint) -> Conversion:
    """Plan the conversion of a checkpoint.

    Raises:
        UnsupportedModelError: unknown, without routed experts of one shape, or quantized in an unsupported layout.
        CheckpointError: tensors are missing or mis-shaped, or experts are surplus.
    """
    model = build_model(checkpoint)
    experts = find_experts(model)
    dtype = expert_dtype(model, experts)
    if checkpoint.gguf is None:
        plan = plan_conversion(model, checkpoint)
    else:
        from ...checkpoints.gguf_plan import plan_gguf

        plan = plan_gguf(model, checkpoint, experts)
    expert_params = {path for module in experts for path in module.params.values()}
    aliases = _aliases(model, plan)
    check_missing(model, plan, satisfied=set(aliases))
    tied = tuple(TiedWeight(name=name, source=source) for name, source in sorted(aliases.items()))
    dense = [
        name for group in plan.groups for name in group.targets if name not in expert_params and name not in aliases
    ]
    for name in expert_params:
        if type_code(plan.makers[name].targets[name].dtype) != DTYPE_CODES[dtype]:
            raise CheckpointError(f"parameter {name} is not converted to {dtype}", OTHER_CONFIG)
    published = None
    gated = all(module.shape.gates == 2 for module in experts)  # else a GGUF file's experts are dequantized
    if gated if checkpoint.gguf is not None else is_published(plan, experts):
        published = tuple(layer_experts(plan, module) for module in experts)
    matrices = dense_matrices(model, plan, dense, aliases)
    head = _plan_head(model, checkpoint)
    of_head = set() if head is None else set(mtp.names_of_head(plan.left_out, model.config))
    left_out = tuple(name for name in plan.left_out if name not in of_head)
    return Conversion(checkpoint, model, experts, dtype, plan, dense, matrices, tied, published, head, left_out)


def _plan_head(model: PreTrainedModel, checkpoint: Checkpoint) -> tuple[PreTrainedModel, Plan] | None:
    """The model's own head for drafts; None: the checkpoint has none, or one that transformers cannot run."""
    names = set(mtp.names_of_head(checkpoint.tensors, model.config))
    if not names or checkpoint.gguf is not None:
        return None
    tensors = {name: entry for name, entry in checkpoint.tensors.items() if name in names}
    try:
        head = mtp.head_on_meta(model, names)
        mapping = head.get_weight_conversions(model)
        plan = plan_conversion(head, replace(checkpoint, tensors=tensors, absent={}), mapping)
        own = mtp.own_names(head)
        check_missing(head, plan, satisfied=set(head.state_dict()).difference(own))
    except (UnsupportedModelError, CheckpointError):
        return None
    groups = [group for group in plan.groups if set(group.targets) <= set(own)]
    return head, replace(plan, groups=groups)



def write_store(conversion: Conversion, folder: Path, advance: Advance) -> None:
    """Write the files of a store into a work folder, the manifest last. Finished files of an earlier run count.

    Raises:
        CheckpointError: a tensor is not finite, or a file changed or ended early.
        StoreError: the disk is full or may not be written.
    """
    bound_torch_threads()
    checkpoint = conversion.checkpoint
    journal = Journal(folder, checkpoint.source, transformers.__version__)
    layers = [_write_layer(conversion, i, folder, journal, advance) for i in range(len(conversion.experts))]
    dense = _write_dense(conversion, folder, journal, advance)
    extras = [write_file(folder / path.name, _extra(path)) for path in checkpoint.extras()]
    if conversion.head is not None:
        extras.append(_write_head(*conversion.head, folder, journal, advance))
    if read_source(checkpoint.path) != checkpoint.source:
        raise CheckpointError(f"{shown(checkpoint.path)} changed while it was read", "run the same command again")
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
        published=_published(conversion),
    )
    journal.remove()
    write_file(folder / MANIFEST_NAME, manifest.encode())


def _extra(path: Path) -> bytes:
    """A small file of the checkpoint; of `config.json`, what the dequantized model needs."""
    data = path.read_bytes()
    if path.name == CONFIG and quantization_dict(config := json.loads(data)) is not None:
        return json.dumps(without_quantization(config), indent=1).encode()
    return data


def _published(conversion: Conversion) -> Published | None:
    layers = conversion.published
    if layers is None:
        return None
    mapped = any(layer.mapped for layer in layers)
    checkpoint = str(conversion.checkpoint.path) if mapped else None
    return Published.of_layers([layer.form for layer in layers], checkpoint)


def _write_published(
    layer: LayerExperts, index: int, checkpoint: Checkpoint, folder: Path, journal: Journal, advance: Advance
) -> FileRecord:
    """Check a layer's experts and write where they lie, or their parts if slots need another order."""
    name = map_name(index) if layer.mapped else layer_name(index)
    if journal.finished(name) is not None:
        advance(layer.nbytes)

    def make() -> FileRecord:
        if not layer.mapped:
            header = {part: ("U8", (layer.experts, nbytes)) for part, nbytes in part_bytes(layer.form).items()}
            return write_tensors(folder / name, header, _parts(layer, advance))
        for _ in _parts(layer, advance):
            pass
        files = {shown(checkpoint.path / file.file): number for number, file in enumerate(checkpoint.source)}
        return write_file(folder / name, layer.places(files).encode())

    return journal.once(name, make)


def _parts(layer: LayerExperts, advance: Advance) -> Iterator[memoryview]:
    """The checked parts of a layer in order, one matrix of all experts at a time."""
    for matrix in layer.form.matrices:
        held: dict[str, list[memoryview]] = {}
        for parts in layer.read(matrix):
            for part, array in parts.items():
                piece = np.ascontiguousarray(array).view(np.uint8).reshape(-1).data
                if layer.mapped:
                    advance(len(piece))
                else:
                    held.setdefault(part, []).append(piece)
        for pieces in held.values():
            yield from _counted(iter(pieces), advance)


def _write_layer(conversion: Conversion, index: int, folder: Path, journal: Journal, advance: Advance) -> LayerFile:
    module, name, code = conversion.experts[index], layer_name(index), DTYPE_CODES[conversion.dtype]
    if conversion.published is not None:
        layer = conversion.published[index]
        record = _write_published(layer, index, conversion.checkpoint, folder, journal, advance)
        return LayerFile(index=index, module=module.path, **record.model_dump())
    if journal.finished(name) is not None:
        advance(conversion.layer_bytes(index))
    header = {stored: (code, shape) for stored, shape in module.shape.stacked().items()}
    data = _counted(_layer_data(conversion, module), advance)
    record = journal.once(name, lambda: write_tensors(folder / name, header, data))
    return LayerFile(index=index, module=module.path, **record.model_dump())


def _layer_data(conversion: Conversion, module: ExpertsModule) -> Iterator[memoryview]:
    """The tensors of a layer file in order, some experts at a time."""
    for stored in module.shape.stacked():
        param = module.params[stored]
        group = conversion.plan.makers[param]
        for block in group.blocks(conversion.model, [param]):
            yield _checked_bytes(group, module.neuron_major(stored, block))


def _write_dense(conversion: Conversion, folder: Path, journal: Journal, advance: Advance) -> DenseFile:
    if journal.finished(DENSE_NAME) is not None:
        advance(conversion.dense_bytes())
    header: dict[str, tuple[str, tuple[int, ...]]] = {}
    for name in conversion.dense:
        if (matrix := conversion.matrices.get(name)) is not None:
            header |= {part_tensor(name, part): what for part, what in matrix.form.parts().items()}
        else:
            made = conversion.plan.makers[name].targets[name]
            header[name] = (type_code(made.dtype), tuple(made.shape))
    data = _counted(_dense_data(conversion), advance)
    record = journal.once(DENSE_NAME, lambda: write_tensors(folder / DENSE_NAME, header, data))
    forms = {name: matrix.form for name, matrix in conversion.matrices.items()}
    return DenseFile(tied=conversion.tied, forms=forms, **record.model_dump())


def _write_head(
    head: PreTrainedModel, plan: Plan, folder: Path, journal: Journal, advance: Advance
) -> FileRecord:
    if journal.finished(mtp.FILE) is not None:
        advance(sum(made.nbytes for group in plan.groups for made in group.targets.values()))
    made = [(group, name) for group in plan.groups for name in group.targets]
    header = {name: (type_code(group.targets[name].dtype), tuple(group.targets[name].shape)) for group, name in made}
    blocks = (_checked_bytes(group, block) for group in plan.groups for block in group.blocks(head, [*group.targets]))
    return journal.once(mtp.FILE, lambda: write_tensors(folder / mtp.FILE, header, _counted(blocks, advance)))


def _dense_data(conversion: Conversion) -> Iterator[memoryview]:
    """The tensors of the dense file in order; each conversion runs once, small dequantizations on all cores."""
    wanted = set(conversion.dense)
    groups = [group for group in conversion.plan.groups if wanted & set(group.targets)]

    def made(group: Group) -> Iterator[memoryview]:
        if (matrix := conversion.matrices.get(group.key)) is not None:
            for block in matrix.blocks():
                yield np.ascontiguousarray(block).view(np.uint8).reshape(-1).data
            return
        for block in group.blocks(conversion.model, [name for name in group.targets if name in wanted]):
            yield _checked_bytes(group, block)

    def ahead(group: Group) -> list[memoryview] | None:
        dequantized = any(isinstance(entry, QuantizedEntry) for _, _, entry in group.sources)
        small = sum(target.nbytes for target in group.targets.values()) <= _AHEAD_BYTES
        return list(made(group)) if dequantized and small else None

    for group, blocks in zip(groups, in_order(ahead, groups), strict=True):
        yield from made(group) if blocks is None else blocks


def _counted(pieces: Iterator[memoryview], advance: Advance) -> Iterator[memoryview]:
    for piece in pieces:
        yield piece
        advance(len(piece))


def _checked_bytes(group: Group, block: torch.Tensor) -> memoryview:
    if not is_finite(block):
        paths = [path for _, _, entry in group.sources for path in entry.paths]
        raise CheckpointError(f"the tensors of {group.key} hold NaN or infinity", compare_hash(*paths))
    return raw_bytes(block)


def _aliases(model: PreTrainedModel, plan: Plan) -> dict[str, str]:
    """Parameters that share the storage of another one.

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
