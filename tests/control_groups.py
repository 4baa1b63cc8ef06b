"""Control groups as the kernel shows them: folders below one that stands for `/`, with their limits."""

from __future__ import annotations

import os
from pathlib import Path

VERSIONS = ("v1", "v2", "hybrid")
# Who sets the limit: its path for people is `PATHS[place]`.
PLACES = ("own", "slice", "pod", "namespaced", "mounted elsewhere", "hidden")
_OWN = {
    "own": "/system.slice/x.service", "slice": "/system.slice/x.service",
    "pod": "/kubepods.slice/burstable/pod1/main", "namespaced": "/", "mounted elsewhere": "/docker/abc/job",
    "hidden": "/",
}  # fmt: skip
_TOP = {"mounted elsewhere": "/docker/abc", "hidden": "/../.."}  # the group at which the mount begins; else /
_BELOW = {"hidden": "kubepods/main"}  # from the mount to the own group, which /proc does not tell
PATHS = {
    "own": "/system.slice/x.service", "slice": "/system.slice", "pod": "/kubepods.slice/burstable/pod1",
    "namespaced": "/", "mounted elsewhere": "/docker/abc", "hidden": "/../../kubepods",
}  # fmt: skip
_LIMITED = {  # folder of the limit below the mount
    "own": "system.slice/x.service", "slice": "system.slice", "pod": "kubepods.slice/burstable/pod1", "namespaced": "",
    "mounted elsewhere": "", "hidden": "kubepods",
}  # fmt: skip
V1_NONE = 9223372036854771712


def make_groups(
    root: Path, version: str, place: str, *, cores: float | None = None, memory: int | None = None, used: int = 0,
    cached: int = 0, high: int | None = None,
) -> None:  # fmt: skip
    """A process in a group, with limits of that group or of one above it; all other groups say that they have none.

    Args:
        cores: CPU quota. memory: limit in bytes. used: bytes in use, cached: of these, pages given back when needed.
        high: in place of `memory`'s hard limit, the soft one of version 2.
    """
    own, top = _OWN[place], _TOP.get(place, "/")
    proc, base = root / "proc/self", root / "sys/fs/cgroup"
    proc.mkdir(parents=True, exist_ok=True)
    v1 = version != "v2"
    mounts = ["31 23 0:28 / /sys/fs/cgroup rw,relatime - tmpfs tmpfs rw,mode=755"]
    if v1:
        for number, controllers in enumerate(("cpu,cpuacct", "memory", "name=systemd")):
            at = controllers.replace("name=", "")
            where = f"{40 + number} 31 0:3{number} {top} /sys/fs/cgroup/{at}"
            mounts.append(f"{where} rw shared:9 - cgroup cgroup rw,{controllers}")
    unified = {"v2": "", "hybrid": "/unified"}.get(version)
    if unified is not None:
        mounts.append(f"50 31 0:40 {top} /sys/fs/cgroup{unified} rw,nosuid - cgroup2 cgroup2 rw,nsdelegate")
    lines = [f"4:memory:{own}", f"3:cpu,cpuacct:{own}", f"1:name=systemd:{own}"] if v1 else []
    (proc / "mountinfo").write_text("\n".join(mounts) + "\n")
    (proc / "cgroup").write_text("\n".join([*lines, *([f"0::{own}"] if version != "v1" else [])]) + "\n")
    relative = _BELOW.get(place, own[len(top) :] if top != "/" and own.startswith(top) else own).strip("/")
    chain = [Path(), *reversed([Path(relative), *list(Path(relative).parents)[:-1]])] if relative else [Path()]
    for level in chain:
        here = str(level) == (_LIMITED[place] or ".")
        _write(base, version, level, here, cores, memory, used, cached, high)
    for hierarchy in ("memory", "cpu,cpuacct") if v1 else ("",):
        (base / hierarchy / relative / "cgroup.procs").write_text(f"{os.getpid()}\n")


def _write(
    base: Path, version: str, level: Path, here: bool, cores: float | None, memory: int | None, used: int, cached: int,
    high: int | None,
) -> None:  # fmt: skip
    quota = None if cores is None or not here else round(cores * 100_000)
    limit = memory if here else None
    if version == "v2":
        folder = base / level
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "cpu.max").write_text(f"{'max' if quota is None else quota} 100000\n")
        (folder / "memory.max").write_text(f"{'max' if limit is None else limit}\n")
        (folder / "memory.high").write_text(f"{high if here and high is not None else 'max'}\n")
        (folder / "memory.current").write_text(f"{used}\n")
        (folder / "memory.stat").write_text(f"anon {used}\ninactive_file {cached}\n")
        return
    cpu, mem = base / "cpu,cpuacct" / level, base / "memory" / level
    cpu.mkdir(parents=True, exist_ok=True)
    mem.mkdir(parents=True, exist_ok=True)
    (base / "unified" / level).mkdir(parents=True, exist_ok=True)
    (cpu / "cpu.cfs_quota_us").write_text(f"{-1 if quota is None else quota}\n")
    (cpu / "cpu.cfs_period_us").write_text("100000\n")
    (mem / "memory.limit_in_bytes").write_text(f"{V1_NONE if limit is None else limit}\n")
    (mem / "memory.usage_in_bytes").write_text(f"{used}\n")
    (mem / "memory.stat").write_text(f"cache 7\nhierarchical_memory_limit {V1_NONE}\ntotal_inactive_file {cached}\n")
