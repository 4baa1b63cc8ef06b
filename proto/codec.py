"""Messages to frames and back: encode, pack; unpack, decode. How a class of messages travels follows from its fields.

Little endian. A frame is

    request, deadline_ns         u64     see `Frame`
    role, kind                   u32     kind: the place of the message's class in `messages.MESSAGES`
    bytes of body and of layout  u32
    body      the numbers of the message in the order of its fields, then the lengths and the bytes of its texts
    layout    of each array its dtype and its shape
    padding   so that what follows starts at a multiple of 16
    payload   the arrays' bytes, each array at a multiple of 16

Arrays are copied only where they are not contiguous; received arrays are views of the received bytes. Sizes, indices
and floats of a received message are checked; every fault raises a `MessageError`.
"""

from __future__ import annotations

import functools
import json
import math
import operator
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, NamedTuple, TypeVar, get_args, get_type_hints

import numpy as np
from numpy.typing import NDArray

from . import _ring
from .messages import MESSAGES, Hello, Message, Ping, Pong, Welcome
from .options import Limits, Received, malformed, too_large

ALIGNMENT = 16  # bytes; frames and their payloads start there, so arrays are aligned for every dtype
MAX_TENSORS = 24
MAX_DIMENSIONS = 4
_CACHED_LAYOUTS = 4096
_MAX_LAYOUT_BYTES = 4096
_CACHED_BODIES = 1024  # with texts; of batches there is one for each layer of a model
_MAX_CACHED_BODY_BYTES = 64

_DTYPES = tuple(np.dtype(name) for name in ("<f4", "<f2", "<u2", "<i4", "u1", "<i8"))  # by their number on the wire
_CODES = {dtype: code for code, dtype in enumerate(_DTYPES)}
# The exponent's bits of the float dtypes: all set means infinite or NaN.
_EXPONENTS = {np.dtype("<f4"): 0x7F800000, np.dtype("<f2"): 0x7C00, np.dtype("<u2"): 0x7F80}
_TENSOR = struct.Struct(f"<BB{MAX_DIMENSIONS}I")  # dtype, dimensions, sizes; those of absent dimensions are 0
_HEAD = struct.Struct("<QQIIII")
_PADDING = tuple(bytes(n) for n in range(ALIGNMENT))

Dtype = np.dtype[Any]
Shapes = tuple[tuple[Dtype, tuple[int, ...]], ...]
_Declared = TypeVar("_Declared")


# Forms


class _Array(NamedTuple):
    """A field's array: the dtypes that it may have, and letters of its dimensions."""

    name: str
    dtypes: frozenset[Dtype]
    letters: tuple[str, ...]
    optional: bool


