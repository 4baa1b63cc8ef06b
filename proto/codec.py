"""Messages to bytes and back, checked.

    message -> Encoded(kind, body, arrangement, arrays)        encode: no array is copied unless it is not contiguous
    kind, body, layout, payload -> message                     decode: arrays are views of the received bytes

What arrives is trusted in nothing: sizes are checked against the bytes that are there, indices against their ranges,
numbers for being finite. Whatever is wrong with it ends in a `MessageError`.
"""

from __future__ import annotations

import functools
import math
import struct
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from google.protobuf.message import DecodeError, EncodeError
from numpy.typing import NDArray

from . import _ring
from .generated import messages_pb2 as pb
from .layout import EXPONENTS, Arrangement, arrangement_of, parse_layout
from .limits import Limits, malformed
from .messages import (
    Acknowledged,
    Context,
    ExpertBatch,
    ExpertResult,
    Failure,
    FileReply,
    FileRequest,
    HealthReport,
    HealthRequest,
    Message,
    PlacementCommand,
    PrefetchCommand,
    StoreReply,
    StoreRequest,
)

Arrays = list[NDArray[Any]]
_BATCH_FAULTS = {
    1: "an expert id is out of range",
    2: "an expert is named twice",
    3: "a width is above 8 bits",
    4: "starts does not rise from 0 to the number of pairs",
    5: "a row number is out of range",
}
_MOST_DETAILS = 256
_MOST_NAME = 256  # characters of a file's name
_REMEMBERED = 1024  # bodies of batches: one for each layer of a model
_MOST_REMEMBERED_BYTES = 64  # of each


class Encoded(NamedTuple):
    """A message ready to be written: `arrays` are contiguous and follow each other as `arrangement` says."""

    kind: int
    body: bytes
    arrangement: Arrangement
    arrays: tuple[NDArray[Any], ...]


def encode(message: Message) -> Encoded:
    """The parts of a message.

    Raises:
        MessageError: dtypes, shapes or numbers break the rules of its kind.
    """
    encoder = _ENCODERS.get(type(message))
    if encoder is None:
        raise malformed(f"{type(message).__name__} is no message")
    kind, make = encoder
    try:
        body, arrays = make(message)
    except (TypeError, ValueError, OverflowError, AttributeError, EncodeError, struct.error) as error:
        raise malformed(f"{type(message).__name__}: {error}") from error
    for array in arrays:
        if not isinstance(array, np.ndarray):
            raise malformed(f"{type(message).__name__} has a {type(array).__name__} for an array")
        if not array.flags.c_contiguous:
            arrays = tuple([np.ascontiguousarray(a) for a in arrays])
            break
    return Encoded(kind, body, arrangement_of(kind, arrays), arrays)


def decode(kind: int, body: bytes, layout: bytes, payload: memoryview, limits: Limits) -> Message:
    """The message that these bytes are; its arrays are read-only views of `payload`.

    Raises:
        MessageError: they are none, or it breaks the rules of its kind.
    """
    decoder = _DECODERS.get(kind)
    if decoder is None:
        raise malformed(f"kind {kind} is unknown")
    arrangement = parse_layout(kind, layout)
    if arrangement.size != len(payload):
        raise malformed(f"the arrays take {arrangement.size} bytes, there are {len(payload)}")
    arrays = [np.ndarray(place.shape, place.dtype, payload, place.offset) for place in arrangement.places]
    try:
        return decoder(body, arrays, limits)
    except (DecodeError, UnicodeDecodeError):
        raise malformed(f"the body is none of kind {kind}") from None


def _below(name: str, value: int, limit: int) -> int:
    if value >= limit:
        raise malformed(f"{name} {value} is not below {limit}")
    return value


def _finite(name: str, array: NDArray[Any]) -> NDArray[Any]:
    if not _ring.finite(array, EXPONENTS[array.dtype]):
        raise malformed(f"{name} has numbers that are not finite")
    return array


