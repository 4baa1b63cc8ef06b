"""Published forms of quantized weights: the parts of a matrix or an expert, and what they mean.

A matrix is that of an nn.Linear: [outputs, inputs], row-major. Its parts keep the bytes and the orientation of the
checkpoint, so that they may be mapped files. `dequantize` is the reference: it computes every weight in float32, and
kernels compute the same numbers to the bit.

    kind         weight                       a weight's value
    float32 ..   F32, F16, BF16 [O, I]        itself
    fp8_block    F8_E4M3 [O, I]               e4m3 * scale[o / block, i / group]        DeepSeek-V3 `weight_scale_inv`
    fp8_channel  F8_E4M3 [O, I]               e4m3 * scale[o]                           compressed-tensors
    fp8_tensor   F8_E4M3 [O, I]               e4m3 * scale                              compressed-tensors
    mxfp4        U8 [O, I / 2]                e2m1 * 2**(scale[o, i / 32] - 127)        gpt-oss, compressed-tensors
    nvfp4        U8 [O, I / 2]                e2m1 * (e4m3 scale[o, i / 16] * global_scale), or / global_scale
    int          U8 [O, I * bits / 8]         (code - zero[o, i / group]) * scale[o, i / group]
    q8_0 ..      U8 [O, bytes of a row]       GGUF blocks as the file has them

The first of two inputs is the low half of a byte, except in GGUF's blocks, which the package `gguf` dequantizes. NumPy
arrays hold BF16 as uint16 and the types of eight bits as uint8. `repack` turns what AWQ, GPTQ and compressed-tensors
publish into `int`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import FormError

Parts = Mapping[str, NDArray[Any]]
Layout = dict[str, tuple[str, tuple[int, ...]]]  # of each part: its safetensors type and its shape

DTYPES: dict[str, type[np.generic]] = {
    "F32": np.float32, "F16": np.float16, "BF16": np.uint16, "I32": np.int32,
    "U8": np.uint8, "F8_E4M3": np.uint8, "F8_E8M0": np.uint8,
}  # fmt: skip
FLOATS = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}
# of a block of GGUF: weights, bytes, and where its float16 scales lie (without them: see `verify`); in the order
# of FormKind in cpu/forms.hpp. Named as in `gguf`, in lower case; with `_gguf` where a published form has the name
BLOCKS: dict[str, tuple[int, int, tuple[int, ...]]] = {
    "q8_0": (32, 34, (0,)), "q4_0": (32, 18, (0,)), "q4_1": (32, 20, (0, 2)), "q5_0": (32, 22, (0,)),
    "q5_1": (32, 24, (0, 2)), "iq4_nl": (32, 18, (0,)), "mxfp4_gguf": (32, 17, ()),
    "q2_k": (256, 84, (80, 82)), "q3_k": (256, 110, (108,)), "q4_k": (256, 144, (0, 2)), "q5_k": (256, 176, (0, 2)),
    "q6_k": (256, 210, (208,)), "iq1_s": (256, 50, (0,)), "iq1_m": (256, 56, ()), "iq2_xxs": (256, 66, (0,)),
    "iq2_xs": (256, 74, (0,)), "iq2_s": (256, 82, (0,)), "iq3_xxs": (256, 98, (0,)), "iq3_s": (256, 110, (0,)),
    "iq4_xs": (256, 136, (0,)), "tq1_0": (256, 54, (52,)), "tq2_0": (256, 66, (64,)),
}  # fmt: skip
_FLOAT_SCALES = ("F32", "F16", "BF16")
_POWERS = ("U8", "F8_E8M0")  # exponents, biased by 127
# kind -> the types that its scales may have, the first by default
SCALES: dict[str, tuple[str, ...]] = {
    "fp8_block": (*_FLOAT_SCALES, *_POWERS), "fp8_channel": _FLOAT_SCALES, "fp8_tensor": _FLOAT_SCALES,
    "mxfp4": _POWERS, "nvfp4": ("F8_E4M3",), "int": ("F16", "BF16", "F32"),
}  # fmt: skip
KINDS = (*FLOATS, *SCALES, *BLOCKS)
_LARGEST = {"fp8_block": 448.0, "fp8_channel": 448.0, "fp8_tensor": 448.0, "mxfp4": 6.0, "nvfp4": 6.0, "int": 255.0}

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)


def _e4m3() -> NDArray[np.float32]:
    """The 256 values of float8 e4m3fn; 127 and 255 are NaN."""
    codes = np.arange(256)
    exponent, fraction = codes >> 3 & 15, (codes & 7).astype(np.float64)
    size = np.where(exponent == 0, fraction * 2.0**-9, (8 + fraction) * 2.0 ** (exponent - 10.0))
    size[[127, 255]] = np.nan
    return np.where(codes & 128, -size, size).astype(np.float32)


E4M3 = _e4m3()


OTHER_CONFIG = "pass the configuration that belongs to these weights, or another release of the model"
ODD_VALUES = "compare the sha256 of the file with the publisher's: replace it where they differ"


def ceil_div(size: int, part: int) -> int:
    return -(-size // part)


@dataclass(frozen=True)
class MatrixForm:
    """One matrix in a published form.

    Args:
        kind: one of `KINDS`.
        outputs, inputs: of the matrix.
        group: inputs that share a scale. 0: the whole row (`int`), or what the kind prescribes; 128 for `fp8_block`.
        block: outputs that share a scale (`fp8_block`); 0: 128.
        bits: of a code of `int`, 4 or 8.
        scale: type of the scales, see `SCALES`; "": the first there.
        zeros: `int` with zero points; without them they are 8 or 128.
        order: `int` with a permutation: column k of the stored codes is input order[k] of the matrix (act-order).
        divides: the global scale of `nvfp4` divides (compressed-tensors) and does not multiply (ModelOpt).

    Raises:
        FormError: these say nothing that exists, or the inputs do not fill the blocks.
    """

    kind: str
    outputs: int
    inputs: int
    group: int = 0
    block: int = 0
    bits: int = 0
    scale: str = ""
    zeros: bool = False
    order: bool = False
    divides: bool = False

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise FormError(f"there is no form of weights {self.kind!r}", f"known forms: {', '.join(KINDS)}")
        if self.outputs < 1 or self.inputs < 1:
            raise FormError(f"a matrix of {self.outputs} x {self.inputs} has no weights", OTHER_CONFIG)
        fixed = {"fp8_block": (128, 128), "mxfp4": (32, 0), "nvfp4": (16, 0)}.get(self.kind, (0, 0))
        for name, value in (("group", self.group or fixed[0]), ("block", self.block or fixed[1])):
            object.__setattr__(self, name, value)
        if self.kind in SCALES and not self.scale:
            object.__setattr__(self, "scale", SCALES[self.kind][0])
        self._check_fields()
        unit = {"mxfp4": 32, "nvfp4": 16}.get(self.kind) or BLOCKS.get(self.kind, (1,))[0]
        if self.inputs % unit:
            raise FormError(f"{self.inputs} inputs are not a multiple of {unit}, the block of {self.kind}",
                            OTHER_CONFIG)  # fmt: skip

    def _check_fields(self) -> None:
        kind = self.kind
        allowed = {
            "group": kind == "int" or {"fp8_block": self.group, "mxfp4": 32, "nvfp4": 16}.get(kind, 0) == self.group,
            "block": kind == "fp8_block" or self.block == 0,
            "bits": self.bits in (4, 8) if kind == "int" else self.bits == 0,
            "scale": self.scale in SCALES.get(kind, ("",)),
            "zeros": kind == "int" or not self.zeros,
            "order": kind == "int" or not self.order,
            "divides": kind == "nvfp4" or not self.divides,
        }
        for name, fits in allowed.items():
            value = getattr(self, name)
            if not fits or (name in ("group", "block") and value < 0):
                raise FormError(f"the form {kind} has no {name} of {value!r}", "check the quantization config")

    def parts(self) -> Layout:
        """Name -> (safetensors type, shape), in the order of slots."""
        o, i = self.outputs, self.inputs
        if self.kind in FLOATS:
            return {"weight": (FLOATS[self.kind], (o, i))}
        if self.kind in BLOCKS:
            weights, size, _ = BLOCKS[self.kind]
            return {"weight": ("U8", (o, i // weights * size))}
        if self.kind.startswith("fp8"):
            of_blocks = (ceil_div(o, self.block or 1), ceil_div(i, self.group or i))
            shape = {"fp8_block": of_blocks, "fp8_channel": (o, 1), "fp8_tensor": (1,)}[self.kind]
            return {"weight": ("F8_E4M3", (o, i)), "scale": (self.scale, shape)}
        groups = ceil_div(i, self.group or i)
        width = ceil_div(i * (self.bits or 4), 8)
        layout: Layout = {"weight": ("U8", (o, width)), "scale": (self.scale, (o, groups))}
        if self.kind == "nvfp4":
            layout["global_scale"] = ("F32", (1,))
        if self.zeros:
            layout["zero"] = ("U8", (o, groups))
        if self.order:
            layout["order"] = ("I32", (i,))
        return layout

    def nbytes(self) -> int:
        """Bytes of all parts."""
        return layout_bytes(self.parts())

    @property
    def width(self) -> int:
        """Whole bits of a weight, without its scales."""
        return 8 * layout_bytes({"weight": self.parts()["weight"]}) // (self.outputs * self.inputs)

    def check(self, parts: Parts) -> None:
        """Raise FormError unless `parts` are `parts()`: names, types and shapes, not values."""
        check_layout(self.parts(), parts)

    def verify(self, parts: Parts) -> None:
        """Raise FormError unless every weight is finite and `order` is a permutation. Reads all parts.

        A scale whose largest possible weight is beyond float32 is refused too.
        """
        self.check(parts)
        if self.kind in FLOATS:
            _refuse(not np.isfinite(_floats(parts["weight"], FLOATS[self.kind])).all(), "a weight is not finite")
        elif self.kind in BLOCKS:
            _, size, places = BLOCKS[self.kind]
            blocks = parts["weight"].reshape(-1, size)
            for at in places:
                scales = np.ascontiguousarray(blocks[:, at : at + 2]).view(np.float16)
                _refuse(not np.isfinite(scales).all(), "a scale is not finite")
            if self.kind == "mxfp4_gguf":
                _refuse(bool((blocks[:, 0] > 252).any()), "a scale is not finite")  # half of e8m0
            if self.kind == "iq1_m":  # the upper four bits of four words are one float16, whose exponent is not 31
                exponents = blocks[:, 55] >> 2 & 28 | blocks[:, 53] >> 6
                _refuse(bool((exponents == 31).any()), "a scale is not finite")
        else:
            codes = parts["weight"]
            if self.kind.startswith("fp8"):
                _refuse(bool(((codes & 127) == 127).any()), "a weight is NaN")
            with np.errstate(all="ignore"):
                largest = self.scales(parts) * np.float32(_LARGEST[self.kind])
            _refuse(not np.isfinite(largest).all(), "a scale is not finite")
            if self.kind == "int" and self.bits == 4 and self.zeros:
                _refuse(bool((parts["zero"] > 15).any()), "a zero point has more than four bits")
            if self.order:
                _refuse(not np.array_equal(np.sort(parts["order"]), np.arange(self.inputs)), "order is no permutation")

    def scales(self, parts: Parts) -> NDArray[np.float32]:
        """The scales as float32, of the shape of `scale`; for `nvfp4` with the global scale."""
        scales = _floats(parts["scale"], self.scale, power=self.scale in _POWERS)
        if self.kind != "nvfp4":
            return scales
        whole = parts["global_scale"].reshape(())
        with np.errstate(all="ignore"):
            return (scales / whole if self.divides else scales * whole).astype(np.float32, copy=False)

    def dequantize(self, parts: Parts) -> NDArray[np.float32]:
        """The matrix [outputs, inputs], exact.

        Raises:
            FormError: the parts are not those of this form.
        """
        self.check(parts)
        o, i = self.outputs, self.inputs
        weight = parts["weight"]
        if self.kind in FLOATS:
            return _floats(weight, FLOATS[self.kind])
        if self.kind in BLOCKS:
            size = BLOCKS[self.kind][1]
            return _gguf_values(self.kind, np.ascontiguousarray(weight).reshape(-1, size)).reshape(o, i)
        scales = self.scales(parts)
        with np.errstate(invalid="ignore", over="ignore"):
            if self.kind.startswith("fp8"):
                values = E4M3[weight]
                if self.kind == "fp8_block":
                    scales = scales.repeat(self.block, axis=0)[:o].repeat(self.group, axis=1)[:, :i]
                return values * scales
            scales = scales.repeat(self.group or i, axis=1)[:, :i]
            codes = weight if self.bits == 8 else _halves(weight)[:, :i]
            if self.kind != "int":
                return E2M1[codes] * scales
            zeros: Any = np.float32(1 << (self.bits - 1))
            if self.zeros:
                zeros = parts["zero"].astype(np.float32).repeat(self.group or i, axis=1)[:, :i]
            values = (codes.astype(np.float32) - zeros) * scales
        if not self.order:
            return values
        whole = np.empty_like(values)
        whole[:, parts["order"]] = values
        return whole


@dataclass(frozen=True)
class Expert:
    """A dequantized expert, float32: gate and up [I, H], down [H, I], biases [I], [I], [H] or None."""

    gate: NDArray[np.float32]
    up: NDArray[np.float32]
    down: NDArray[np.float32]
    gate_bias: NDArray[np.float32] | None = None
    up_bias: NDArray[np.float32] | None = None
    down_bias: NDArray[np.float32] | None = None


@dataclass(frozen=True)
class ExpertForm:
    """One expert: `down` and either `gate` and `up`, or both in one matrix `gate_up`.

    Args:
        down: without `order`: its inputs are the expert's neurons, which `repack.neurons_in_order` puts in that order.
        interleaved: rows of `gate_up` are gate 0, up 0, gate 1, .. (gpt-oss); else all of gate, then all of up.
        bias: type of the biases of `gate_up` and `down`, or "" for none; only with `gate_up`.

    Raises:
        FormError: the matrices do not fit together, or `down` has an order of its inputs.
    """

    down: MatrixForm
    gate: MatrixForm | None = None
    up: MatrixForm | None = None
    gate_up: MatrixForm | None = None
    interleaved: bool = False
    bias: str = ""

    def __post_init__(self) -> None:
        fused = self.gate_up is not None
        if (self.gate is None, self.up is None) != (fused, fused):
            raise FormError("an expert has gate and up, or gate_up", "give one of these pairs")
        if (self.bias and self.bias not in _FLOAT_SCALES) or (not fused and (self.bias or self.interleaved)):
            raise FormError(f"interleaved {self.interleaved} and biases of type {self.bias!r} do not fit",
                            "both need gate_up, and biases are F32, F16 or BF16")  # fmt: skip
        if self.down.order:
            raise FormError("the inputs of down are in another order than the neurons", "put the neurons in its order")
        i, h = self.intermediate, self.hidden
        expected = {"gate": (i, h), "up": (i, h), "gate_up": (2 * i, h), "down": (h, i)}
        for name, matrix in self.matrices.items():
            if (matrix.outputs, matrix.inputs) != expected[name]:
                raise FormError(f"{name} is {matrix.outputs} x {matrix.inputs}, not {expected[name]}",
                                "the matrices are not those of one expert")  # fmt: skip

    @property
    def hidden(self) -> int:
        return self.down.outputs

    @property
    def intermediate(self) -> int:
        return self.down.inputs

    @cached_property
    def matrices(self) -> dict[str, MatrixForm]:
        """The matrices by name, in the order of slots."""
        given = {"gate": self.gate, "up": self.up, "gate_up": self.gate_up, "down": self.down}
        return {name: matrix for name, matrix in given.items() if matrix is not None}

    def parts(self) -> Layout:
        """`MATRIX.PART` -> (safetensors type, shape), in the order of slots."""
        layout: Layout = {}
        for name, matrix in self.matrices.items():
            layout |= {f"{name}.{part}": what for part, what in matrix.parts().items()}
            if self.bias:
                layout[f"{name}.bias"] = (self.bias, (matrix.outputs,))
        return layout

    def nbytes(self) -> int:
        """Bytes of all parts."""
        return layout_bytes(self.parts())

    @property
    def width(self) -> int:
        """Whole bits of a weight, without scales, on the average of the matrices."""
        sizes = [matrix.outputs * matrix.inputs for matrix in self.matrices.values()]
        bits = sum(m.width * n for m, n in zip(self.matrices.values(), sizes, strict=True))
        return bits // sum(sizes)

    def check(self, parts: Parts, *, leading: int = 0) -> None:
        """Raise FormError unless `parts` are `parts()`, after `leading` common axes: types and shapes, not values."""
        check_layout(self.parts(), parts, leading=leading)

    def verify(self, parts: Parts) -> None:
        """Raise FormError unless every weight is finite. Reads all parts."""
        self.check(parts)
        for name, matrix in self.matrices.items():
            matrix.verify(self.of(name, parts))
            if self.bias:
                _refuse(not np.isfinite(_floats(parts[f"{name}.bias"], self.bias)).all(), "a bias is not finite")

    def of(self, matrix: str, parts: Parts) -> dict[str, NDArray[Any]]:
        """The parts of one matrix, under the names of `MatrixForm.parts`."""
        return {part: parts[f"{matrix}.{part}"] for part in self.matrices[matrix].parts()}

    def dequantize(self, parts: Parts) -> Expert:
        """The expert in float32, exact.

        Raises:
            FormError: the parts are not those of this form.
        """
        self.check(parts)
        whole = {name: matrix.dequantize(self.of(name, parts)) for name, matrix in self.matrices.items()}
        if self.gate_up is None:
            return Expert(whole["gate"], whole["up"], whole["down"])
        gate, up = self.split(whole["gate_up"])
        if not self.bias:
            return Expert(gate, up, whole["down"])
        biases = {name: _floats(parts[f"{name}.bias"], self.bias) for name in whole}
        return Expert(gate, up, whole["down"], *self.split(biases["gate_up"]), biases["down"])

    def split(self, gate_up: Any) -> tuple[Any, Any]:
        """Gate and up, from rows of `gate_up`: a NumPy array or a torch tensor."""
        if self.interleaved:
            return gate_up[0::2], gate_up[1::2]
        return gate_up[: self.intermediate], gate_up[self.intermediate :]


def layout_bytes(layout: Layout) -> int:
    """Bytes of all parts of a layout."""
    return sum(math.prod(shape) * np.dtype(DTYPES[code]).itemsize for code, shape in layout.values())


def check_layout(layout: Layout, parts: Parts, *, leading: int = 0) -> None:
    """Raise FormError unless `parts` have the names, types and shapes of `layout`, after `leading` common axes."""
    if set(parts) != set(layout):
        raise FormError(f"the parts {sorted(layout)} are expected, not {sorted(parts)}", OTHER_CONFIG)
    front = next(iter(parts.values())).shape[:leading]
    for name, (code, shape) in layout.items():
        array, dtype = parts[name], np.dtype(DTYPES[code])
        if array.dtype != dtype or array.shape != (*front, *shape):
            raise FormError(f"{name} is {array.dtype} {array.shape}, not {dtype} {(*front, *shape)} ({code})",
                            OTHER_CONFIG)  # fmt: skip


def _refuse(wrong: bool, what: str) -> None:
    if wrong:
        raise FormError(what, ODD_VALUES)


def _floats(array: NDArray[Any], code: str, *, power: bool = False) -> NDArray[np.float32]:
    """A part as float32; `power`: bytes are exponents, 255 is NaN."""
    if power:
        bits = np.where(array == 0, np.uint32(0x00400000), array.astype(np.uint32) << 23)  # 2**-127 is subnormal
        return np.where(array == 255, np.float32(np.nan), bits.view(np.float32))
    if code == "BF16":
        return (array.astype(np.uint32) << 16).view(np.float32)
    return E4M3[array] if code == "F8_E4M3" else array.astype(np.float32)


def _halves(weight: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """[O, B] bytes -> [O, 2 B] codes of four bits, the low one first."""
    return np.stack([weight & 15, weight >> 4], axis=-1).reshape(len(weight), -1)


def _gguf_values(kind: str, blocks: NDArray[np.uint8]) -> NDArray[np.float32]:
    """[N, bytes of a block] -> [N, weights], by the format's own package."""
    from gguf import GGMLQuantizationType, dequantize  # a tenth of a second, for the few that dequantize

    return np.asarray(dequantize(blocks, GGMLQuantizationType[kind.removesuffix("_gguf").upper()]), np.float32)
