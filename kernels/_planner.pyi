"""
The planner of `auto` (kernels/cpu/planner.hpp), which actors/policies/auto.py documents. Arrays are contiguous;
each function raises ValueError for numbers out of range and arrays of another size.
"""

import numpy
import numpy.typing


class Planner:
    pass

def planner(layers: int, experts: int, top_k: int, slots: int, workers: int, costs: tuple[float, float, float, float, float, float, float, float], states: numpy.typing.NDArray[numpy.uint8 | numpy.bool], without: int) -> Planner:
    """
    costs: copy, gpu, gpu_row, near, near_busy, free_rows, message, dense. states [L, E] are read in place.
    """

def plan(planner: Planner, layer: int, needed: numpy.typing.NDArray[numpy.int32], rows: numpy.typing.NDArray[numpy.int32], now_s: float, link_free_s: float, flight_keys: numpy.typing.NDArray[numpy.int32], arrival_s: numpy.typing.NDArray[numpy.float64], action: numpy.typing.NDArray[numpy.uint8 | numpy.bool], worker: numpy.typing.NDArray[numpy.uint8 | numpy.bool], prompt_tokens: float, gpus: numpy.typing.NDArray[numpy.uint8 | numpy.bool] | None, held: numpy.typing.NDArray[numpy.uint8 | numpy.bool] | None, room: int) -> tuple[float, float, float, float, int, int, int, list[tuple[int, int, float, bool]]]:
    """
    end_s, near_s, link_s, owner_s, loads, near, waits, and key, victim, worth_s, prefetch of each background copy.
    """

def predict(planner: Planner, layer: int, ids: numpy.typing.NDArray[numpy.int32], ranks: int) -> None:
    """Experts that a later layer is predicted to need."""

def used(planner: Planner, layer: int, needed: numpy.typing.NDArray[numpy.int32], share: numpy.typing.NDArray[numpy.float32] | None) -> None:
    """A layer has run."""

def prompt_end(planner: Planner, counts: numpy.typing.NDArray[numpy.int64], tokens: float, requests: int, batch: int) -> None:
    """Prompts have run: V is what they say of each expert."""

def popularity(planner: Planner, counts: numpy.typing.NDArray[numpy.int64], tokens: float, top_k: int, batch: int) -> None:
    """Popularity from elsewhere."""

def resize(planner: Planner, slots: int) -> None:
    """Another number of slots."""

def admit(planner: Planner, key: int) -> tuple[bool, int]:
    """Whether an expert takes a slot, and whose; -1: of none."""

def worth(planner: Planner, key: int) -> float:
    """Seconds that keeping an expert is worth: S of its layer times V."""

def values(planner: Planner) -> int:
    """The address of V, float64 [L, E], which lives as long as the planner."""

def saw(planner: Planner, part: int, expected_s: float, seen_s: float) -> None:
    """Correct a part of the costs."""

def took(planner: Planner, seen_s: float) -> None:
    """A layer's seen time."""

def filled(planner: Planner) -> None:
    """A background copy of a miss has ended."""

def costs(planner: Planner) -> tuple[float, float, float, float, float, float, float, float]:
    """Costs as corrected."""

def followed(planner: Planner) -> tuple[int, float, float, float, float]:
    """
    The rule that is followed (0: its own), seconds of a token as seen, and of on-demand, fill and split.
    """

def error(planner: Planner) -> float:
    """Mean error of predicted layer times, as a share of the time."""

def replay(rule: int, slots: int, shape: tuple[int, int, int, int, int, int], needed: numpy.typing.NDArray[numpy.int32], rows: numpy.typing.NDArray[numpy.int32], count: numpy.typing.NDArray[numpy.int32], predicted: numpy.typing.NDArray[numpy.int32], share: numpy.typing.NDArray[numpy.float32], prompts: numpy.typing.NDArray[numpy.int64], popular: numpy.typing.NDArray[numpy.int64], popular_tokens: float, truth: tuple[float, float, float, float, float, float, float, float], belief: tuple[float, float, float, float, float, float, float, float], without: int, start: bool, planner_s: float, first: int) -> tuple[float, float, float, int, int, int, int, int, int, int, int, int]:
    """
    A rule on a stated machine, for `bench auto` (`planner_replay.hpp`).

    shape: layers, experts, top_k, batch, rounds, prompt_tokens. Gives decode_s, prompt_s, error, tokens, prompts,
    needed, hits, loads, near, waits, fills, prefetches.
    """
