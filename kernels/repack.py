"""What AWQ, GPTQ and compressed-tensors publish as int4 and int8, as the form `int` of `forms`. No value changes.

    published             codes                                      zero points                       here
    compressed-tensors    int32 [O, I * bits / 32], along inputs     [O * bits / 32, G] along outputs  the same bytes
    GPTQ                  int32 [I * bits / 32, O], along inputs     [G, O * bits / 32], less 1 in v1  a transposition
    AWQ                   int32 [I, O / 8], along outputs, permuted  [G, O / 8], permuted              a transposition

Act-order (`g_idx`: the group of each input) becomes columns sorted by group, and their permutation. Of an expert's
`down`, whose inputs are its neurons, no permutation is left: the neurons take that order (`neurons_in_order`).
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import FormError
from .forms import DTYPES, OTHER_CONFIG, ExpertForm, MatrixForm, Parts, ceil_div

_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # output, among eight, of each nibble of a word from the lowest on
_TILE = 256  # words of a side of what is transposed at a time, so that both sides stay in a cache
_ROWS = 128  # whose columns are permuted at a time


def repack_compressed_tensors(
    form: MatrixForm, packed: NDArray[np.int32], scale: NDArray[Any], zero: NDArray[np.int32] | None = None,
    g_idx: NDArray[np.int32] | None = None,
) -> dict[str, NDArray[Any]]:  # fmt: skip
    """`weight_packed`, `weight_scale`, `weight_zero_point` and `weight_g_idx` of the format pack-quantized.

    The weight is a view of `packed` where its rows fill whole words and the form has no `order`.

    Raises:
        FormError: these are not the arrays of a matrix of this form.
    """
    words = ceil_div(form.inputs * form.bits, 32)
    _expect("weight_packed", packed, np.int32, (form.outputs, words))
    weight = packed.view(np.uint8)[:, : form.parts()["weight"][1][1]]
    groups = form.parts()["scale"][1]
    parts: dict[str, NDArray[Any]] = {"weight": weight, "scale": np.ascontiguousarray(scale.reshape(groups))}
    if form.zeros:
        if zero is None:
            raise FormError("there are no zero points", "the quantization config is of another checkpoint")
        _expect("weight_zero_point", zero, np.int32, (ceil_div(form.outputs * form.bits, 32), groups[1]))
        parts["zero"] = np.ascontiguousarray(_codes(np.ascontiguousarray(zero.T), form.bits)[:, : form.outputs].T)
    return _ordered(form, parts, g_idx)


def repack_gptq(
    form: MatrixForm, qweight: NDArray[np.int32], qzeros: NDArray[np.int32], scales: NDArray[Any],
    g_idx: NDArray[np.int32] | None = None, *, version: int = 1,
) -> dict[str, NDArray[Any]]:  # fmt: skip
    """The tensors of GPTQ. `version` 1 ("gptq") stores zero points less one, 2 ("gptq_v2") stores them as they are.

    Raises:
        FormError: these are not the arrays of a matrix of this form; or it has no `zeros` and they are not all half of
            the range.
    """
    words, groups = ceil_div(form.inputs * form.bits, 32), form.parts()["scale"][1][1]
    _expect("qweight", qweight, np.int32, (words, form.outputs))
    _expect("qzeros", qzeros, np.int32, (groups, ceil_div(form.outputs * form.bits, 32)))
    zeros = _codes(qzeros, form.bits)[:, : form.outputs] + np.uint8(version == 1) & np.uint8((1 << form.bits) - 1)
    weight = _transposed(qweight).view(np.uint8)[:, : form.parts()["weight"][1][1]]
    return _ordered(form, _with_zeros(form, weight, scales, zeros), g_idx)


def repack_awq(
    form: MatrixForm, qweight: NDArray[np.int32], qzeros: NDArray[np.int32], scales: NDArray[Any]
) -> dict[str, NDArray[Any]]:
    """The tensors of AWQ ("gemm"), four bits.

    Raises:
        FormError: these are not the arrays of a matrix of this form; or it has no `zeros` and they are not all 8.
    """
    if form.bits != 4 or form.order or form.outputs % 8:
        raise FormError(f"AWQ has no matrix of {form}", "it has 4 bits, no order and a multiple of 8 outputs")
    o, i, groups = form.outputs, form.inputs, form.parts()["scale"][1][1]
    _expect("qweight", qweight, np.int32, (i, o // 8))
    _expect("qzeros", qzeros, np.int32, (groups, o // 8))
    inverse = np.argsort(_AWQ_ORDER)
    zeros = _codes(qzeros, 4).reshape(groups, -1, 8)[:, :, inverse].reshape(groups, o)
    weight = np.empty((o // 8, 8, ceil_div(i, 2)), np.uint8)
    low, high = np.uint32(0x0F0F0F0F), np.uint32(0xF0F0F0F0)
    for first in range(0, i, 2 * _TILE):
        words = qweight[first : first + 2 * _TILE].view(np.uint32)
        even, odd = words[0::2], np.zeros_like(words[0::2])
        odd[: len(words) // 2] = words[1::2]
        pair = slice(first // 2, first // 2 + len(even))
        for half, both in enumerate((even & low | (odd & low) << 4, even >> 4 & low | odd & high)):
            by_output = both.view(np.uint8).reshape(len(even), -1, 4)  # nibble half + 2 b of each word
            for byte in range(4):
                weight[:, _AWQ_ORDER[half + 2 * byte], pair] = by_output[:, :, byte].T
    return _with_zeros(form, weight.reshape(o, -1), scales, zeros)


def needs_order(g_idx: NDArray[np.int32], group: int) -> bool:
    """Whether these groups of inputs are not simply `group` after `group` (act-order): the form needs `order`."""
    return bool((g_idx != np.arange(len(g_idx)) // (group or len(g_idx))).any())


def column_order(form: MatrixForm, g_idx: NDArray[np.int32]) -> NDArray[np.int32]:
    """The inputs sorted by their group: the part `order` of a form that has one.

    Raises:
        FormError: `g_idx` is of another matrix, or its groups have other sizes.
    """
    _expect("g_idx", g_idx, np.int32, (form.inputs,))
    order = np.argsort(g_idx, kind="stable").astype(np.int32)
    if needs_order(g_idx[order], form.group):
        raise FormError(f"the groups of g_idx do not have {form.group} inputs each", OTHER_CONFIG)
    return order


def neurons_in_order(form: ExpertForm, matrix: str, parts: Parts, order: NDArray[np.int32]) -> dict[str, NDArray[Any]]:
    """Gate, up or both of an expert whose neurons are put in another order, the inputs' order of its `down`.

    Args:
        matrix: name of the matrix in the form. parts: its parts, with `bias` where it has one.
        order: neuron k becomes the one that was order[k].

    Raises:
        FormError: neurons of several groups of outputs share scales.
    """
    of = form.matrices[matrix]
    if of.block:
        raise FormError("neurons that are quantized in blocks cannot follow the act-order of down",
                        "pass another release of the model")  # fmt: skip
    rows: NDArray[Any] = order
    if matrix == "gate_up":
        both = (2 * order, 2 * order + 1) if form.interleaved else (order, order + form.intermediate)
        rows = np.stack(both, axis=-1).reshape(-1) if form.interleaved else np.concatenate(both)
    whole = {"global_scale", "order"} | ({"scale"} if of.kind == "fp8_tensor" else set())
    return {name: array if name in whole else array[rows] for name, array in parts.items()}


def _with_zeros(
    form: MatrixForm, weight: NDArray[np.uint8], scales: NDArray[Any], zeros: NDArray[np.uint8]
) -> dict[str, NDArray[Any]]:
    """Scales and zero points are [G, O]."""
    code, shape = form.parts()["scale"]
    _expect("scales", scales, DTYPES[code], shape[::-1])
    parts: dict[str, NDArray[Any]] = {"weight": weight, "scale": np.ascontiguousarray(scales.T)}
    if form.zeros:
        parts["zero"] = np.ascontiguousarray(zeros.T)
    elif (zeros != 1 << form.bits - 1).any():
        raise FormError("there are zero points other than half of the range, and the configuration says symmetric",
                        "say `sym: false` in it")  # fmt: skip
    return parts


def _ordered(
    form: MatrixForm, parts: dict[str, NDArray[Any]], g_idx: NDArray[np.int32] | None
) -> dict[str, NDArray[Any]]:
    """Columns sorted by their group, if the form has an order."""
    moved = g_idx is not None and needs_order(g_idx, form.group)
    if moved and not form.order:
        raise FormError("the inputs are not in the order of their groups, and the configuration says nothing of that",
                        "say `desc_act: true` in it")  # fmt: skip
    if form.order:
        order = np.arange(form.inputs, dtype=np.int32)
        if moved:
            assert g_idx is not None
            order = column_order(form, g_idx)
            parts["weight"] = _permuted(parts["weight"], order, form.bits)
        parts["order"] = order
    parts = {name: parts[name] for name in form.parts()}
    form.check(parts)
    return parts


def _permuted(weight: NDArray[np.uint8], order: NDArray[np.int32], bits: int) -> NDArray[np.uint8]:
    """Columns of codes in another order."""
    if bits == 8:
        return weight[:, order]
    whole = np.empty_like(weight, order="C")
    for first in range(0, len(weight), _ROWS):
        octets = np.ascontiguousarray(weight[first : first + _ROWS].T)
        codes = np.empty((2 * len(octets), octets.shape[1]), np.uint8)  # an input a row, to be moved at once
        codes[0::2], codes[1::2] = octets & 15, octets >> 4
        codes[: len(order)] = codes[order]
        whole[first : first + _ROWS] = (codes[0::2] | codes[1::2] << 4).T
    return whole


def _codes(words: NDArray[np.int32], bits: int) -> NDArray[np.uint8]:
    """int32 [R, W] -> [R, 32 W / bits], the lowest bits of a word first."""
    octets = np.ascontiguousarray(words).view(np.uint8)
    return octets if bits == 8 else np.stack([octets & 15, octets >> 4], axis=-1).reshape(len(words), -1)


def _transposed(words: NDArray[np.int32]) -> NDArray[np.int32]:
    """A contiguous transposition, tile by tile."""
    turned = np.empty(words.shape[::-1], words.dtype)
    for row in range(0, words.shape[0], _TILE):
        for column in range(0, words.shape[1], _TILE):
            turned[column : column + _TILE, row : row + _TILE] = words[row : row + _TILE, column : column + _TILE].T
    return turned


def _expect(name: str, array: NDArray[Any], dtype: type[np.generic], shape: tuple[int, ...]) -> None:
    if array.dtype != dtype or array.shape != shape:
        raise FormError(f"{name} is {array.dtype} {array.shape}, not {np.dtype(dtype)} {shape}",
                        OTHER_CONFIG)  # fmt: skip
