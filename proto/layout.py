"""Which arrays follow a message, and where: the `Layout` of messages.proto, its rules per kind, and the alignment.

Batches of equal shape have equal layouts, so both directions are remembered: a layout is serialized, parsed and checked
against the rules of its kind once, not per message.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any

import numpy as np
from google.protobuf.message import DecodeError
from numpy.typing import NDArray

from .generated import messages_pb2 as pb
from .limits import malformed

ALIGNMENT = 16  # bytes; frames and their payloads start there, so arrays are aligned for every dtype
MOST_TENSORS = 24
MOST_DIMENSIONS = 4
_REMEMBERED = 4096
_MOST_LAYOUT_BYTES = 4096

Kind = pb.Kind
_DTYPES: dict[int, np.dtype[Any]] = {
    pb.DTYPE_FLOAT32: np.dtype("<f4"),
    pb.DTYPE_FLOAT16: np.dtype("<f2"),
    pb.DTYPE_BFLOAT16: np.dtype("<u2"),
    pb.DTYPE_INT32: np.dtype("<i4"),
    pb.DTYPE_UINT8: np.dtype("u1"),
    pb.DTYPE_INT64: np.dtype("<i8"),
}
_CODES = {dtype: code for code, dtype in _DTYPES.items()}
# The exponent's bits of the float dtypes: all set means infinite or NaN.
EXPONENTS = {np.dtype("<f4"): 0x7F800000, np.dtype("<f2"): 0x7C00, np.dtype("<u2"): 0x7F80}

F32, I32, U8, I64 = "f4", "i4", "u1", "i8"
FLOAT = "float"  # f4, f2 or bfloat16
ANY = "any"
# Per kind: dtype and dimensions of each array; equal letters are equal sizes, "N+1" is one more than N.
_RULES: dict[int, tuple[tuple[str, tuple[str, ...]], ...]] = {
    pb.KIND_EXPERT_BATCH: (
        (I32, ("N",)), (U8, ("N",)), (I32, ("N+1",)), (I32, ("P",)), (F32, ("P",)), (FLOAT, ("T", "H")),
    ),
    pb.KIND_EXPERT_RESULT: ((F32, ("T", "H")), (U8, ("B",))),
    pb.KIND_PREFETCH_COMMAND: ((I32, ("N",)), (F32, ("N",))),
    pb.KIND_PLACEMENT_COMMAND: ((I32, ("N",)),),
    pb.KIND_CONTEXT: ((I64, ("S",)), (F32, ("S", "D")), (F32, ("S", "E"))),
    pb.KIND_STORE_REQUEST: ((I32, ("N",)),),
    pb.KIND_STORE_REPLY: ((I32, ("N",)),),
    pb.KIND_FILE_REPLY: ((U8, ("N",)),),
}  # fmt: skip
_OPTIONAL: dict[int, int] = {pb.KIND_EXPERT_RESULT: 1}  # how many of the last arrays may be left out
_OPEN_ENDED = frozenset({pb.KIND_STORE_REPLY})  # any arrays may follow, each with N rows
_ACCEPTED = {F32: ("f4",), I32: ("i4",), U8: ("u1",), I64: ("i8",), FLOAT: ("f4", "f2", "u2")}


@dataclass(frozen=True)
class Place:
    """One array within the payload."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    offset: int
    size: int  # bytes


@dataclass(frozen=True)
class Arrangement:
    """All arrays of a payload.

    Attributes:
        serialized: the `Layout` message.
        places: in order.
        gaps: bytes of padding before each array.
        size: bytes of the payload.
    """

    serialized: bytes
    places: tuple[Place, ...]
    gaps: tuple[int, ...]
    size: int


Shapes = tuple[tuple[np.dtype[Any], tuple[int, ...]], ...]


def arrangement_of(kind: int, arrays: tuple[NDArray[Any], ...]) -> Arrangement:
    """How these arrays of a message of this kind travel.

    Raises:
        MessageError: dtypes or shapes break the rules of the kind.
    """
    return _arrange(kind, tuple([(array.dtype, array.shape) for array in arrays]))


