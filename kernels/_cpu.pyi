"""
CPU kernels (kernels/cpu). Buffers are given by address, which the modules of `tiermoe.kernels` check.
"""

from collections.abc import Sequence

import numpy
import numpy.typing
from typing_extensions import CapsuleType


def table() -> CapsuleType:
    """The kernels that the core's executor runs; see table.hpp."""

def expert_ffn(hidden: int, gate_up: int, down: int, pairs: int, pair_count: int, groups: Sequence[tuple[int, int, int, int, bool]], top_k: int, neurons: int, width: int, activation: int, y: int) -> None:
    """
    Experts over groups (start, stop, first, neurons, add) of pairs; see expert_ffn.hpp.

    The pool has so many neurons, hidden pair_count / top_k rows, pairs pair_count entries, y as many rows.
    Raises ValueError: a group, a pair, a neuron, the width or the activation is out of range.
    """

def slot_experts(gate_up: int, down: int, neurons: int, width: int, activation: int, max_rows: int) -> CapsuleType:
    """
    Experts of float32 slots for the core's executor, of so many neurons each; see experts.hpp.

    Raises ValueError: a number is out of range.
    """

def combine(y: int, weights: int, tokens: int, top_k: int, width: int, out: int) -> None:
    """Weighted sum of each token's pairs; see expert_ffn.hpp."""

def decode_next(inputs: int, tokens: Sequence[int]) -> list[tuple[int, int]]:
    """
    The inputs of the next decode step of the same requests: of each group the keys read, and the most of one request.

    Raises ValueError: not one token for each row, or no column is left.
    """

def argmax_rows(scores: int, rows: int, width: int) -> list[int]:
    """The place of each row's largest number. scores: float32 [rows, width]."""

def draw_rows(scores: int, rows: int, width: int, asked: Sequence[tuple[int, float, float, int, float, int, int]]) -> list[int]:
    """
    A token of each row that is asked: (row, temperature, min_p, top_k or 0, top_p, seed, step). By temperature, then min-p,
    top-k and top-p, then inverse transform sampling of 1 - Philox(key=seed, counter=step), tokens in the order of their
    numbers; -1: the row has no finite largest score. scores: float32 [rows, width].
    """

def router_scores(hidden: int, rows: int, weight: int, width: int, outputs: int, bias: int, softmax: int, out: numpy.typing.NDArray[numpy.float32]) -> None:
    """
    A router's scores on a few rows. softmax: over each so many outputs; 0: none.

    Raises ValueError: `out` has another size.
    """

class Program:
    """A program of row operators, with its threads; see dense.hpp."""

def dense_program(ints: int, floats: int, count: int, segments: Sequence[int], matrices: Sequence[Sequence[int]], arena: int, rows: int, layers: int, groups: int, threads: int) -> Program:
    """
    ints and floats are the addresses of [count, 25] int64 and [count, 2] float64. matrices: in published forms, as
    `MatrixNumbers` has them.

    Raises ValueError: a number of a step is out of range; OSError: a thread cannot be started.
    """

def dense_bind(program: Program, layer: int, keys: int, values: int, key_stride: int, value_stride: int, kind: int, round: bool) -> None:
    """
    Where a layer's keys and values are, and of which `CacheKind`. Raises ValueError: there is no such layer or kind.
    """

def dense_begin(program: Program, rows: int, sequences: int, cu_rows: int, groups: Sequence[tuple[int, int, int, int]]) -> None:
    """
    The rows of the next step, and of each group of its cache read, write, cu_keys and window.

    Raises ValueError: the tables do not fit each other.
    """

def dense_run(program: Program, segment: int, addresses: Sequence[int]) -> None:
    """
    One segment. Raises ValueError: there is no such segment, no step has begun, or an address is missing.
    """

def dense_layers(program: Program, segment: int, layers: Sequence[CapsuleType], rows: int, top_k: int, cpu: bool, hidden: int, ids: int, weights: int, out: int, last: int, spent: int) -> int:
    """
    Layers (`CpuLayer.step`), each with the segment behind it, from this on. How many ran; -1 - n: layer n has failed.

    hidden, ids and weights are the inputs of the first and of the first that did not run.
    last: output of the program's last segment, where it is behind the last of these; else 0. spent: float64
    [layers, 3], seconds that each waited for copies, ran kernels (where it times them) and took; cpu: the last two
    by the thread's CPU time. Raises ValueError: there is no such segment.
    """

