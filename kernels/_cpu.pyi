"""The C++ extension (`kernels/cpu/module.cpp`, `neuron_module.cpp`). Buffers are given by address, which
`kernels/cpu_ffn.py` and `kernels/packed_ffn.py` check."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from .expert_ffn import Group

RowGroup = tuple[int, int, int]  # expert, start, stop

class Pool:
    """A pool of threads: an opaque capsule, which ends them when it goes."""

class Program:
    """A program of row operators: an opaque capsule, which ends its threads when it goes."""

class KernelTable:
    """The kernels that the core's executor runs: an opaque capsule."""

class LayerStep:
    """A layer's step of the core's executor: an opaque capsule."""

class Importance:
    """The state of ActiveEvict's eviction: an opaque capsule."""

def expert_ffn(
    hidden: int,
    gate_up: int,
    down: int,
    pairs: int,
    pair_count: int,
    groups: list[Group],
    top_k: int,
    neurons: int,
    width: int,
    activation: int,
    y: int,
    /,
) -> None:
    """Raises ValueError: a group, a pair, a neuron, the width or the activation is out of range."""

def combine(y: int, weights: int, tokens: int, top_k: int, width: int, out: int, /) -> None: ...
def table() -> KernelTable: ...
def instruction_sets() -> tuple[str, ...]:
    """What this processor can run, best first: "avx512" (with VNNI), "avx2", "portable"."""

def threads(count: int, cores: list[int], /) -> Pool:
    """Raises ValueError: a number out of range; OSError: a thread cannot be started, or not on its core."""

def packed_ffn(
    threads: Pool,
    set_number: int,
    activation: int,
    hidden: int,
    neurons: int,
    experts: int,
    bits: int,
    group: int,
    gate_up: int,
    gate_up_scales: int,
    down: int,
    down_scales: int,
    groups: list[RowGroup],
    rows: NDArray[np.int32],
    weights: NDArray[np.float32],
    hidden_rows: NDArray[np.float32],
    out: NDArray[np.float32],
    /,
) -> None:
    """Raises ValueError: an array of another shape, type or layout; a number out of range."""

def full_ffn(
    threads: Pool,
    set_number: int,
    activation: int,
    hidden: int,
    neurons: int,
    experts: int,
    element: int,
    gate_up: int,
    down: int,
    groups: list[RowGroup],
    rows: NDArray[np.int32],
    weights: NDArray[np.float32],
    hidden_rows: NDArray[np.float32],
    out: NDArray[np.float32],
    /,
) -> None:
    """Raises ValueError: an array of another shape, type or layout; a number out of range."""

def fit(
    threads: Pool,
    set_number: int,
    hidden: int,
    neurons: int,
    experts: int,
    element: int,
    group: int,
    gate_up: int,
    down: int,
    powers: int,
    widths: list[tuple[int, int, int, int, int, int]],
    /,
) -> None:
    """widths: bits, and the addresses of gate_up, gate_up_scales, down, down_scales, errors.

    Raises ValueError: a number out of range."""

class FormExperts:
    """The parts of a layer's experts in published forms, by address: an opaque capsule."""

# kind, scale type, whether the global scale divides, outputs, inputs, group, block, and the addresses of weight, scale,
# zero points, global scale and order, 0 for none: `read_matrix` in neuron_module.cpp
FormNumbers = tuple[int, ...]

def form_layer(
    hidden: int, neurons: int, experts: list[tuple[FormNumbers, FormNumbers, FormNumbers, FormNumbers]], /
) -> FormExperts:
    """Of each expert gate, up, down, and the numbers of `read_expert`. Raises ValueError: they do not fit together."""

def form_ffn(
    threads: Pool,
    set_number: int,
    activation: int,
    layer: FormExperts,
    groups: list[RowGroup],
    rows: NDArray[np.int32],
    weights: NDArray[np.float32],
    hidden_rows: NDArray[np.float32],
    out: NDArray[np.float32],
    /,
) -> None:
    """Raises ValueError: an array of another shape, type or layout; a number or an order out of range."""

def form_linear(
    threads: Pool, set_number: int, matrix: FormNumbers, x: NDArray[np.float32], out: NDArray[np.float32], /
) -> None:
    """Raises ValueError: an array of another shape, type or layout; a number or an order out of range."""

def gptq_block(
    threads: Pool,
    set_number: int,
    outputs: int,
    inputs: int,
    bits: int,
    left: int,
    weights: int,
    factor: int,
    stride: int,
    pivots: int,
    codes: int,
    rest: int,
    scales: int,
    offsets: int,
    /,
) -> None:
    """Raises ValueError: a number out of range."""

def read_bytes(address: int, size: int, /) -> int:
    """Reads a buffer once, as fast as one thread can."""

def dot_rows(function: int, n: int, rows: int, matrix: int, row_bytes: int, y: int, out: int, /) -> None:
    """out[i] = function(row i of matrix, y), with ggml's `ggml_vec_dot_t`; for the benchmark alone."""

def dense_program(
    ints: int,
    floats: int,
    count: int,
    segments: list[int],
    arena: int,
    rows: int,
    layers: int,
    groups: int,
    threads: int,
    /,
) -> Program:
    """Raises ValueError: a number of a step is out of range; OSError: a thread cannot be started."""

def dense_bind(
    program: Program, layer: int, keys: int, values: int, key_stride: int, value_stride: int, bf16: bool, /
) -> None:
    """Raises ValueError: there is no such layer."""

