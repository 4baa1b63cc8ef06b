"""A file that changes while it is mapped is named, and ends the process that maps it."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from tiermoe.actors.store.pages import FileStamp, check_files, map_file
from tiermoe.errors import StoreError

_PAGE = 4096
_SAME, _OTHER = b"\1" * 4 * _PAGE, b"\2" * 4 * _PAGE
_WAIT_S = 60.0


def _mapped(path: Path) -> NDArray[np.uint8]:
    with open(path, "rb") as file:
        return np.frombuffer(map_file(file.fileno(), str(path), FileStamp.of(path.stat())), np.uint8)


def _write(path: Path) -> None:
    before = path.stat()
    with open(path, "r+b") as file:
        file.write(_OTHER)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))  # the change time stays


def _truncate(path: Path) -> None:
    os.truncate(path, _PAGE)


def _replace(path: Path) -> None:
    path.with_name("new").write_bytes(_SAME)
    path.with_name("new").replace(path)


_CHANGES: dict[str, tuple[Callable[[Path], None], str]] = {
    "written in place": (_write, "changed"),
    "truncated": (_truncate, "changed"),
    "replaced": (_replace, "was removed or replaced"),
    "removed": (Path.unlink, "was removed or replaced"),
}


@pytest.mark.parametrize("change", _CHANGES)
def test_a_change_is_known_while_the_file_is_mapped(tmp_path: Path, change: str) -> None:
    (tmp_path / "file").write_bytes(_SAME)
    array = _mapped(tmp_path / "file")
    check_files()
    make, how = _CHANGES[change]
    time.sleep(0.02)  # the clock of the change times ticks
    make(tmp_path / "file")
    with pytest.raises(StoreError, match=f"{tmp_path / 'file'} {how} while it was served"):
        check_files()
    (tmp_path / "file").write_bytes(_SAME)
    with pytest.raises(StoreError):  # what was read meanwhile may be in a slot
        check_files()
    assert array[0] in (1, 2)
    del array
    check_files()


def test_a_hard_link_or_another_mode_is_no_change(tmp_path: Path) -> None:
    """Guards: a copy of a store by hard links, as benchmarks make one, stopped the servers of that store."""
    path, link = tmp_path / "file", tmp_path / "link"
    path.write_bytes(_SAME)
    array = _mapped(path)
    for change in (lambda: os.link(path, link), link.unlink, lambda: path.chmod(0o600)):
        time.sleep(0.02)
        change()
        check_files()
    time.sleep(0.02)
    _write(path)
    with pytest.raises(StoreError, match="changed while it was served"):
        check_files()
    del array


_CHILD = """
import sys, time
import numpy as np
from tiermoe.actors.store.pages import FileStamp, FileWatch, map_file

path = sys.argv[1]
with open(path, "rb") as file:
    import os
    array = np.frombuffer(map_file(file.fileno(), path, FileStamp.of(os.fstat(file.fileno()))), np.uint8)
watch = FileWatch()
print("maps", flush=True)
sys.stdin.readline()
while True:
    if sys.argv[2] == "reads":
        array.max()
    time.sleep(0.01)
"""


@pytest.mark.parametrize(
    ("change", "does", "code"),
    [*((change, "waits", 1) for change in _CHANGES), ("truncated", "reads", -signal.SIGBUS)],
)
def test_a_change_ends_the_process_that_maps_the_file(tmp_path: Path, change: str, does: str, code: int) -> None:
    """A page behind the new end of a file ends its reader by itself, perhaps before the change is noticed."""
    path = tmp_path / "file"
    path.write_bytes(_SAME)
    child = subprocess.Popen(
        [sys.executable, "-c", _CHILD, str(path), does],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert child.stdout is not None
        assert select.select([child.stdout], [], [], _WAIT_S)[0]
        assert child.stdout.readline() == "maps\n"
        make, how = _CHANGES[change]
        make(path)
        _, said = child.communicate("go\n", _WAIT_S)
    finally:
        child.kill()
        child.wait()
    if does == "reads":
        assert child.returncode in (code, 1)
    else:
        assert child.returncode == code
        assert f"{path} {how} while it was served; put the file back" in said