class Form:
    """How the values of a class travel, read from its fields (see `messages.py`).

    A mapping to arrays travels as arrays and a text with their names, another mapping as a text; both texts are JSON.

    Attributes:
        arrays: in the order of the layout; the optional one is the last.
        open_ended: the field whose arrays follow them, each with N rows.
    """

    def __init__(self, declared: type[Any]) -> None:
        self.declared = declared
        self.numbers: list[str] = []
        self.texts: list[str] = []
        self.mappings: list[str] = []
        self.arrays: list[_Array] = []
        self.open_ended: str | None = None
        hints, codes = get_type_hints(declared, include_extras=True), ""
        for name in (field.name for field in fields(declared)):
            hint = hints[name]
            kind, note = get_args(hint) if hasattr(hint, "__metadata__") else (hint, "")
            if kind in (bool, int, float):
                self.numbers.append(name)
                codes += {bool: "?", float: "d"}.get(kind, note)
            elif kind is str:
                self.texts.append(name)
            elif getattr(kind, "__origin__", None) is not Mapping:
                optional = type(None) in get_args(kind)
                self.arrays.append(
                    _Array(name, _dtypes(get_args(kind)[0] if optional else kind), tuple(note.split()), optional)
                )
            elif note:
                self.open_ended = name
            else:
                self.mappings.append(name)
        self.coded = [*self.texts, *self.mappings, *([self.open_ended] if self.open_ended else [])]  # as texts
        self.fixed = struct.Struct(f"<{codes}{len(self.coded)}I")
        self.places = [*self.numbers, *self.coded, *(array.name for array in self.arrays)]
        self.fewest = sum(not array.optional for array in self.arrays)
        self.values_of = _getter(self.numbers + self.texts)
        self.arrays_of = _getter([array.name for array in self.arrays])

    def made(self, parts: Sequence[Any]) -> Any:
        """The value of these fields, in the order of `places`; a frozen class's `__init__` takes thrice the time."""
        value = object.__new__(self.declared)
        vars(value).update(zip(self.places, parts, strict=True))
        return value

    def body(self, value: Any) -> bytes:
        """The numbers and texts of a value. Raises what struct and JSON raise."""
        if not self.coded:
            return self.fixed.pack(*self.values_of(value))
        texts = [json.dumps(getattr(value, name)) for name in self.mappings]
        if self.open_ended is not None:
            texts.append(json.dumps(list(getattr(value, self.open_ended))))
        return _written(self, *self.values_of(value), *texts)

    def parts(self, body: bytes) -> tuple[Any, ...]:
        """The numbers and texts of a body; of a mapping, what its JSON gives.

        Raises:
            MessageError: the body is none of this class.
        """
        try:
            if not self.coded:
                return self.fixed.unpack(body)
            parts = (_parts if len(body) <= _MAX_CACHED_BODY_BYTES else _parts.__wrapped__)(self, body)
            texts = len(self.numbers) + len(self.texts)
            return parts if texts == len(parts) else (*parts[:texts], *map(json.loads, parts[texts:]))
        except (struct.error, ValueError, RecursionError):
            raise malformed(f"{len(body)} bytes are no body of {self.declared.__name__}") from None


@functools.lru_cache(maxsize=_CACHED_BODIES)
def _written(form: Form, *values: Any) -> bytes:
    """A body with texts, which are the last of the values."""
    numbers = len(form.numbers)
    texts = [text.encode() for text in values[numbers:]]
    return b"".join((form.fixed.pack(*values[:numbers], *map(len, texts)), *texts))


@functools.lru_cache(maxsize=_CACHED_BODIES)
def _parts(form: Form, body: bytes) -> tuple[Any, ...]:
    """The numbers and texts of a body with texts. Raises struct.error or ValueError: it is none."""
    parts: list[Any] = list(form.fixed.unpack_from(body))
    at = form.fixed.size
    for place in range(len(form.numbers), len(parts)):
        end = at + parts[place]
        parts[place] = body[at:end].decode()
        at = end
    if at != len(body):
        raise ValueError("the texts have another length")
    return tuple(parts)


def _getter(names: list[str]) -> Callable[[Any], tuple[Any, ...]]:
    """`operator.attrgetter`, which gives a tuple for more than one name."""
    if len(names) > 1:
        return operator.attrgetter(*names)
    return lambda value: tuple([getattr(value, name) for name in names])


def _dtypes(array: Any) -> frozenset[Dtype]:
    scalar = get_args(get_args(array)[1])[0]
    return frozenset(_EXPONENTS if scalar is Any else (np.dtype(scalar),))


_FORMS: dict[type[Any], tuple[int, Form]] = {
    declared: (kind, Form(declared)) for kind, declared in enumerate(MESSAGES, 1)
}
_KINDS: dict[int, Form] = dict(_FORMS.values())
_CONTROL: dict[type[Any], Form] = {
    declared: Form(declared) for declared in (Hello, Welcome, Ping, Pong)
}  # of the control stream


def to_bytes(value: Any) -> bytes:
    """A value of the control stream as bytes."""
    return _CONTROL[type(value)].body(value)


def from_bytes(declared: type[_Declared], data: bytes) -> _Declared:
    """The value of a class of the control stream. Raises MessageError: the bytes are none."""
    form = _CONTROL[declared]
    value: _Declared = form.made(form.parts(data))
    return value


# Arrays. A layout is written, read and checked once per shape, not per message.


@dataclass(frozen=True)
class Arrangement:
    """The arrays of a payload: the layout; dtype, shape, offset and `_EXPONENTS` of each; the padding before each."""

    serialized: bytes
    arrays: tuple[tuple[Dtype, tuple[int, ...], int, int], ...]
    gaps: tuple[int, ...]
    size: int  # bytes of the payload


