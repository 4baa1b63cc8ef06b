"""Messages survive the round trip; malformed ones are refused."""

from __future__ import annotations

import struct
from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
from channel_peer import batch
from hypothesis import given, settings
from hypothesis import strategies as st

from tiermoe.errors import ConfigError, MessageError, MessageTooLarge
from tiermoe.proto import codec
from tiermoe.proto.codec import decode, encode, from_bytes, to_bytes
from tiermoe.proto.messages import (
    MESSAGES,
    Acknowledged,
    Context,
    ExpertResult,
    Failure,
    FileReply,
    FileRequest,
    HealthReport,
    HealthRequest,
    Hello,
    Message,
    Ping,
    PlacementCommand,
    Pong,
    PrefetchCommand,
    StoreReply,
    StoreRequest,
    Welcome,
)
from tiermoe.proto.options import Limits

LIMITS = Limits(layers=8, experts=16)
_F32 = np.float32


def _bytes(message: Message) -> bytes:
    return b"".join(codec.pack(encode(message), 8, 10, codec.REQUEST, 1 << 20)[0])


def _message(data: bytes) -> Message:
    frame = codec.unpack(data)
    return decode(frame.kind, frame.body, frame.layout, frame.payload, LIMITS)


SENT: list[Message] = [
    batch(),
    replace(batch(), decode=True),
    replace(batch(), hidden=np.ones((2, 8), np.float16)),
    replace(batch(), hidden=np.full((2, 8), 0x3F80, np.uint16)),
    ExpertResult(np.ones((3, 4), _F32), 0.5, 0.25, 1.0),
    ExpertResult(np.ones((3, 4), _F32), 0.5, 0.25, 1.0, np.array([3, 128], np.uint8)),
    PlacementCommand(np.array([3, 0, 127], np.int32), True, False),
    PrefetchCommand(2**40, 3, np.array([0, 127], np.int32), np.array([1.0, -2.0], _F32)),
    PrefetchCommand(2**40, 3, np.array([0, 127], np.int32), np.array([1.0, -2.0], _F32), 2, True),
    Context(5, 2, np.array([2**40], np.int64), np.ones((1, 3), _F32), np.ones((1, 16), _F32)),
    Context(5, 0, np.array([1, 2], np.int64), np.ones((2, 3), _F32), np.empty((2, 0), _F32)),
    Context(5, 2, np.array([1, 2], np.int64), np.empty((2, 0), _F32), np.ones((2, 16), _F32)),
    Context(5, 6, np.array([1, 2], np.int64), np.empty((2, 0), _F32), np.ones((2, 32), _F32)),
    HealthRequest(),
    HealthReport("ndp", {"a": "text", "b": 3, "c": 0.5, "d": True, "e": -1, "f": False}),
    Failure("StoreError", "what", "remedy"),
    StoreRequest(1, np.array([3, 1], np.int32)),
    StoreReply(1, np.array([3], np.int32), {"gate_up": np.ones((1, 2, 3), np.float16), "q": np.ones((1, 5), np.uint8)}),
    StoreRequest(1, np.array([3], np.int32), first=2**31, neurons=7),
    StoreReply(0, np.array([], np.int32), {}, first=9),
    FileRequest("config.json", 2**40, 4096),
    FileReply("config.json", 2, 5, np.array([1, 2, 255], np.uint8)),
    Acknowledged(),
]


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, np.ndarray):
        return a.dtype == b.dtype and a.shape == b.shape and bool(np.array_equal(a, b))
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(_same(a[k], b[k]) and type(a[k]) is type(b[k]) for k in a)
    return bool(a == b)


@pytest.mark.parametrize("message", SENT, ids=lambda m: type(m).__name__)
def test_there_and_back(message: Message) -> None:
    data = _bytes(message)
    back = _message(data)
    assert type(back) is type(message)
    for field in fields(message):
        assert _same(getattr(message, field.name), getattr(back, field.name)), field.name
    frame = codec.unpack(data)
    assert (frame.request, frame.deadline_ns) == (8, 10)


@pytest.mark.parametrize(
    "value",
    [Hello(2, 2**63, 1 << 20), Hello(2, 1, 1, 2**31, 3, 1 << 22), Welcome(2, 1 << 20, 9, "a0"), Ping(3), Pong(3, 4)],
)
def test_the_control_stream_there_and_back(value: Any) -> None:
    data = to_bytes(value)
    assert from_bytes(type(value), data) == value
    for bad in (data[:-1], data + b"x", b"", b"\xff"):
        with pytest.raises(MessageError):
            from_bytes(type(value), bad)


def test_arrays_are_views_of_the_bytes_and_aligned() -> None:
    data = _bytes(batch())
    frame = codec.unpack(data)
    back = decode(frame.kind, frame.body, frame.layout, frame.payload, LIMITS)
    hidden = getattr(back, "hidden")  # noqa: B009
    assert not hidden.flags.owndata
    assert not hidden.flags.writeable
    assert hidden.flags.aligned
    assert (len(data) - len(frame.payload)) % 16 == 0


