"""Experts of a layer on the CPU, packed or in full precision, from NumPy arrays (`kernels/cpu/neuron_ffn.hpp`).

    out[row] += weight * FFN_expert(hidden[row])       FFN(x) = down(act(gate x) * up x)

Without torch, so that the NDP worker starts in a second. The arrays may be mapped files; nothing is copied.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from . import _cpu
from .pack import PackedShape, PackError

if TYPE_CHECKING:
    from typing_extensions import CapsuleType

ACTIVATIONS = {"silu": 0, "gelu": 1, "gelu_tanh": 2, "relu": 3}  # Activation in expert_ffn.hpp
ELEMENTS = {"float32": (0, np.float32), "float16": (1, np.float16), "bfloat16": (2, np.uint16)}  # Element there

RowGroup = tuple[int, int, int]  # expert, start, stop: rows[start:stop] go through the expert


def instruction_sets() -> tuple[str, ...]:
    """The processor's instruction sets, best first: "avx512" (with VNNI), "avx2", "portable"."""
    return _cpu.instruction_sets()


class Threads:
    """The compute threads of a worker, for one call at a time; they end with this object.

    Args:
        count: threads, the caller among them.
        cores: one core number per thread, or none; the caller is bound to the first during a call.
        instruction_set: one of `instruction_sets()`; by default the best.

    Raises:
        ValueError: the count, a core or the instruction set does not exist.
        OSError: a thread cannot start, or cannot be bound to its core.
    """

    def __init__(self, count: int = 1, cores: Sequence[int] = (), instruction_set: str | None = None) -> None:
        sets = instruction_sets()
        self.count = count
        self.instruction_set = instruction_set or sets[0]
        if self.instruction_set not in sets:
            raise ValueError(f"this processor has no {instruction_set}: choose one of {', '.join(sets)}")
        self._set = sets.index(self.instruction_set)
        self._pool = _cpu.threads(count, list(cores))

    @property
    def handle(self) -> tuple[_cpu.Pool, int]:
        """The extension's arguments: the pool, and the number of the instruction set."""
        return self._pool, self._set


class HostLayer:
    """Experts of one layer, in arrays of this host.

    Results do not depend on the threads, the other rows or the other experts of a call.

    Args:
        ffn: the function of the extension that runs them. layer: its arguments, before those of a call.
        experts: E. hidden: H. neurons: I.
        capsule: the function that makes them an operand of the core's executor; None: there is none.
    """

    def __init__(
        self, ffn: Callable[..., None], layer: tuple[Any, ...], experts: int, hidden: int, neurons: int,
        capsule: Callable[..., CapsuleType] | None = None,
    ) -> None:  # fmt: skip
        self._ffn, self._layer, self._capsule = ffn, layer, capsule
        self.experts, self.hidden, self.neurons = experts, hidden, neurons

    def native(self, first: int, max_rows: int) -> CapsuleType:
        """For the core's executor, which holds this object: the experts of slots from `first` on, each of up to
        `max_rows` rows.

        Raises TypeError: these experts have no such operand.
        """
        if self._capsule is None:
            raise TypeError(f"{type(self).__name__} is no operand of the core's executor")
        return self._capsule(*self._layer, first, max_rows)

    def run(
        self,
        groups: list[RowGroup],
        rows: NDArray[np.int32],
        weights: NDArray[np.float32],
        hidden: NDArray[np.float32],
        out: NDArray[np.float32],
    ) -> None:
        """out = 0; then out[rows[p]] += weights[p] * FFN_expert(hidden[rows[p]]), group by group in their order.

        Args:
            groups: (expert, start, stop): entries start to stop of `rows` and `weights`.
            rows: int32 [P], rows of `hidden`; a row may occur in several groups.
            weights: float32 [P].
            hidden: float32 [T, H].
            out: float32 [T, H], overwritten; not the memory of `hidden`.

        Raises:
            ValueError: shapes, types or memory layouts differ, or a group, expert, row or `order` is out of range.
        """
        self._ffn(*self._layer, groups, rows, weights, hidden, out)


class PackedLayer(HostLayer):
    """Quantized experts of one layer and one width, as `pack.pack_expert` lays them out.

    The hidden rows, and the neurons between the projections, are quantized to int8 with a scale per group (largest
    absolute value: 127); besides, only the order of additions differs from `dequantized()` weights. A group of inputs
    below 1e-30 counts as zero; a row with a value that is not finite gives NaN.

    Args:
        arrays: of `PackedShape.tensors()`, each with the experts in front; C-contiguous.
        activation: a key of `ACTIVATIONS`.

    Raises:
        PackError: the arrays are not those of `shape`.
        ValueError: the activation is unknown.
    """

    def __init__(
        self, arrays: Mapping[str, NDArray[Any]], shape: PackedShape, activation: str, threads: Threads
    ) -> None:
        shape.check(arrays, leading=1)
        self._arrays = [_contiguous(name, arrays[name]) for name in shape.tensors()]
        experts, addresses = len(self._arrays[0]), map(_address, self._arrays)
        sizes = shape.hidden, shape.intermediate, experts, shape.bits, shape.group
        layer = (*threads.handle, _code(activation), *sizes, *addresses)
        super().__init__(_cpu.packed_ffn, layer, experts, shape.hidden, shape.intermediate)


class FullLayer(HostLayer):
    """Full-precision experts of one layer, neuron-major as in the expert store; float32 arithmetic.

    Args:
        gate_up: [E, I, 2, H], C-contiguous; bfloat16 as its bits, uint16.
        down: [E, I, H], the same type.
        dtype: a key of `ELEMENTS`.
        activation: a key of `ACTIVATIONS`.

    Raises:
        PackError: shapes or types do not fit together.
        ValueError: the type or the activation is unknown.
    """

    def __init__(
        self, gate_up: NDArray[Any], down: NDArray[Any], dtype: str, activation: str, threads: Threads
    ) -> None:
        if dtype not in ELEMENTS:
            raise ValueError(f"there is no kernel for {dtype}: choose one of {', '.join(ELEMENTS)}")
        code, element = ELEMENTS[dtype]
        if gate_up.ndim != 4 or gate_up.shape[2] != 2 or 0 in gate_up.shape:
            raise PackError(f"gate_up must be [E, I, 2, H], not {gate_up.shape}")
        experts, neurons, _, hidden = gate_up.shape
        if down.shape != (experts, neurons, hidden):
            raise PackError(f"down must be {(experts, neurons, hidden)} for gate_up {gate_up.shape}, not {down.shape}")
        for name, array in (("gate_up", gate_up), ("down", down)):
            if array.dtype != element:
                raise PackError(f"{name} must be {np.dtype(element)} for {dtype}, not {array.dtype}")
        self._arrays = _contiguous("gate_up", gate_up), _contiguous("down", down)
        addresses = _address(gate_up), _address(down)
        layer = (*threads.handle, _code(activation), hidden, neurons, experts, code, *addresses)
        super().__init__(_cpu.full_ffn, layer, experts, hidden, neurons, _cpu.full_experts)


def _code(activation: str) -> int:
    if activation not in ACTIVATIONS:
        raise ValueError(f"there is no activation {activation}: choose one of {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[activation]


def _contiguous(name: str, array: NDArray[Any]) -> NDArray[Any]:
    if not array.flags.c_contiguous:
        raise PackError(f"{name} must be C-contiguous, its strides are {array.strides}")
    if len(array) == 0:
        raise PackError(f"{name} has no experts")
    return array


def _address(array: NDArray[Any]) -> int:
    address: int = array.__array_interface__["data"][0]
    return address
