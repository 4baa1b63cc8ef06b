"""What computing takes on this machine, measured beside a recording, for simulated replays."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field
from statistics import median

from ...simulate.trace_format import Costs

_KEPT = 4096  # samples of each kind


@dataclass
class _Pass:
    """One forward: rows, seconds between its layers and inside them, experts and pairs of all layers."""

    rows: int
    start_s: float
    end_s: float = 0.0
    dense_s: float = 0.0
    inside_s: float = 0.0
    experts: int = 0
    pairs: int = 0


@dataclass
class CostMeter:
    """Told of each layer of each forward; the first of one row and of several give the model of `Costs`."""

    layers: int
    _now: _Pass | None = None
    _decode: deque[_Pass] = field(default_factory=lambda: deque(maxlen=_KEPT))
    _prefill: deque[_Pass] = field(default_factory=lambda: deque(maxlen=_KEPT))
    _between: deque[float] = field(default_factory=lambda: deque(maxlen=_KEPT))

    def layer(self, index: int, rows: int, experts: int, pairs: int, start_s: float, inside_s: float) -> None:
        """A layer's experts ran for `inside_s` from `start_s` on, waits for copies not counted."""
        last = self._now
        if index == 0:
            if last is not None and last.rows == rows == 1:
                self._between.append(start_s - last.end_s)
            self._now = last = _Pass(rows, start_s)
        elif last is not None:
            last.dense_s += start_s - last.end_s
        if last is None:
            return
        last.inside_s += inside_s
        last.experts += experts
        last.pairs += pairs
        last.end_s = time.perf_counter()
        if index == self.layers - 1:
            (self._decode if rows == 1 else self._prefill).append(last)

    def costs(self) -> Costs | None:
        """None before there was a forward of one row."""
        if not self._decode:
            return None
        gaps = max(1, self.layers - 1)
        dense_s = median(p.dense_s for p in self._decode) / gaps
        expert_s = median(p.inside_s / p.experts for p in self._decode)
        dense_row, expert_row = [0.0], [0.0]
        if self._prefill:
            dense_row = [(p.dense_s / gaps - dense_s) / (p.rows - 1) for p in self._prefill]
            many = [p for p in self._prefill if p.pairs > p.experts]
            expert_row = [(p.inside_s - p.experts * expert_s) / (p.pairs - p.experts) for p in many] or [0.0]
        forward_s = median(self._between) - dense_s if self._between else 0.0
        return Costs(
            forward_s=max(0.0, forward_s), dense_s=dense_s, dense_row_s=max(0.0, median(dense_row)),
            expert_s=expert_s, expert_row_s=max(0.0, median(expert_row)),
        )  # fmt: skip
