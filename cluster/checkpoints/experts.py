"""The routed experts of a quantized checkpoint: which tensors make each matrix, and where their bytes lie.

transformers' conversion of a layer's experts says which tensors are gate, up and down: it stacks the experts of each
source pattern and concatenates gate and up. Here nothing is stacked: each expert keeps its own bytes and orientation.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...actors.store.format import part_bytes
from ...actors.store.published import LayerMap, runs_of
from ...errors import CheckpointError, FormError, UnsupportedModelError
from ...kernels.forms import DTYPES, ExpertForm, MatrixForm
from ...kernels.repack import neurons_in_order
from ...limits import usable_cores
from .gguf_header import EXPERT_REMEDY
from .matrices import Entry, QuantizedEntry, Raw, plain_form
from .plan import ExpertsModule, Group, Plan
from .weight_files import OTHER_CONFIG, TensorEntry, compare_hash, read_bytes

_REMEDY = "pass another release of the model, such as its bfloat16 one"


@dataclass(frozen=True)
class Matrices:
    """One matrix of every expert of a layer. entries: one for each expert, or one stack of them."""

    entries: tuple[Entry, ...]

    def of(self, expert: int) -> tuple[Entry, int]:
        """The tensor that holds an expert's matrix, and the number of the matrix in it."""
        return (self.entries[0], expert) if len(self.entries) == 1 else (self.entries[expert], 0)

    def form(self) -> MatrixForm:
        """Raises UnsupportedModelError: the experts have several forms, or one that cannot be kept."""
        forms = {_form(entry) for entry in self.entries}
        if len(forms) > 1:
            kinds = ", ".join(sorted({form.kind for form in forms}))
            name = self.entries[0].spec.name
            raise UnsupportedModelError(f"the experts beside {name!r} have {len(forms)} forms ({kinds})", _REMEDY)
        return forms.pop()

    def order(self, expert: int) -> NDArray[np.int32] | None:
        """As `QuantizedEntry.order`."""
        entry, _ = self.of(expert)
        return entry.order() if isinstance(entry, QuantizedEntry) else None

    @property
    def repacked(self) -> bool:
        return any(isinstance(entry, QuantizedEntry) and entry.repack is not None for entry in self.entries)


@dataclass(frozen=True)
class LayerExperts:
    """The experts of one layer in their published form.

    form: with the neurons in the order of down's inputs, where down has act-order. biases: of gate_up and down, stacked
    [E, n]; the concatenation of several.
    """

    form: ExpertForm
    experts: int
    matrices: Mapping[str, Matrices]
    biases: Mapping[str, tuple[TensorEntry, ...]]

    @property
    def mapped(self) -> bool:
        """Whether all bytes lie in the checkpoint as slots want them."""
        joined = any(len(entries) > 1 for entries in self.biases.values())
        return not joined and not any(matrices.repacked for matrices in self.matrices.values())

    @property
    def nbytes(self) -> int:
        return self.experts * self.form.nbytes()

    def places(self, files: Mapping[Path, int]) -> LayerMap:
        """Where the experts of a mapped layer lie. files: the number of each of the checkpoint's files."""
        found: dict[str, list[tuple[int, int]]] = {name: [] for name in self.form.parts()}
        for name, nbytes in part_bytes(self.form).items():
            matrix, part = name.split(".")
            for expert in range(self.experts):
                if part == "bias":
                    entry, index = self.biases[matrix][0], expert
                else:
                    whole, index = self.matrices[matrix].of(expert)
                    entry = whole.raw[part] if isinstance(whole, QuantizedEntry) else whole
                found[name].append((files[entry.path], entry.spec.offset + index * nbytes))
        return LayerMap(runs={name: runs_of(places) for name, places in found.items()})

    def read(self, matrix: str) -> Iterator[dict[str, NDArray[Any]]]:
        """The parts of a matrix of each expert, in their order, once every weight is finite.

        Raises:
            CheckpointError: unreadable, not of the form, or not finite.
        """
        form, reordered = self.form.matrices[matrix], self.matrices["down"].form().order

        def one(expert: int) -> dict[str, NDArray[Any]]:
            entry, index = self.matrices[matrix].of(expert)
            if not isinstance(entry, QuantizedEntry):
                entry = QuantizedEntry(entry.spec, form, {"weight": entry}, _stacked(entry))
            parts = entry.verified(index)
            if matrix in self.biases:
                parts["bias"] = self._bias(matrix, expert)
            if reordered and matrix == "down":
                del parts["order"]
            elif reordered and (order := self.matrices["down"].order(expert)) is not None:
                parts = neurons_in_order(self.form, matrix, parts, order)
            return parts

        yield from in_order(one, range(self.experts))

    def _bias(self, matrix: str, expert: int) -> NDArray[Any]:
        code, shape = self.form.parts()[f"{matrix}.bias"]
        found = []
        for entry in self.biases[matrix]:
            nbytes = entry.spec.nbytes // self.experts
            found.append(np.frombuffer(read_bytes(entry, expert * nbytes, nbytes), DTYPES[code]))
        bias, name = np.concatenate(found), self.biases[matrix][0].spec.name
        if bias.shape != shape:
            raise CheckpointError(f"the bias {name!r} is {bias.shape}, not {shape}", OTHER_CONFIG)
        if not np.isfinite(bias if code != "BF16" else (bias.astype(np.uint32) << 16).view(np.float32)).all():
            raise CheckpointError(f"tensor {name!r} holds NaN or infinity", compare_hash(self.biases[matrix][0].path))
        return bias