def _ids(name: str, array: NDArray[np.int32], limit: int) -> NDArray[np.int32]:
    if not _ring.below(array, limit):
        raise malformed(f"{name} are not all in 0..{limit - 1}")
    return array


@functools.lru_cache(maxsize=_REMEMBERED, typed=True)
def _batch_body(layer: int, activation: str, decode: bool) -> bytes:
    return pb.ExpertBatch(layer=layer, activation=activation, decode=decode).SerializeToString()


def _parse_batch(body: bytes) -> tuple[int, str, bool]:
    header = pb.ExpertBatch.FromString(body)
    return header.layer, header.activation, header.decode


_batch_header = functools.lru_cache(maxsize=_REMEMBERED)(_parse_batch)


def _expert_batch(m: ExpertBatch) -> tuple[bytes, tuple[NDArray[Any], ...]]:
    return _batch_body(m.layer, m.activation, m.decode), (
        m.experts, m.bits, m.starts, m.rows, m.weights, m.hidden,
    )  # fmt: skip


def _to_expert_batch(body: bytes, arrays: Arrays, limits: Limits) -> ExpertBatch:
    layer, activation, decode = _batch_header(body) if len(body) <= _MOST_REMEMBERED_BYTES else _parse_batch(body)
    _below("layer", layer, limits.layers)
    experts, bits, starts, rows, weights, hidden = arrays
    fault = _ring.batch_fault(experts, bits, starts, rows, hidden.shape[0], limits.experts)
    if fault:
        raise malformed(_BATCH_FAULTS[fault])
    _finite("weights", weights)
    _finite("hidden", hidden)
    return ExpertBatch(layer, experts, bits, starts, rows, weights, hidden, activation, decode)


_SECONDS = struct.Struct("<BdBdBd")  # ExpertResult's three doubles, as protobuf writes them


def _expert_result(m: ExpertResult) -> tuple[bytes, tuple[NDArray[Any], ...]]:
    body = _SECONDS.pack(0x09, m.measured_s, 0x11, m.modelled_s, 0x19, m.paced_s)
    return body, (m.partial,) if m.held is None else (m.partial, m.held)


def _seconds(body: bytes) -> tuple[float, float, float]:
    if len(body) == _SECONDS.size:  # as we write them
        tag1, measured_s, tag2, modelled_s, tag3, paced_s = _SECONDS.unpack(body)
        if (tag1, tag2, tag3) == (0x09, 0x11, 0x19):
            return measured_s, modelled_s, paced_s
    result = pb.ExpertResult.FromString(body)
    return result.measured_s, result.modelled_s, result.paced_s


def _to_expert_result(body: bytes, arrays: Arrays, limits: Limits) -> ExpertResult:
    seconds = _seconds(body)
    for value in seconds:
        if not 0.0 <= value < math.inf:
            raise malformed(f"a result took {value} seconds")
    return ExpertResult(_finite("partial", arrays[0]), *seconds, arrays[1] if len(arrays) > 1 else None)


def _prefetch(m: PrefetchCommand) -> tuple[bytes, tuple[NDArray[Any], ...]]:
    body = pb.PrefetchCommand(iteration=m.iteration, layer=m.layer, hints=m.hints, mapped=m.mapped)
    return body.SerializeToString(), (m.keys, m.priorities)


def _to_prefetch(body: bytes, arrays: Arrays, limits: Limits) -> PrefetchCommand:
    command = pb.PrefetchCommand.FromString(body)
    return PrefetchCommand(
        command.iteration,
        _below("layer", command.layer, limits.layers),
        _ids("keys", arrays[0], limits.layers * limits.experts),
        _finite("priorities", arrays[1]),
        _below("the number of hints", command.hints, len(arrays[0]) + 1),
        command.mapped,
    )


def _placement(m: PlacementCommand) -> tuple[bytes, tuple[NDArray[Any], ...]]:
    body = pb.PlacementCommand(keep_others=m.keep_others, preload=m.preload)
    return body.SerializeToString(), (m.keys,)


