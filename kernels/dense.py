"""Programs of row operators for the CPU (`kernels/cpu/dense.hpp`): every value is one vector a row.

A `Builder` appends steps and gives out the arena's space; `Program` runs the result, segment by segment. Vectors are
float32; a step may round its result to bfloat16, as an operator of that type does.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from . import _cpu
from .form_ffn import matrix_numbers
from .forms import MatrixForm, Parts

if TYPE_CHECKING:
    from typing_extensions import CapsuleType

CODES = (
    "linear", "binary", "unary", "reduce", "softmax", "norm", "topk", "gather", "scatter", "copy", "select", "attend",
    "load", "store",
)  # fmt: skip
BINARY = ("add", "sub", "mul", "div", "maximum", "minimum", "gt", "ge", "lt", "le", "eq", "ne", "mask")
UNARY = (
    "copy", "neg", "rsqrt", "sqrt", "exp", "log", "sigmoid", "silu", "gelu", "gelu_tanh", "tanh", "relu", "abs", "cos",
    "sin", "reciprocal", "power", "square", "softplus", "clamp", "scale", "shift", "logical_not", "fill", "gt", "ge",
    "lt", "le", "eq", "ne",
)  # fmt: skip
REDUCE = ("sum", "mean", "maximum", "minimum")
TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.int64: 2, torch.int32: 3}
_CACHES = ("float32", "bfloat16", "int8", "fp8")  # `CacheKind`
_INTS, _LINE = 25, 16  # numbers of a step; float32 of a cache line

Shape = tuple[int, ...]
Coded = Literal["int8", "fp8"]  # numbers of 8 bits


@dataclass(frozen=True, eq=False)
class Value:
    """A vector for each row, of this shape; or, with `constant`, one for all rows (contiguous float32)."""

    shape: Shape
    at: int = -1
    constant: torch.Tensor | None = None

    @property
    def width(self) -> int:
        return math.prod(self.shape)

    def seen(self, shape: Shape) -> Value:
        """The same numbers in another shape."""
        return Value(shape, self.at, self.constant)


class Builder:
    """Appends steps. `build` gives every value its space in the arena, from its first step to its last."""

    def __init__(self) -> None:
        self._steps: list[_Step] = []
        self._segments: list[int] = []
        self._matrices: list[tuple[int, ...]] = []
        self._alive: list[Any] = []
        self._count = 0
        self.layers: list[int] = []  # of the model, that attend

    def new(self, shape: Shape) -> Value:
        self._count += 1
        return Value(shape, self._count - 1)

    def constant(self, tensor: torch.Tensor) -> Value:
        kept = tensor.detach().to(torch.float32).contiguous()
        self._alive.append(kept)
        return Value(tuple(kept.shape), constant=kept)

    def step(
        self, code: str, kind: int = 0, out: Value | None = None, a: Value | None = None, b: Value | None = None,
        c: Value | None = None, p: Sequence[int] = (), f: Sequence[float] = (), rounded: bool = False,
    ) -> None:  # fmt: skip
        self._steps.append(_Step(code, kind, rounded, (out, a, b, c), p, f))

    def linear(
        self, out: Value, a: Value, weight: torch.Tensor, bias: Value | None = None, rounded: bool = False
    ) -> None:
        """out [n] = a [k] @ weight.T + bias. weight: [n, k], contiguous, float32 or bfloat16; it is not copied."""
        if weight.shape != (out.width, a.width) or not weight.is_contiguous() or weight.dtype not in _WEIGHTS:
            raise ValueError(f"a product of {a.width} numbers with {weight.dtype} {tuple(weight.shape)}")
        self._alive.append(weight)
        self.step("linear", _WEIGHTS[weight.dtype], out, a, c=bias, p=[weight.data_ptr()], rounded=rounded)

    def form_linear(self, out: Value, a: Value, form: MatrixForm, parts: Parts) -> None:
        """out [n] = a [k] @ weight.T, with weight in a published form; its parts are not copied.

        Raises:
            FormError: the parts are not those of the form, not contiguous or not aligned.
        """
        if (form.outputs, form.inputs) != (out.width, a.width):
            raise ValueError(f"a product of {a.width} numbers with a matrix {[form.outputs, form.inputs]}")
        self._alive.append(parts)
        self._matrices.append(matrix_numbers(parts, form))
        self.step("linear", _FORM, out, a, p=[len(self._matrices) - 1])

    def attend(
        self, out: Value, query: Value, key: Value, value: Value, sinks: torch.Tensor | None, layer: int,
        scale: float, softcap: float, rounded: bool,
    ) -> None:  # fmt: skip
        """Attention and write of a layer's cache: query [heads, D], key [kv, D], value [kv, Dv], sinks [heads]."""
        kept = None if sinks is None else self.constant(sinks)
        sizes = [query.shape[0], key.shape[0], query.shape[1], value.shape[1]]
        self.step(
            "attend", 0, out, query, key, value,
            p=[*sizes, layer, len(self.layers), 0 if kept is None else _address(kept)], f=[scale, softcap],
            rounded=rounded,
        )  # fmt: skip
        self.layers.append(layer)

    def end_segment(self) -> None:
        self._segments.append(len(self._steps))

    def build(self, max_rows: int, groups: int, group_of: Mapping[int, int], threads: int) -> Program:
        """The program.

        Args:
            max_rows: of a step.
            groups: whose tables `Program.begin` gets.
            group_of: the group of each of `layers`.

        Raises:
            ValueError: a number is out of range.
        """
        places, arena = self._places()
        ints, floats = [], []
        for step in self._steps:
            row = [CODES.index(step.code), step.kind, int(step.rounded)]
            for value in step.operands:
                row += (-1, 0, 0) if value is None else (places.get(value.at, -1), _address(value), value.width)
            p = list(step.p)
            if step.code == "attend":
                p[4] = group_of[p[4]]
            ints.append([*row, *p, *([0] * (_INTS - len(row) - len(p)))])
            floats.append([*step.f, *([0.0] * (2 - len(step.f)))])
        numbers = np.array(ints, np.int64).reshape(-1, _INTS), np.array(floats, np.float64).reshape(-1, 2)
        made = _cpu.dense_program(
            numbers[0].ctypes.data, numbers[1].ctypes.data, len(ints), self._segments, self._matrices, arena,
            max_rows, len(self.layers), groups, threads,
        )  # fmt: skip
        return Program(made, max_rows, self._alive)

    def _places(self) -> tuple[dict[int, int], int]:
        """Where each value begins in the arena, and its size; space is given out again after a value's last step."""
        last = {v.at: i for i, step in enumerate(self._steps) for v in step.operands if v is not None and v.at >= 0}
        places: dict[int, int] = {}
        free: dict[int, list[int]] = defaultdict(list)
        arena = 0
        for i, step in enumerate(self._steps):
            values = {v.at: v.width for v in step.operands if v is not None and v.at >= 0}
            for at, width in values.items():
                if at not in places:
                    if free[width]:
                        places[at] = free[width].pop()
                    else:
                        places[at], arena = arena, arena + -(-width // _LINE) * _LINE
            for at, width in values.items():
                if last[at] == i:
                    free[width].append(places[at])
        return places, arena


@dataclass(frozen=True)
class _Step:
    code: str
    kind: int
    rounded: bool
    operands: tuple[Value | None, ...]  # out, a, b, c
    p: Sequence[int]
    f: Sequence[float]


_WEIGHTS: dict[torch.dtype, Literal[0, 1]] = {torch.float32: 0, torch.bfloat16: 1}
_FORM = 2  # of a product's weights, beside those


def _address(value: Value) -> int:
    return 0 if value.constant is None else value.constant.data_ptr()


class Program:
    """A built program. One step at a time: `begin`, then every segment in order.

    max_rows: of a step.
    """

    def __init__(self, made: _cpu.Program, max_rows: int, alive: list[Any]) -> None:
        self._made, self.max_rows, self._alive = made, max_rows, alive
        self._bound: list[torch.Tensor] = []

    def bind(
        self, layer: int, keys: torch.Tensor, values: torch.Tensor, coded: Coded | None = None, round: bool = False
    ) -> None:
        """Where a layer's cache is: keys [slots, kv, D] and values [slots, kv, Dv], float32 or bfloat16.

        Args:
            coded: keys and values are rows of 8 bits with a scale (`engine.serving.kv_rows`); None: they are numbers.
            round: what is read of coded rows is rounded to bfloat16.
        """
        for rows in (keys, values):
            fits = rows.dtype == torch.int8 if coded is not None else rows.dtype in _WEIGHTS
            if not fits or rows.dtype != keys.dtype or not rows[:1].is_contiguous():
                raise ValueError(f"a cache of {rows.dtype} with strides {rows.stride()}")
        self._bound += [keys, values]
        kind = _CACHES.index(str(keys.dtype).removeprefix("torch.") if coded is None else coded)
        _cpu.dense_bind(
            self._made, layer, keys.data_ptr(), values.data_ptr(), keys.stride(0), values.stride(0), kind, round
        )

    def begin(
        self, rows: int, cu_rows: torch.Tensor, groups: Sequence[tuple[Any, torch.Tensor, torch.Tensor, int]]
    ) -> None:
        """The rows of the next step.

        Args:
            cu_rows: int32 [sequences + 1].
            groups: of each group of layers: cache slots that each sequence reads (int64, its new rows last; None:
                all are new), slots to write (int64 [rows]), int32 [sequences + 1] where each sequence's reads begin,
                and keys that a row sees (0: all).

        Raises:
            ValueError: the numbers do not fit each other.
        """
        self._step = (cu_rows, groups)  # alive until the next
        _cpu.dense_begin(
            self._made, rows, cu_rows.shape[0] - 1, cu_rows.data_ptr(),
            [
                (0 if read is None else read.data_ptr(), write.data_ptr(), cu_keys.data_ptr(), window)
                for read, write, cu_keys, window in groups
            ],
        )  # fmt: skip

    def run_layers(
        self, segment: int, layers: list[CapsuleType], inputs: Sequence[torch.Tensor], out: torch.Tensor,
        last: torch.Tensor | None, cpu: bool, spent: NDArray[np.float64],
    ) -> int:  # fmt: skip
        """Run layers of experts, and behind each the segment that follows it.

        Args:
            segment: behind the first of them.
            layers: `engine.executors.CpuExecutor.handle` of each.
            inputs: of the first: hidden [T, H] float32, ids [T, K] int64, weights [T, K] float32; then of the first
                that did not run.
            out: [T, H], where each layer's result goes. last: that of the last segment, if it is behind the last layer.
            spent: [layers, 3], gets the seconds that each waited for copies, ran kernels (where it times them), and
                took; cpu: the last two by the thread's CPU time.

        Returns:
            How many ran; -1 - n: layer n has failed.
        """
        hidden, ids, weights = inputs
        tokens, top_k = ids.shape
        return _cpu.dense_layers(
            self._made, segment, layers, tokens, top_k, cpu, hidden.data_ptr(), ids.data_ptr(),
            weights.data_ptr(), out.data_ptr(), 0 if last is None else last.data_ptr(), spent.ctypes.data,
        )  # fmt: skip

    def run(self, segment: int, *tensors: torch.Tensor) -> None:
        """Run a segment: `tensors` are what its loads and stores name, contiguous, of the rows of the step."""
        _cpu.dense_run(self._made, segment, tuple([tensor.data_ptr() for tensor in tensors]))
