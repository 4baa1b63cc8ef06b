"""Cores and memory that this process may use: of the machine, by its affinity, and by every control group above it.

    cores  = min(affinity, quotas of all levels), rounded down, at least 1
    memory = min(machine, limits of all levels)
    free   = min(machine's available, limit - used + given back when needed, of each level)

A limit of a control group holds for all groups below it: a systemd slice bounds its units, a pod its containers. So
level counts, from this process's own group up to the root of what is mounted. `/proc/self/cgroup` has the group in
each hierarchy (version 2: `0::/path`; version 1: `4:memory:/path`), `/proc/self/mountinfo` the folder in which a
hierarchy is seen and the group at which that folder begins. A machine may have both versions (hybrid).

`memory.high` counts as `memory.max` does: a group above it is slowed down until it gives memory back. Pages of files
that were read and are not in use, such as a checkpoint's, count as free.

This module and `errors` are the lowest of the package: every other may ask them.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePosixPath
from typing import NamedTuple

import psutil

from .errors import ConfigError, size

_ROOT = Path("/")
_NO_LIMIT = 1 << 60  # version 1 writes the greatest number of pages
_ESCAPE = re.compile(r"\\([0-7]{3})")  # in mountinfo: blanks and the like
# By version: limits, usage, and in memory.stat the pages that are given back when needed, with those of groups below.
_MEMORY_FILES = {
    1: (("memory.limit_in_bytes",), "memory.usage_in_bytes", "total_inactive_file"),
    2: (("memory.max", "memory.high"), "memory.current", "inactive_file"),
}
MACHINE, AFFINITY = "this machine", "affinity of this process"


class Limit(NamedTuple):
    """One bound.

    Attributes:
        amount: cores, or bytes.
        source: what sets it, such as `cpu.max of /system.slice/x.service`.
        free: bytes that may still be allocated below it; of memory only.
    """

    amount: float
    source: str
    free: int = 0


class Memory(NamedTuple):
    """Bytes that this process may use in all and now, each with what bounds it."""

    total: int
    total_from: str
    free: int
    free_from: str


def usable_cores() -> int:
    """Cores that this process may keep busy, at least 1: by its affinity and by quotas of control groups."""
    return cores()[0]


def cores() -> tuple[int, str]:
    """`usable_cores`, and what bounds them."""
    own = _machine()
    if hasattr(os, "sched_getaffinity") and (found := len(os.sched_getaffinity(0))) != own.amount:
        own = Limit(found, AFFINITY)
    amount, source, _ = min([own, *cpu_quotas()], key=lambda bound: bound.amount)
    fraction = f", {amount:.2f} cores" if amount != int(amount) else ""
    return max(1, int(amount)), source + fraction


def check_threads(key: str, threads: int | None) -> None:
    """Refuse more threads of one process than cores that it may keep busy; None: not given.

    Raises:
        ConfigError: with the number of usable cores, and what bounds them.
    """
    count, source = cores()
    if threads is not None and threads > count:
        raise ConfigError(
            f"{key} is {threads}, and {cores_words(count, source)} can be used here",
            f"give at most {count}, or leave it out",
        )


def cores_with_peers() -> int:
    """Cores that this process and others beside it may keep busy together: affinity is of this process alone."""
    return max(1, int(min(bound.amount for bound in (_machine(), *cpu_quotas()))))


def _machine() -> Limit:
    return Limit(os.cpu_count() or 1, MACHINE)


def memory() -> Memory:
    """Host memory of this process: the machine's, as far as control groups allow."""
    found = psutil.virtual_memory()
    bounds = [Limit(found.total, MACHINE, int(found.available)), *memory_limits()]
    total, free = min(bounds, key=lambda bound: bound.amount), min(bounds, key=lambda bound: bound.free)
    return Memory(int(total.amount), total.source, free.free, free.source)


def cores_words(count: int, source: str) -> str:
    """`1 core (cpu.max of /system.slice/x.service)`."""
    return f"{count} core{'s' if count != 1 else ''} ({source})"


def memory_words(of: Memory) -> str:
    """`400.00 MiB free of 512.00 MiB (memory.max of /system.slice/x.service)`."""
    where = f" ({of.free_from})" if of.free_from != of.total_from else ""
    return f"{size(of.free)} free{where} of {size(of.total)} ({of.total_from})"


def host_free_bytes() -> int:
    """Memory that this process may still allocate."""
    return memory().free


