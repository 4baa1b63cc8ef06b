"""
Launches of compiled Triton kernels from native code (kernels/triton/launch_module.cpp).
"""

from collections.abc import Sequence
from typing import Any

from typing_extensions import CapsuleType


class Driver:
    """
    Functions of the GPU's driver by address: cuLaunchKernel, cuGetErrorString, cuCtxSetCurrent; 0: none.
    """

    def __init__(self, launch: int, text: int = 0, current: int = 0) -> None: ...

class Launch:
    """
    A kernel's compiled forms. loose: numbers of its integers that Triton does not specialise.

    A subclass has `first(grid, *args)`, which launches once and returns a function (grid, *args), or (driver, function,
    context, threads, shared, packed, nulls, () -> stream).
    """

    def __init__(self, loose: Sequence[int]) -> None: ...

    @property
    def known(self) -> int: ...

    def __call__(self, grid: tuple[int, int, int], /, *args: Any) -> None: ...

class Ring:
    """
    Pinned buffers, taken in turn. A subclass has `turned`, `read_by_this_stream`, `grown`, `copied`, `source`.
    """

    def __init__(self, buffers: Sequence[int], nbytes: int, sections: int, copy: Launch | None, block: int, stream: object | None) -> None: ...

    def write(self, target: object, array: object) -> None:
        """
        Bring a contiguous array to a tensor, for later work on the current stream.
        """

class Fetch:
    """
    What the host reads of a layer, in one pinned buffer, by one kernel and one event; for one thread.

    A subclass has `grown(nbytes)`, a new buffer as int32; `views(parts)`, of each (place, bytes, number of its type or
    -1 for scores, shape) a tensor and an array on it; and `copied(target, source)`, called where there is no kernel.

    Args:
        runtime: kept, for it keeps the driver. calls, context: of the driver, as of `_core.Driver`.
        stream: gives the address of the current one.
        reads: the kernels with 0, 1 and 2 routers; empty: there are none. block, scores: of a program.
        types: dtype, bytes of an item, and whether it arrives as float32. spin_s: of a wait, before it gives up the lock.
    """

    def __init__(self, runtime: object, calls: dict, context: int, stream: object, reads: Sequence[Launch], block: int, scores: int, int32: object, types: Sequence[tuple[object, int, bool]], spin_s: float) -> None: ...

    def enqueue(self, tensors: object, hidden: object | None, routers: object) -> None:
        """
        Read tensors, and the scores of routers (weight [D*E, H], bias, D, softmax) of hidden [T, H].
        """

    def wait(self) -> None:
        """
        Wait for what was enqueued; after some time without the interpreter's lock.
        """

    def take(self) -> list[Any]:
        """
        Arrays of what was read: of tensors, then of scores [T, E], of several layers [T, D, E].
        """

    @property
    def reads(self) -> CapsuleType | None:
        """
        `LayerReads` of `kernels/triton/experts.hpp`, of this object; None: there is no kernel.
        """

class Experts:
    """
    The launches that run experts.

    up, down: tensors that the launches get of the slots, behind the pairs. dtype: of rows.
    classes: (most rows, rows of a tile, gate_up, its columns, down, its columns), ascending. sizes: neurons of the pool
    and of a slot, H, items of a row of activations, and what divides them. tables: a `Ring`. scratch: (rows, numbers of a
    table, pairs) -> activations, words for pairs, weights and table, the table, the pairs, rows of y. kept: rows up to which these
    are kept, for each stream. combining: top_k -> the launch that sums, whose program has `block` columns.
    """

    def __init__(self, up: tuple, down: tuple, dtype: object, classes: Sequence[tuple[int, int, Launch, int, Launch, int]], sizes: tuple[int, int, int, int, int], tables: object, scratch: object, kept: int, stream: object, dtypes: tuple, int64: object, combining: object, block: int) -> None: ...

    def run(self, hidden: object, pairs: object, groups: object, top_k: int, y: object) -> bool: ...

    def combine(self, y: Any, weights: Any) -> Any: ...

    @property
    def launches(self) -> CapsuleType:
        """`ExpertLaunches` of `kernels/triton/experts.hpp`, of this object."""
