"""Mapped files that outlive a bad page: a truncated file or a failing disk becomes a `StoreError` that names it.

Reading such a page would end the process by SIGBUS. `map_file` lets the read see zeros instead and remembers the file
(`kernels/cpu/pages_module.cpp`); whoever sends results away calls `check_pages` before it does.
"""

from __future__ import annotations

import mmap
import weakref
from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...errors import StoreError
from ...kernels import _cpu

_paths: dict[int, str] = {}


def map_file(descriptor: int, path: str) -> mmap.mmap:
    """Map a whole file read-only. Raises OSError or ValueError: it cannot be mapped, or is empty."""
    pages = mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ)
    file = _cpu.guard_pages(np.frombuffer(pages, np.uint8).ctypes.data, len(pages))
    _paths[file] = path
    weakref.finalize(pages, _cpu.release_pages, file).atexit = False
    return pages


def check_pages() -> None:
    """Raises StoreError: a page of a mapped file could not be read, so what was computed since is wrong."""
    if (found := _cpu.bad_page()) is not None:
        file, offset = found
        raise StoreError(
            f"{_paths[file]} cannot be read at byte {offset}: it was truncated, or its disk fails",
            "put the file back or prepare the model again, and restart the runtime",
        )


def read_pages(arrays: Iterable[NDArray[Any]]) -> None:
    """Read a byte of each page of C-contiguous runs, then `check_pages`: before views of mapped files are sent."""
    for array in arrays:
        for run in array:
            if run.flags.c_contiguous:
                run.reshape(-1).view(np.uint8)[:: mmap.PAGESIZE].max(initial=0)
    check_pages()