def cpu_quotas(root: Path | None = None) -> list[Limit]:
    """The quotas of this process's control groups in cores, own group first; a group without a quota has no entry.

    Args:
        root: the folder that stands for `/`.
    """
    found = list[Limit]()
    for version, folder, path in _groups(root or _ROOT, "cpu"):
        if version == 2:
            name, parts = "cpu.max", _words(folder / "cpu.max")
        else:
            name = "cpu.cfs_quota_us"
            parts = [*_words(folder / name), *_words(folder / "cpu.cfs_period_us")]
        quota, period = (_count(part) for part in parts) if len(parts) == 2 else (None, None)
        if quota and period:
            found.append(Limit(quota / period, f"{name} of {path}"))
    return found


def memory_limits(root: Path | None = None) -> list[Limit]:
    """The memory limits of this process's control groups, own group first; arguments as of `cpu_quotas`."""
    found = list[Limit]()
    for version, folder, path in _groups(root or _ROOT, "memory"):
        words = _words(folder / "memory.stat")
        stat = dict(zip(words[::2], words[1::2], strict=False))
        names, usage, cached = _MEMORY_FILES[version]
        limits = {name: _first(folder / name) for name in names}
        if version == 1:  # the least of this group and all above it, also of those that are not mounted here
            limits["hierarchical_memory_limit"] = _count(stat.get("hierarchical_memory_limit", ""))
        used = max(0, (_first(folder / usage) or 0) - (_count(stat.get(cached, "")) or 0))
        for name, limit in limits.items():
            if limit is not None and limit < _NO_LIMIT:
                found.append(Limit(limit, f"{name} of {path}", max(0, limit - used)))
    return found


def _groups(root: Path, controller: str) -> Iterator[tuple[int, Path, str]]:
    """The control groups that bound this process in one resource, from its own to the top of each hierarchy: the
    version of the hierarchy, the group's folder, and its path for people.
    """
    mounts = _mounts(root / "proc/self/mountinfo")
    for line in _lines(root / "proc/self/cgroup"):
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number == "0" and not controllers:
            version, seen = 2, [mount for mount in mounts if mount.controllers is None]
        elif controller in controllers.split(","):
            version, seen = 1, [mount for mount in mounts if mount.controllers and controller in mount.controllers]
        else:
            continue
        yield from ((version, folder, name) for folder, name in _levels(root, path, seen))


def _levels(root: Path, path: str, mounts: Sequence[_Mount]) -> Iterator[tuple[Path, str]]:
    """The folders of a group and of those above it, with their paths.

    Of several mounts the one that shows most levels counts. A mount that does not hold the group counts from its own
    top: a container's runtime may show the container's group there, under another name than the process sees.

    Args:
        path: of the group, relative to the name space's top. mounts: of its hierarchy.
    """
    own = PurePosixPath(path).parts[1:]
    for mount in sorted(mounts, key=lambda mount: (own[: len(mount.top)] != mount.top, len(mount.top)))[:1]:
        below = own[len(mount.top) :] if own[: len(mount.top)] == mount.top else ()
        top = root.joinpath(*mount.folder)
        if ".." in mount.top and not own:
            below = _hidden(top, len(mount.top))
        for count in range(len(below), -1, -1):
            yield top.joinpath(*below[:count]), "/" + "/".join((*mount.top, *below[:count]))


def _hidden(top: Path, depth: int) -> tuple[str, ...]:
    """The names from a mount's folder to this process's group, where a name space hides them: `depth` levels."""
    pid = str(os.getpid())
    for procs in top.glob("*/" * depth + "cgroup.procs"):
        if pid in _words(procs):
            return procs.parent.relative_to(top).parts
    return ()


class _Mount(NamedTuple):
    """Where a hierarchy is seen: its controllers (None: version 2), the group at which it begins, and the folder."""

    controllers: frozenset[str] | None
    top: tuple[str, ...]
    folder: tuple[str, ...]


def _mounts(path: Path) -> list[_Mount]:
    found = []
    for line in _lines(path):
        mount, _, system = line.partition(" - ")
        fields, (kind, *options) = mount.split(" "), system.split(" ")
        if len(fields) > 4 and kind in ("cgroup", "cgroup2"):
            named = (_ESCAPE.sub(lambda code: chr(int(code[1], 8)), field) for field in fields[3:5])
            top, folder = (PurePosixPath(name).parts[1:] for name in named)
            found.append(_Mount(None if kind == "cgroup2" else frozenset(options[-1].split(",")), top, folder))
    return found


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:  # no such file: another system, or a group without this controller
        return []


def _words(path: Path) -> list[str]:
    return [word for line in _lines(path) for word in line.split()]


def _first(path: Path) -> int | None:
    """The number that a file begins with."""
    words = _words(path)
    return _count(words[0]) if words else None


def _count(text: str) -> int | None:
    """A number as the kernel writes it; None: no limit (`max`, -1), or none that can be read."""
    return int(text) if text.isascii() and text.isdigit() else None
