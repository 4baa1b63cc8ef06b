"""The rings: order, wrap-around, messages longer than the ring, waiting, ends, and a peer that writes nonsense."""

from __future__ import annotations

import os
import struct
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tiermoe.proto import shm

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="shared memory is Linux only")
_MOST = 1 << 24
_RING = 4096
_HEAD, _TAIL, _BYTES = 4096, 4096 + 64, 4096 + 256


def _pair(ring_bytes: int = _RING) -> tuple[shm.SharedRings, shm.SharedRings]:
    """Both ends, mapped separately, as two processes have them."""
    offer = shm.offer(ring_bytes, 0.0)
    accepted = shm.accept(os.getpid(), offer.fd, ring_bytes, 0.0)
    assert accepted is not None
    rings, nonce = accepted
    assert nonce == offer.nonce
    offer.close_fd()
    return offer.rings, rings


@given(st.lists(st.binary(max_size=1500), max_size=40))
@settings(max_examples=50, deadline=None)
def test_messages_come_whole_and_in_order(messages: list[bytes]) -> None:
    ours, theirs = _pair()
    for message in messages:  # more bytes than the ring has, so that it wraps at all places
        assert ours.requests.write((message[:7], message[7:]), 0.0)
        assert theirs.requests.read(0.0, _MOST) == message
    assert theirs.requests.read(0.0, _MOST) is None


@pytest.mark.parametrize("size", [0, 1, 4088, 4096, 5001, 300_001])
def test_a_message_may_be_longer_than_the_ring(size: int) -> None:
    ours, theirs = _pair()
    data = np.random.default_rng(0).integers(0, 256, size, np.uint8).tobytes()
    writer = threading.Thread(target=lambda: [ours.requests.write((data[:11], data[11:]), 5.0) for _ in range(3)])
    writer.start()
    assert all(theirs.requests.read(5.0, _MOST) == data for _ in range(3))
    writer.join(5.0)
    assert not writer.is_alive()


def test_no_torn_reads_between_threads() -> None:
    ours, theirs = _pair()
    rng = np.random.default_rng(1)
    sizes = [int(n) for n in rng.integers(0, 3000, 3000)]
    parked = shm.Ring(theirs.requests._memory, 4096, _RING, 20e-6)

    def write() -> None:
        for number, size in enumerate(sizes):
            ours.requests.write((struct.pack("<I", number), bytes([number % 251]) * size), 5.0)

    writer = threading.Thread(target=write)
    writer.start()
    for number, size in enumerate(sizes):
        assert parked.read(5.0, _MOST) == struct.pack("<I", number) + bytes([number % 251]) * size
    writer.join(5.0)


def test_close_wakes_who_waits_and_keeps_what_was_written() -> None:
    ours, theirs = _pair()
    ours.requests.write((b"last",), 0.0)
    ended = threading.Event()

    def wait() -> None:
        assert theirs.requests.read(5.0, _MOST) == b"last"
        with pytest.raises(shm.RingEnded, match="closed"):
            theirs.requests.read(5.0, _MOST)
        ended.set()

    reader = threading.Thread(target=wait)
    reader.start()
    ours.close()
    assert ended.wait(5.0)
    with pytest.raises(shm.RingEnded):
        ours.requests.write((b"more",), 0.0)
    reader.join(5.0)


@pytest.mark.parametrize(
    ("at", "value"),
    [(_HEAD, 2**63), (_HEAD, 3), (_HEAD, _RING + 8), (_TAIL, 8), (_BYTES, 2**64 - 1), (_BYTES, _MOST + 1)],
)
def test_nonsense_in_shared_memory_is_refused(at: int, value: int) -> None:
    ours, theirs = _pair()
    assert ours.requests.write((b"12345678",), 0.0)
    ours.requests._memory[at : at + 8] = struct.pack("<Q", value)
    with pytest.raises(shm.RingEnded, match="no peer"):
        theirs.requests.read(0.0, _MOST)
    if at == _HEAD:  # a producer reads the others only where they are its own
        with pytest.raises(shm.RingEnded, match="no peer"):
            ours.requests.write((b"x",), 0.0)