def dense_begin(
    program: Program, rows: int, sequences: int, cu_rows: int, groups: list[tuple[int, int, int, int]], /
) -> None:
    """Raises ValueError: the tables do not fit each other."""

def dense_layers(
    program: Program,
    segment: int,
    layers: list[LayerStep],
    rows: int,
    top_k: int,
    asking: int,
    cpu: bool,
    hidden: int,
    ids: int,
    weights: int,
    out: int,
    last: int,
    spent: int,
    /,
) -> int:
    """How many of the layers ran, each with the segment behind it; -1 - n: layer n has failed. Raises ValueError: there
    is no such segment."""

def dense_run(program: Program, segment: int, addresses: tuple[int, ...], /) -> None:
    """Raises ValueError: there is no such segment, no step has begun, or an address is missing."""

def router_scores(
    hidden: int, rows: int, weight: int, width: int, outputs: int, bias: int, softmax: int, out: NDArray[np.float32], /
) -> None:
    """softmax: over each so many outputs; 0: none. Raises ValueError: `out` has another size."""

def importance(
    layers: int,
    experts: int,
    window: int,
    top_k: int,
    alpha: float,
    powers: int,
    values: int,
    picked: int,
    seen: int,
    predicted: int,
    resident: int,
    stamp: int,
    /,
) -> Importance:
    """The addresses of a state's arrays, as in importance.hpp; the caller keeps them alive."""

def importance_saw(state: Importance, layer: int, ids: NDArray[np.int64], /) -> None:
    """Raises ValueError: no such layer or expert, or rows of another width."""

def importance_target(
    state: Importance, layer: int, logits: NDArray[np.float32], held: NDArray[np.bool_], tau: float, most: int, /
) -> int:
    """Raises ValueError: no such layer, no rows, or other experts."""

def importance_lowest(state: Importance, count: int, /) -> list[int]: ...
def importance_release(
    state: Importance, seen: int, ids: NDArray[np.int64], layer: int, logits: NDArray[np.float32],
    states: NDArray[np.uint8], evictable: NDArray[np.uint8], free: int, tau: float, most: int, /,
) -> list[int]:  # fmt: skip
    """Raises ValueError: as `importance_saw` and `importance_target`."""

def misses_fit(ids: NDArray[np.int64], present: NDArray[np.bool_], vacant: int, /) -> bool:
    """Raises ValueError: there is no such expert."""

def budget_top_k(
    ids: NDArray[np.int64], weights: NDArray[np.float32], top_k: int, present: NDArray[np.bool_], vacant: int,
    narrowest: int, renormalise: bool, ids_out: NDArray[np.int64], weights_out: NDArray[np.float32], /,
) -> int:  # fmt: skip
    """The number of dropped pairs. Raises ValueError: no such expert, or other pairs."""

def rank_by_votes(scores: NDArray[np.floating], top: int, base: int, /) -> list[int]:
    """`predicted_experts` of scores [T, E], float32 or float64, with `base` added to each."""

def rank_by_score(scores: NDArray[np.floating], top: int, base: int, /) -> tuple[list[int], list[float]]:
    """`by_score` of scores [T, E], float32 or float64: experts with `base` added, and their highest scores."""

def lowest_products(
    a: NDArray[np.float64],
    b: NDArray[np.float64],
    stamps: NDArray[np.int64],
    present: NDArray[np.bool_],
    count: int,
    /,
) -> list[int]:
    """The first `count` present keys by rising a * b, then stamp, then key. Raises ValueError: lengths differ."""

def expect_map(
    probabilities: NDArray[np.float64], keys: NDArray[np.int32], priorities: NDArray[np.float32], now: int,
    experts: int, told: NDArray[np.int64], /,
) -> None:  # fmt: skip
    """Sets the probabilities of those keys that there are; what is told of their layers [L] changes. Raises ValueError:
    lengths differ."""

def decode_next(inputs: int, tokens: list[int], /) -> list[tuple[int, int]]:
    """Raises ValueError: not one token for each row, or no column is left."""

def argmax_rows(scores: int, rows: int, width: int, /) -> list[int]: ...

def guard_pages(address: int, size: int, /) -> int:
    """Survive bad pages of a mapped file; the file's number. Raises ValueError: too many files; OSError: no handler."""

def release_pages(file: int, /) -> None:
    """The file is about to be unmapped. Raises ValueError: there is no such file."""

def bad_page() -> tuple[int, int] | None:
    """The file and the offset of the first page that could not be read."""

def replaceable(
    ids: NDArray[np.int64],
    resident: NDArray[np.bool_],
    beta: float,
    shard_of: NDArray[np.int64] | None,
    shards: int,
    out: NDArray[np.bool_],
    /,
) -> None:
    """Raises ValueError: an array is of another kind or size, or an expert or shard does not exist."""

def substitute(
    ids: NDArray[np.int64],
    weights: NDArray[np.float32],
    probabilities: NDArray[np.float32] | None,
    replace: NDArray[np.bool_],
    reach: NDArray[np.float32],
    buddies: NDArray[np.int32],
    similarity: NDArray[np.float32],
    out_ids: NDArray[np.int64],
    out_weights: NDArray[np.float32],
    numbers: tuple[Any, ...],
    /,
) -> tuple[int, int]:
    """Pairs replaced and left out. Raises ValueError: as `replaceable`, or what is needed is None."""
