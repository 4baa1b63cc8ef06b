"""`bench kernel`: packed experts, on one core or many."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from rich.progress import Progress

from tiermoe.cluster.jobs.bench.metrics import Bar, Case, Measures, Report, Spread, interleaved, ratio, rows_of
from tiermoe.errors import ConfigError
from tiermoe.kernels import _cpu
from tiermoe.kernels.form_ffn import FormLayer
from tiermoe.kernels.forms import ExpertForm, MatrixForm
from tiermoe.kernels.pack import BITS, GROUPS, PackedShape
from tiermoe.kernels.packed_ffn import FullLayer, PackedLayer, Threads, instruction_sets

if TYPE_CHECKING:
    from .cases import Kernel

SHAPES = ((2048, 768), (4096, 14336))  # hidden size, neurons: Qwen3-30B-A3B, Mixtral-8x7B
ROWS = (1, 8, 64)
COLD_BYTES = 128 << 20  # of each competitor's experts: several times a last-level cache

# published forms that are measured
PUBLISHED: dict[str, dict[str, Any]] = {
    "fp8_block": {}, "mxfp4": {}, "nvfp4": {}, "int 4 bits": {"bits": 4, "group": 128, "zeros": True}, "q4_k": {},
}  # fmt: skip

# ours, theirs, least ratio of weights per second at one row
AGAINST = (
    ("mxfp4", "full float32", 2.0),
    ("int 4 bits", "full float32", 2.0),
    ("4 bits", "torch fp32", 4.0),
)

THREADS_SHAPES = ((2048, 768), (2048, 1408), (4096, 14336))  # and Qwen1.5-MoE-A2.7B
THREADS_BITS = (1, 2, 3, 4)
THREADS_COLD_BYTES = 1 << 30  # several times a server's last-level cache
EXPERTS = 8  # of one call on many threads, as in a decode step
_PIECES = 4  # of each thread's share of the read, to balance slow cores


def kernel(options: Kernel, progress: Progress | None) -> Report:
    """Weights per second of whole experts on one thread; with `threads`: `kernel_threads`.

    Every competitor's experts fill `COLD_BYTES`, and a repetition runs all of them once, so that weights come from
    memory, as in decode. Time is the thread's.

    Bars, for each shape at one row: `AGAINST`; the time at 2 bits <= 0.6 of that at 4.

    Raises:
        ConfigError: this processor lacks the instruction set, or there is no such group.
    """
    group, chosen = options.group, options.instruction_set
    if options.threads is not None:
        return kernel_threads(options.threads, options.repeats, group, chosen, progress)
    import torch

    threads = _threads(1, chosen, group)
    torch.set_num_threads(1)
    settings = options.settings(
        threads=1, instruction_set=threads.instruction_set, cold_bytes=COLD_BYTES, time="of the thread"
    )
    report = Report("kernel", "real", settings=settings)
    for hidden, neurons in SHAPES:
        shape = _Shape(hidden, neurons, threads, group)
        for rows in ROWS:
            cases = [shape.read(), *(shape.packed(bits, rows) for bits in BITS)]
            cases += [shape.form(kind, rows) for kind in PUBLISHED]
            if rows == 1:
                cases += [shape.full(name) for name in ("float32", "bfloat16")]
            cases += [shape.torch(name, rows) for name in ("fp32", "bf16")]
            results = interleaved(cases, options.repeats, 1, progress)
            report.rows += rows_of(results, hidden=hidden, intermediate=neurons, rows=rows)
            if rows == 1:
                report.bars += _kernel_bars(results, f"{hidden} x {neurons}")
    return report


def _threads(threads: int, instruction_set: str | None, group: int) -> Threads:
    """A thread pool. Raises ConfigError: no such group of inputs or instruction set."""
    if group not in GROUPS:
        raise ConfigError(f"there is no group of {group} inputs", f"choose one of {GROUPS}")
    if instruction_set is not None and instruction_set not in instruction_sets():
        raise ConfigError(f"this processor has no {instruction_set}", f"choose one of {instruction_sets()}")
    return Threads(threads, (), instruction_set)


def _width(bits: int) -> str:
    return "1 bit" if bits == 1 else f"{bits} bits"


class _Shape:
    """The competitors at one shape of an expert; values repeat one block.

    Args:
        pool: threads of our kernels. at_once: experts of one call of them. now: the clock that times, in seconds.
        cold_bytes: of each competitor's experts, at least; packed experts of all widths share one block of them.
    """

    def __init__(
        self, hidden: int, neurons: int, pool: Threads, group: int, cold_bytes: int = COLD_BYTES, at_once: int = 1,
        now: Callable[[], float] = time.thread_time,
    ) -> None:  # fmt: skip
        self._hidden, self._neurons, self._pool, self._group = hidden, neurons, pool, group
        self._cold_bytes, self._at_once, self._now = cold_bytes, at_once, now
        self._weights = 3 * hidden * neurons
        self._rng = np.random.default_rng(0)
        self._bytes = self._rng.integers(0, 256, 1 << 24, dtype=np.uint8)
        self._values = self._rng.standard_normal(1 << 22, dtype=np.float32) * np.float32(0.02)
        self._codes = np.resize(self._bytes, cold_bytes)
        self._scales = np.resize(self._values.astype(np.float16), cold_bytes // 2)

    def read(self, pieces: int = 1, run_all: Callable[..., Iterable[Any]] = map) -> Case:
        """Reading the block, as so many pieces that `run_all` reads like `map`."""
        bounds = np.linspace(0, self._cold_bytes, pieces + 1, dtype=np.int64).tolist()
        address = self._codes.ctypes.data
        parts = [(address + begin, end - begin) for begin, end in itertools.pairwise(bounds)]

        def run() -> Measures:
            start_s = self._now()
            for _ in run_all(lambda part: _cpu.read_bytes(*part), parts):
                pass
            return {"gbps": self._cold_bytes / (self._now() - start_s) / 1e9}

        return Case("read", run)

    def packed(self, bits: int, rows: int) -> Case:
        """Experts of a width. Raises ConfigError: those of one call do not fit in the block."""
        shape = PackedShape(self._hidden, self._neurons, bits, self._group)
        size = shape.nbytes()
        experts = len(self._codes) // size // self._at_once * self._at_once
        if experts == 0:
            what = f"{self._at_once} experts of {size} bytes do not fit in {len(self._codes)} bytes"
            raise ConfigError(what, "give more cold bytes")
        arrays: dict[str, NDArray[Any]] = {}
        taken = {"U8": 0, "F16": 0}
        for name, (code, dimensions) in shape.tensors().items():
            block: NDArray[Any] = self._codes if code == "U8" else self._scales
            count, first = experts * math.prod(dimensions), taken[code]
            arrays[name] = block[first : first + count].reshape(experts, *dimensions)
            taken[code] = first + -(-count // 64) * 64  # kernels need multiples of 64 bytes
        layer = PackedLayer(arrays, shape, "silu", self._pool)
        return self._case(_width(bits), self._runner(layer, rows), size, rows, experts)

    def form(self, kind: str, rows: int) -> Case:
        """Experts as published: `kind` is one of `PUBLISHED`."""
        gate, down = (
            MatrixForm(kind.split()[0], *size, **PUBLISHED[kind])
            for size in ((self._neurons, self._hidden), (self._hidden, self._neurons))
        )
        form = ExpertForm(down=down, gate=gate, up=gate)
        experts = math.ceil(self._cold_bytes / form.nbytes())
        # scales are finite whatever they are: exponents of 100 to 115 of e8m0
        fills = {"F32": self._values, "F16": self._values.astype(np.float16), "U8": self._bytes}
        arrays = {
            name: np.resize(self._bytes % 16 + 100 if name.endswith("scale") and code == "U8" else
                            fills.get(code, self._bytes), (experts, *size))
            for name, (code, size) in form.parts().items()
        }  # fmt: skip
        parts = [{name: array[expert] for name, array in arrays.items()} for expert in range(experts)]
        layer = FormLayer(parts, [form] * experts, "silu", self._pool)
        return self._case(kind, self._runner(layer, rows), form.nbytes(), rows)

    def full(self, dtype: str) -> Case:
        values = self._values if dtype == "float32" else (self._values.view(np.uint32) >> 16).astype(np.uint16)
        size = self._weights * values.itemsize
        experts = math.ceil(self._cold_bytes / size)
        gate_up = np.resize(values, (experts, self._neurons, 2, self._hidden))
        down = np.resize(values, (experts, self._neurons, self._hidden))
        layer = FullLayer(gate_up, down, dtype, "silu", self._pool)
        return self._case(f"full {dtype}", self._runner(layer, 1), size, 1)

    def torch(self, name: str, rows: int) -> Case:
        """Two GEMMs and the activation; down as [H, I], which torch prefers at one row."""
        import torch
        from torch.nn import functional

        dtype = torch.float32 if name == "fp32" else torch.bfloat16
        size = self._weights * dtype.itemsize
        experts = math.ceil(self._cold_bytes / size)
        flat = torch.from_numpy(np.resize(self._values, experts * self._weights)).to(dtype)
        whole = flat.view(experts, 3 * self._neurons, self._hidden)
        x = torch.from_numpy(self._inputs(rows)).to(dtype)

        def run(expert: int) -> None:
            gate_up, down = whole[expert, : 2 * self._neurons], whole[expert, 2 * self._neurons :]
            gate, up = functional.linear(x, gate_up).chunk(2, dim=1)
            functional.linear(functional.silu(gate) * up, down.view(self._hidden, self._neurons))

        return self._case(f"torch {name}", run, size, rows)

    def _runner(self, layer: PackedLayer | FullLayer | FormLayer, rows: int) -> Callable[[int], None]:
        """One call of our kernels from such an expert on, for each of the experts on all rows."""
        x, count = self._inputs(rows), self._at_once
        out, numbers = np.empty_like(x), np.tile(np.arange(rows, dtype=np.int32), count)
        weights = np.full(rows * count, 1 / count, dtype=np.float32)

        def run(first: int) -> None:
            groups = [(first + i, i * rows, (i + 1) * rows) for i in range(count)]
            layer.run(groups, numbers, weights, x, out)

        return run

    def _case(self, name: str, run: Callable[[int], None], size: int, rows: int, experts: int | None = None) -> Case:
        """All experts once, each of `size` bytes; fewer of several rows, which arithmetic bounds."""
        count = math.ceil(self._cold_bytes / size) if experts is None else experts
        turns = max(1, count // self._at_once // rows) * self._at_once

        def measure() -> Measures:
            start_s = self._now()
            for expert in range(0, turns, self._at_once):
                run(expert)
            seconds = (self._now() - start_s) / turns
            return {
                "us_per_expert": seconds * 1e6,
                "gweights_per_s": self._weights / seconds / 1e9,
                "gbps": size / seconds / 1e9,
            }

        return Case(name, measure)

    def _inputs(self, rows: int) -> NDArray[np.float32]:
        return self._rng.standard_normal((rows, self._hidden), dtype=np.float32)


def _kernel_bars(results: Mapping[str, Mapping[str, Spread]], shape: str) -> list[Bar]:
    speed = {name: m["gweights_per_s"].median for name, m in results.items() if "gweights_per_s" in m}
    bars = [
        Bar(f"{shape}: weights per second at {ours} over {theirs}", ratio(speed[ours], speed[theirs]), ">=", limit)
        for ours, theirs, limit in AGAINST
        if theirs in speed
    ]
    times = ratio(results["2 bits"]["us_per_expert"].median, results["4 bits"]["us_per_expert"].median)
    return [*bars, Bar(f"{shape}: time at 2 bits over 4 bits", times, "<=", 0.6)]


def kernel_threads(
    threads: int,
    repeats: int,
    group: int = 64,
    instruction_set: str | None = None,
    progress: Progress | None = None,
    *,
    shapes: Sequence[tuple[int, int]] = THREADS_SHAPES,
    cold_bytes: int = THREADS_COLD_BYTES,
) -> Report:
    """Gigabytes of packed weights per second through the NDP worker's kernel, at one row, by wall-clock.

    One thread fills the block of experts: on several NUMA nodes it is the memory of one.

    Args:
        threads: that compute, and that read.
        repeats: counted rounds; in each every case goes through the block once.
        group: quantization group.
        instruction_set: of the kernel; by default the best.
        shapes: (hidden size, neurons) of an expert.

    Returns:
        Rows of the cases "read" and "1 bit" to "4 bits" with the measures `gbps` (packed bytes, scales included),
        `us_per_expert`, `gweights_per_s`, and `of_read`: their rate over that of "read".

    Raises:
        ConfigError: this processor lacks the instruction set, there is no such group, or the experts of one call do
            not fit in `cold_bytes`.
    """
    pool = _threads(threads, instruction_set, group)
    settings = {
        "threads": threads, "group": group, "instruction_set": pool.instruction_set,
        "repeats": repeats, "cold_bytes": cold_bytes, "experts_per_call": EXPERTS, "rows": 1, "time": "on the wall",
    }  # fmt: skip
    report = Report("kernel", "real", settings=settings)
    with ThreadPoolExecutor(threads) as readers:
        for hidden, neurons in shapes:
            shape = _Shape(hidden, neurons, pool, group, cold_bytes, EXPERTS, time.perf_counter)
            cases = [shape.read(threads * _PIECES, readers.map), *(shape.packed(bits, 1) for bits in THREADS_BITS)]
            results = interleaved(cases, repeats, 1, progress, f"{hidden} x {neurons}")
            common = {"hidden": hidden, "intermediate": neurons}
            report.rows += rows_of(results, **common)
            read = results["read"]["gbps"].median
            report.rows += [
                {"case": case, **common, "measure": "of_read", "median": ratio(measures["gbps"].median, read)}
                for case, measures in results.items()
                if case != "read"
            ]
    return report
