"""The C++ planner of `auto` (`kernels/cpu/planner_module.cpp`); `actors/policies/auto.py` documents it. Arrays are
contiguous; each function raises ValueError for numbers out of range and arrays of another size."""

import numpy as np
from numpy.typing import NDArray

class Planner:
    """A planner: an opaque capsule."""

# copy, gpu, gpu_row, near, near_busy, free_rows, message, dense
_Costs = tuple[float, float, float, float, float, float, float, float]
_Ids = NDArray[np.int32]

def planner(
    layers: int,
    experts: int,
    top_k: int,
    slots: int,
    workers: int,
    costs: _Costs,
    states: NDArray[np.uint8],
    without: int,
    /,
) -> Planner: ...
def plan(
    planner: Planner,
    layer: int,
    needed: _Ids,
    rows: _Ids,
    now_s: float,
    link_free_s: float,
    flight_keys: _Ids,
    arrival_s: NDArray[np.float64],
    action: NDArray[np.uint8],
    worker: NDArray[np.uint8],
    prompt_tokens: float,
    gpus: NDArray[np.uint8] | None,
    held: NDArray[np.uint8] | None,
    room: int,
    /,
) -> tuple[float, float, float, float, int, int, int, list[tuple[int, int, float, bool]]]: ...
def predict(planner: Planner, layer: int, ids: _Ids, ranks: int, /) -> None: ...
def used(planner: Planner, layer: int, needed: _Ids, share: NDArray[np.float32] | None, /) -> None: ...
def prompt_end(
    planner: Planner, counts: NDArray[np.int64], tokens: float, requests: int, batch: int, hot: _Ids, /
) -> None: ...
def popularity(planner: Planner, counts: NDArray[np.int64], tokens: float, top_k: int, batch: int, /) -> None: ...
def resize(planner: Planner, slots: int, /) -> None: ...
def admit(planner: Planner, key: int, /) -> tuple[bool, int]: ...
def worth(planner: Planner, key: int, /) -> float: ...
def values(planner: Planner, /) -> int:
    """The address of V, float64 [L, E], which lives as long as the planner."""

def saw(planner: Planner, part: int, expected_s: float, seen_s: float, /) -> None: ...
def took(planner: Planner, seen_s: float, /) -> None: ...
def filled(planner: Planner, /) -> None: ...
def costs(planner: Planner, /) -> _Costs: ...
def error(planner: Planner, /) -> float: ...
def replay(
    rule: int,
    slots: int,
    shape: tuple[int, int, int, int, int, int],
    needed: _Ids,
    rows: _Ids,
    count: _Ids,
    predicted: _Ids,
    share: NDArray[np.float32],
    prompts: NDArray[np.int64],
    popular: NDArray[np.int64],
    popular_tokens: float,
    truth: _Costs,
    belief: _Costs,
    without: int,
    start: bool,
    planner_s: float,
    first: int,
    /,
) -> tuple[float, float, float, int, int, int, int, int, int, int, int, int]:
    """A rule on a stated machine, for `bench auto` (`planner_replay.hpp`). shape: layers, experts, top_k, batch,
    rounds, prompt_tokens. Returns decode_s, prompt_s, error, tokens, prompts, needed, hits, loads, near, waits, fills,
    prefetches."""
