"""How fast a disk gives files past the page cache, as `core/disk_link.hpp` reads experts from them.

Without torch.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from ...errors import StoreError
from ..core import _core

READERS = 8  # threads: a disk of flash reads its best with several pieces under way
MEASURED_BYTES = 64 << 20
_WEIGHTS = (".safetensors", ".gguf")


def weights_in(folders: Sequence[Path]) -> Path | None:
    """The largest file of weights of the first of these folders that has one: what a disk is measured by."""
    for folder in folders:
        files = [file for file in (folder.iterdir() if folder.is_dir() else ()) if file.suffix in _WEIGHTS]
        if files:
            return max(files, key=lambda file: file.stat().st_size)
    return None


def read_gbps(file: Path, nbytes: int = MEASURED_BYTES) -> tuple[float, bool]:
    """1e9 bytes per second of pieces from all over a file, and whether they were read past the page cache.

    Raises:
        StoreError: it cannot be opened, or read.
    """
    try:
        descriptor = os.open(file, os.O_RDONLY)
    except OSError as error:
        raise StoreError(f"{file} cannot be opened ({error.strerror})", "give one that can be read") from error
    try:
        link = _core.DiskLink([(str(file), descriptor, 0, os.fstat(descriptor).st_size)], READERS)
        try:
            return link.measure(nbytes) / 1e9, link.direct
        finally:
            link.close()
    finally:
        os.close(descriptor)
