"""The C++ extension (`kernels/cpu/substitute.cpp`). Arrays are checked there: kind, size, contiguous."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

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