@given(rows=st.integers(0, 5), width=st.integers(0, 9), experts=st.integers(0, 6), data=st.data())
@settings(max_examples=60, deadline=None)
def test_batches_of_any_shape(rows: int, width: int, experts: int, data: st.DataObject) -> None:
    counts = data.draw(st.lists(st.integers(0, 3 if rows else 0), min_size=experts, max_size=experts))
    starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    pairs = int(starts[-1])
    numbers = data.draw(st.lists(st.integers(0, max(rows - 1, 0)), min_size=pairs, max_size=pairs))
    message = replace(
        batch(), experts=np.arange(experts, dtype=np.int32), bits=np.full(experts, 3, np.uint8), starts=starts,
        rows=np.array(numbers, np.int32), weights=np.ones(pairs, _F32), hidden=np.ones((rows, width), _F32),
    )  # fmt: skip
    back = _message(_bytes(message))
    assert all(_same(getattr(message, f.name), getattr(back, f.name)) for f in fields(message))


_i32 = np.int32
BAD: list[tuple[str, Message]] = [
    ("experts of 1", replace(batch(), bits=np.array([1], np.uint8))),
    ("starts short", replace(batch(), starts=np.array([0, 2], _i32))),
    ("wrong dtype", replace(batch(), rows=np.array([0, 0], np.int64))),
    ("hidden flat", replace(batch(), hidden=np.ones(8, _F32))),
    ("doubles", replace(batch(), hidden=np.ones((2, 8)))),
    ("a list", replace(batch(), hidden=[[1.0]])),  # type: ignore[arg-type]
    ("layer below 0", replace(batch(), layer=-1)),
    ("layer of text", replace(batch(), layer="x")),  # type: ignore[arg-type]
    ("objects", StoreReply(1, np.array([1], _i32), {"a": np.array([None])})),
    ("tensor without rows", StoreReply(1, np.array([1], _i32), {"a": np.ones((2, 2), _F32)})),
    ("file bytes of int32", FileReply("a", 0, 4, np.zeros(1, _i32))),  # type: ignore[arg-type]
    ("offset below 0", FileRequest("a", -1, 1)),
    ("neurons below 0", StoreRequest(0, np.array([1], _i32), 0, -1)),
    ("no message", "text"),  # type: ignore[list-item]
]


@pytest.mark.parametrize("message", [m for _, m in BAD], ids=[name for name, _ in BAD])
def test_what_cannot_be_sent(message: Message) -> None:
    with pytest.raises(MessageError):
        encode(message)


REFUSED: list[tuple[str, Message]] = [
    ("expert out of range", replace(batch(), experts=np.array([1, 16], _i32))),
    ("expert below 0", replace(batch(), experts=np.array([1, -1], _i32))),
    ("expert twice", replace(batch(), experts=np.array([1, 1], _i32))),
    ("9 bits", replace(batch(), bits=np.array([9, 0], np.uint8))),
    ("starts at 1", replace(batch(), starts=np.array([1, 1, 2], _i32))),
    ("starts falls", replace(batch(), starts=np.array([0, 3, 2], _i32))),
    ("starts ends early", replace(batch(), starts=np.array([0, 1, 1], _i32))),
    ("row out of range", replace(batch(), rows=np.array([0, 2], _i32))),
    ("row below 0", replace(batch(), rows=np.array([0, -1], _i32))),
    ("NaN in weights", replace(batch(), weights=np.array([0, np.nan], _F32))),
    ("infinity in hidden", replace(batch(), hidden=np.full((2, 8), np.inf, _F32))),
    ("infinity in float16", replace(batch(), hidden=np.full((2, 8), -np.inf, np.float16))),
    ("NaN in bfloat16", replace(batch(), hidden=np.full((2, 8), 0x7FC0, np.uint16))),
    ("layer out of range", replace(batch(), layer=8)),
    ("time below 0", ExpertResult(np.ones((1, 1), _F32), -1.0, 0.0, 0.0)),
    ("time that is none", ExpertResult(np.ones((1, 1), _F32), 0.0, float("nan"), 0.0)),
    ("hot key out of range", PlacementCommand(np.array([-1], _i32), False, True)),
    ("key out of range", PrefetchCommand(0, 0, np.array([128], _i32), np.ones(1, _F32))),
    ("more hints than keys", PrefetchCommand(0, 0, np.array([1], _i32), np.ones(1, _F32), 2)),
    ("too many experts", Context(0, 6, np.ones(1, np.int64), np.ones((1, 1), _F32), np.ones((1, 33), _F32))),
    ("a file of no length", FileRequest("config.json", 0, 0)),
    ("more of a file than a message", FileRequest("config.json", 0, 2**31)),
    ("a long file name", FileRequest("x" * 257, 0, 1)),
    ("a long file name, answered", FileReply("x" * 257, 0, 1, np.zeros(1, np.uint8))),
    ("more than the file", FileReply("config.json", 3, 4, np.zeros(2, np.uint8))),
    ("infinite weights", StoreReply(0, np.array([0], _i32), {"w": np.full((1, 1), np.inf, _F32)})),
]


