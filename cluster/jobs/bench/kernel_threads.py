"""`tiermoe bench kernel --threads N`: packed experts on many cores, against the bandwidth that they can read with."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from numpy.typing import NDArray
from rich.progress import Progress

from ....errors import ConfigError
from ....kernels import _cpu
from ....kernels.pack import GROUPS, PackedShape
from ....kernels.packed_ffn import PackedLayer, Threads, instruction_sets
from .metrics import Case, Measures, Report, interleaved, ratio, rows_of

SHAPES = ((2048, 768), (2048, 1408), (4096, 14336))  # Qwen3-30B-A3B, Qwen1.5-MoE-A2.7B and Mixtral-8x7B
BITS = (1, 2, 3, 4)
COLD_BYTES = 1 << 30  # that a width's experts take turns out of: several times a server's last-level cache
EXPERTS = 8  # of one call, as a decode step sends them at once
_PIECES = 4  # that each thread's share of the read is cut into, so that a slow core is helped
_WARMUP = 1


def bench_kernel_threads(
    threads: int,
    repeats: int,
    group: int = 64,
    instruction_set: str | None = None,
    progress: Progress | None = None,
    *,
    cores: Sequence[int] = (),
    shapes: Sequence[tuple[int, int]] = SHAPES,
    cold_bytes: int = COLD_BYTES,
) -> Report:
    """Gigabytes of packed weights per second that the NDP worker's kernel computes on, at one row.

    All widths share one block of memory, which is as large as `cold_bytes` and which one thread filled: on a machine of
    several NUMA nodes it is the memory of one of them. Time is that of the clock on the wall.

    Args:
        threads: that compute, and that read.
        repeats: counted rounds; in each every case goes through the block once.
        group: quantization group.
        instruction_set: of the kernel; by default the best.
        cores: one for each thread of the kernel; empty: the system chooses.
        shapes: (hidden size, neurons) of an expert.
        cold_bytes: of the block.

    Returns:
        Rows of the cases "read" and "1 bit" to "4 bits" with the measures `gbps` (packed bytes, scales included),
        `us_per_expert`, and `of_read`: the former over what was read in the same rounds.

    Raises:
        ConfigError: this processor lacks the instruction set or a core, there is no such group, or not one call's
            experts fit in `cold_bytes`.
    """
    if group not in GROUPS:
        raise ConfigError(f"there is no group of {group} inputs", f"choose one of {GROUPS}")
    pool = _pool(threads, cores, instruction_set)
    settings = {
        "threads": threads, "cores": list(cores), "group": group, "instruction_set": pool.instruction_set,
        "repeats": repeats, "cold_bytes": cold_bytes, "experts_per_call": EXPERTS, "rows": 1, "time": "on the wall",
    }  # fmt: skip
    report = Report("kernel", "real", settings=settings)
    rng = np.random.default_rng(0)
    codes = np.resize(rng.integers(0, 256, 1 << 24, dtype=np.uint8), cold_bytes)
    values = (rng.standard_normal(1 << 22, dtype=np.float32) * np.float32(0.02)).astype(np.float16)
    scales = np.resize(values, cold_bytes // 2)
    with ThreadPoolExecutor(threads) as readers:
        for hidden, neurons in shapes:
            cases = [_read(codes, readers, threads)]
            cases += [_packed(codes, scales, PackedShape(hidden, neurons, bits, group), pool) for bits in BITS]
            results = interleaved(cases, repeats, _WARMUP, progress, f"{hidden} x {neurons}")
            shape = {"hidden": hidden, "intermediate": neurons}
            report.rows += rows_of(results, **shape)
            read = results["read"]["gbps"].median
            report.rows += [
                {"case": case, **shape, "measure": "of_read", "median": ratio(measures["gbps"].median, read)}
                for case, measures in results.items()
                if case != "read"
            ]
    return report


def _pool(threads: int, cores: Sequence[int], instruction_set: str | None) -> Threads:
    """Who computes. Raises ConfigError: this processor lacks the instruction set or a core."""
    if instruction_set is not None and instruction_set not in instruction_sets():
        raise ConfigError(f"this processor has no {instruction_set}", f"choose one of {instruction_sets()}")
    try:
        return Threads(threads, cores, instruction_set)
    except (ValueError, OSError) as error:
        raise ConfigError(f"{threads} threads on cores {list(cores)}: {error}", "choose fewer, or others") from error


def _read(block: NDArray[np.uint8], readers: ThreadPoolExecutor, threads: int) -> Case:
    bounds = np.linspace(0, block.nbytes, threads * _PIECES + 1, dtype=np.int64).tolist()
    address = block.ctypes.data
    pieces = [(address + begin, end - begin) for begin, end in itertools.pairwise(bounds)]

    def run() -> Measures:
        start_s = time.perf_counter()
        for _ in readers.map(lambda piece: _cpu.read_bytes(*piece), pieces):
            pass
        return {"gbps": block.nbytes / (time.perf_counter() - start_s) / 1e9}

    return Case("read", run)


def _packed(codes: NDArray[np.uint8], scales: NDArray[np.float16], shape: PackedShape, pool: Threads) -> Case:
    """One width: its experts are the codes and scales that lie in the blocks one after the other."""
    size, tensors = shape.nbytes(), shape.tensors()
    experts = codes.nbytes // size // EXPERTS * EXPERTS
    if experts == 0:
        raise ConfigError(
            f"{EXPERTS} experts of {size} bytes do not fit in {codes.nbytes} bytes", "give more cold bytes"
        )
    arrays, taken = {}, {"U8": 0, "F16": 0}
    for name, (code, dimensions) in tensors.items():
        block = codes if code == "U8" else scales
        count = experts * int(np.prod(dimensions))
        first = taken[code]
        arrays[name] = block[first : first + count].reshape(experts, *dimensions)
        taken[code] = first + -(-count // 64) * 64  # kernels want multiples of 64 bytes
    layer = PackedLayer(arrays, shape, "silu", pool)
    hidden = np.random.default_rng(1).standard_normal((1, shape.hidden), dtype=np.float32)
    out, rows = np.empty_like(hidden), np.zeros(EXPERTS, np.int32)
    weights = np.full(EXPERTS, 1 / EXPERTS, np.float32)
    calls = [
        [(first + i, i, i + 1) for i in range(EXPERTS)] for first in range(0, experts, EXPERTS)
    ]

    def run() -> Measures:
        start_s = time.perf_counter()
        for groups in calls:
            layer.run(groups, rows, weights, hidden, out)
        seconds = time.perf_counter() - start_s
        return {"us_per_expert": seconds / experts * 1e6, "gbps": experts * size / seconds / 1e9}

    return Case("1 bit" if shape.bits == 1 else f"{shape.bits} bits", run)
