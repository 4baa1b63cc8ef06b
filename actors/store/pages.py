"""Mapped files that fail or change while a process serves from them: a `StoreError` that names the file.

- A truncated file or a failing disk: reading such a page would end the process by SIGBUS. `map_file` lets the read see
  zeros instead and remembers the file (`kernels/cpu/pages_module.cpp`).
- A file that was written, replaced or removed: its stamp is compared with the one it was mapped with, `LOOK_S` seconds
  after the last check, by the first caller: a token that is sent, a result of a worker, a health check.

Whoever sends results away calls `check_pages` before it does. What was found stays until the mapping is gone, since
slots and keys may hold what was read meanwhile; a `StoreGuard` says it, and when a new process can serve again.
"""

from __future__ import annotations

import gc
import mmap
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...errors import StoreError
from ...kernels import _cpu

LOOK_S = 1.0
_AGAIN_S = 60.0  # at least, between verifications of files that have not changed since
_REMEDY = "put the file back or prepare the model again; once it verifies, it is served again"

_paths: dict[int, str] = {}  # by number of the mapping
_descriptors: dict[int, int] = {}
_watched: dict[int, _Watched] = {}  # by number of a mapping that lives
_changed: dict[int, str] = {}  # of those, what happened
_looking = threading.Lock()
_looked_s = 0.0


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
        and leaves the content as it is; the last link that goes is a file that was removed or replaced.
        """
        if (self.nbytes, self.mtime_ns, self.inode) != (now.nbytes, now.mtime_ns, now.inode) or not now.links:
            return True
        kept = (self.links, self.mode, self.owner) == (now.links, now.mode, now.owner)
        return kept and self.ctime_ns != now.ctime_ns


@dataclass
class _Watched:
    stamp: FileStamp


def map_file(descriptor: int, path: str, stamp: FileStamp, writable: bool = False) -> mmap.mmap:
    """Map a whole file and watch it.

    Args:
        writable: what is written stays in this process; the file is never written to.

    Raises:
        OSError, ValueError: it cannot be mapped, or is empty.
    """
    pages = mmap.mmap(descriptor, 0, access=mmap.ACCESS_COPY if writable else mmap.ACCESS_READ)
    file = _cpu.guard_pages(np.frombuffer(pages, np.uint8).ctypes.data, len(pages))
    _descriptors[file] = os.dup(descriptor)  # also where the folder is closed to this process by now
    _paths[file], _watched[file] = path, _Watched(stamp)
    weakref.finalize(pages, _release, file).atexit = False
    return pages


def _release(file: int) -> None:
    _watched.pop(file, None)
    _changed.pop(file, None)
    os.close(_descriptors.pop(file))
    _cpu.release_pages(file)


def problem() -> StoreError | None:
    """What happened to a file that this process maps; None: all are unchanged since they were mapped."""
    if (found := _cpu.bad_page()) is not None:
        file, offset = found
        return StoreError(
            f"{_paths[file]} cannot be read at byte {offset}: it was truncated, or its disk fails", _REMEDY
        )
    if time.monotonic() - _looked_s >= LOOK_S:
        _look()
    for what in list(_changed.values()):
        return StoreError(what, _REMEDY)
    return None


def check_pages() -> None:
    """Raises StoreError: a mapped file cannot be read or has changed, so what was computed since is wrong."""
    if (found := problem()) is not None:
        raise found


def _look() -> None:
    """Compare the stamps of all mapped files; one thread at a time."""
    global _looked_s
    with _looking:
        found = _differences()
        if found:
            gc.collect()  # a mapping without readers is no reason
        _changed.update({file: what for file, (watched, what) in found.items() if _watched.get(file) is watched})
        _looked_s = time.monotonic()


def _differences() -> dict[int, tuple[_Watched, str]]:
    """State of a mapping whose file may have been written."""
    found = {}
    for file, watched in list(_watched.items()):
        try:
            now = os.fstat(_descriptors[file])
        except (KeyError, OSError) as error:  # KeyError: it was released meanwhile
            found[file] = watched, f"{_paths[file]} cannot be looked at while it is served ({error})"
            continue
        seen = FileStamp.of(now)
        if watched.stamp.written_since(seen):
            how = "changed" if now.st_nlink else "was removed or replaced"
            found[file] = watched, f"{_paths[file]} {how} while it was served"
        else:
            watched.stamp = seen  # from here on the next write is seen by its change time again
    return found


def _stamps_now() -> dict[str, FileStamp | None]:
    """Of the mapped files; None: it is not there."""
    found: dict[str, FileStamp | None] = {}
    for path in {_paths[file] for file in list(_watched)}:
        try:
            found[path] = FileStamp.of(os.stat(path))
        except OSError:
            found[path] = None
    return found


def read_pages(arrays: Iterable[NDArray[Any]]) -> None:
    """Read a byte of each page of C-contiguous runs, then `check_pages`: before views of mapped files are sent."""
    for array in arrays:
        for run in array:
            if run.flags.c_contiguous:
                run.reshape(-1).view(np.uint8)[:: mmap.PAGESIZE].max(initial=0)
    check_pages()


class StoreGuard:
    """What a process that serves from mapped files says of them.

    serving -> damaged (a file changed, or cannot be read: nothing is sent) -> mended (the files verify again)

    A mended process still has the old mappings and results from them: its watcher restarts it. The files are
    verified by a thread, when their stamps have stood still for `LOOK_S` and are others than at the last attempt, or a
    minute after it.

    Args:
        verify: hashes the files, all or only those whose stamp differs from the verified one (`whole`); raises
            StoreError while they are not what is served.
    """

    def __init__(self, verify: Callable[[bool], None]) -> None:
        self._verify = verify
        self._lock = threading.Lock()
        self._mended = False
        self._thread: threading.Thread | None = None

    def state(self) -> dict[str, str]:
        """`state`, and with one that is not "serving" the `problem`, which names the file, and its `remedy`."""
        if (found := problem()) is None:
            return {"state": "serving"}
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._await_files, name="tiermoe-store-guard", daemon=True)
                self._thread.start()
        return {"state": "mended" if self._mended else "damaged", "problem": found.what, "remedy": found.remedy}

    def _await_files(self) -> None:
        tried: dict[str, FileStamp | None] | None = None
        again_s = 0.0
        before = _stamps_now()
        while not self._mended:
            time.sleep(LOOK_S)
            now = _stamps_now()
            still, before = now == before, now
            if not still or None in now.values() or (now == tried and time.monotonic() < again_s):
                continue
            tried, begin_s = now, time.monotonic()
            try:
                # a page that could not be read leaves no mark on the stamps
                self._verify(_cpu.bad_page() is not None)
                self._mended = True
            except StoreError:
                took_s = time.monotonic() - begin_s
                again_s = time.monotonic() + max(_AGAIN_S, 10 * took_s)
