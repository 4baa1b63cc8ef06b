"""Frames: the `Frame` of channel.proto, written and read by frame.cpp, because a payload must not be copied on the way.

The bytes are what protobuf writes for the message with every field present and in order, so any protobuf implementation
reads them. What others write, who leave out what is empty, is read too, a little slower.

    offset  0  9 18 27  fixed64 client, request, settled, deadline_ns, each after its tag
           36 41        fixed32 role, kind, each after its tag
           46           body, layout, padding, payload, each after its tag and length; the payload at a multiple of 16
"""

from __future__ import annotations

from typing import Any, NamedTuple

from google.protobuf.message import DecodeError

from . import _ring
from .codec import Encoded
from .generated import channel_pb2
from .layout import ALIGNMENT
from .limits import malformed, too_large
from .options import Received

REQUEST, REPLY, POST = channel_pb2.ROLE_REQUEST, channel_pb2.ROLE_REPLY, channel_pb2.ROLE_POST
PROBE, UNKNOWN = channel_pb2.ROLE_PROBE, channel_pb2.ROLE_UNKNOWN
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


def pack(
    encoded: Encoded, client: int, request: int, settled: int, deadline_ns: int, role: int, most: int
) -> tuple[Pieces, int]:
    """The buffers that make up a frame, and their bytes together.

    Raises:
        MessageTooLarge: there are more than `most`.
    """
    arrangement = encoded.arrangement
    start = _ring.frame_head(
        client, request, settled, deadline_ns, role, encoded.kind, encoded.body, arrangement.serialized,
        arrangement.size,
    )  # fmt: skip
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
    return (_ring.frame_head(client, request, settled, deadline_ns, role, 0, b"", b"", 0),)


def unpack(data: Received) -> Frame:
    """Find the parts of a frame, whose payload stays where it is.

    Raises:
        MessageError: the bytes are no frame.
    """
    parts = _ring.frame_parts(data)
    return Frame._make(parts) if parts is not None else _unpack_by_protobuf(data)


def _unpack_by_protobuf(data: Received) -> Frame:
    """A frame as others write it, with fields left out or in another order; its payload is copied."""
    try:
        f = channel_pb2.Frame.FromString(bytes(data))
    except DecodeError:
        raise malformed(f"{len(data)} bytes that are no frame") from None
    return Frame(
        f.client, f.request, f.settled, f.deadline_ns, f.role, f.kind, f.body, f.layout, memoryview(f.payload)
    )  # fmt: skip
