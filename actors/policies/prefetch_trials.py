"""Whether prefetch pays: decode forwards with and without it are compared."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple


class DecodeForward(NamedTuple):
    """What was measured of one decode forward.

    elapsed_s: from its begin to the begin of the next. waited_s: part of it in which the compute waited for copies.
    prefetched_bytes, link_s: bytes that prefetch brought, seconds that the link was busy.
    """

    elapsed_s: float
    waited_s: float
    prefetched_bytes: int = 0
    link_s: float = 0.0


@dataclass
class TrialResult:
    """The last trial. Times, bytes and link seconds are means of a forward."""

    trials: int = 0  # concluded
    pays: bool = True  # prefetch is on between trials
    paused_forwards: int = 0  # decode forwards without prefetch, those of trials included
    saved_wait_s: float = 0.0  # waits for copies without prefetch, less those with it
    cost_s: float = 0.0  # the rest of a forward with prefetch (host work, slower compute), less that without it
    prefetched_bytes: float = 0.0  # with prefetch
    added_link_s: float = 0.0  # the link's busy time with prefetch, less that without it


class PrefetchTrials:
    """Turns prefetch off while the waits that it saves are less than what it costs.

    Rule: a trial has four blocks of decode forwards: with prefetch, two without, with. The first forwards of a block
    are not counted, since copies and residents of the block before remain. Of each arm the slowest and the fastest
    eighth are left out (pauses between requests, interruptions by other processes). Prefetch pays if

        mean wait without - mean wait with  >  mean rest with - mean rest without

    The result holds for `hold` decode forwards; then the next trial begins. A trial is given up if the number of rows
    changes, and begins again after `first` forwards. State: the measured forwards of the trial. Cost: O(1) a forward,
    one sort a trial. The rule reads no clock: the executor measures.

    Args:
        block: forwards of a block. settle: of these not counted. first: forwards before the first trial.

    Attributes:
        result: for people and metrics; one object for good.
    """

    def __init__(self, block: int = 16, settle: int = 4, first: int = 128, hold: int = 512) -> None:
        self._block, self._settle, self._first, self._hold = block, settle, first, hold
        self._left = first  # forwards until the trial
        self._at = 0  # forwards of the trial that have begun
        self._rows = 0
        self._with: list[DecodeForward] = []
        self._without: list[DecodeForward] = []
        self.result = TrialResult()

    def next(self, rows: int, before: DecodeForward | None) -> bool:
        """Whether the decode forward that begins now prefetches.

        Args:
            rows: of this forward. before: the forward before; None: it was no decode forward, or was not measured.
        """
        on = self._next(rows, before)
        self.result.paused_forwards += not on
        return on

    def _next(self, rows: int, before: DecodeForward | None) -> bool:
        if self._left:
            self._left -= 1
            return self.result.pays
        if self._at:
            if rows != self._rows:
                return self._end(self._first)
            last = self._at - 1
            if before is not None and last % self._block >= self._settle:
                (self._with if self._prefetches(last) else self._without).append(before)
        if self._at == 4 * self._block:
            self._judge()
            return self._end(self._hold)
        self._rows, self._at = rows, self._at + 1
        return self._prefetches(self._at - 1)

    def _prefetches(self, at: int) -> bool:
        return at // self._block in (0, 3)

    def _end(self, left: int) -> bool:
        """The trial is over; the next one begins after `left` forwards."""
        self._left, self._at = left - 1, 0
        self._with, self._without = [], []
        return self.result.pays

    def _judge(self) -> None:
        if min(len(self._with), len(self._without)) < self._block - self._settle:
            return  # too few were measured: the last result stays
        a, b, result = _mean(self._with), _mean(self._without), self.result
        result.trials += 1
        result.saved_wait_s = b.waited_s - a.waited_s
        result.cost_s = (a.elapsed_s - a.waited_s) - (b.elapsed_s - b.waited_s)
        result.prefetched_bytes, result.added_link_s = a.prefetched_bytes, a.link_s - b.link_s
        result.pays = result.saved_wait_s > result.cost_s


def _mean(forwards: Sequence[DecodeForward]) -> DecodeForward:
    """Of the middle three quarters by time."""
    rest = len(forwards) // 8
    middle = sorted(forwards)[rest : len(forwards) - rest]
    return DecodeForward(*(sum(values) / len(middle) for values in zip(*middle, strict=True)))
