"""Two rings in one anonymous file, shared by two processes of a host. Linux only.

The client makes the file, writes a random nonce into it, and sends its pid and file descriptor. The server opens
/proc/<pid>/fd/<fd> and returns the nonce: only a server that sees the same processes finds the right one. The file
disappears with the last process that maps it.

    0        nonce, 32 bytes
    4096     ring of the requests: header, bytes (ring.hpp)
    then     ring of the replies
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import secrets
import stat
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from . import _ring
from .codec import Pieces
from .options import Received, Supply, good_ring_bytes

NONCE_BYTES = 32
_FIRST_RING = 4096
_HEADER = 256  # RING_HEADER in ring.hpp
_OK, _TIMEOUT, _CLOSED, _CORRUPT, _STALLED, _INTERRUPTED = range(6)  # Status in ring.hpp
_REASONS = {
    _CLOSED: "the ring was closed",
    _CORRUPT: "the ring holds what no peer of this version writes",
    _STALLED: "the peer stopped in the middle of a message",
}
_MAX_WAIT_S = 3600.0
_READ_STALL_NS = 5_000_000_000  # the longest pause of a live writer within a message


def supported() -> bool:
    return sys.platform == "linux" and hasattr(os, "memfd_create") and hasattr(_ring, "read")


class RingEnded(Exception):
    """The ring ended; the text says why."""


class Ring:
    """One direction, with one writer thread and one reader thread at a time.

    Args:
        spin_s: how long a side polls before it sleeps.
        doze_s: how long after a message the reader polls at intervals, so that the writer need not wake it.
        helps: the reader works for the writer, and leaves its core: the kernel lets a reader that wakes take the core
            of who woke it, and a writer that waits for the answer is in its way there.
    """

    def __init__(
        self, memory: mmap.mmap, offset: int, capacity: int, spin_s: float, doze_s: float = 0.0, helps: bool = False
    ) -> None:
        self._memory, self._offset, self._capacity, self._helps = memory, offset, capacity, helps
        self._spin_ns, self._doze_ns = int(spin_s * 1e9), int(doze_s * 1e9)
        self._doze_until_ns = 0

    def write(self, pieces: Pieces, timeout_s: float, stall_s: float = _MAX_WAIT_S) -> bool:
        """Write a message; False: no space within `timeout_s`.

        A message longer than the ring starts when half of the ring is free; if the reader then stalls for `stall_s`,
        the ring is broken.

        Raises:
            RingEnded: the ring is closed or broken.
        """
        timeout_ns = int(min(timeout_s, _MAX_WAIT_S) * 1e9)
        status = _ring.write(
            self._memory, self._offset, self._capacity, pieces, timeout_ns, self._spin_ns, int(stall_s * 1e9)
        )  # fmt: skip
        return True if status == _OK else self._nothing(status)

    def read(self, timeout_s: float, max_bytes: int, supply: Supply | None = None) -> Received | None:
        """The next message; None: none arrived within `timeout_s`, or a signal did.

        Args:
            supply: where to put the message, see `Supply`; if it raises, the message stays in the ring.

        Raises:
            RingEnded: the ring is closed and empty, or broken.
            ValueError: the supplied buffer has another size or is not aligned.
        """
        timeout_ns = int(min(timeout_s, _MAX_WAIT_S) * 1e9)
        data = _ring.read(
            self._memory, self._offset, self._capacity, max_bytes, timeout_ns, self._spin_ns, _READ_STALL_NS,
            self._doze_until_ns, self._helps, supply,
        )  # fmt: skip
        if isinstance(data, int):
            self._nothing(data)
            return None
        if self._doze_ns:
            self._doze_until_ns = time.monotonic_ns() + self._doze_ns
        return data if isinstance(data, bytes) else memoryview(data).toreadonly()

    @property
    def whole(self) -> int:
        """Bytes of the longest message that fits."""
        return self._capacity - 8

    def close(self) -> None:
        """Close both sides and wake waiting threads. Written messages can still be read."""
        _ring.close(self._memory, self._offset, self._capacity)

    @staticmethod
    def _nothing(status: int) -> bool:
        if status in _REASONS:
            raise RingEnded(_REASONS[status])
        return False


@dataclass(frozen=True)
class SharedRings:
    requests: Ring
    replies: Ring

    def close(self) -> None:
        self.requests.close()
        self.replies.close()


@dataclass(frozen=True)
class Offer:
    """The client's rings before the server has opened them."""

    rings: SharedRings
    nonce: bytes
    fd: int
    ring_bytes: int

    def close_fd(self) -> None:
        """Close the file: no further process can map it."""
        with contextlib.suppress(OSError):
            os.close(self.fd)


