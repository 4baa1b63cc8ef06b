"""The C++ extension (`proto/module.cpp`). Buffers are any objects with contiguous bytes; times in nanoseconds."""

from collections.abc import Callable
from typing import Any

from numpy.typing import NDArray
from typing_extensions import Buffer

# `Status` in ring.hpp: ok 0, timeout 1, closed 2, corrupt 3, stalled 4, interrupted 5
def write(
    memory: Buffer, offset: int, capacity: int, pieces: tuple[Buffer, ...],
    timeout_ns: int, spin_ns: int, stall_ns: int, /,
) -> int: ...  # fmt: skip
def read(
    memory: Buffer, offset: int, capacity: int, max_bytes: int, timeout_ns: int, spin_ns: int, stall_ns: int,
    doze_ns: int, helps: bool, supply: Callable[[int], Buffer | None] | None, /,
) -> bytes | Buffer | int: ...  # fmt: skip
def close(memory: Buffer, offset: int, capacity: int, /) -> None: ...
def finite(buffer: NDArray[Any], exponent: int, /) -> bool: ...
def below(values: NDArray[Any], limit: int, /) -> bool: ...
def batch_fault(
    experts: NDArray[Any], bits: NDArray[Any], starts: NDArray[Any], rows: NDArray[Any],
    tokens: int, max_experts: int, /,
) -> int: ...  # fmt: skip
