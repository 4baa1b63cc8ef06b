"""Linear layers and embeddings on matrices in their published forms (`kernels.forms`): on the CPU in float32, on a GPU.

A product is one operator, `tiermoe::form_linear`, which the kernels of published forms run; the native dense program
has a step of its own for it (`dense.lowering`). An embedding decodes the rows of its tokens. So a step reads the bytes
that the checkpoint has. On a GPU results differ from those on the dequantized matrix in the order of additions alone.

Code of a model that reads `weight` itself would get NaN: only modules of exactly the classes here are exchanged, and
none of `READ_DIRECTLY`.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, Protocol
from weakref import WeakValueDictionary

import numpy as np
import torch
from torch import nn

from ....kernels.expert_ffn import DECODE_ROWS, SHORT_ROWS
from ....kernels.form_ffn import form_linear
from ....kernels.form_slots import dequantize
from ....kernels.forms import BLOCKS, DTYPES, FLOATS, MatrixForm, Parts
from ....kernels.packed_ffn import Threads
from ...store.published import is_table

if TYPE_CHECKING:
    from ....kernels.triton.form_linear import TritonMatrix

_SCALE = "scalar_embed_scale"  # of transformers' scaled embeddings: a number
READ_DIRECTLY = ("dt_proj",)  # last names of linear layers whose weight a model multiplies without calling them
_handles = itertools.count(1)


class FormMatrix(Protocol):
    """A matrix in its published form."""

    @property
    def form(self) -> MatrixForm: ...

    @property
    def device(self) -> torch.device: ...

    def product(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., inputs] times the transposed matrix: [..., outputs]."""
        ...

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        """The rows of these numbers [...]: [..., inputs]."""
        ...


@dataclass(frozen=True, eq=False)
class PublishedMatrix:
    """In memory of this host."""

    form: MatrixForm
    parts: Parts

    @property
    def device(self) -> torch.device:
        return torch.device("cpu")

    def product(self, x: torch.Tensor) -> torch.Tensor:
        """As of `FormMatrix`, in float32."""
        rows = x.detach().reshape(-1, self.form.inputs).contiguous().numpy()
        found = form_linear(self.form, self.parts, rows, _threads(torch.get_num_threads()))
        return torch.from_numpy(found).view(*x.shape[:-1], self.form.outputs)

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        """As of `FormMatrix`, of GGUF's blocks or of numbers, in float32."""
        form, part = self.form, self.parts["weight"]
        table = torch.from_numpy(part.view(np.int16) if part.dtype == np.uint16 else part)  # bfloat16's bits
        rows = table.index_select(0, ids.reshape(-1)).numpy().view(part.dtype)
        one = MatrixForm(form.kind, max(1, len(rows)), form.inputs)
        values = one.dequantize({"weight": rows}) if len(rows) else np.empty((0, form.inputs), np.float32)
        return torch.from_numpy(values).view(*ids.shape, form.inputs)


class DeviceMatrix:
    """On a GPU, by Triton; where that is not installed or fails, torch dequantizes the matrix in each call.

    Args:
        parts: on the device; types of eight bits are uint8. dtype: of rows.

    Attributes:
        note: why torch runs it, or "".
    """

    def __init__(self, form: MatrixForm, parts: Mapping[str, torch.Tensor], dtype: torch.dtype) -> None:
        self.form, self.note, self._parts, self._dtype = form, "", dict(parts), dtype
        self._triton: TritonMatrix | None = None
        try:  # compiled now, not in a request
            from ....kernels.triton.form_linear import TritonMatrix

            made = TritonMatrix(form, parts)
            for rows in (1, DECODE_ROWS + 1, SHORT_ROWS + 1):
                made.product(parts["weight"].new_zeros((rows, form.inputs), dtype=dtype))
            made.rows(parts["weight"].new_zeros(1, dtype=torch.int64), dtype)[0, 0].item()
            self._triton = made
        except Exception as error:  # whatever a compiler or driver raises: torch can do it
            said = f"{type(error).__name__}: {error}"
            self.note = f"the dense part is dequantized in each step, slowly: {said[:200]}"

    @property
    def device(self) -> torch.device:
        return self._parts["weight"].device

    def product(self, x: torch.Tensor) -> torch.Tensor:
        """As of `FormMatrix`, in the type of x."""
        if self._triton is not None:
            return self._triton.product(x)
        return nn.functional.linear(x, dequantize(self.form, self._parts).to(x.dtype))

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        """As of `FormMatrix`, in the type of rows."""
        if self._triton is not None:
            return self._triton.rows(ids, self._dtype)
        return nn.functional.embedding(ids, dequantize(self.form, self._parts).to(self._dtype))


_matrices: WeakValueDictionary[int, FormMatrix] = WeakValueDictionary()

_library = torch.library.Library("tiermoe", "FRAGMENT")
_library.define("form_linear(Tensor x, int handle, int outputs) -> Tensor")


@cache
def _threads(count: int) -> Threads:
    return Threads(count)


def _product(x: torch.Tensor, handle: int, outputs: int) -> torch.Tensor:
    """x [..., inputs] -> [..., outputs]."""
    return _matrices[handle].product(x)


