"""Row counts that CUDA graphs are recorded for, and the padding of forwards to them.

A graph is recorded for a number of rows. A decoder layer of T rows runs as one of the next larger number in
`GRAPH_SHAPES`: its norms, router and shared experts run on rows of zeros too, attention and routed experts on the T
rows only, so that nothing is loaded or written for the others. All are recorded before serving (`recorded_prompts`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional

GRAPH_SHAPES = (1, 2, 4, 8, 16)
GRAPH_ROWS = GRAPH_SHAPES[-1]  # larger forwards, mostly prompts, are not recorded
_RUNS = 3  # of each shape: torch warms up, records, replays


class _Padded(threading.local):
    rows: int | None = None  # of the padded layer that runs in this thread; None: it is not padded


_padded = _Padded()


def recorded_prompts() -> list[list[int]]:
    """Prompts whose forwards have each recorded number of rows, largest first, as often as recording takes."""
    return [[0] * rows for rows in reversed(GRAPH_SHAPES) for _ in range(_RUNS)]


def run_padded(layer: Callable[..., Any], hidden: torch.Tensor) -> Any:
    """layer(hidden [1, T, H]) with its rows padded to the next of `GRAPH_SHAPES`; the outputs have T rows."""
    rows = hidden.shape[1]
    shape = next(shape for shape in GRAPH_SHAPES if shape >= rows)
    if shape == rows:
        return layer(hidden)
    _padded.rows = rows
    try:
        out = layer(_pad(hidden, shape))
    finally:
        _padded.rows = None
    return (out[0][:, :rows], *out[1:]) if isinstance(out, tuple) else out[:, :rows]


def unpadded(forward: Callable[..., Any]) -> Callable[..., Any]:
    """A submodule's forward, such as attention's, that runs on the rows of the forward only; hidden [1, T, H] first."""

    def run(hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        rows = _padded.rows
        if rows is None:
            return forward(hidden_states, *args, **kwargs)
        out = forward(hidden_states[:, :rows], *args, **kwargs)
        shape = hidden_states.shape[1]
        return (_pad(out[0], shape), *out[1:]) if isinstance(out, tuple) else _pad(out, shape)

    return run


def run_unpadded(
    forward: Callable[..., torch.Tensor], hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    """The routed experts on the rows of the forward only: hidden [T, H], ids and weights [T, K] -> [T, H]."""
    rows = _padded.rows
    if rows is None:
        return forward(hidden, ids, weights)
    out = torch.zeros_like(hidden)
    out[:rows] = forward(hidden[:rows], ids[:rows], weights[:rows])
    return out


def _pad(hidden: torch.Tensor, rows: int) -> torch.Tensor:
    return functional.pad(hidden, (0, 0, 0, rows - hidden.shape[1]))