def in_order(function: Any, items: Sequence[Any]) -> Iterator[Any]:
    """The results of calls on all usable cores, in order; NumPy works without the interpreter's lock. Few are ahead."""
    cores = usable_cores()
    with ThreadPoolExecutor(cores) as pool:
        waiting = []
        for item in items:
            waiting.append(pool.submit(function, item))
            if len(waiting) > 2 * cores:
                yield waiting.pop(0).result()
        for future in waiting:
            yield future.result()


def is_published(plan: Plan, experts: Sequence[ExpertsModule]) -> bool:
    """Whether any expert of the checkpoint is quantized."""
    return any(
        isinstance(entry, QuantizedEntry)
        for module in experts
        for path in module.params.values()
        for _, _, entry in plan.makers[path].sources
    )


def layer_experts(plan: Plan, module: ExpertsModule) -> LayerExperts:
    """The experts of a layer by their tensors.

    Raises:
        UnsupportedModelError: their layout is not one whose bytes can be kept. CheckpointError: they do not fit.
    """
    if module.shape.gates != 2:
        raise UnsupportedModelError(f"{module.path} has quantized experts without a gate", _REMEDY)
    matrices = _gate_and_up(plan.makers[module.params["gate_up"]], module)
    matrices["down"] = _stack(plan.makers[module.params["down"]], module)
    biases = {
        name.removesuffix("_bias"): _bias(plan.makers[path], module)
        for name, path in module.params.items()
        if name.endswith("_bias")
    }
    codes = {entry.spec.dtype for entries in biases.values() for entry in entries}
    if biases and "gate_up" not in matrices:
        matrices = {"gate_up": _fused(matrices.pop("gate"), matrices.pop("up"), module), **matrices}
    if len(codes) > 1:
        raise UnsupportedModelError(f"{module.path} has biases of several types", _REMEDY)
    of_gguf = plan.makers[module.params["down"]].sources[0][0] in _OF_GGUF
    try:
        forms = {name: found.form() for name, found in matrices.items()}
        form = ExpertForm(
            **forms | {"down": replace(forms["down"], order=False)},
            interleaved="gate_up" in matrices and not module.concatenated and not of_gguf,
            bias=codes.pop() if codes else "",
        )
    except FormError as error:
        raise CheckpointError(f"{module.path}: {error.what}", error.remedy) from error
    if (form.hidden, form.intermediate) != (module.shape.hidden, module.shape.intermediate):
        raise CheckpointError(f"{module.path} has experts of another shape than config.json says", OTHER_CONFIG)
    return LayerExperts(form, module.shape.num_experts, matrices, biases)


_OF_GGUF = ("gate", "up", "gate_up", "down")  # source names that `gguf_plan` gives


