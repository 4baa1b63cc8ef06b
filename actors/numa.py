"""The memory node (NUMA) that a GPU hangs on, and a worker that keeps to it.

On a machine of several sockets each has memory of its own. Copies to a GPU from the other socket's cross the link
between the two, and so does each poll of a thread that runs there. So a GPU's worker keeps its threads on the cores of
the GPU's node, and has the pages that it brings in there: those of the store's files, of which one may be in memory
already, of pinned buffers and of copies.

No library is needed: sysfs says what is where, and three system calls say what is wanted. Somebody who has bound the
process himself (`numactl`, `taskset`) wins: a memory policy of its own, or an affinity without a core of that node,
stays as it is.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import NamedTuple

from . import gpu_driver

_CALLS = {  # numbers of system calls by machine: mbind, set_mempolicy, get_mempolicy
    "x86_64": (237, 238, 239), "aarch64": (235, 237, 236),
}  # fmt: skip
_DEFAULT, _PREFERRED = 0, 1  # MPOL_*: where the thread runs; this node, or another one if it is full
_MOVE = 2  # MPOL_MF_MOVE: pages, too, that are elsewhere and that no other process maps
_MOST_NODES = 1024


class MemoryNode(NamedTuple):
    """A memory node. cores: of its own that this machine has on."""

    number: int
    cores: frozenset[int]


def memory_nodes() -> dict[int, MemoryNode]:
    """Those of this machine by their numbers; empty: it does not say."""
    found = {}
    for folder in gpu_driver.ROOT.glob("sys/devices/system/node/node[0-9]*"):
        with contextlib.suppress(OSError, ValueError):
            number = int(folder.name.removeprefix("node"))
            found[number] = MemoryNode(number, _cores_of((folder / "cpulist").read_text()))
    return found


def node_of(bus: str) -> MemoryNode | None:
    """The node of the GPU at an address such as `0000:3b:00.0`; None: this machine has one node, or does not say."""
    nodes = memory_nodes()
    try:
        number = int((gpu_driver.ROOT / "sys/bus/pci/devices" / bus.lower() / "numa_node").read_text())
    except (OSError, ValueError):
        return None
    found = nodes.get(number)  # -1: the firmware does not say
    return found if found is not None and found.cores and len(nodes) > 1 else None


def gpu_nodes(environ: Mapping[str, str] = os.environ) -> list[MemoryNode | None]:
    """The node of each GPU that the environment does not hide, as `nvidia-smi` numbers them; without CUDA."""
    if gpu_driver.hidden(environ):
        return []
    buses = sorted(folder.name for folder in gpu_driver.ROOT.glob("proc/driver/nvidia/gpus/*"))
    chosen = [name.strip() for name in environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]
    if all(name.isdecimal() and int(name) < len(buses) for name in chosen):  # else names of another kind
        buses = [buses[int(name)] for name in chosen] or buses
    return [node_of(bus) for bus in buses]


def words(node: MemoryNode) -> str:
    """For people: `node 1 (cores 16-31)`."""
    cores, spans = sorted(node.cores), list[list[int]]()
    for core in cores:
        if spans and core == spans[-1][1] + 1:
            spans[-1][1] = core
        else:
            spans.append([core, core])
    shown = ",".join(str(first) if first == last else f"{first}-{last}" for first, last in spans)
    return f"node {node.number} (cores {shown})"


def keep_to(node: MemoryNode) -> str | None:
    """Bind this process's threads to the cores of a node, and have pages there that it brings in from now on.

    Threads that are made later inherit both; of threads that there are only the calling one gets the pages.

    Returns:
        None: done; else why not.
    """
    own = os.sched_getaffinity(0)
    if not own & node.cores:
        return f"the affinity of this process has no core of node {node.number}"
    mode = ctypes.c_int(-1)
    try:
        _call("get_mempolicy", ctypes.byref(mode), None, ctypes.c_ulong(0), None, ctypes.c_ulong(0))
        if mode.value != _DEFAULT:
            return "this process has a memory policy of its own"
        mask, size = _mask(node)
        _call("set_mempolicy", ctypes.c_int(_PREFERRED), mask, size)
    except OSError as error:
        return f"the kernel refuses a memory policy: {error.strerror}"
    for task in _tasks():
        with contextlib.suppress(ProcessLookupError):  # it has ended
            os.sched_setaffinity(task, own & node.cores)
    return None


def bring(ranges: Iterable[tuple[int, int]], node: MemoryNode) -> bool:
    """Move the pages of these (first, last) addresses to a node that are in memory elsewhere.

    Pages that another process maps stay. Before memory is pinned, after which no page moves.

    Returns:
        Whether the kernel took all of them.
    """
    try:
        mask, size = _mask(node)
        for first, last in ranges:
            at, nbytes = ctypes.c_void_p(first), ctypes.c_ulong(last - first)
            _call("mbind", at, nbytes, ctypes.c_int(_PREFERRED), mask, size, ctypes.c_uint(_MOVE))
    except OSError:
        return False
    return True


def _mask(node: MemoryNode) -> tuple[ctypes.Array[ctypes.c_ulong], ctypes.c_ulong]:
    """The node as a set of bits, and their number as the kernel counts it, which is one more."""
    bits = 8 * ctypes.sizeof(ctypes.c_ulong)
    mask = (ctypes.c_ulong * (_MOST_NODES // bits))()
    mask[node.number // bits] |= 1 << node.number % bits
    return mask, ctypes.c_ulong(_MOST_NODES + 1)


def _tasks() -> list[int]:
    """Threads of this process."""
    return [int(path.name) for path in Path("/proc/self/task").iterdir()]


def _call(name: str, *given: object) -> None:
    """A system call. Raises OSError: it is refused, or this machine's number of it is not known."""
    numbers = _CALLS.get(platform.machine())
    if numbers is None:
        raise OSError(0, f"its calls are not known on {platform.machine()}")
    number = dict(zip(("mbind", "set_mempolicy", "get_mempolicy"), numbers, strict=True))[name]
    if _libc().syscall(ctypes.c_long(number), *given) != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))


@cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _cores_of(text: str) -> frozenset[int]:
    """Of a list such as `0-15,32-47`."""
    found = set[int]()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        found.update(range(int(first), int(last or first) + 1))
    return frozenset(found)
