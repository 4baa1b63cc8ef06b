"""Tensors of a checkpoint, plain and quantized ones as those of the dequantized model: names, forms and reading.

A published matrix is several tensors (`X.weight` and `X.weight_scale_inv`, `X.qweight`, `X.qzeros`, ...). `join` makes
one `QuantizedEntry` of each, under the name that the unquantized checkpoint has (`X.weight`), so that transformers'
renamings and conversions apply to it as ever. Reading one dequantizes it; experts keep its bytes.

NumPy without torch.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...actors.store.format import TensorSpec, first_problem
from ...errors import CheckpointError, FormError, UnsupportedModelError
from ...kernels.forms import DTYPES, MatrixForm, ceil_div
from ...kernels.repack import column_order, needs_order, repack_awq, repack_compressed_tensors, repack_gptq
from .quantization import FP8_SCALES, LAYOUTS, Layout, Quantization, Scheme
from .weight_files import CONFIG, OTHER_CONFIG, TensorEntry, compare_hash, read_bytes

Raw = dict[str, NDArray[Any]]
Repack = Callable[[MatrixForm, Raw], Raw]

_NUMPY = {**DTYPES, "I8": np.int8, "I64": np.int64, "F64": np.float64, "I16": np.int16, "U32": np.uint32}
# of activations and of a quantized KV cache, which this runtime does not quantize
OF_ACTIVATIONS = re.compile(
    r"(\.|_proj_)((input|output|act|activation|q|k|v|kv|prob)_(scale|scale_inv|scale_ub|global_scale|zero_point|amax)|qscale_act)$"
)


@dataclass(frozen=True)
class QuantizedEntry:
    """A quantized matrix, or a stack of them, in place of the `TensorEntry` of its dequantized form.

    Attributes:
        spec: name, type and shape of the dequantized tensor; without a place in a file.
        form: of one matrix.
        raw: the tensors in the checkpoint, by part of the form, or by the published name if they are repacked.
        stack: matrices in it; 0: it is one matrix, not a stack.
        transposed: the dequantized tensor has [inputs, outputs].
        repack: from `raw` to the form's parts; None: they have the same bytes.
    """

    spec: TensorSpec
    form: MatrixForm
    raw: dict[str, TensorEntry] = field(repr=False)
    stack: int = 0
    transposed: bool = False
    repack: Repack | None = field(default=None, repr=False)

    @property
    def paths(self) -> tuple[Path, ...]:
        """The files that hold its tensors."""
        return tuple(entry.path for entry in self.raw.values())

    @property
    def rows(self) -> int:
        """Length of the first dimension."""
        return self.spec.shape[0]

    @property
    def row_nbytes(self) -> int:
        """Bytes of one entry of the first dimension, dequantized to float32."""
        return math.prod(self.spec.shape[1:]) * 4

    def parts(self, index: int = 0) -> Raw:
        """The form's parts of a matrix of the stack. Raises CheckpointError: unreadable, or not of the form."""
        try:
            raw = {name: self._array(entry, index) for name, entry in self.raw.items()}
            if self.repack is not None:
                return self.repack(self.form, raw)
            return {
                name: raw[name].reshape(-1).view(DTYPES[code]).reshape(shape)
                for name, (code, shape) in self.form.parts().items()
            }
        except FormError as error:
            raise FormError(f"tensor {self.spec.name!r}: {error.what}", error.remedy) from error
        except (ValueError, IndexError, TypeError) as error:
            what = f"the tensors of {self.spec.name!r} do not fit together ({first_problem(error)})"
            raise CheckpointError(what, OTHER_CONFIG) from error

    def verified(self, index: int = 0) -> Raw:
        """As `parts`, once every weight is finite. Raises CheckpointError as `parts`, or it is not finite."""
        parts = self.parts(index)
        try:
            self.form.verify(parts)
        except FormError as error:
            raise FormError(f"tensor {self.spec.name!r}: {error.what}", compare_hash(*self.paths)) from error
        return parts

    def order(self) -> NDArray[np.int32] | None:
        """The part `order` of a matrix, without the others; None: the checkpoint has its inputs in order.

        Raises CheckpointError: as `parts`.
        """
        name = next((name for name in self.raw if name.endswith("g_idx")), None)
        return None if name is None else column_order(self.form, self._array(self.raw[name], 0))

    def dequantized(self, start: int, stop: int) -> NDArray[np.float32]:
        """Rows start..stop-1 of the dequantized tensor; only those are read if possible."""
        if self.stack:
            whole = [self.form.dequantize(self.verified(i)) for i in range(start, stop)]
            return np.stack([matrix.T for matrix in whole] if self.transposed else whole)
        part = None if self.repack is not None else _row_slice(self, start, stop)
        if part is not None:
            return part.dequantized(0, stop - start)
        return self.form.dequantize(self.verified())[start:stop]

    def of_rows(self, start: int, stop: int) -> QuantizedEntry:
        """The entry of some rows of a matrix whose parts are divided by rows, and so may begin at any."""
        return _row_slice(self, start, stop) or self

    def _array(self, entry: TensorEntry, index: int) -> NDArray[Any]:
        shape = entry.spec.shape[1:] if self.stack else entry.spec.shape
        nbytes = entry.spec.nbytes // max(1, self.stack)
        data = read_bytes(entry, index * nbytes, nbytes)
        return np.frombuffer(data, _NUMPY.get(entry.spec.dtype, np.uint8)).reshape(shape)