def _to_placement(body: bytes, arrays: Arrays, limits: Limits) -> PlacementCommand:
    command = pb.PlacementCommand.FromString(body)
    keys = _ids("keys", arrays[0], limits.layers * limits.experts)
    return PlacementCommand(keys, command.keep_others, command.preload)


def _context(m: Context) -> tuple[bytes, tuple[NDArray[Any], ...]]:
    body = pb.Context(iteration=m.iteration, layer=m.layer)
    return body.SerializeToString(), (m.sequences, m.embedding, m.probabilities)


def _to_context(body: bytes, arrays: Arrays, limits: Limits) -> Context:
    context = pb.Context.FromString(body)
    sequences, embedding, probabilities = arrays
    _below("the number of experts", probabilities.shape[1], limits.experts + 1)
    return Context(
        context.iteration,
        _below("layer", context.layer, limits.layers),
        sequences,
        _finite("embedding", embedding),
        _finite("probabilities", probabilities),
    )


def _health_report(m: HealthReport) -> tuple[bytes, tuple[NDArray[Any], ...]]:
    report = pb.HealthReport(role=m.role)
    for name, value in m.details.items():
        if isinstance(value, bool):  # before int, of which bool is one
            report.details[name].flag = value
        elif isinstance(value, int):
            report.details[name].integer = value
        elif isinstance(value, float):
            report.details[name].real = value
        else:
            report.details[name].text = value
    return report.SerializeToString(), ()


def _to_health_report(body: bytes, arrays: Arrays, limits: Limits) -> HealthReport:
    report = pb.HealthReport.FromString(body)
    if len(report.details) > _MOST_DETAILS:
        raise malformed(f"a health report with {len(report.details)} details")
    details: dict[str, str | float | int | bool] = {}
    for name, detail in report.details.items():
        which = detail.WhichOneof("value")
        if which is None:
            raise malformed(f"the detail {name!r} has no value")
        details[name] = getattr(detail, which)
    return HealthReport(report.role, details)


def _failure(m: Failure) -> tuple[bytes, tuple[NDArray[Any], ...]]:
    return pb.Failure(kind=m.kind, what=m.what, remedy=m.remedy).SerializeToString(), ()


def _to_failure(body: bytes, arrays: Arrays, limits: Limits) -> Failure:
    failure = pb.Failure.FromString(body)
    return Failure(failure.kind, failure.what, failure.remedy)


def _store_request(m: StoreRequest) -> tuple[bytes, tuple[NDArray[Any], ...]]:
    return pb.StoreRequest(layer=m.layer, first=m.first, neurons=m.neurons).SerializeToString(), (m.experts,)


def _to_store_request(body: bytes, arrays: Arrays, limits: Limits) -> StoreRequest:
    request = pb.StoreRequest.FromString(body)
    layer = _below("layer", request.layer, limits.layers)
    return StoreRequest(layer, _ids("experts", arrays[0], limits.experts), request.first, request.neurons)


def _store_reply(m: StoreReply) -> tuple[bytes, tuple[NDArray[Any], ...]]:
    body = pb.StoreReply(layer=m.layer, names=list(m.tensors), first=m.first)
    return body.SerializeToString(), (m.experts, *m.tensors.values())


def _to_store_reply(body: bytes, arrays: Arrays, limits: Limits) -> StoreReply:
    reply = pb.StoreReply.FromString(body)
    experts, *tensors = arrays
    names = list(reply.names)
    if len(names) != len(tensors) or len(set(names)) != len(names):
        raise malformed(f"{len(names)} names for {len(tensors)} tensors, or one of them twice")
    for name, tensor in zip(names, tensors, strict=True):
        if tensor.dtype in EXPONENTS:
            _finite(name, tensor)
    layer = _below("layer", reply.layer, limits.layers)
    ids = _ids("experts", experts, limits.experts)
    return StoreReply(layer, ids, dict(zip(names, tensors, strict=True)), reply.first)


