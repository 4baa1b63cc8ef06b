"""Files and folders that no other user of the machine can change, replace, or lead elsewhere.

A file that is opened again by its name may be another one by then, where others may write into its folder: a file of
theirs, or a link to one of ours. So every such file is opened by `open_own`. What this user's processes run, or keep
for each other, is in a folder that `own_folder` made.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import os
import shutil
import stat
import sys
import tempfile
from pathlib import Path

_LINKS = 8  # that are followed, one after the other


def open_own(path: Path | str, flags: int) -> int:
    """Open a file by name, where it is this user's or root's; its descriptor.

    A symbolic link is followed where its owner is this user or root, too (such as Kubernetes makes for secrets). A file
    to be written has no second name: it could be any file of ours. A FIFO that nobody reads raises and does not block.

    Args:
        flags: as those of `os.open`; a file that is made has mode 0600.

    Raises:
        PermissionError: it is another user's, a link of another user's, a file to be written that has several names, or
            neither a file nor a FIFO.
        OSError: what the system says.
    """
    where = os.fspath(path)
    for _ in range(_LINKS):
        try:
            opened = os.open(where, flags | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK, 0o600)
        except OSError as error:
            if error.errno != errno.ELOOP:
                raise
            where = _target(where)
            continue
        try:
            _check(opened, where, writes=bool(flags & (os.O_WRONLY | os.O_RDWR)))
            os.set_blocking(opened, True)
        except BaseException:
            os.close(opened)
            raise
        return opened
    raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path))


def own_folder(path: Path) -> Path:
    """Make a folder with mode 0700 where it is missing; what others could have put there, or can change, is refused.
    From a group the right to write is taken.

    Raises:
        PermissionError: it is no folder, another user's, others may write it, or they may replace it: all may write a
            folder above it, which has no sticky bit. Whose the folder above is, is not asked: check one of ours, too.
        OSError: it cannot be made.
    """
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    about = path.lstat()
    if not stat.S_ISDIR(about.st_mode):
        raise PermissionError(errno.EPERM, "it is no folder", str(path))
    if about.st_uid != os.geteuid():
        raise PermissionError(errno.EPERM, "it is another user's", str(path))
    if about.st_mode & stat.S_IWOTH:
        raise PermissionError(errno.EPERM, f"others may write it (mode {stat.S_IMODE(about.st_mode):04o})", str(path))
    if about.st_mode & stat.S_IWGRP:  # as with a umask of 002, where each user has a group of one
        path.chmod(about.st_mode & ~stat.S_IWGRP)
    weak: Path | None = None
    for above in path.resolve().parents:
        mode = above.stat().st_mode
        if _alone(above):
            weak = None  # others do not get below it
        elif mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
            weak = above
    if weak is not None:
        raise PermissionError(errno.EPERM, f"others may replace it, as they may write '{weak}'", str(path))
    return path


def reachable(path: Path) -> bool:
    """Whether other users can get to a path at all: no folder above it is this user's alone."""
    path = path.resolve()
    return not any(_alone(folder) for folder in (path, *path.parents))


def run_folder() -> Path:
    """Folder of what this user's programs keep while they run: `tiermoe` in XDG_RUNTIME_DIR, or `tiermoe.run.UID` in
    the temporary folder. It is not made; see `own_folder`.
    """
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    if runtime and Path(runtime).is_dir():
        return Path(runtime) / "tiermoe"
    return Path(tempfile.gettempdir()) / f"tiermoe.run.{os.getuid()}"


def user_cache() -> Path:
    """Folder of what this user can do without: prepared stores, and how long starts took."""
    own = Path.home() / (Path("Library", "Caches") if sys.platform == "darwin" else ".cache")
    given = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return (given if given.is_absolute() else own) / "tiermoe"


def keep_code_private() -> None:
    """Say where torch and Triton keep compiled code, unless the user has: they run what they find there.

    torch's own choice is a folder of a known name in /tmp, which another user may have made before.
    """
    if "TORCHINDUCTOR_CACHE_DIR" in os.environ and "TRITON_CACHE_DIR" in os.environ:
        return
    try:
        folder = own_folder(own_folder(user_cache()) / "compiled")
    except (OSError, RuntimeError):  # no home that can be written: it goes with this process
        folder = Path(tempfile.mkdtemp(prefix="tiermoe-compiled-"))
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(folder))
    os.environ.setdefault("TRITON_CACHE_DIR", str(folder / "triton"))


def _alone(folder: Path) -> bool:
    about = folder.stat()
    return about.st_uid == os.geteuid() and not about.st_mode & (stat.S_IRWXG | stat.S_IRWXO)


def _target(link: str) -> str:
    """Where a link of this user's or root's leads. Raises PermissionError: it is another's."""
    held = os.open(link, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC) if hasattr(os, "O_PATH") else None
    try:
        about = os.lstat(link) if held is None else os.fstat(held)
        if about.st_uid not in (0, os.geteuid()):
            raise PermissionError(errno.EPERM, "it is a link of another user's", link)
        with contextlib.suppress(OSError):  # it is no link any more: it is opened anew
            target = os.readlink(link) if held is None else os.readlink("", dir_fd=held)
            return os.path.join(os.path.dirname(link), target)
        return link
    finally:
        if held is not None:
            os.close(held)


def _check(opened: int, path: str, writes: bool) -> None:
    about = os.fstat(opened)
    if about.st_uid not in (0, os.geteuid()):
        raise PermissionError(errno.EPERM, "it is another user's", path)
    if not (stat.S_ISREG(about.st_mode) or stat.S_ISFIFO(about.st_mode)):
        raise PermissionError(errno.EPERM, "it is no plain file", path)
    if writes and stat.S_ISREG(about.st_mode) and about.st_nlink > 1:
        raise PermissionError(errno.EPERM, "it has another name, too (a hard link)", path)