def test_only_sealed_memory_of_the_right_size_is_accepted(tmp_path: Path) -> None:
    assert shm.accept(os.getpid(), 10_000, _RING, 0.0) is None
    assert shm.accept(2**22 + 1, 0, _RING, 0.0) is None
    read_end, write_end = os.pipe()
    plain = os.open(tmp_path / "plain", os.O_RDWR | os.O_CREAT)
    unsealed = os.memfd_create("x")
    offer = shm.offer(_RING, 0.0)
    try:
        for fd in (plain, unsealed):
            os.ftruncate(fd, os.fstat(offer.fd).st_size)
        assert [shm.accept(os.getpid(), fd, _RING, 0.0) for fd in (read_end, plain, unsealed)] == [None] * 3
        assert shm.accept(os.getpid(), offer.fd, 2 * _RING, 0.0) is None
        assert shm.accept(os.getpid(), offer.fd, 5000, 0.0) is None
        with pytest.raises(OSError, match="not permitted"):
            os.ftruncate(offer.fd, 0)
    finally:
        for fd in (read_end, write_end, plain, unsealed):
            os.close(fd)
        offer.close_fd()


@pytest.mark.parametrize("supplied", [False, True])
def test_a_reader_that_dozes_misses_nothing(supplied: bool) -> None:
    """For a while after a message it looks by itself; then it sleeps and is woken as ever.

    Guards against a doze that forgot where messages are to be put.
    """
    offer = shm.offer(_RING, 0.0)
    accepted = shm.accept(os.getpid(), offer.fd, _RING, 0.0, doze_s=0.01)
    offer.close_fd()
    reader, writer = accepted[0].requests, offer.rings.requests
    got: list[bytes | memoryview | None] = []
    took = threading.Semaphore(0)

    def supply(nbytes: int) -> np.ndarray | None:
        return np.zeros(nbytes, np.uint8) if supplied else None

    def read() -> None:
        while True:
            try:
                got.append(reader.read(20.0, _MOST, supply))
            except shm.RingEnded:
                return
            finally:
                took.release()

    thread = threading.Thread(target=read)
    thread.start()
    for i in range(40):
        assert writer.write((bytes([i]),), 0.0)
        assert took.acquire(timeout=20.0)
        if i % 10 == 0:
            threading.Event().wait(0.02)  # longer than it dozes: it sleeps now
    writer.close()
    thread.join(20.0)
    assert not thread.is_alive()
    assert got == [bytes([i]) for i in range(40)]
    assert {type(message) for message in got} == {memoryview if supplied else bytes}


def test_a_message_is_put_where_the_reader_wants_it() -> None:
    ours, theirs = _pair()
    asked: list[int] = []
    place = np.zeros(5001, np.uint8)

    def supply(nbytes: int) -> np.ndarray | None:
        asked.append(nbytes)
        return place[:nbytes] if nbytes >= 1024 else None

    data = np.random.default_rng(0).integers(0, 256, 5001, np.uint8).tobytes()  # longer than the ring
    writer = threading.Thread(target=ours.replies.write, args=((data,), 5.0))
    writer.start()
    received = theirs.replies.read(5.0, _MOST, supply)
    writer.join()
    assert isinstance(received, memoryview)
    assert received.readonly
    assert received == data
    assert place.tobytes() == data
    assert ours.replies.write((b"short",), 0.0)
    assert theirs.replies.read(0.0, _MOST, supply) == b"short"
    assert asked == [5001, 5]


@pytest.mark.parametrize("part", [slice(1023), slice(1025), slice(1, 1025)])
def test_memory_that_does_not_fit_leaves_the_message_there(part: slice) -> None:
    given = np.zeros(1040, np.uint8)[part]
    ours, theirs = _pair()
    assert ours.replies.write((bytes(1024),), 0.0)
    with pytest.raises(ValueError, match="another size, or is not aligned"):
        theirs.replies.read(0.0, _MOST, lambda _: given)
    with pytest.raises(TypeError):
        theirs.replies.read(0.0, _MOST, lambda _: 3)
    with pytest.raises(BufferError):
        theirs.replies.read(0.0, _MOST, lambda _: bytes(1024))  # nobody may write there
    assert theirs.replies.read(0.0, _MOST) == bytes(1024)