def instruction_sets() -> tuple[str, ...]:
    """
    What this processor can run, best first: "avx512" (with VNNI), "avx2", "portable".
    """

class Pool:
    """A pool of threads, which ends them when it goes; see threads.hpp."""

def threads(count: int, cores: Sequence[int]) -> Pool:
    """
    Raises ValueError: a number out of range; OSError: a thread cannot be started, or not on its core.
    """

def packed_ffn(threads: Pool, set_number: int, activation: int, hidden: int, neurons: int, experts: int, bits: int, group: int, gate_up: int, gate_up_scales: int, down: int, down_scales: int, groups: Sequence[tuple[int, int, int]], rows: numpy.typing.NDArray[numpy.int32], weights: numpy.typing.NDArray[numpy.float32], hidden_rows: numpy.typing.NDArray[numpy.float32], out: numpy.typing.NDArray[numpy.float32]) -> None:
    """
    Raises ValueError: an array of another shape, type or layout; a number out of range.
    """

def full_ffn(threads: Pool, set_number: int, activation: int, hidden: int, neurons: int, experts: int, element: int, gate_up: int, down: int, groups: Sequence[tuple[int, int, int]], rows: numpy.typing.NDArray[numpy.int32], weights: numpy.typing.NDArray[numpy.float32], hidden_rows: numpy.typing.NDArray[numpy.float32], out: numpy.typing.NDArray[numpy.float32]) -> None:
    """
    Raises ValueError: an array of another shape, type or layout; a number out of range.
    """

def fit(threads: Pool, set_number: int, hidden: int, neurons: int, experts: int, element: int, group: int, gate_up: int, down: int, powers: int, widths: Sequence[tuple[int, int, int, int, int, int]]) -> None:
    """
    widths: bits, and the addresses of gate_up, gate_up_scales, down, down_scales, errors.

    Raises ValueError: a number out of range.
    """

def gptq_block(threads: Pool, set_number: int, outputs: int, inputs: int, bits: int, left: int, weights: int, factor: int, stride: int, pivots: int, codes: int, rest: int, scales: int, offsets: int) -> None:
    """
    One group of a GPTQ sweep; see fit.hpp. Raises ValueError: a number out of range.
    """

class FormExperts:
    """The parts of a layer's experts in published forms, by address."""

def form_layer(hidden: int, neurons: int, experts: Sequence[tuple[Sequence[int], Sequence[int], Sequence[int], Sequence[int]]]) -> FormExperts:
    """
    Of each expert gate, up, down, and the numbers of `Expert` in neuron_module.cpp.

    Raises ValueError: they do not fit together.
    """

def form_ffn(threads: Pool, set_number: int, activation: int, layer: FormExperts, groups: Sequence[tuple[int, int, int]], rows: numpy.typing.NDArray[numpy.int32], weights: numpy.typing.NDArray[numpy.float32], hidden_rows: numpy.typing.NDArray[numpy.float32], out: numpy.typing.NDArray[numpy.float32]) -> None:
    """
    Raises ValueError: an array of another shape, type or layout; a number or an order out of range.
    """

def full_experts(threads: Pool, set_number: int, activation: int, hidden: int, neurons: int, experts: int, element: int, gate_up: int, down: int, first: int, max_rows: int) -> CapsuleType:
    """
    Experts of slots from `first` on for the core's executor; see experts.hpp. What is given stays with the caller.

    Raises ValueError: a number is out of range.
    """

def form_experts(threads: Pool, set_number: int, activation: int, layer: FormExperts, first: int, max_rows: int) -> CapsuleType:
    """As `full_experts`."""

def form_linear(threads: Pool, set_number: int, matrix: Sequence[int], x: numpy.typing.NDArray[numpy.float32], out: numpy.typing.NDArray[numpy.float32]) -> None:
    """
    Raises ValueError: an array of another shape, type or layout; a number or an order out of range.
    """