Entry = TensorEntry | QuantizedEntry  # quantized ones are dequantized when they are read


def _row_slice(entry: QuantizedEntry, start: int, stop: int) -> QuantizedEntry | None:
    """An entry of some rows alone; None: a part is not divided by rows, or these rows begin within a block."""
    form, outputs = entry.form, entry.form.outputs
    if (start, stop) == (0, outputs):
        return None
    raw, count = {}, stop - start
    for name, part in entry.raw.items():
        if name == "scale" and form.kind == "fp8_tensor":
            raw[name] = part
            continue
        rows = part.spec.shape[0] if part.spec.shape else 0
        per = form.block if name == "scale" and form.block else 1
        if rows != -(-outputs // per) or start % per:
            return None
        first, last = start // per, -(-stop // per)
        nbytes = part.spec.nbytes // rows
        spec = part.spec.model_copy(
            update={
                "offset": part.spec.offset + first * nbytes, "nbytes": (last - first) * nbytes,
                "shape": (last - first, *part.spec.shape[1:]),
            }
        )  # fmt: skip
        raw[name] = TensorEntry(part.path, spec)
    spec = entry.spec.model_copy(update={"shape": (count, *entry.spec.shape[1:])})
    return replace(entry, spec=spec, form=replace(form, outputs=count), raw=raw)


@dataclass(frozen=True)
class PublishedMatrix:
    """The tensors of one quantized matrix, or of a stack of them, as they were found; `entry` checks them.

    Attributes:
        name: of the dequantized tensor.
        first: suffix of the tensor that makes it.
        tensors: by suffix.
        other: further tensors of its module, by suffix, that are of no known use.
        twice: whether the dequantized tensor is there, too.
    """

    name: str
    module: str
    scheme: Scheme
    tensors: Mapping[str, TensorEntry] = field(repr=False)
    other: tuple[str, ...] = ()
    twice: bool = False

    def entry(self, dtype: str) -> QuantizedEntry:
        """The matrix. dtype: type code that the dequantized one is given, such as "BF16".

        Raises:
            CheckpointError: a tensor is missing, or does not have the shape of the form.
            UnsupportedModelError: a tensor of the module has a meaning that is not known.
        """
        layout = self.scheme.layout
        first, needed = LAYOUTS[layout].first, LAYOUTS[layout].needed
        wanted = next((suffix for suffix in needed if suffix not in self.tensors), "")
        of_fp8 = LAYOUTS[layout].optional == FP8_SCALES
        if of_fp8 and len(self.tensors) < 2:
            wanted = FP8_SCALES[0] if self.scheme.block is not None else FP8_SCALES[1]
        if wanted:
            raise CheckpointError(
                f"tensor {self.module + wanted!r} is missing, which {self.module + first!r} needs", _BOTH
            )
        surplus = [*self.other, *(tuple(self.tensors)[2:] if of_fp8 else ())]  # one scale
        if surplus:
            raise UnsupportedModelError(
                f"tensor {self.module + surplus[0]!r} belongs to a quantized matrix ({layout}) and is not supported",
                "pass another release of the model",
            )
        if self.twice:
            remedy = "pass a release that has it once"
            raise CheckpointError(f"tensor {self.name!r} occurs twice, quantized and unquantized", remedy)
        return _entry(self.name, self.scheme, dict(self.tensors), dtype)


Found = TensorEntry | PublishedMatrix  # by a name of the checkpoint


_BOTH = "pass a release whose files have both, or the config.json that belongs to these weights"


def join(tensors: Mapping[str, TensorEntry], quantization: Quantization) -> dict[str, TensorEntry | PublishedMatrix]:
    """The tensors of the dequantized checkpoint, by name; of a quantized matrix nothing is checked yet.

    Raises:
        CheckpointError: the configuration says that weights are quantized, and none is.
    """
    out: dict[str, TensorEntry | PublishedMatrix] = {}
    used: set[str] = set()
    suffixes: dict[str, list[str]] = {}
    for name in tensors:
        module, dot, suffix = name.rpartition(".")
        suffixes.setdefault(module, []).append(dot + suffix)
    for name, entry in tensors.items():
        found = _matrix_of(name, entry, quantization)
        if found is None:
            continue
        module, scheme = found
        parts = {s: tensors[module + s] for s in LAYOUTS[scheme.layout].suffixes if module + s in tensors}
        used |= {module + suffix for suffix in parts}
        target = module if scheme.layout in ("gpt-oss", "fp8-stack") else f"{module}.weight"
        known = {*parts, ".weight", ".bias"}
        other = [s for s in suffixes.get(module, ()) if s not in known and not OF_ACTIVATIONS.search(s)]
        twice = target in tensors and target not in used
        out[target] = PublishedMatrix(target, module, scheme, parts, tuple(other), twice)
    if not out and quantization.source == CONFIG:
        raise CheckpointError(
            f"config.json says that weights are quantized ({quantization.method}), but none is in that form",
            OTHER_CONFIG,
        )
    return out | {
        name: entry
        for name, entry in tensors.items()
        if name not in used and name not in out and not OF_ACTIVATIONS.search(name)
    }


def _matrix_of(name: str, entry: TensorEntry, quantization: Quantization) -> tuple[str, Scheme] | None:
    """The module and scheme of the matrix whose first tensor this is; None: it is not the first one of a matrix."""
    for suffix in (".weight", ".weight_packed", ".qweight", "_blocks"):
        if name.endswith(suffix):
            module = name.removesuffix(suffix)
            scheme = quantization.of(module, entry.spec.dtype)
            if scheme is None or LAYOUTS[scheme.layout].first != suffix:
                return None
            return (module, scheme) if entry.spec.dtype == LAYOUTS[scheme.layout].code else None
    scheme = quantization.of(name, entry.spec.dtype)
    if scheme is None or scheme.layout != "fp8" or entry.spec.dtype != "F8_E4M3" or len(entry.spec.shape) != 3:
        return None
    return name, replace(scheme, layout="fp8-stack")


def _entry(name: str, scheme: Scheme, raw: dict[str, TensorEntry], dtype: str) -> QuantizedEntry:
    try:
        form, parts, stack, repack = _MAKERS[scheme.layout](scheme, raw)
        entry = QuantizedEntry(
            _dequantized_spec(name, form, stack, dtype, transposed=scheme.layout == "gpt-oss"),
            form, parts, stack, scheme.layout == "gpt-oss", repack,
        )  # fmt: skip
        if repack is None:
            _check_bytes(entry)
    except FormError as error:
        raise FormError(f"tensor {name!r}: {error.what}", error.remedy) from error
    except (IndexError, KeyError, ValueError) as error:
        what = f"the tensors of {name!r} do not have the shapes of {scheme.layout}"
        raise CheckpointError(what, OTHER_CONFIG) from error
    return entry


def _dequantized_spec(name: str, form: MatrixForm, stack: int, dtype: str, transposed: bool = False) -> TensorSpec:
    matrix = (form.inputs, form.outputs) if transposed else (form.outputs, form.inputs)
    shape = (stack, *matrix) if stack else matrix
    return TensorSpec(name=name, dtype=dtype, shape=shape, offset=0, nbytes=0)


def _check_bytes(entry: QuantizedEntry) -> None:
    """Raise FormError unless the raw tensors have the types and bytes of the form's parts."""
    layout = entry.form.parts()
    for name, (code, shape) in layout.items():
        spec, count = entry.raw[name].spec, math.prod(shape) * max(1, entry.stack)
        same = spec.dtype == code or (code == "U8" and spec.dtype in ("I8", "I32"))  # read as bytes
        if not same or spec.nbytes != count * np.dtype(DTYPES[code]).itemsize:
            raise FormError(f"its {name} is {spec.dtype} {list(spec.shape)}, not {code} {list(shape)}", OTHER_CONFIG)


_FoundForm = tuple[MatrixForm, dict[str, TensorEntry], int, Repack | None]


def _matrix(entry: TensorEntry) -> tuple[int, int]:
    if len(entry.spec.shape) != 2:
        raise ValueError("not a matrix")
    return entry.spec.shape[0], entry.spec.shape[1]


def _fp8(scheme: Scheme, raw: dict[str, TensorEntry]) -> _FoundForm:
    o, i = _matrix(raw[".weight"])
    scale = next(raw[suffix] for suffix in FP8_SCALES if suffix in raw)
    form = _fp8_form(scheme, o, i, scale.spec.dtype, scale.spec.shape)
    return form, {"weight": raw[".weight"], "scale": scale}, 0, None


def _fp8_stack(scheme: Scheme, raw: dict[str, TensorEntry]) -> _FoundForm:
    (stack, o, i), scale = raw[""].spec.shape, raw["_scale_inv"]
    if scale.spec.shape[:1] != (stack,):
        raise ValueError("not a scale for each expert")
    form = _fp8_form(scheme, o, i, scale.spec.dtype, scale.spec.shape[1:])
    return form, {"weight": raw[""], "scale": scale}, stack, None


def _fp8_form(scheme: Scheme, o: int, i: int, code: str, shape: tuple[int, ...]) -> MatrixForm:
    """One scale for the matrix, for each row, or for each block; decided by the shape of the scales."""
    if len(shape) == 4 and shape[1::2] == (1, 1):  # ModelOpt's blocks
        shape = shape[::2]
    block = scheme.block or (128, 128)
    if math.prod(shape) == 1:
        return MatrixForm("fp8_tensor", o, i, scale=code)
    if shape == (ceil_div(o, block[0]), ceil_div(i, block[1])):
        return MatrixForm("fp8_block", o, i, group=block[1], block=block[0], scale=code)
    if shape in ((o,), (o, 1)):
        return MatrixForm("fp8_channel", o, i, scale=code)
    if shape == (2, 1) and scheme.layout == "fp8-stack" and o % 2 == 0:  # one for gate, one for up
        return MatrixForm("fp8_block", o, i, group=i, block=o // 2, scale=code)
    stated = "nothing of blocks" if scheme.block is None else f"blocks of {block[0]} x {block[1]}"
    raise FormError(
        f"its scales are {list(shape)} for {o} x {i} weights, and the configuration says {stated}", OTHER_CONFIG
    )


def _gpt_oss(scheme: Scheme, raw: dict[str, TensorEntry]) -> _FoundForm:
    stack, outputs, groups, octets = raw["_blocks"].spec.shape  # two weights a byte
    form = MatrixForm("mxfp4", outputs, groups * octets * 2, scale=raw["_scales"].spec.dtype)
    return form, {"weight": raw["_blocks"], "scale": raw["_scales"]}, stack, None


def _fp4(scheme: Scheme, raw: dict[str, TensorEntry]) -> _FoundForm:
    packed = raw.get(".weight_packed") or raw[".weight"]
    o, half = _matrix(packed)
    parts = {"weight": packed, "scale": raw[".weight_scale"]}
    if scheme.layout == "mxfp4":
        return MatrixForm("mxfp4", o, 2 * half, scale=parts["scale"].spec.dtype), parts, 0, None
    divides = scheme.layout == "nvfp4"
    parts["global_scale"] = raw[".weight_global_scale"] if divides else raw[".weight_scale_2"]
    return MatrixForm("nvfp4", o, 2 * half, divides=divides), parts, 0, None


def _fp4_of_fp8(scheme: Scheme, raw: dict[str, TensorEntry]) -> _FoundForm:
    o, half = _matrix(raw[".weight"])
    scale = next(raw[suffix] for suffix in FP8_SCALES if suffix in raw)
    if scale.spec.shape != (o, half // 16):
        raise FormError(f"its scales are {list(scale.spec.shape)} for {o} x {2 * half} weights of 4 bits", OTHER_CONFIG)
    return MatrixForm("mxfp4", o, 2 * half, scale=scale.spec.dtype), {"weight": raw[".weight"], "scale": scale}, 0, None


def _int_form(scheme: Scheme, o: int, i: int, scale: TensorEntry) -> MatrixForm:
    group = 0 if scheme.group >= i else scheme.group
    return MatrixForm(
        "int", o, i, group=group, bits=scheme.bits, scale=scale.spec.dtype, zeros=scheme.zeros, order=scheme.order
    )


def _spread(form: MatrixForm, array: NDArray[Any]) -> NDArray[Any]:
    """Scales or zero points of the form's shape; one for the whole tensor (strategy `tensor`) becomes one a row."""
    shape = form.parts()["scale"][1]
    return np.ascontiguousarray(np.broadcast_to(array.reshape(-1), shape) if array.size == 1 else array.reshape(shape))


def _packed(scheme: Scheme, raw: dict[str, TensorEntry]) -> _FoundForm:
    o, words = _matrix(raw[".weight_packed"])
    scale = raw[".weight_scale"]
    if ".weight_g_idx" in raw:  # whatever the configuration says of act-order
        scheme = replace(scheme, order=True)
    form = _int_form(scheme, o, _packed_inputs(scheme, raw, words), scale)
    _refuse_zeros(scheme, raw.get(".weight_zero_point"))
    spread = math.prod(scale.spec.shape) < form.parts()["scale"][1][0]
    if not (scheme.zeros or scheme.order or spread or form.inputs * scheme.bits % 32):
        return form, {"weight": raw[".weight_packed"], "scale": scale}, 0, None

    def repack(form: MatrixForm, raw: Raw) -> Raw:
        scales = _spread(form, raw[".weight_scale"])
        return repack_compressed_tensors(
            form, raw[".weight_packed"], scales, raw.get(".weight_zero_point"), raw.get(".weight_g_idx")
        )

    return form, {name: entry for name, entry in raw.items() if name != ".weight_shape"}, 0, repack


def _refuse_zeros(scheme: Scheme, zeros: TensorEntry | None) -> None:
    """Raise FormError if a symmetric matrix has zero points other than 0, which the library would subtract."""
    if scheme.zeros or zeros is None:
        return
    if any(bytes(read_bytes(zeros, 0, zeros.spec.nbytes))):
        raise FormError("it has zero points, and the configuration says symmetric", OTHER_CONFIG)


def _packed_inputs(scheme: Scheme, raw: dict[str, TensorEntry], words: int) -> int:
    """Inputs, from `weight_shape`; the packed words give an upper bound."""
    shape = raw.get(".weight_shape")
    most = words * 32 // scheme.bits
    if shape is None:
        return most
    if shape.spec.dtype not in ("I64", "I32") or math.prod(shape.spec.shape) != 2:
        raise ValueError("weight_shape is not a shape")
    stated = np.frombuffer(read_bytes(shape, 0, shape.spec.nbytes), np.int64 if shape.spec.dtype == "I64" else np.int32)
    inputs = int(stated[1])
    if not most - 32 // scheme.bits < inputs <= most or int(stated[0]) != raw[".weight_packed"].spec.shape[0]:
        raise FormError(f"weight_shape is {stated.tolist()}, which the packed weights do not have", OTHER_CONFIG)
    return inputs


def _int8(scheme: Scheme, raw: dict[str, TensorEntry]) -> _FoundForm:
    o, i = _matrix(raw[".weight"])
    _refuse_zeros(scheme, raw.get(".weight_zero_point"))

    def repack(form: MatrixForm, raw: Raw) -> Raw:
        parts = {"weight": raw[".weight"].view(np.uint8) ^ np.uint8(128), "scale": _spread(form, raw[".weight_scale"])}
        if form.zeros:
            parts["zero"] = _spread(form, raw[".weight_zero_point"].view(np.uint8) ^ np.uint8(128))
        form.check(parts)
        return parts

    return _int_form(scheme, o, i, raw[".weight_scale"]), raw, 0, repack


def _awq(scheme: Scheme, raw: dict[str, TensorEntry]) -> _FoundForm:
    i, words = _matrix(raw[".qweight"])

    def repack(form: MatrixForm, raw: Raw) -> Raw:
        return repack_awq(form, raw[".qweight"], raw[".qzeros"], raw[".scales"])

    return _int_form(scheme, words * 8, i, raw[".scales"]), raw, 0, repack


def _gptq(scheme: Scheme, raw: dict[str, TensorEntry]) -> _FoundForm:
    words, o = _matrix(raw[".qweight"])
    i = words * 32 // scheme.bits
    if not scheme.order and (groups := raw.get(".g_idx")) is not None and groups.spec.dtype == "I32":
        # the tools go by it whatever the configuration says of act-order
        g_idx = np.frombuffer(read_bytes(groups, 0, groups.spec.nbytes), np.int32)
        scheme = replace(scheme, order=len(g_idx) == i and needs_order(g_idx, scheme.group))

    def repack(form: MatrixForm, raw: Raw) -> Raw:
        arrays = raw[".qweight"], raw[".qzeros"], raw[".scales"], raw.get(".g_idx")
        return repack_gptq(form, *arrays, version=scheme.version)

    return _int_form(scheme, o, i, raw[".scales"]), raw, 0, repack


_MAKERS: Mapping[Layout, Callable[[Scheme, dict[str, TensorEntry]], _FoundForm]] = {
    "fp8": _fp8, "fp8-stack": _fp8_stack, "fp4": _fp4_of_fp8, "gpt-oss": _gpt_oss, "mxfp4": _fp4, "nvfp4": _fp4,
    "modelopt-nvfp4": _fp4, "packed": _packed, "int8": _int8, "awq": _awq, "gptq": _gptq,
}  # fmt: skip


def plain_form(entry: TensorEntry, outputs: int, inputs: int) -> MatrixForm:
    """The form of an unquantized matrix. Raises UnsupportedModelError: it is of another type than a float."""
    kinds = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
    if entry.spec.dtype not in kinds:
        raise UnsupportedModelError(
            f"tensor {entry.spec.name!r} is of type {entry.spec.dtype}", "pass another release of the model"
        )
    return MatrixForm(kinds[entry.spec.dtype], outputs, inputs)
