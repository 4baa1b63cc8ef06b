"""What this machine offers, without loading a heavy library: cores, the versions of packages."""

from __future__ import annotations

import platform
import sys
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil

from ..limits import usable_cores
from ..proto.private import user_cache

GGUF_CACHE = "gguf"  # in the user's cache: folders that stand for GGUF files
STORE_CPUS = 1.0  # that Ray reserves for a store
_THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
_PACKAGES = ("tiermoe", "torch", "transformers", "ray")
# What our kernels can make use of, by the kernel's names for it (x86, then Arm).
_FEATURES = (
    "sse4_2", "avx", "f16c", "fma", "avx2", "avx_vnni", "avx512f", "avx512bw", "avx512_vnni", "avx512_bf16",
    "avx512_fp16", "amx_tile", "amx_int8", "amx_bf16", "asimd", "asimddp", "i8mm", "bf16", "sve", "sve2",
)  # fmt: skip


def shown(path: Path) -> Path:
    """The path of a checkpoint or of a file in it, for people: the user's own, if the cache has a folder for it.

    A GGUF file has such a folder, with links to its parts (`checkpoints.gguf_files`).
    """
    folder = path if path.is_dir() else path.parent
    if not stands_for_gguf(folder):
        return path
    if path.is_symlink():
        return path.readlink()
    links = [file for file in sorted(folder.glob("*.gguf")) if file.is_symlink()]
    if not links:
        return path
    own = links[0].readlink()
    beside = own.with_name(path.name)
    return beside if path != folder and beside.exists() else own


def stands_for_gguf(folder: Path) -> bool:
    """Whether a folder is one of the cache that stands for GGUF files elsewhere, to which its links lead."""
    return (user_cache() / GGUF_CACHE).resolve() in folder.resolve().parents


def thread_limits(threads: int) -> dict[str, str]:
    """Environment that bounds the threads of arithmetic libraries."""
    return dict.fromkeys(_THREAD_VARIABLES, str(threads))


def cpu() -> dict[str, Any]:
    """Model, cores that this process may use, and the instruction sets that matter here."""
    model, flags = _cpuinfo()
    usable = usable_cores()
    return {
        "model": model or platform.processor() or platform.machine(),
        "architecture": platform.machine(),
        "cores": usable,
        "physical_cores": psutil.cpu_count(logical=False) or usable,
        "instruction_sets": [name for name in _FEATURES if name in flags],
    }


def _cpuinfo() -> tuple[str, set[str]]:
    """Model name and feature flags as Linux reports them; empty elsewhere."""
    model, flags = "", set[str]()
    path = Path("/proc/cpuinfo")
    for line in path.read_text().splitlines() if path.is_file() else ():
        key, _, value = line.partition(":")
        if key.strip() == "model name":
            model = value.strip()
        elif key.strip() in ("flags", "Features"):
            flags = set(value.split())
        if model and flags:
            break
    return model, flags


def now() -> str:
    """Date and time for a result, in UTC to the minute."""
    return datetime.now(UTC).isoformat(timespec="minutes")


def versions() -> dict[str, str]:
    """Versions of Python and of the main packages, from their metadata: none of them is imported.

    A package that is not installed is "absent": a clone may run without being installed, and GPU workers without Ray.
    """
    found = {"python": sys.version.split()[0]}
    for name in _PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "absent"
    return found