@functools.lru_cache(maxsize=_REMEMBERED)
def _arrange(kind: int, shapes: Shapes) -> Arrangement:
    layout = pb.Layout()
    for dtype, shape in shapes:
        if dtype not in _CODES:
            raise malformed(f"arrays of {dtype} do not travel")
        tensor = layout.tensors.add()
        tensor.dtype = pb.DType.Name(_CODES[dtype])  # type: ignore[assignment]
        tensor.shape.extend(shape)
        tensor.byte_length = math.prod(shape) * dtype.itemsize
    _check_rules(kind, shapes)
    return _placed(shapes, layout.SerializeToString())


@functools.lru_cache(maxsize=_REMEMBERED)
def parse_layout(kind: int, serialized: bytes) -> Arrangement:
    """What a received `Layout` says.

    Raises:
        MessageError: it is none, its sizes do not agree, or it breaks the rules of the kind.
    """
    if len(serialized) > _MOST_LAYOUT_BYTES:  # what is remembered has a bound
        raise malformed(f"a layout of {len(serialized)} bytes")
    try:
        layout = pb.Layout.FromString(serialized)
    except DecodeError:
        raise malformed("the layout is none") from None
    if len(layout.tensors) > MOST_TENSORS:
        raise malformed(f"{len(layout.tensors)} arrays")
    shapes: list[tuple[np.dtype[Any], tuple[int, ...]]] = []
    for tensor in layout.tensors:
        dtype, shape = _DTYPES.get(tensor.dtype), tuple(tensor.shape)
        if dtype is None:
            raise malformed(f"dtype {tensor.dtype} is unknown")
        if len(shape) > MOST_DIMENSIONS:
            raise malformed(f"{len(shape)} dimensions")
        # NumPy multiplies the sizes that are not zero, and an empty array of 2**63 columns is refused by it
        if any(size >= 2**31 for size in shape) or math.prod(max(size, 1) for size in shape) >= 2**40:
            raise malformed(f"shape {shape}")
        if math.prod(shape) * dtype.itemsize != tensor.byte_length:
            raise malformed(f"{dtype} {shape} does not take {tensor.byte_length} bytes")
        shapes.append((dtype, shape))
    _check_rules(kind, tuple(shapes))
    return _placed(tuple(shapes), serialized)


def _placed(shapes: Shapes, serialized: bytes) -> Arrangement:
    places: list[Place] = []
    gaps: list[int] = []
    at = 0
    for dtype, shape in shapes:
        size = math.prod(shape) * dtype.itemsize
        gaps.append(-at % ALIGNMENT)
        at += gaps[-1]
        places.append(Place(dtype, shape, at, size))
        at += size
    return Arrangement(serialized, tuple(places), tuple(gaps), at)


def _check_rules(kind: int, shapes: Shapes) -> None:
    rules = _RULES.get(kind, ())
    fewest = len(rules) - _OPTIONAL.get(kind, 0)
    if len(shapes) < fewest or (len(shapes) > len(rules) and kind not in _OPEN_ENDED):
        raise malformed(f"kind {kind} has {len(shapes)} arrays")
    sizes: dict[str, int] = {}
    for (dtype, shape), (wanted, names) in zip(shapes, rules, strict=False):
        if dtype.str[1:] not in _ACCEPTED[wanted] or len(shape) != len(names):
            raise malformed(f"kind {kind} has an array of {dtype} {shape}")
        for size, name in zip(shape, names, strict=True):
            letter, _, more = name.partition("+")
            if sizes.setdefault(letter, size - int(more or 0)) != size - int(more or 0):
                raise malformed(f"in kind {kind}, {letter} is {sizes[letter]} in one array and differs in another")
    for _, shape in shapes[len(rules) :]:
        if not shape or shape[0] != sizes["N"]:
            raise malformed(f"an array {shape} does not have a row for each of {sizes['N']} experts")