@functools.lru_cache(maxsize=_CACHED_LAYOUTS)
def _arrange(kind: int, shapes: Shapes) -> Arrangement:
    """How arrays of these shapes travel with a message of this kind."""
    _check_shapes(kind, shapes)
    serialized = [
        _TENSOR.pack(_CODES[dtype], len(shape), *shape, *[0] * (MAX_DIMENSIONS - len(shape))) for dtype, shape in shapes
    ]
    return _placed(shapes, b"".join(serialized))


@functools.lru_cache(maxsize=_CACHED_LAYOUTS)
def _parse_layout(kind: int, serialized: bytes) -> Arrangement:
    """The arrangement in a received layout."""
    if len(serialized) > _MAX_LAYOUT_BYTES or len(serialized) % _TENSOR.size:  # bounds the memory of the cache
        raise malformed(f"a layout of {len(serialized)} bytes")
    shapes: list[tuple[Dtype, tuple[int, ...]]] = []
    for code, dimensions, *sizes in _TENSOR.iter_unpack(serialized):
        if code >= len(_DTYPES) or dimensions > MAX_DIMENSIONS:
            raise malformed(f"an array of dtype {code} with {dimensions} dimensions")
        shapes.append((_DTYPES[code], tuple(sizes[:dimensions])))
    _check_shapes(kind, tuple(shapes))
    return _placed(tuple(shapes), serialized)


def _placed(shapes: Shapes, serialized: bytes) -> Arrangement:
    places, gaps, at = [], [], 0
    for dtype, shape in shapes:
        gaps.append(-at % ALIGNMENT)
        at += gaps[-1]
        places.append((dtype, shape, at, _EXPONENTS.get(dtype, 0)))
        at += math.prod(shape) * dtype.itemsize
    return Arrangement(serialized, tuple(places), tuple(gaps), at)


def _check_shapes(kind: int, shapes: Shapes) -> None:
    form = _KINDS[kind]
    name, most = form.declared.__name__, MAX_TENSORS if form.open_ended else len(form.arrays)
    if not form.fewest <= len(shapes) <= most:
        raise malformed(f"{name} has {len(shapes)} arrays")
    for dtype, shape in shapes:
        # NumPy multiplies the sizes that are not zero, and an empty array of 2**63 columns is refused by it
        if dtype not in _CODES or len(shape) > MAX_DIMENSIONS or math.prod(max(size, 1) for size in shape) >= 2**40:
            raise malformed(f"{name} has an array of {dtype} {shape}")
    sizes: dict[str, int] = {}
    for (dtype, shape), array in zip(shapes, form.arrays, strict=False):
        if dtype not in array.dtypes or len(shape) != len(array.letters):
            raise malformed(f"{name} has {array.name} of {dtype} {shape}")
        for size, letters in zip(shape, array.letters, strict=True):
            letter, _, more = letters.partition("+")
            if sizes.setdefault(letter, size - int(more or 0)) != size - int(more or 0):
                raise malformed(f"in {name}, {letter} is {sizes[letter]} in one array and differs in {array.name}")
    for _, shape in shapes[len(form.arrays) :]:
        if not shape or shape[0] != sizes["N"]:
            raise malformed(f"{name} has an array {shape} without a row for each of {sizes['N']}")


# Messages


class Encoded(NamedTuple):
    """A message ready to be written; the arrays are contiguous."""

    kind: int
    body: bytes
    arrangement: Arrangement
    arrays: tuple[NDArray[Any], ...]


def encode(message: Message) -> Encoded:
    """Turn a message into its parts.

    Raises:
        MessageError: dtypes, shapes or numbers break the rules of its kind.
    """
    known = _FORMS.get(type(message))
    if known is None:
        raise malformed(f"{type(message).__name__} is no message")
    kind, form = known
    try:
        body, arrays = form.body(message), form.arrays_of(message)
        if form.open_ended is not None:
            arrays = (*arrays, *getattr(message, form.open_ended).values())
        elif arrays and arrays[-1] is None:
            arrays = arrays[:-1]
        for array in arrays:
            if not array.flags.c_contiguous:
                arrays = tuple([np.ascontiguousarray(array) for array in arrays])
                break
        shapes = tuple([(array.dtype, array.shape) for array in arrays])
    except (TypeError, ValueError, OverflowError, AttributeError, struct.error) as error:
        raise malformed(f"{type(message).__name__}: {error}") from error
    return Encoded(kind, body, _arrange(kind, shapes), arrays)


