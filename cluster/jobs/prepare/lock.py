"""One preparation of a store at a time, across the processes of a machine."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from .write import disk_errors


@contextmanager
def exclusive(path: Path, on_wait: Callable[[], None]) -> Iterator[None]:
    """Hold the lock file `path`; wait for whoever holds it. The kernel frees it if its holder dies.

    Args:
        on_wait: called once when someone else holds it.

    Raises:
        StoreError: the lock file cannot be made.
    """
    with disk_errors(path):
        descriptor = _acquire(path, on_wait)
    try:
        yield
    finally:
        path.unlink(missing_ok=True)  # while it is held: whoever waits sees that the name is gone
        os.close(descriptor)


def _acquire(path: Path, on_wait: Callable[[], None]) -> int:
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                on_wait()
                fcntl.flock(descriptor, fcntl.LOCK_EX)
            if _is_current(path, descriptor):
                return descriptor
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)  # its holder removed this file: lock the one that bears the name now


def _is_current(path: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(os.stat(path), os.fstat(descriptor))
    except FileNotFoundError:
        return False
