"""`tiermoe bench kernel`: packed experts on one core, against memory, torch and ggml."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.progress import Progress

from ....errors import ConfigError
from ....kernels import _cpu
from ....kernels.pack import BITS, GROUPS, PackedShape
from ....kernels.packed_ffn import FullLayer, PackedLayer, Threads, instruction_sets
from .ggml import FORMATS, Format, Ggml
from .metrics import Bar, Case, Measures, Report, Spread, interleaved, ratio, rows_of

SHAPES = ((2048, 768), (4096, 14336))
ROWS = (1, 8, 64)
COLD_BYTES = 128 << 20  # of each competitor's experts, which take turns: several times a last-level cache
WARMUP = 1

# of weights per second at one row: ours, theirs, limit
AGAINST = (
    ("4 bits", "torch fp32", 4.0),
    ("4 bits", "ggml Q4_0", 1.2),
    ("3 bits", "ggml Q3_K", 1.5),
    ("2 bits", "ggml Q2_K", 2.0),
    ("1 bit", "ggml Q2_K", 3.0),
)


def bench_kernel(
    repeats: int, group: int, instruction_set: str | None, ggml: Path | None, progress: Progress | None
) -> Report:
    """Weights per second of whole experts on one thread.

    Every competitor has as many experts as fill `COLD_BYTES`, and a repetition goes through all of them once, so that
    weights come from memory, as in decode. Time is that of the thread, not of the clock on the wall: other processes
    of the machine take none of it. ggml is given its dot products and the quantization of activations alone.

    Args:
        repeats: counted rounds.
        group: quantization group of our widths.
        instruction_set: of our kernels; by default the best.
        ggml: a library; by default that of an installed wheel, if there is one.

    Bars, for each shape at one row: `AGAINST`, where the competitor is here; the time at 2 bits <= 0.6 of that at 4.

    Raises:
        ConfigError: the library given is no ggml, this processor lacks the instruction set, there is no such group.
    """
    import torch

    if group not in GROUPS:
        raise ConfigError(f"there is no group of {group} inputs", f"choose one of {GROUPS}")
    if instruction_set is not None and instruction_set not in instruction_sets():
        raise ConfigError(f"this processor has no {instruction_set}", f"choose one of {instruction_sets()}")
    torch.set_num_threads(1)
    threads = Threads(1, instruction_set=instruction_set)
    library = ggml or Ggml.find()
    other = None if library is None else Ggml(library)
    settings = {
        "threads": 1, "group": group, "instruction_set": threads.instruction_set, "repeats": repeats,
        "cold_bytes": COLD_BYTES, "time": "of the thread", "ggml": None if library is None else library.name,
    }  # fmt: skip
    report = Report("kernel", "real", settings=settings)
    for hidden, neurons in SHAPES:
        bench = _Shape(hidden, neurons, threads, group)
        for rows in ROWS:
            cases = bench.cases(rows)
            if rows == 1:
                cases += [*bench.full_cases(), *bench.ggml_cases(other)]
            results = interleaved(cases + bench.torch_cases(rows), repeats, WARMUP, progress)
            report.rows += rows_of(results, hidden=hidden, intermediate=neurons, rows=rows)
            if rows == 1:
                report.bars += _bars(results, f"{hidden} x {neurons}")
    return report


class _Shape:
    """The competitors at one shape of an expert."""

    def __init__(self, hidden: int, neurons: int, threads: Threads, group: int) -> None:
        self._hidden, self._neurons, self._threads, self._group = hidden, neurons, threads, group
        self._weights = 3 * hidden * neurons
        self._rng = np.random.default_rng(0)
        self._bytes = self._rng.integers(0, 256, 1 << 24, dtype=np.uint8)
        self._values = self._rng.standard_normal(1 << 22, dtype=np.float32) * np.float32(0.02)

    def cases(self, rows: int) -> list[Case]:
        """Read bandwidth, and our widths."""
        block = self._filled(self._bytes, (COLD_BYTES,))

        def read() -> Measures:
            start = time.thread_time()
            _cpu.read_bytes(block.ctypes.data, block.nbytes)
            return {"gbps": block.nbytes / (time.thread_time() - start) / 1e9}

        return [Case("read", read)] + [self._packed(bits, rows) for bits in BITS]

    def full_cases(self) -> list[Case]:
        """Our kernels for full precision."""
        return [self._full(name) for name in ("float32", "bfloat16")]

    def torch_cases(self, rows: int) -> list[Case]:
        """Two GEMMs and the activation, in float32 and bfloat16; down as [H, I], which torch prefers at one row."""
        import torch
        from torch.nn import functional

        def case(name: str, dtype: torch.dtype) -> Case:
            size = self._weights * dtype.itemsize
            experts = self._experts(size)
            flat = torch.from_numpy(self._filled(self._values, (experts * self._weights,))).to(dtype)
            whole = flat.view(experts, 3 * self._neurons, self._hidden)
            x = torch.from_numpy(self._inputs(rows)).to(dtype)

            def run(expert: int) -> None:
                gate_up, down = whole[expert, : 2 * self._neurons], whole[expert, 2 * self._neurons :]
                gate, up = functional.linear(x, gate_up).chunk(2, dim=1)
                functional.linear(functional.silu(gate) * up, down.view(self._hidden, self._neurons))

            return self._case(f"torch {name}", run, experts, size, rows)

        return [case("fp32", torch.float32), case("bf16", torch.bfloat16)]

    def ggml_cases(self, ggml: Ggml | None) -> list[Case]:
        """The three products of an expert at one row."""
        return [] if ggml is None else [self._ggml(ggml, fmt) for fmt in FORMATS]

    def _ggml(self, ggml: Ggml, fmt: Format) -> Case:
        gate_up = ggml.matrix(fmt, 2 * self._neurons, self._hidden, self._rng)
        down = ggml.matrix(fmt, self._hidden, self._neurons, self._rng)
        size = gate_up.nbytes + down.nbytes
        experts = self._experts(size)
        all_gate_up, all_down = np.stack([gate_up] * experts), np.stack([down] * experts)
        x, h = self._inputs(1)[0], self._rng.standard_normal(self._neurons, dtype=np.float32)

        products = [
            (ggml.product(fmt, all_gate_up[e], x), ggml.product(fmt, all_down[e], h)) for e in range(experts)
        ]

        def run(expert: int) -> None:
            up, back = products[expert]
            up()
            back()

        return self._case(f"ggml {fmt.name}", run, experts, size, 1)

    def _packed(self, bits: int, rows: int) -> Case:
        shape = PackedShape(self._hidden, self._neurons, bits, self._group)
        experts = self._experts(shape.nbytes())
        arrays: dict[str, NDArray[Any]] = {
            name: self._filled(self._bytes, (experts, *size))
            if code == "U8"
            else self._filled(self._values.astype(np.float16), (experts, *size))
            for name, (code, size) in shape.tensors().items()
        }
        layer = PackedLayer(arrays, shape, "silu", self._threads)
        name = "1 bit" if bits == 1 else f"{bits} bits"
        return self._case(name, self._runner(layer, rows), experts, shape.nbytes(), rows)

    def _full(self, dtype: str) -> Case:
        values = self._values if dtype == "float32" else (self._values.view(np.uint32) >> 16).astype(np.uint16)
        size = self._weights * values.itemsize
        experts = self._experts(size)
        gate_up = self._filled(values, (experts, self._neurons, 2, self._hidden))
        down = self._filled(values, (experts, self._neurons, self._hidden))
        layer = FullLayer(gate_up, down, dtype, "silu", self._threads)
        return self._case(f"full {dtype}", self._runner(layer, 1), experts, size, 1)

    def _runner(self, layer: PackedLayer | FullLayer, rows: int) -> Callable[[int], None]:
        x = self._inputs(rows)
        out, numbers = np.empty_like(x), np.arange(rows, dtype=np.int32)
        weights = np.ones(rows, dtype=np.float32)
        return lambda expert: layer.run([(expert, 0, rows)], numbers, weights, x, out)

    def _case(self, name: str, run: Callable[[int], None], experts: int, size: int, rows: int) -> Case:
        turns = experts if rows == 1 else max(1, experts // rows)  # more rows are bound by arithmetic, not by memory

        def measure() -> Measures:
            start = time.thread_time()
            for expert in range(turns):
                run(expert)
            seconds = (time.thread_time() - start) / turns
            return {
                "us_per_expert": seconds * 1e6,
                "gweights_per_s": self._weights / seconds / 1e9,
                "gbps": size / seconds / 1e9,
            }

        return Case(name, measure)

    def _experts(self, size: int) -> int:
        return math.ceil(COLD_BYTES / size)

    def _inputs(self, rows: int) -> NDArray[np.float32]:
        return self._rng.standard_normal((rows, self._hidden), dtype=np.float32)

    @staticmethod
    def _filled(block: NDArray[Any], shape: tuple[int, ...]) -> NDArray[Any]:
        """A new array that repeats `block`: what the values are changes no time."""
        return np.resize(block, shape)


def _bars(results: Mapping[str, Mapping[str, Spread]], shape: str) -> list[Bar]:
    speed = {name: m["gweights_per_s"].median for name, m in results.items() if "gweights_per_s" in m}
    bars = [
        Bar(f"{shape}: weights per second at {ours} over {theirs}", ratio(speed[ours], speed[theirs]), ">=", limit)
        for ours, theirs, limit in AGAINST
        if theirs in speed
    ]
    times = ratio(results["2 bits"]["us_per_expert"].median, results["4 bits"]["us_per_expert"].median)
    return [*bars, Bar(f"{shape}: time at 2 bits over 4 bits", times, "<=", 0.6)]