def decode(kind: int, body: bytes, layout: bytes, payload: memoryview, limits: Limits) -> Message:
    """Turn parts into a message; its arrays are read-only views of `payload`.

    Raises:
        MessageError: the bytes are malformed, or the message breaks the rules of its kind.
    """
    form = _KINDS.get(kind)
    if form is None:
        raise malformed(f"kind {kind} is unknown")
    arrangement = _parse_layout(kind, layout)
    if arrangement.size != len(payload):
        raise malformed(f"the arrays take {arrangement.size} bytes, there are {len(payload)}")
    arrays: list[Any] = []
    for dtype, shape, offset, exponent in arrangement.arrays:
        array = np.ndarray(shape, dtype, payload, offset)
        if exponent and not _ring.finite(array, exponent):
            raise malformed(f"{form.declared.__name__} has numbers that are not finite")
        arrays.append(array)
    parts: list[Any] = [*form.parts(body), *arrays]
    if form.open_ended is not None:
        at, own = len(parts) - len(arrays), len(form.arrays)
        parts[at - 1 :] = [_named(parts[at - 1], arrays[own:]), *arrays[:own]]
    elif len(arrays) < len(form.arrays):
        parts.append(None)
    message: Message = form.made(parts)
    message.check(limits)
    return message


def _named(names: Any, arrays: list[Any]) -> dict[str, NDArray[Any]]:
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise malformed("the names of the arrays are no names")
    if len(names) != len(arrays) or len(set(names)) != len(names):
        raise malformed(f"{len(names)} names for {len(arrays)} arrays, or one of them twice")
    return dict(zip(names, arrays, strict=True))


# Frames

REQUEST, REPLY, POST = 1, 2, 3  # is answered by a frame of the same number; the answer; is not answered

Pieces = tuple[Any, ...]  # buffers, to be written one after the other


class Frame(NamedTuple):
    """A received frame, not decoded yet.

    Attributes:
        request: number within the channel, rising from 1.
        deadline_ns: on the server's monotonic clock; 0: none.
    """

    request: int
    deadline_ns: int
    role: int
    kind: int
    body: bytes
    layout: bytes
    payload: memoryview


def pack(encoded: Encoded, request: int, deadline_ns: int, role: int, max_bytes: int) -> tuple[Pieces, int]:
    """The buffers of a frame, and their total bytes.

    Raises:
        MessageTooLarge: the total is above `max_bytes`.
    """
    kind, body, arrangement, arrays = encoded
    layout = arrangement.serialized
    head = _HEAD.pack(request, deadline_ns, role, kind, len(body), len(layout))
    start = b"".join((head, body, layout, _PADDING[-(len(body) + len(layout)) % ALIGNMENT]))
    size = len(start) + arrangement.size
    if size > max_bytes:
        raise too_large(size, max_bytes)
    pieces: list[Any] = [start]
    for gap, array in zip(arrangement.gaps, arrays, strict=True):
        if gap:
            pieces.append(_PADDING[gap])
        if array.nbytes:
            pieces.append(array)
    return tuple(pieces), size


def unpack(data: Received) -> Frame:
    """Split a frame into its parts without a copy.

    Raises:
        MessageError: the bytes are no frame.
    """
    if len(data) < _HEAD.size:
        raise malformed(f"{len(data)} bytes are not a frame")
    request, deadline_ns, role, kind, body, layout = _HEAD.unpack_from(data)
    body += _HEAD.size  # where it ends, as the layout below
    layout += body
    payload = layout + -layout % ALIGNMENT
    if payload > len(data):
        raise malformed(f"a frame of {len(data)} bytes ends before its payload")
    view = memoryview(data)
    parts = bytes(view[_HEAD.size : body]), bytes(view[body:layout]), view[payload:]
    return Frame._make((request, deadline_ns, role, kind, *parts))