def offer(ring_bytes: int, spin_s: float) -> Offer:
    """Make rings; raises OSError without memory or such files."""
    fd = os.memfd_create("tiermoe-channel", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        size = _size(ring_bytes)
        os.ftruncate(fd, size)
        # a file that could shrink would let one side kill the other with SIGBUS
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
        memory = mmap.mmap(fd, size)
        nonce = secrets.token_bytes(NONCE_BYTES)
        memory[:NONCE_BYTES] = nonce
        return Offer(_rings(memory, ring_bytes, spin_s), nonce, fd, ring_bytes)
    except BaseException:
        os.close(fd)
        raise


def accept(
    pid: int, fd: int, ring_bytes: int, spin_s: float, doze_s: float = 0.0, helps: bool = False
) -> tuple[SharedRings, bytes] | None:
    """The rings that a client offers and the nonce found; None if the file cannot be opened or holds no rings."""
    if not supported() or not good_ring_bytes(ring_bytes):
        return None
    try:
        # O_NONBLOCK: the descriptor may be of a pipe
        here = os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
    except OSError:
        return None
    try:
        status = os.fstat(here)
        seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
        if not stat.S_ISREG(status.st_mode) or status.st_size != _size(ring_bytes):
            return None
        if fcntl.fcntl(here, fcntl.F_GET_SEALS) & seals != seals:
            return None
        memory = mmap.mmap(here, status.st_size)
    except OSError:
        return None
    finally:
        os.close(here)
    return _rings(memory, ring_bytes, spin_s, doze_s, helps), bytes(memory[:NONCE_BYTES])


def _size(ring_bytes: int) -> int:
    return _FIRST_RING + 2 * (_HEADER + ring_bytes)


def _rings(memory: mmap.mmap, ring_bytes: int, spin_s: float, doze_s: float = 0.0, helps: bool = False) -> SharedRings:
    """`doze_s` and `helps` apply to the requests, which the server reads."""
    requests = Ring(memory, _FIRST_RING, ring_bytes, spin_s, doze_s, helps)
    return SharedRings(requests, Ring(memory, _FIRST_RING + _HEADER + ring_bytes, ring_bytes, spin_s))


class ShmTransport:
    """Frames of up to `max_bytes` through shared memory; the waiting thread reads them."""

    name: Literal["shm"] = "shm"
    pull = True

    def __init__(self, rings: SharedRings, max_bytes: int, supply: Supply | None = None) -> None:
        self._rings, self._max_bytes, self._supply = rings, max_bytes, supply
        self.send_ring, self.receive_ring = rings.requests, rings.replies
        self.whole = self.send_ring.whole

    def start(self, deliver: Callable[[Received], None], lose: Callable[[str], None]) -> None:
        """`receive` reads: there is nothing to start."""

    def send(self, pieces: Pieces, size: int, timeout_s: float, stall_s: float) -> bool:
        return self.send_ring.write(pieces, timeout_s, stall_s)

    def receive(self, timeout_s: float) -> Received | None:
        return self.receive_ring.read(timeout_s, self._max_bytes, self._supply)

    def close(self) -> None:
        self._rings.close()
