"""Frames: the `Frame` of channel.proto, written and read by hand, because a payload must not be copied on the way.

The bytes are what protobuf writes for the message with every field present and in order, so any protobuf implementation
reads them. What others write, who leave out what is empty, is read too, a little slower.

    offset  0  9 18 27  fixed64 client, request, settled, deadline_ns, each after its tag
           36 41        fixed32 role, kind, each after its tag
           46           body, layout, padding, payload, each after its tag and length; the payload at a multiple of 16
"""

from __future__ import annotations

import functools
import struct
from typing import Any, NamedTuple

from google.protobuf.message import DecodeError

from .codec import Encoded
from .generated import channel_pb2
from .layout import ALIGNMENT
from .limits import malformed, too_large

REQUEST, REPLY, POST = channel_pb2.ROLE_REQUEST, channel_pb2.ROLE_REPLY, channel_pb2.ROLE_POST
PROBE, UNKNOWN = channel_pb2.ROLE_PROBE, channel_pb2.ROLE_UNKNOWN
_FIXED = struct.Struct("<BQBQBQBQBIBI")
_TAGS = (0x09, 0x11, 0x19, 0x21, 0x2D, 0x35)
_BODY, _LAYOUT, _PADDING, _PAYLOAD = 0x3A, 0x42, 0x4A, 0x52
_NO_BYTES = tuple(bytes(n) for n in range(ALIGNMENT))

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


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


@functools.lru_cache(maxsize=4096)
def _after_body(layout: bytes, before: int, size: int) -> bytes:
    """Layout, padding and the payload's tag and length, where `before` bytes (modulo 16) come first."""
    head = bytes((_LAYOUT,)) + _varint(len(layout)) + layout
    tail = bytes((_PAYLOAD,)) + _varint(size)
    gap = -(before + len(head) + 2 + len(tail)) % ALIGNMENT
    return head + bytes((_PADDING, gap)) + _NO_BYTES[gap] + tail


def pack(
    encoded: Encoded, client: int, request: int, settled: int, deadline_ns: int, role: int, most: int
) -> tuple[Pieces, int]:
    """The buffers that make up a frame, and their bytes together.

    Raises:
        MessageTooLarge: there are more than `most`.
    """
    body, arrangement = encoded.body, encoded.arrangement
    fixed = _FIXED.pack(
        0x09, client, 0x11, request, 0x19, settled, 0x21, deadline_ns, 0x2D, role, 0x35, encoded.kind
    )  # fmt: skip
    start = fixed + bytes((_BODY,)) + _varint(len(body)) + body
    start += _after_body(arrangement.serialized, len(start) % ALIGNMENT, arrangement.size)
    size = len(start) + arrangement.size
    if size > most:
        raise too_large(size, most)
    pieces: list[Any] = [start]
    for gap, array in zip(arrangement.gaps, encoded.arrays, strict=True):
        if gap:
            pieces.append(_NO_BYTES[gap])
        if array.nbytes:
            pieces.append(array)
    return tuple(pieces), size


def bare(client: int, request: int, settled: int, deadline_ns: int, role: int) -> Pieces:
    """A frame without a message."""
    fixed = _FIXED.pack(0x09, client, 0x11, request, 0x19, settled, 0x21, deadline_ns, 0x2D, role, 0x35, 0)
    return (fixed + bytes((_BODY, 0, _LAYOUT, 0, _PADDING, 0, _PAYLOAD, 0)),)


def unpack(data: bytes) -> Frame:
    """Find the parts of a frame.

    Raises:
        MessageError: the bytes are no frame.
    """
    if len(data) >= _FIXED.size:
        t1, client, t2, request, t3, settled, t4, deadline_ns, t5, role, t6, kind = _FIXED.unpack_from(data)
        if (t1, t2, t3, t4, t5, t6) == _TAGS:
            _, body_at, body_end = _field(data, _FIXED.size, _BODY)
            _, layout_at, layout_end = _field(data, body_end, _LAYOUT)
            _, _, padding_end = _field(data, layout_end, _PADDING)
            found, payload_at, payload_end = _field(data, padding_end, _PAYLOAD)
            if found and payload_end == len(data):
                return Frame(
                    client, request, settled, deadline_ns, role, kind,
                    data[body_at:body_end], data[layout_at:layout_end], memoryview(data)[payload_at:],
                )  # fmt: skip
    return _unpack_by_protobuf(data)


def _field(data: bytes, at: int, tag: int) -> tuple[bool, int, int]:
    """Whether the field of bytes with this tag is at `at`, and where its bytes begin and end."""
    size, shift = 0, 0
    try:
        if data[at] != tag:
            return False, at, at
        while True:
            at += 1
            byte = data[at]
            size |= (byte & 0x7F) << shift
            if byte < 0x80:
                break
            shift += 7
            if shift > 28:
                return False, at, at
    except IndexError:
        return False, at, at
    return at + 1 + size <= len(data), at + 1, at + 1 + size


def _unpack_by_protobuf(data: bytes) -> Frame:
    """A frame as others write it, with fields left out or in another order; its payload is copied."""
    try:
        f = channel_pb2.Frame.FromString(data)
    except DecodeError:
        raise malformed(f"{len(data)} bytes that are no frame") from None
    return Frame(
        f.client, f.request, f.settled, f.deadline_ns, f.role, f.kind, f.body, f.layout, memoryview(f.payload)
    )  # fmt: skip