def _fake(x: torch.Tensor, handle: int, outputs: int) -> torch.Tensor:
    return x.new_empty((*x.shape[:-1], outputs))


for _kind in ("CPU", "CUDA"):
    _library.impl("form_linear", _product, _kind)
torch.library.register_fake("tiermoe::form_linear", _fake, lib=_library)


def matrix_of(handle: int) -> FormMatrix:
    """The matrix of a handle of `tiermoe::form_linear`."""
    return _matrices[handle]


class PublishedLinear(nn.Linear):
    """A linear layer on a matrix in its published form, with the bias of the layer that it stands for."""

    def __init__(self, module: nn.Linear, matrix: FormMatrix) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = module.in_features, module.out_features
        self.weight, self.bias = _no_weight(module.weight, matrix), module.bias
        self.matrix, self._handle = matrix, next(_handles)
        _matrices[self._handle] = matrix

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = torch.ops.tiermoe.form_linear(x, self._handle, self.out_features)
        return out if self.bias is None else out + self.bias


class PublishedEmbedding(nn.Embedding):
    """An embedding table in its published form; the rows of tokens are decoded when they are asked for.

    So of a table in a mapped file only those rows are in memory. Gemma's multiply what they look up.
    """

    def __init__(self, module: nn.Embedding, matrix: FormMatrix) -> None:
        none = _no_weight(module.weight, matrix)
        super().__init__(*module.weight.shape, padding_idx=module.padding_idx, _weight=none)
        scale = getattr(module, _SCALE, None)
        self.matrix, self._scale = matrix, None if scale is None else torch.full_like(none[:1, 0], scale)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        found = self.matrix.rows(ids)
        return found if self._scale is None else found * self._scale


def keeps_form(module: nn.Module, name: str, form: MatrixForm) -> bool:
    """Whether a module of a model, of this name there, may have its weight in a published form."""
    if isinstance(module, nn.Embedding):
        table = form.kind in ("bfloat16", "float16") and is_table(f"{name}.weight", form.nbytes())
        return (type(module) is nn.Embedding or hasattr(module, _SCALE)) and (form.kind in BLOCKS or table)
    return type(module) is nn.Linear and form.kind not in FLOATS and name.rpartition(".")[2] not in READ_DIRECTLY


def exchange(model: nn.Module, matrices: Mapping[str, FormMatrix]) -> None:
    """Have modules of a model run on matrices in their published forms, by the names of their weights."""
    for name, matrix in matrices.items():
        path = name.removesuffix(".weight")
        module: Any = model.get_submodule(path)
        kind = PublishedEmbedding if isinstance(module, nn.Embedding) else PublishedLinear
        model.set_submodule(path, kind(module, matrix))


def published_bytes(model: nn.Module) -> int:
    """Bytes of the matrices of a model in their published forms; shared ones once, tables of this host not at all."""
    found = {
        id(m.matrix): m.matrix.form.nbytes()
        for name, m in model.named_modules()
        if isinstance(m, PublishedLinear) or (isinstance(m, PublishedEmbedding) and not _is_mapped(name, m))
    }
    return sum(found.values())


def _is_mapped(name: str, module: PublishedEmbedding) -> bool:
    matrix = module.matrix
    return matrix.device.type == "cpu" and is_table(f"{name}.weight", matrix.form.nbytes())


def published_notes(model: nn.Module) -> list[str]:
    """What the plan says of matrices that no kernel runs."""
    return list(dict.fromkeys(note for m in _exchanged(model) if (note := getattr(m.matrix, "note", ""))))


def held_parameters(model: nn.Module) -> list[torch.Tensor]:
    """The parameters of a model that hold numbers: not on meta, and not the stand-ins of published matrices."""
    stand_ins = {id(m.weight) for m in _exchanged(model)}
    return [p for p in model.parameters() if not p.is_meta and id(p) not in stand_ins]


def bytes_of(part: torch.Tensor, code: str) -> torch.Tensor:
    """A part of a matrix as `kernels.form_slots.dequantize` takes it: types of eight bits are uint8."""
    return part.view(torch.uint8) if DTYPES[code] is np.uint8 else part


def numbers_of(part: torch.Tensor) -> np.ndarray[Any, np.dtype[Any]]:
    """A part of `bytes_of` as the kernels of the CPU take it, in the same memory: BF16 is uint16."""
    found: np.ndarray[Any, np.dtype[Any]] = (part.view(torch.uint16) if part.dtype == torch.bfloat16 else part).numpy()
    return found


def _exchanged(model: nn.Module) -> list[Any]:
    return [m for m in model.modules() if isinstance(m, PublishedLinear | PublishedEmbedding)]


def _no_weight(weight: torch.Tensor, matrix: FormMatrix) -> nn.Parameter:
    """A parameter of this shape and type in four bytes on the matrix's device, for code that asks for these."""
    none = torch.full((), torch.nan, dtype=weight.dtype, device=matrix.device)
    return nn.Parameter(none.expand(weight.shape), requires_grad=False)