@pytest.mark.parametrize("message", [m for _, m in REFUSED], ids=[name for name, _ in REFUSED])
def test_what_is_not_accepted(message: Message) -> None:
    with pytest.raises(MessageError):
        _message(_bytes(message))


_KIND = {declared: kind for kind, declared in enumerate(MESSAGES, 1)}
_RESULT = _KIND[ExpertResult], struct.pack("<3d", 0.0, 0.0, 0.0)  # and its body


def _layout(*arrays: tuple[int, tuple[int, ...]]) -> bytes:
    return b"".join(struct.pack("<BB4I", code, len(shape), *(*shape, 0, 0, 0, 0)[:4]) for code, shape in arrays)


# of a payload of 16 bytes: dtype x shape must give the same
@pytest.mark.parametrize(
    "layout",
    [
        _layout((0, (1, 5))),
        _layout((0, (1, 3))),
        _layout((0, (2**31, 2**31))),  # dtype x shape is 0 modulo 2**64
        _layout((0, (0, 2**31)), (4, (2**20,))),
        _layout((99, (1, 4))),  # no dtype
        _layout((5, (1, 2))),  # another dtype than the message's
        _layout((0, (4,))),
        _layout((0, (1, 1, 1, 1, 4))),
        _layout(),
        _layout(*[(0, (1, 4))] * 30),
        _layout((0, (1, 4)), (0, (1, 4))),
        _layout((0, (1, 4)))[:-1],
        b"\xff\xff",
    ],
)
def test_layouts_that_lie(layout: bytes) -> None:
    with pytest.raises(MessageError):
        decode(*_RESULT, layout, memoryview(bytes(16)), LIMITS)


# A body's texts: another length, no UTF-8, no JSON, JSON of something else
BODIES: list[tuple[type[Message], bytes, bytes]] = [
    (ExpertResult, bytes(23), _layout((0, (1, 4)))),
    (HealthRequest, b"x", b""),
    (Failure, struct.pack("<3I", 1, 1, 1) + b"ab", b""),
    (Failure, struct.pack("<3I", 1, 1, 2**32 - 1) + b"abc", b""),
    (Failure, struct.pack("<3I", 1, 1, 1) + b"abcd", b""),
    (Failure, struct.pack("<3I", 1, 1, 1) + b"ab\xff", b""),
    *(
        (HealthReport, struct.pack("<2I", 1, len(text)) + b"r" + text, b"")
        for text in (b"", b"{", b"[1]", b"3", b'{"a": [1]}', b'{"a": null}', b"[" * 5000, b"{}" * 9)
    ),
    (HealthReport, encode(HealthReport("r", {str(n): n for n in range(257)})).body, b""),
    *(
        (StoreReply, struct.pack("<3I", 0, 0, len(text)) + text, _layout((3, (4,)), (0, (4, 0)), (0, (4, 0))))
        for text in (b'["a"]', b'["a", "a"]', b'["a", 1]', b'{"a": 1, "b": 2}', b"ab")
    ),
]


@pytest.mark.parametrize(("kind", "body", "layout"), BODIES, ids=[f"{i} {b[0].__name__}" for i, b in enumerate(BODIES)])
def test_bodies_that_lie(kind: type[Message], body: bytes, layout: bytes) -> None:
    with pytest.raises(MessageError):
        decode(_KIND[kind], body, layout, memoryview(bytes(16 if layout else 0)), LIMITS)


FRAMES: list[tuple[str, bytes]] = [
    ("short", bytes(31)),
    ("a body that is not there", struct.pack("<2Q4I", 0, 0, 1, 1, 1, 0)),
    ("a body of 4 GiB", struct.pack("<2Q4I", 0, 0, 1, 1, 2**32 - 1, 2**32 - 1) + bytes(64)),
    ("no room for the padding", struct.pack("<2Q4I", 0, 0, 1, 1, 1, 0) + b"x"),
]


@pytest.mark.parametrize("data", [data for _, data in FRAMES], ids=[name for name, _ in FRAMES])
def test_bytes_that_are_no_frame(data: bytes) -> None:
    with pytest.raises(MessageError):
        codec.unpack(data)


def test_bounds_of_a_frame_and_of_the_limits() -> None:
    with pytest.raises(MessageTooLarge):
        codec.pack(encode(batch(64, 64)), 1, 0, codec.REQUEST, 4096)
    with pytest.raises(ConfigError):
        Limits(experts=0)


_VALID = [_bytes(message) for message in SENT]


@given(
    st.sampled_from(_VALID),
    st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 255)), min_size=1, max_size=4),
    st.integers(0, 40),
)
@settings(max_examples=1500, deadline=None)
def test_mutated_messages_decode_or_are_refused(data: bytes, changes: list[tuple[int, int]], cut: int) -> None:
    mutated = bytearray(data)
    for at, value in changes:
        mutated[at % len(mutated)] = value
    if cut > 30:
        del mutated[-(cut - 30) :]
    try:
        message = _message(bytes(mutated))
    except MessageError:
        return
    for field in fields(message):  # what came through keeps the rules
        value = getattr(message, field.name)
        if isinstance(value, np.ndarray) and value.dtype.kind == "f":
            assert np.isfinite(value).all()
