"""Mapped files that change while a process serves from them: the process ends, and names the file.

A file that is written, truncated, replaced or removed leaves what was read meanwhile in slots and keys. So nothing of
such a process is worth keeping. A `FileWatch` compares the stamp of each mapped file with the one that it was mapped
with, every `LOOK_S` seconds. Where one differs it says so on standard error, which is the process's log, and ends the
process. Who made the process makes it again, and it opens its files anew: while one does not verify, the error of its
start names the file (`cluster.supervision`). Replicas are replaced by a run that wants them fitted to a text: those
that a process maps stay as they are until it ends.

Reading a page behind the end of a truncated file, or of a failing disk, ends the process at once by SIGBUS. Where
experts are read past the page cache (`core/disk_link.hpp`), no page of theirs is touched: a mapping says where they
lie.
"""

from __future__ import annotations

import contextlib
import gc
import mmap
import os
import sys
import threading
import weakref
from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from ...errors import StoreError

LOOK_S = 1.0


@dataclass(frozen=True)
class FileStamp:
    """Detects that a file was written or replaced since it was verified; a writer cannot set the change time back."""

    nbytes: int
    mtime_ns: int
    ctime_ns: int
    inode: int
    links: int = 1
    mode: int = 0
    owner: int = 0

    @classmethod
    def of(cls, status: os.stat_result) -> FileStamp:
        return cls(
            status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino, status.st_nlink, status.st_mode,
            status.st_uid,
        )  # fmt: skip

    def written_since(self, now: FileStamp) -> bool:
        """Whether the content may be another one now. A hard link, a mode or an owner that changes sets the change time
        and leaves the content as it is, and so does the last link that goes.
        """
        if (self.nbytes, self.mtime_ns, self.inode) != (now.nbytes, now.mtime_ns, now.inode):
            return True
        kept = (self.links, self.mode, self.owner) == (now.links, now.mode, now.owner)
        return kept and self.ctime_ns != now.ctime_ns


@dataclass(eq=False)
class _Mapping:
    """A mapped file. descriptor: of the open file, which also tells where its folder is closed to this process.
    address: of its first byte. replaceable: as of `map_file`.
    """

    path: str
    descriptor: int
    stamp: FileStamp
    address: int
    replaceable: bool

    def change(self) -> str | None:
        """What happened to the file; None: nothing."""
        try:
            now = os.fstat(self.descriptor)
        except OSError as error:
            return f"{self.path} cannot be looked at while it is served ({error})"
        seen = FileStamp.of(now)
        if not (seen.links or self.replaceable):
            return f"{self.path} was removed or replaced while it was served"
        if self.stamp.written_since(seen):
            return f"{self.path} changed while it was served"
        self.stamp = seen  # from here on the next write is seen by its change time again
        return None

    def release(self) -> None:
        _mappings.discard(self)
        os.close(self.descriptor)


_mappings: set[_Mapping] = set()  # that live


def map_file(
    descriptor: int, path: str, stamp: FileStamp, writable: bool = False, replaceable: bool = False
) -> mmap.mmap:
    """Map a whole file, which `check_files` looks at from now on.

    Args:
        writable: what is written stays in this process; the file is never written to.
        replaceable: it may be removed or replaced, which leaves this mapping as it is.

    Raises:
        OSError, ValueError: it cannot be mapped, or is empty.
    """
    pages = mmap.mmap(descriptor, 0, access=mmap.ACCESS_COPY if writable else mmap.ACCESS_READ)
    address = np.frombuffer(pages, np.uint8, 1).ctypes.data
    mapping = _Mapping(path, os.dup(descriptor), stamp, address, replaceable)
    _mappings.add(mapping)
    weakref.finalize(pages, mapping.release).atexit = False
    return pages


def files_at(addresses: Iterable[int]) -> list[tuple[str, int, int, int]]:
    """The mapped files in which these addresses lie: path, descriptor, address of the first byte, bytes.

    Raises:
        ValueError: an address is in none.
    """
    known = sorted(_mappings, key=lambda mapping: mapping.address)
    starts, found = [mapping.address for mapping in known], set[_Mapping]()
    for address in addresses:
        index = bisect_right(starts, address) - 1
        if index < 0 or address >= starts[index] + known[index].stamp.nbytes:
            raise ValueError("an expert lies in no mapped file")
        found.add(known[index])
    return [(m.path, m.descriptor, m.address, m.stamp.nbytes) for m in known if m in found]


def check_files() -> None:
    """Compare the stamps of all mapped files. Raises StoreError: one changed since it was mapped."""
    for mapping in list(_mappings):
        if (what := mapping.change()) is None:
            continue
        gc.collect()  # a mapping without readers is no reason
        if mapping in _mappings:
            raise StoreError(what, "put the file back or prepare the model again, and it is served once it verifies")


class FileWatch:
    """Ends this process when a file that it maps changes; a thread that looks every `LOOK_S` seconds."""

    def __init__(self) -> None:
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, name="tiermoe-file-watch", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Look no more. Safe to call twice."""
        self._end.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._end.wait(LOOK_S):
            try:
                check_files()
            except StoreError as error:
                with contextlib.suppress(OSError, ValueError):  # the log is on a full disk, or closed
                    print(error, file=sys.stderr, flush=True)
                os._exit(1)
