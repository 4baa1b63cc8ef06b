"""Another user of the machine: what that one can replace is not opened, and what is ours cannot be reached."""

from __future__ import annotations

import errno
import os
import stat
import sys
from contextlib import closing
from pathlib import Path

import pytest
from ray._common.utils import try_to_create_directory
from second_user import as_nobody, needs_root

from tiermoe.cluster.api.records import RequestRecord
from tiermoe.cluster.api.request_log import RequestLog
from tiermoe.cluster.registry import Registry
from tiermoe.cluster.scratch import _INSIDE, _MAX_TMPDIR, Scratch
from tiermoe.errors import ConfigError, RuntimeFailure
from tiermoe.proto.private import keep_code_private, open_own, own_folder, reachable
from tiermoe.proto.tls import read_private


def _open_to_all(folder: Path) -> Path:
    """A folder that everybody gets to, and may write, as Ray makes them."""
    for above in (folder, *folder.parents):
        if above.stat().st_uid == os.geteuid() and not above.stat().st_mode & 0o001:
            above.chmod(0o711)
    folder.chmod(0o777)
    return folder


@needs_root
def test_a_second_user_does_not_get_at_a_local_ray(tmp_path: Path) -> None:
    """Ray made its temporary folder, the session's, `sockets` and `logs` writable to all: it was our private one."""
    with closing(Scratch()) as scratch:
        sockets = scratch.ray / "session_1" / "sockets"
        for folder in (scratch.ray, sockets.parent, sockets):
            try_to_create_directory(str(folder))  # Ray's own
        (sockets / "raylet").touch()
        assert stat.S_IMODE(sockets.stat().st_mode) == 0o777
        counters = own_folder(sockets.parent / "tiermoe-server") / "counters"
        counters.touch()
        assert as_nobody(lambda: os.listdir(scratch.path)) == "EACCES"
        assert as_nobody(lambda: (sockets / "raylet").rename(sockets / "old")) == "EACCES"
        assert as_nobody(counters.unlink) == "EACCES"
        assert as_nobody(lambda: (scratch.path / "inductor").mkdir()) == "EACCES"
        assert not reachable(sockets)


def test_the_paths_of_rays_sockets_fit_a_socket_s_address() -> None:
    base = "/" + "x" * (_MAX_TMPDIR - 1)
    path = f"{base}/tiermoe-12345678/{_INSIDE}/session_2026-11-25_19-52-07_123456_4194304/sockets/plasma_store"
    assert len(path) == 107


@needs_root
@pytest.mark.parametrize("kind", ["link", "hard link", "file"])
def test_a_log_that_a_second_user_replaces_is_not_written(tmp_path: Path, kind: str) -> None:
    """The appender opened what had been put in the log's place: lines went to a file of ours that a shell runs."""
    folder, profile = _open_to_all(tmp_path), tmp_path.parent / f"{tmp_path.name}-profile"
    profile.write_text("mine\n")
    log, dropped = folder / "log", list[None]()
    sink = RequestLog("text", log, lambda: dropped.append(None))
    try:
        log.rename(folder / "old")  # as another could: the folder is writable to all
        if kind == "hard link":
            os.link(profile, log)  # where fs.protected_hardlinks is 0
        else:
            put = (lambda: log.symlink_to(profile)) if kind == "link" else log.touch
            assert as_nobody(put) == "done"
        sink(RequestRecord("one", "GET", "/evil", status=404))
        sink(RequestRecord("two", "GET", "/evil", status=404))
    finally:
        sink.close()
    assert profile.read_text() == "mine\n"
    assert log.read_text() == ("" if kind == "file" else "mine\n")
    assert len(dropped) == 2  # the thread goes on, and counts them


@needs_root
def test_secrets_of_a_second_user_are_refused(tmp_path: Path) -> None:
    folder, ours = _open_to_all(tmp_path), tmp_path / "ours"
    ours.write_text("secret")
    ours.chmod(0o600)

    def theirs() -> None:
        (folder / "theirs").write_text("secret")
        (folder / "theirs").chmod(0o600)
        (folder / "their link").symlink_to(ours)

    assert as_nobody(theirs) == "done"
    for name in ("theirs", "their link"):
        with pytest.raises(ConfigError, match="another user's"):
            read_private(folder / name, "key file")
    (folder / "our link").symlink_to("ours")  # as Kubernetes makes them
    assert read_private(folder / "our link", "key file") == b"secret"


def test_links_that_lead_nowhere_and_in_circles_raise(tmp_path: Path) -> None:
    (tmp_path / "a").symlink_to("b")
    with pytest.raises(FileNotFoundError):
        open_own(tmp_path / "a", os.O_RDONLY)
    (tmp_path / "b").symlink_to("a")
    with pytest.raises(OSError, match="symbolic links"):
        open_own(tmp_path / "a", os.O_RDONLY)


def test_a_path_that_is_not_a_file_and_a_pipe_without_reader_raise(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(OSError, match=f"Errno {errno.ENXIO}"):
        open_own(tmp_path / "fifo", os.O_WRONLY)
    with pytest.raises(PermissionError, match="no plain file"):
        open_own(tmp_path, os.O_RDONLY)


@pytest.mark.parametrize("how", ["link", "file", "mode", "above"])
def test_a_folder_that_others_can_change_is_refused(tmp_path: Path, how: str) -> None:
    folder = tmp_path / "above" / "folder"
    folder.parent.mkdir(mode=0o755)
    _open_to_all(tmp_path).chmod(0o755)
    if how == "link":
        folder.symlink_to(tmp_path)
    elif how == "file":
        folder.touch()
    elif how == "mode":
        folder.mkdir()
        folder.chmod(0o777)
    else:
        folder.parent.chmod(0o777)
    with pytest.raises((PermissionError, FileExistsError)):
        own_folder(folder)
    with pytest.raises(RuntimeFailure), Registry(folder).entered("aaaaaa", "h:1", local=True):
        pytest.fail("entered")
    if how == "above":
        folder.parent.chmod(0o1777)  # /tmp
        folder.chmod(0o775)  # made with a umask of 002
        assert own_folder(folder) == folder
        assert stat.S_IMODE(folder.stat().st_mode) == 0o755


@pytest.mark.skipif(sys.platform == "darwin", reason="caches are elsewhere")
def test_compiled_code_is_where_only_the_user_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch takes /tmp/torchinductor_USER, which another user may have made before, and runs what is in it."""
    for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"):
        monkeypatch.setenv(name, "")  # put back afterwards
        monkeypatch.delenv(name)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    keep_code_private()
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(tmp_path / "tiermoe" / "compiled")
    assert stat.S_IMODE((tmp_path / "tiermoe" / "compiled").stat().st_mode) == 0o700
    (tmp_path / "tiermoe" / "compiled").chmod(0o777)
    for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"):
        monkeypatch.delenv(name)
    keep_code_private()
    other = Path(os.environ["TORCHINDUCTOR_CACHE_DIR"])
    assert tmp_path not in other.parents
    assert stat.S_IMODE(other.stat().st_mode) == 0o700
    assert os.environ["TRITON_CACHE_DIR"] == str(other / "triton")
