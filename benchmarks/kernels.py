"""`bench kernel`: the CPU's kernels of experts against its memory bandwidth."""

from __future__ import annotations

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
from tiermoe.kernels.form_ffn import FormLayer
from tiermoe.kernels.forms import BLOCKS, ExpertForm, MatrixForm
from tiermoe.kernels.pack import BITS, GROUPS, PackedShape
from tiermoe.kernels.packed_ffn import FullLayer, PackedLayer, Threads, instruction_sets
from tiermoe.limits import check_threads

from .random_forms import random_expert

if TYPE_CHECKING:
    from .cases import Kernel

# hidden size, neurons: Qwen3-30B-A3B, Qwen1.5-MoE-A2.7B, Mixtral-8x7B
SHAPES = ((2048, 768), (2048, 1408), (4096, 14336))
EXPERTS = 8  # of one call, as in a decode step, where so many fit in the bytes of a case
COLD_BYTES, MOST_COLD = 256 << 20, 1 << 30  # of each case's experts, for each thread and at most: beyond the caches
_PIECES = 4  # of each thread's share of the read, to balance slow cores

# published forms that are measured
PUBLISHED: dict[str, dict[str, Any]] = {
    "fp8_block": {}, "mxfp4": {}, "nvfp4": {}, "int 4 bits": {"bits": 4, "group": 128, "zeros": True}, "q4_k": {},
}  # fmt: skip
FULL = ("float32", "bfloat16")
AGAINST = ("mxfp4", "int 4 bits")  # at least twice the weights per second of full float32
FASTER, NARROWER = 2.0, 0.6


def kernel(options: Kernel, progress: Progress | None) -> Report:
    """Packed experts, published forms and plain numbers: see `measured`."""
    check_threads("--threads", options.threads)
    return measured(options.threads, options.repeats, options.group, options.instruction_set, progress, published=True)


def measured(
    threads: int, repeats: int, group: int = 64, instruction_set: str | None = None, progress: Progress | None = None,
    *, shapes: Sequence[tuple[int, int]] = SHAPES, cold_bytes: int | None = None, published: bool = False,
) -> Report:  # fmt: skip
    """Gigabytes and weights per second of whole experts at one row, by time of the thread, of several by wall-clock.

    A repetition runs all experts of a case once, so that weights come from memory, as in decode. One thread fills them:
    on several NUMA nodes they are in the memory of one.

    Bars, for each shape on one thread: `AGAINST`; the time at 2 bits <= 0.6 of that at 4.

    Args:
        threads: that compute, and that read.
        repeats: counted rounds; in each every case goes through its experts once.
        group: quantization group.
        instruction_set: of the kernel; by default the best.
        shapes: (hidden size, neurons) of an expert.
        cold_bytes: of each case's experts, at least; by default as `COLD_BYTES` says.
        published: also published forms and plain numbers.

    Returns:
        Rows of the cases "read", "1 bit" to "8 bits" and the published ones with the measures `gbps` (scales included),
        `us_per_expert`, `gweights_per_s`, and `of_read`: their rate over that of "read".

    Raises:
        ConfigError: this processor lacks the instruction set, there is no such group, or no packed expert fits in
            `cold_bytes`.
    """
    if group not in GROUPS:
        raise ConfigError(f"there is no group of {group} inputs", f"choose one of {GROUPS}")
    if instruction_set is not None and instruction_set not in instruction_sets():
        raise ConfigError(f"this processor has no {instruction_set}", f"choose one of {instruction_sets()}")
    pool = Threads(threads, (), instruction_set)
    cold_bytes = min(threads * COLD_BYTES, MOST_COLD) if cold_bytes is None else cold_bytes
    now = time.thread_time if threads == 1 else time.perf_counter
    settings = {
        "threads": threads, "group": group, "instruction_set": pool.instruction_set, "repeats": repeats,
        "cold_bytes": cold_bytes, "experts_per_call": EXPERTS, "rows": 1,
        "time": "of the thread" if threads == 1 else "on the wall",
    }  # fmt: skip
    report = Report("kernel", "real", settings=settings)
    with ThreadPoolExecutor(threads) as readers:
        read = (1, map) if threads == 1 else (threads * _PIECES, readers.map)
        for hidden, neurons in shapes:
            shape = _Shape(hidden, neurons, pool, group, cold_bytes, now)
            cases = [shape.read(*read), *(shape.packed(bits) for bits in BITS)]
            if published:
                kinds = [kind for kind in PUBLISHED if neurons % BLOCKS.get(kind, (1,))[0] == 0]  # q4_k's are of 256
                cases += [*(shape.form(kind) for kind in kinds), *(shape.full(dtype) for dtype in FULL)]
            results = interleaved(cases, repeats, 1, progress, f"{hidden} x {neurons}")
            common = {"hidden": hidden, "intermediate": neurons}
            report.rows += rows_of(results, **common)
            rates = {case: measures["gbps"].median for case, measures in results.items()}
            report.rows += [
                {"case": case, **common, "measure": "of_read", "median": ratio(gbps, rates["read"])}
                for case, gbps in rates.items()
                if case != "read"
            ]
            if threads == 1:
                report.bars += _bars(results, f"{hidden} x {neurons}")
    return report


