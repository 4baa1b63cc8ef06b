"""A second user of this machine, `nobody`: what that one may do to files."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable

import pytest

_NOBODY = 65534
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as a second user")


def as_nobody(act: Callable[[], object]) -> str:
    """What comes of a call in a process of that user: "done", or the name of the error."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.setgroups([])
            os.setgid(_NOBODY)
            os.setuid(_NOBODY)
            act()
            said = "done"
        except BaseException as error:
            said = errno.errorcode.get(getattr(error, "errno", None) or 0, type(error).__name__)
        os.write(writer, said.encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as file:
        said = file.read()
    os.waitpid(child, 0)
    return said