def _fused(gate: Matrices, up: Matrices, module: ExpertsModule) -> Matrices:
    """Gate and up in one matrix, which experts with biases have: rows of gate, then of up."""
    both, forms = {"gate": gate.entries[0], "up": up.entries[0]}, {gate.form(), up.form()}
    if len(forms) > 1 or gate.repacked or len(gate.entries) > 1:
        raise UnsupportedModelError(f"{module.path} has biases and experts of an unknown layout", _REMEDY)
    form = forms.pop()

    def joined(fused: MatrixForm, raw: Raw) -> Raw:
        return {"weight": np.concatenate([raw["gate"], raw["up"]])}

    raw = {name: entry.raw["weight"] if isinstance(entry, QuantizedEntry) else entry for name, entry in both.items()}
    form = replace(form, outputs=2 * form.outputs)
    return Matrices((QuantizedEntry(both["gate"].spec, form, raw, module.shape.num_experts, repack=joined),))


def _gate_and_up(group: Group, module: ExpertsModule) -> dict[str, Matrices]:
    if group.sources[0][0] in _OF_GGUF:
        names = dict.fromkeys(name for name, _, _ in group.sources)
        return {
            name: _counted(tuple(entry for one, _, entry in group.sources if one == name), group, module)
            for name in names
        }
    if group.converter is None:
        return {"gate_up": _stack(group, module)}
    patterns = list(dict.fromkeys(pattern for pattern, _, _ in group.sources))
    order = [pattern for pattern in group.converter.source_patterns if pattern in patterns]
    if _operations(group) not in (["MergeModulelist", "Concatenate"], ["Concatenate"]) or len(order) != 2:
        raise _unknown(group, module)
    if not module.concatenated or module.transposed:
        raise _unknown(group, module)
    sources = [tuple(e for pattern, _, e in group.sources if pattern == one) for one in order]
    gate, up = (_counted(entries, group, module) for entries in sources)
    return {"gate": gate, "up": up}


def _stack(group: Group, module: ExpertsModule) -> Matrices:
    """The experts of a parameter that is stacked in the checkpoint, or merged from one tensor an expert."""
    if group.converter is not None and _operations(group) != ["MergeModulelist"]:
        raise _unknown(group, module)
    return _counted(tuple(entry for _, _, entry in group.sources), group, module)


def _counted(entries: tuple[Entry, ...], group: Group, module: ExpertsModule) -> Matrices:
    experts = module.shape.num_experts
    first = entries[0]
    stacked = first.stack == experts if isinstance(first, QuantizedEntry) else _stacked(first) == experts
    if len(entries) == 1 and stacked:
        if group.sources[0][0] in _OF_GGUF:
            return Matrices(entries)
        if isinstance(first, QuantizedEntry) and first.transposed == module.transposed:
            return Matrices(entries)
        if not isinstance(first, QuantizedEntry) and not module.transposed:
            return Matrices(entries)
    elif len(entries) == experts and not module.transposed:
        return Matrices(entries)
    raise _unknown(group, module)


def _bias(group: Group, module: ExpertsModule) -> tuple[TensorEntry, ...]:
    entries = tuple(entry for _, _, entry in group.sources if not isinstance(entry, QuantizedEntry))
    if group.converter is not None or len(entries) < len(group.sources):
        raise _unknown(group, module)
    return entries


def _form(entry: Entry) -> MatrixForm:
    if isinstance(entry, QuantizedEntry):
        packed = any(raw.spec.dtype == "U8" for raw in entry.raw.values())
        if packed and entry.form.kind == "float32":  # blocks that are dequantized
            name = entry.spec.name
            raise UnsupportedModelError(f"{name!r} has a GGUF type that is not supported for experts", EXPERT_REMEDY)
        return entry.form
    outputs, inputs = entry.spec.shape[-2:]
    return plain_form(entry, outputs, inputs)


def _stacked(entry: TensorEntry) -> int:
    """Matrices of an unquantized stack; 0: it is one matrix."""
    return entry.spec.shape[0] if len(entry.spec.shape) == 3 else 0


def _operations(group: Group) -> list[str]:
    return [] if group.converter is None else [type(operation).__name__ for operation in group.converter.operations]


def _unknown(group: Group, module: ExpertsModule) -> UnsupportedModelError:
    operations = ", ".join(_operations(group)) or "none"
    return UnsupportedModelError(
        f"{module.path}: quantized experts of this layout (conversion: {operations}) cannot be kept", _REMEDY
    )