def _bars(results: Mapping[str, Mapping[str, Spread]], shape: str) -> list[Bar]:
    us = {name: measures["us_per_expert"].median for name, measures in results.items() if name != "read"}
    theirs = "full float32"
    bars = [
        Bar(f"{shape}: weights per second at {ours} over {theirs}", ratio(us[theirs], us[ours]), ">=", FASTER)
        for ours in AGAINST
        if theirs in us
    ]
    return [*bars, Bar(f"{shape}: time at 2 bits over 4 bits", ratio(us["2 bits"], us["4 bits"]), "<=", NARROWER)]


class _Shape:
    """The cases at one shape of an expert; values repeat one block.

    Args:
        pool: threads of the kernels. now: the clock that times, in seconds.
        cold_bytes: of each case's experts, at least; packed experts of all widths share one block of them.
    """

    def __init__(
        self, hidden: int, neurons: int, pool: Threads, group: int, cold_bytes: int, now: Callable[[], float]
    ) -> None:
        self._hidden, self._neurons, self._pool, self._group = hidden, neurons, pool, group
        self._cold_bytes, self._now = cold_bytes, now
        self._weights = 3 * hidden * neurons
        self._rng = np.random.default_rng(0)
        self._bytes = self._rng.integers(0, 256, 1 << 24, dtype=np.uint8)
        self._values = self._rng.standard_normal(1 << 22, dtype=np.float32) * np.float32(0.02)
        self._codes = np.resize(self._bytes, cold_bytes)
        self._scales = np.resize(self._values.astype(np.float16), cold_bytes // 2)

    def read(self, pieces: int, run_all: Callable[..., Iterable[Any]]) -> Case:
        """Reading the block, as so many pieces that `run_all` reads like `map`."""
        words = self._codes[: len(self._codes) // 8 * 8].view(np.uint64)
        parts = np.array_split(words, pieces)

        def run() -> Measures:
            start_s = self._now()
            for _ in run_all(np.sum, parts):  # reads as fast as a thread can, without the interpreter's lock
                pass
            return {"gbps": self._cold_bytes / (self._now() - start_s) / 1e9}

        return Case("read", run)

    def packed(self, bits: int) -> Case:
        """Experts of a width. Raises ConfigError: none fits in the block."""
        shape = PackedShape(self._hidden, self._neurons, bits, self._group)
        size = shape.nbytes()
        experts = len(self._codes) // size
        if experts == 0:
            raise ConfigError(f"an expert of {size} bytes does not fit in {len(self._codes)}", "give more cold bytes")
        arrays: dict[str, NDArray[Any]] = {}
        taken = {"U8": 0, "F16": 0}
        for name, (code, dimensions) in shape.tensors().items():
            block: NDArray[Any] = self._codes if code == "U8" else self._scales
            count, first = experts * math.prod(dimensions), taken[code]
            arrays[name] = block[first : first + count].reshape(experts, *dimensions)
            taken[code] = first + -(-count // 64) * 64  # kernels need multiples of 64 bytes
        layer = PackedLayer(arrays, shape, "silu", self._pool)
        return self._case("1 bit" if bits == 1 else f"{bits} bits", layer, size, experts)

    def form(self, kind: str) -> Case:
        """Experts as published: `kind` is one of `PUBLISHED`."""
        gate, down = (
            MatrixForm(kind.split()[0], *size, **PUBLISHED[kind])
            for size in ((self._neurons, self._hidden), (self._hidden, self._neurons))
        )
        form = ExpertForm(down=down, gate=gate, up=gate)
        experts = math.ceil(self._cold_bytes / form.nbytes())
        one = random_expert(form, self._rng)
        arrays = {name: np.resize(part, (experts, *part.shape)) for name, part in one.items()}
        parts = [{name: array[expert] for name, array in arrays.items()} for expert in range(experts)]
        layer = FormLayer(parts, [form] * experts, "silu", self._pool)
        return self._case(kind, layer, form.nbytes(), experts)

    def full(self, dtype: str) -> Case:
        values = self._values if dtype == "float32" else (self._values.view(np.uint32) >> 16).astype(np.uint16)
        size = self._weights * values.itemsize
        experts = math.ceil(self._cold_bytes / size)
        gate_up = np.resize(values, (experts, self._neurons, 2, self._hidden))
        down = np.resize(values, (experts, self._neurons, self._hidden))
        layer = FullLayer(gate_up, down, dtype, "silu", self._pool)
        return self._case(f"full {dtype}", layer, size, experts)

    def _case(self, name: str, layer: PackedLayer | FullLayer | FormLayer, size: int, experts: int) -> Case:
        """All experts once, each of `size` bytes, `EXPERTS` of them in a call."""
        count = min(EXPERTS, experts)
        turns = experts // count * count
        x = self._rng.standard_normal((1, self._hidden), dtype=np.float32)
        out, numbers = np.empty_like(x), np.zeros(count, np.int32)
        weights = np.full(count, 1 / count, dtype=np.float32)

        def measure() -> Measures:
            start_s = self._now()
            for first in range(0, turns, count):
                layer.run([(first + i, i, i + 1) for i in range(count)], numbers, weights, x, out)
            seconds = (self._now() - start_s) / turns
            return {
                "us_per_expert": seconds * 1e6,
                "gweights_per_s": self._weights / seconds / 1e9,
                "gbps": size / seconds / 1e9,
            }

        return Case(name, measure)