def _file_request(m: FileRequest) -> tuple[bytes, tuple[NDArray[Any], ...]]:
    return pb.FileRequest(name=m.name, offset=m.offset, length=m.length).SerializeToString(), ()


def _to_file_request(body: bytes, arrays: Arrays, limits: Limits) -> FileRequest:
    request = pb.FileRequest.FromString(body)
    if not 0 < request.length <= limits.max_message_bytes:
        raise malformed(f"{request.length} bytes of a file are asked for")
    return FileRequest(_file_name(request.name), request.offset, request.length)


def _file_reply(m: FileReply) -> tuple[bytes, tuple[NDArray[Any], ...]]:
    return pb.FileReply(name=m.name, offset=m.offset, size=m.size).SerializeToString(), (m.data,)


def _to_file_reply(body: bytes, arrays: Arrays, limits: Limits) -> FileReply:
    reply = pb.FileReply.FromString(body)
    if reply.offset + len(arrays[0]) > reply.size:
        raise malformed(f"bytes up to {reply.offset + len(arrays[0])} of a file of {reply.size}")
    return FileReply(_file_name(reply.name), reply.offset, reply.size, arrays[0])


def _file_name(name: str) -> str:
    if len(name) > _MOST_NAME:
        raise malformed(f"a file name of {len(name)} characters")
    return name


def _empty(m: Message) -> tuple[bytes, tuple[NDArray[Any], ...]]:
    return b"", ()


def _to_acknowledged(body: bytes, arrays: Arrays, limits: Limits) -> Acknowledged:
    pb.Acknowledged.FromString(body)
    return Acknowledged()


def _to_health_request(body: bytes, arrays: Arrays, limits: Limits) -> HealthRequest:
    pb.HealthRequest.FromString(body)
    return HealthRequest()


_ENCODERS: dict[type, tuple[int, Callable[[Any], tuple[bytes, tuple[NDArray[Any], ...]]]]] = {
    Acknowledged: (pb.KIND_ACKNOWLEDGED, _empty),
    Failure: (pb.KIND_FAILURE, _failure),
    ExpertBatch: (pb.KIND_EXPERT_BATCH, _expert_batch),
    ExpertResult: (pb.KIND_EXPERT_RESULT, _expert_result),
    PrefetchCommand: (pb.KIND_PREFETCH_COMMAND, _prefetch),
    PlacementCommand: (pb.KIND_PLACEMENT_COMMAND, _placement),
    Context: (pb.KIND_CONTEXT, _context),
    HealthRequest: (pb.KIND_HEALTH_REQUEST, _empty),
    HealthReport: (pb.KIND_HEALTH_REPORT, _health_report),
    StoreRequest: (pb.KIND_STORE_REQUEST, _store_request),
    StoreReply: (pb.KIND_STORE_REPLY, _store_reply),
    FileRequest: (pb.KIND_FILE_REQUEST, _file_request),
    FileReply: (pb.KIND_FILE_REPLY, _file_reply),
}
_DECODERS: dict[int, Callable[[bytes, Arrays, Limits], Message]] = {
    pb.KIND_ACKNOWLEDGED: _to_acknowledged,
    pb.KIND_FAILURE: _to_failure,
    pb.KIND_EXPERT_BATCH: _to_expert_batch,
    pb.KIND_EXPERT_RESULT: _to_expert_result,
    pb.KIND_PREFETCH_COMMAND: _to_prefetch,
    pb.KIND_PLACEMENT_COMMAND: _to_placement,
    pb.KIND_CONTEXT: _to_context,
    pb.KIND_HEALTH_REQUEST: _to_health_request,
    pb.KIND_HEALTH_REPORT: _to_health_report,
    pb.KIND_STORE_REQUEST: _to_store_request,
    pb.KIND_STORE_REPLY: _to_store_reply,
    pb.KIND_FILE_REQUEST: _to_file_request,
    pb.KIND_FILE_REPLY: _to_file_reply,
}
