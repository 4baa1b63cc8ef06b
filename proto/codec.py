"""Messages to frames and back: encode, pack; unpack, decode.

Arrays are copied only where they are not contiguous; received arrays are views of the received bytes. Sizes, indices
and floats of a received message are checked; every fault raises a `MessageError`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import numpy as np
from google.protobuf.message import DecodeError, EncodeError
from numpy.typing import NDArray

from . import _ring, messages
from .generated import channel_pb2
from .generated import messages_pb2 as pb
from .options import Limits, Received, malformed, too_large

Arrays = list[NDArray[Any]]
Parts = tuple[bytes, tuple[NDArray[Any], ...]]  # body, arrays
_Encode = Callable[[Any], Parts]
_Decode = Callable[[bytes, Arrays, Limits], messages.Message]

# Arrays. A layout is serialized, parsed and checked once per shape, not per message.

ALIGNMENT = 16  # bytes; frames and their payloads start there, so arrays are aligned for every dtype
MAX_TENSORS = 24
MAX_DIMENSIONS = 4
_CACHED_LAYOUTS = 4096
_MAX_LAYOUT_BYTES = 4096

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
_EXPONENTS = {np.dtype("<f4"): 0x7F800000, np.dtype("<f2"): 0x7C00, np.dtype("<u2"): 0x7F80}

_F32, _I32, _U8, _I64, _FLOAT = ("f4",), ("i4",), ("u1",), ("i8",), ("f4", "f2", "u2")
# Per kind: name, accepted dtypes and dimensions of each array; equal letters are equal sizes, "N+1" is one more than N.
_ARRAYS: dict[int, tuple[tuple[str, tuple[str, ...], tuple[str, ...]], ...]] = {
    pb.KIND_EXPERT_BATCH: (
        ("experts", _I32, ("N",)), ("bits", _U8, ("N",)), ("starts", _I32, ("N+1",)),
        ("rows", _I32, ("P",)), ("weights", _F32, ("P",)), ("hidden", _FLOAT, ("T", "H")),
    ),
    pb.KIND_EXPERT_RESULT: (("partial", _F32, ("T", "H")), ("resident", _U8, ("B",))),
    pb.KIND_PREFETCH_COMMAND: (("keys", _I32, ("N",)), ("priorities", _F32, ("N",))),
    pb.KIND_PLACEMENT_COMMAND: (("keys", _I32, ("N",)),),
    pb.KIND_CONTEXT: (
        ("sequences", _I64, ("S",)), ("embedding", _F32, ("S", "D")), ("probabilities", _F32, ("S", "E")),
    ),
    pb.KIND_STORE_REQUEST: (("experts", _I32, ("N",)),),
    pb.KIND_STORE_REPLY: (("experts", _I32, ("N",)),),
    pb.KIND_FILE_REPLY: (("data", _U8, ("N",)),),
}  # fmt: skip
_OPTIONAL: dict[int, int] = {pb.KIND_EXPERT_RESULT: 1}  # how many of the last arrays may be left out
_OPEN_ENDED = frozenset({pb.KIND_STORE_REPLY})  # any arrays may follow, each with N rows

Shapes = tuple[tuple[np.dtype[Any], tuple[int, ...]], ...]


@dataclass(frozen=True)
class Arrangement:
    """The arrays of a payload: the `Layout`; dtype, shape and offset of each; bytes of padding before each."""

    serialized: bytes
    arrays: tuple[tuple[np.dtype[Any], tuple[int, ...], int], ...]
    gaps: tuple[int, ...]
    size: int  # bytes of the payload


@functools.lru_cache(maxsize=_CACHED_LAYOUTS)
def _arrange(kind: int, shapes: Shapes) -> Arrangement:
    """How arrays of these shapes travel with a message of this kind."""
    layout = pb.Layout()
    for dtype, shape in shapes:
        if dtype not in _CODES:
            raise malformed(f"arrays of {dtype} cannot be sent")
        tensor = layout.tensors.add()
        tensor.dtype = pb.DType.Name(_CODES[dtype])  # type: ignore[assignment]
        tensor.shape.extend(shape)
        tensor.byte_length = math.prod(shape) * dtype.itemsize
    _check_shapes(kind, shapes)
    return _placed(shapes, layout.SerializeToString())


@functools.lru_cache(maxsize=_CACHED_LAYOUTS)
def _parse_layout(kind: int, serialized: bytes) -> Arrangement:
    """The arrangement in a received `Layout`."""
    if len(serialized) > _MAX_LAYOUT_BYTES:  # bounds the memory of the cache
        raise malformed(f"a layout of {len(serialized)} bytes")
    try:
        layout = pb.Layout.FromString(serialized)
    except DecodeError:
        raise malformed("the layout cannot be parsed") from None
    if len(layout.tensors) > MAX_TENSORS:
        raise malformed(f"{len(layout.tensors)} arrays")
    shapes: list[tuple[np.dtype[Any], tuple[int, ...]]] = []
    for tensor in layout.tensors:
        dtype, shape = _DTYPES.get(tensor.dtype), tuple(tensor.shape)
        if dtype is None:
            raise malformed(f"dtype {tensor.dtype} is unknown")
        if len(shape) > MAX_DIMENSIONS:
            raise malformed(f"{len(shape)} dimensions")
        # NumPy multiplies the sizes that are not zero, and an empty array of 2**63 columns is refused by it
        if any(size >= 2**31 for size in shape) or math.prod(max(size, 1) for size in shape) >= 2**40:
            raise malformed(f"shape {shape}")
        if math.prod(shape) * dtype.itemsize != tensor.byte_length:
            raise malformed(f"{dtype} {shape} does not take {tensor.byte_length} bytes")
        shapes.append((dtype, shape))
    _check_shapes(kind, tuple(shapes))
    return _placed(tuple(shapes), serialized)


def _placed(shapes: Shapes, serialized: bytes) -> Arrangement:
    places, gaps, at = [], [], 0
    for dtype, shape in shapes:
        gaps.append(-at % ALIGNMENT)
        at += gaps[-1]
        places.append((dtype, shape, at))
        at += math.prod(shape) * dtype.itemsize
    return Arrangement(serialized, tuple(places), tuple(gaps), at)


def _check_shapes(kind: int, shapes: Shapes) -> None:
    rules = _ARRAYS.get(kind, ())
    fewest = len(rules) - _OPTIONAL.get(kind, 0)
    if len(shapes) < fewest or (len(shapes) > len(rules) and kind not in _OPEN_ENDED):
        raise malformed(f"kind {kind} has {len(shapes)} arrays")
    sizes: dict[str, int] = {}
    for (dtype, shape), (_, accepted, names) in zip(shapes, rules, strict=False):
        if dtype.str[1:] not in accepted or len(shape) != len(names):
            raise malformed(f"kind {kind} has an array of {dtype} {shape}")
        for size, name in zip(shape, names, strict=True):
            letter, _, more = name.partition("+")
            if sizes.setdefault(letter, size - int(more or 0)) != size - int(more or 0):
                raise malformed(f"in kind {kind}, {letter} is {sizes[letter]} in one array and differs in another")
    for _, shape in shapes[len(rules) :]:
        if not shape or shape[0] != sizes["N"]:
            raise malformed(f"an array {shape} does not have a row for each of {sizes['N']} experts")


# Messages


class Encoded(NamedTuple):
    """A message ready to be written; the arrays are contiguous."""

    kind: int
    body: bytes
    arrangement: Arrangement
    arrays: tuple[NDArray[Any], ...]


def encode(message: messages.Message) -> Encoded:
    """Turn a message into its parts.

    Raises:
        MessageError: dtypes, shapes or numbers break the rules of its kind.
    """
    encoder = _ENCODERS.get(type(message))
    if encoder is None:
        raise malformed(f"{type(message).__name__} is no message")
    kind, make = encoder
    try:
        body, arrays = make(message)
    except (TypeError, ValueError, OverflowError, AttributeError, EncodeError) as error:
        raise malformed(f"{type(message).__name__}: {error}") from error
    for array in arrays:
        if not isinstance(array, np.ndarray):
            raise malformed(f"{type(message).__name__} has a {type(array).__name__} for an array")
        if not array.flags.c_contiguous:
            arrays = tuple([np.ascontiguousarray(a) for a in arrays])
            break
    return Encoded(kind, body, _arrange(kind, tuple([(array.dtype, array.shape) for array in arrays])), arrays)


def decode(kind: int, body: bytes, layout: bytes, payload: memoryview, limits: Limits) -> messages.Message:
    """Turn parts into a message; its arrays are read-only views of `payload`.

    Raises:
        MessageError: the bytes are malformed, or the message breaks the rules of its kind.
    """
    decoder = _DECODERS.get(kind)
    if decoder is None:
        raise malformed(f"kind {kind} is unknown")
    arrangement = _parse_layout(kind, layout)
    if arrangement.size != len(payload):
        raise malformed(f"the arrays take {arrangement.size} bytes, there are {len(payload)}")
    arrays = [np.ndarray(shape, dtype, payload, offset) for dtype, shape, offset in arrangement.arrays]
    try:
        return decoder(body, arrays, limits)
    except (DecodeError, UnicodeDecodeError):
        raise malformed(f"the body cannot be parsed as kind {kind}") from None


def _below(name: str, value: int, limit: int) -> int:
    if value >= limit:
        raise malformed(f"{name} {value} is not below {limit}")
    return value


def _finite(name: str, array: NDArray[Any]) -> NDArray[Any]:
    if not _ring.finite(array, _EXPONENTS[array.dtype]):
        raise malformed(f"{name} has numbers that are not finite")
    return array


def _ids(name: str, array: NDArray[np.int32], limit: int) -> NDArray[np.int32]:
    if not _ring.below(array, limit):
        raise malformed(f"{name} are not all in 0..{limit - 1}")
    return array


def _plain(
    kind: int, message: type[Any], body: Any, check: Callable[[Any, Limits], None] | None
) -> tuple[_Encode, _Decode]:
    """For messages whose fields and arrays have the same names as in protobuf and in `_ARRAYS`.

    An array that may be left out is None in the message.
    """
    named = tuple(body.DESCRIPTOR.fields_by_name)
    names = tuple(name for name, *_ in _ARRAYS.get(kind, ()))
    absent = [None] * _OPTIONAL.get(kind, 0)
    places = [(*named, *names).index(field.name) for field in fields(message)]

    def encode(m: Any) -> Parts:
        filled = body(**{name: getattr(m, name) for name in named})
        return filled.SerializeToString(), tuple([a for name in names if (a := getattr(m, name)) is not None])

    def decode(data: bytes, arrays: Arrays, limits: Limits) -> messages.Message:
        read = body.FromString(data)
        parts = [*[getattr(read, name) for name in named], *arrays, *absent]
        made = message(*[parts[place] for place in places])
        if check is not None:
            check(made, limits)
        return made

    return encode, decode


def _check_result(m: messages.ExpertResult, limits: Limits) -> None:
    for seconds in (m.measured_s, m.modelled_s, m.paced_s):
        if not 0.0 <= seconds < math.inf:
            raise malformed(f"a result took {seconds} seconds")
    _finite("partial", m.partial)


def _check_prefetch(m: messages.PrefetchCommand, limits: Limits) -> None:
    _below("layer", m.layer, limits.layers)
    _ids("keys", m.keys, limits.layers * limits.experts)
    _finite("priorities", m.priorities)
    _below("the number of hints", m.hints, len(m.keys) + 1)


def _check_placement(m: messages.PlacementCommand, limits: Limits) -> None:
    _ids("keys", m.keys, limits.layers * limits.experts)


def _check_context(m: messages.Context, limits: Limits) -> None:
    _below("layer", m.layer, limits.layers)
    _below("the number of experts", m.probabilities.shape[1], (limits.layers - m.layer) * limits.experts + 1)
    _finite("embedding", m.embedding)
    _finite("probabilities", m.probabilities)


def _check_store_request(m: messages.StoreRequest, limits: Limits) -> None:
    _below("layer", m.layer, limits.layers)
    _ids("experts", m.experts, limits.experts)


def _check_name(name: str) -> None:
    if len(name) > _MAX_NAME:
        raise malformed(f"a file name of {len(name)} characters")


def _check_file_request(m: messages.FileRequest, limits: Limits) -> None:
    if not 0 < m.length <= limits.max_message_bytes:
        raise malformed(f"{m.length} bytes of a file are asked for")
    _check_name(m.name)


def _check_file_reply(m: messages.FileReply, limits: Limits) -> None:
    if m.offset + len(m.data) > m.size:
        raise malformed(f"bytes up to {m.offset + len(m.data)} of a file of {m.size}")
    _check_name(m.name)


_BATCH_FAULTS = {
    1: "an expert id is out of range",
    2: "an expert is named twice",
    3: "a width is above 8 bits",
    4: "starts does not rise from 0 to the number of pairs",
    5: "a row number is out of range",
}
_MAX_DETAILS = 256  # of a health report
_MAX_NAME = 256  # characters of a file's name
_CACHED_BODIES = 1024  # of batches: one for each layer of a model
_MAX_CACHED_BODY_BYTES = 64


@functools.lru_cache(maxsize=_CACHED_BODIES, typed=True)
def _batch_body(layer: int, activation: str, decode: bool) -> bytes:
    return pb.ExpertBatch(layer=layer, activation=activation, decode=decode).SerializeToString()


def _parse_batch(body: bytes) -> tuple[int, str, bool]:
    header = pb.ExpertBatch.FromString(body)
    return header.layer, header.activation, header.decode


_parse_batch_cached = functools.lru_cache(maxsize=_CACHED_BODIES)(_parse_batch)


def _encode_batch(m: messages.ExpertBatch) -> Parts:
    arrays = (m.experts, m.bits, m.starts, m.rows, m.weights, m.hidden)
    return _batch_body(m.layer, m.activation, m.decode), arrays


def _decode_batch(body: bytes, arrays: Arrays, limits: Limits) -> messages.ExpertBatch:
    parse = _parse_batch_cached if len(body) <= _MAX_CACHED_BODY_BYTES else _parse_batch
    layer, activation, decode = parse(body)
    _below("layer", layer, limits.layers)
    experts, bits, starts, rows, weights, hidden = arrays
    fault = _ring.batch_fault(experts, bits, starts, rows, hidden.shape[0], limits.experts)
    if fault:
        raise malformed(_BATCH_FAULTS[fault])
    _finite("weights", weights)
    _finite("hidden", hidden)
    return messages.ExpertBatch(layer, experts, bits, starts, rows, weights, hidden, activation, decode)


def _encode_report(m: messages.HealthReport) -> Parts:
    report = pb.HealthReport(role=m.role)
    # bool before int, of which it is one
    fields = ((bool, "flag"), (int, "integer"), (float, "real"), (object, "text"))
    for name, value in m.details.items():
        setattr(report.details[name], next(field for kind, field in fields if isinstance(value, kind)), value)
    return report.SerializeToString(), ()


def _decode_report(body: bytes, arrays: Arrays, limits: Limits) -> messages.HealthReport:
    report = pb.HealthReport.FromString(body)
    if len(report.details) > _MAX_DETAILS:
        raise malformed(f"a health report with {len(report.details)} details")
    details: dict[str, str | float | int | bool] = {}
    for name, detail in report.details.items():
        which = detail.WhichOneof("value")
        if which is None:
            raise malformed(f"the detail {name!r} has no value")
        details[name] = getattr(detail, which)
    return messages.HealthReport(report.role, details)


def _encode_store_reply(m: messages.StoreReply) -> Parts:
    body = pb.StoreReply(layer=m.layer, names=list(m.tensors), first=m.first)
    return body.SerializeToString(), (m.experts, *m.tensors.values())


def _decode_store_reply(body: bytes, arrays: Arrays, limits: Limits) -> messages.StoreReply:
    reply = pb.StoreReply.FromString(body)
    experts, *tensors = arrays
    names = list(reply.names)
    if len(names) != len(tensors) or len(set(names)) != len(names):
        raise malformed(f"{len(names)} names for {len(tensors)} tensors, or one of them twice")
    named = dict(zip(names, tensors, strict=True))
    for name, tensor in named.items():
        if tensor.dtype in _EXPONENTS:
            _finite(name, tensor)
    layer = _below("layer", reply.layer, limits.layers)
    return messages.StoreReply(layer, _ids("experts", experts, limits.experts), named, reply.first)


_ACKNOWLEDGED = messages.Acknowledged()


def _decode_acknowledged(body: bytes, arrays: Arrays, limits: Limits) -> messages.Acknowledged:
    if body:
        pb.Acknowledged.FromString(body)
    return _ACKNOWLEDGED


_SPECIAL: tuple[tuple[int, type, _Encode, _Decode], ...] = (
    (pb.KIND_EXPERT_BATCH, messages.ExpertBatch, _encode_batch, _decode_batch),
    (pb.KIND_ACKNOWLEDGED, messages.Acknowledged, lambda m: (b"", ()), _decode_acknowledged),
    (pb.KIND_HEALTH_REPORT, messages.HealthReport, _encode_report, _decode_report),
    (pb.KIND_STORE_REPLY, messages.StoreReply, _encode_store_reply, _decode_store_reply),
)
_PLAIN: tuple[tuple[int, type, Any, Callable[[Any, Limits], None] | None], ...] = (
    (pb.KIND_FAILURE, messages.Failure, pb.Failure, None),
    (pb.KIND_EXPERT_RESULT, messages.ExpertResult, pb.ExpertResult, _check_result),
    (pb.KIND_PREFETCH_COMMAND, messages.PrefetchCommand, pb.PrefetchCommand, _check_prefetch),
    (pb.KIND_CONTEXT, messages.Context, pb.Context, _check_context),
    (pb.KIND_HEALTH_REQUEST, messages.HealthRequest, pb.HealthRequest, None),
    (pb.KIND_PLACEMENT_COMMAND, messages.PlacementCommand, pb.PlacementCommand, _check_placement),
    (pb.KIND_STORE_REQUEST, messages.StoreRequest, pb.StoreRequest, _check_store_request),
    (pb.KIND_FILE_REQUEST, messages.FileRequest, pb.FileRequest, _check_file_request),
    (pb.KIND_FILE_REPLY, messages.FileReply, pb.FileReply, _check_file_reply),
)
_ENCODERS: dict[type, tuple[int, _Encode]] = {message: (kind, encode) for kind, message, encode, _ in _SPECIAL}
_DECODERS: dict[int, _Decode] = {kind: decode for kind, _, _, decode in _SPECIAL}
for _kind, _message, _body, _check in _PLAIN:
    _encode, _DECODERS[_kind] = _plain(_kind, _message, _body, _check)
    _ENCODERS[_message] = _kind, _encode


# Frames: the `Frame` of channel.proto, written and read by frame.cpp without a copy of the payload. The bytes are valid
# protobuf with every field present and in order. Frames that leave out empty fields are read too, but slower.
#
#     offset  0  9 18 27  fixed64 client, request, settled, deadline_ns, each after its tag
#            36 41        fixed32 role, kind, each after its tag
#            46           body, layout, padding, payload, each after its tag and length; the payload at a multiple of 16

REQUEST, REPLY, POST = channel_pb2.ROLE_REQUEST, channel_pb2.ROLE_REPLY, channel_pb2.ROLE_POST
PROBE, UNKNOWN = channel_pb2.ROLE_PROBE, channel_pb2.ROLE_UNKNOWN
_PADDING = tuple(bytes(n) for n in range(ALIGNMENT))

Pieces = tuple[Any, ...]  # buffers, to be written one after the other


class Frame(NamedTuple):
    """A received frame, not decoded yet. `deadline_ns` 0: none."""

    client: int
    request: int
    settled: int
    deadline_ns: int
    role: int
    kind: int
    body: bytes
    layout: bytes
    payload: memoryview


def pack(
    encoded: Encoded, client: int, request: int, settled: int, deadline_ns: int, role: int, max_bytes: int
) -> tuple[Pieces, int]:
    """The buffers of a frame, and their total bytes.

    Raises:
        MessageTooLarge: the total is above `max_bytes`.
    """
    arrangement = encoded.arrangement
    start = _ring.frame_head(
        client, request, settled, deadline_ns, role, encoded.kind, encoded.body, arrangement.serialized,
        arrangement.size,
    )  # fmt: skip
    size = len(start) + arrangement.size
    if size > max_bytes:
        raise too_large(size, max_bytes)
    pieces: list[Any] = [start]
    for gap, array in zip(arrangement.gaps, encoded.arrays, strict=True):
        if gap:
            pieces.append(_PADDING[gap])
        if array.nbytes:
            pieces.append(array)
    return tuple(pieces), size


def pack_bare(client: int, request: int, settled: int, deadline_ns: int, role: int) -> Pieces:
    """A frame without a message."""
    return (_ring.frame_head(client, request, settled, deadline_ns, role, 0, b"", b"", 0),)


def unpack(data: Received) -> Frame:
    """Split a frame into its parts without a copy.

    Raises:
        MessageError: the bytes are no frame.
    """
    parts = _ring.frame_parts(data)
    if parts is not None:
        return Frame._make(parts)
    try:  # other implementations leave fields out or reorder them; this copies the payload
        f = channel_pb2.Frame.FromString(bytes(data))
    except DecodeError:
        raise malformed(f"{len(data)} bytes are not a frame") from None
    payload = memoryview(f.payload)
    return Frame(f.client, f.request, f.settled, f.deadline_ns, f.role, f.kind, f.body, f.layout, payload)
