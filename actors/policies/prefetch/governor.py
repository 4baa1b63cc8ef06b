"""Prefetch that hurts turns itself off."""

from __future__ import annotations


class PrefetchGovernor:
    """Rests prefetching while too little of what it brings is used.

    State: how many of the prefetched experts of the current window were used and how many were
    evicted or cancelled unused. When a window of `window` outcomes closes with a used share below
    `min_useful`, prefetch rests for `rest` layers, then a fresh window probes again. O(1) per call.

    Args:
        min_useful: share in [0, 1]; 0 never rests.
        window: outcomes per judgement.
        rest: layers without prefetch after a bad window.
    """

    def __init__(self, min_useful: float, window: int = 128, rest: int = 512) -> None:
        self.min_useful, self.window, self.rest = min_useful, window, rest
        self._used = 0
        self._wasted = 0
        self._resting = 0

    def used(self, count: int = 1) -> None:
        self._used += count

    def wasted(self, count: int = 1) -> None:
        self._wasted += count

    @property
    def resting(self) -> bool:
        return self._resting > 0

    def allows(self) -> bool:
        """Whether this layer may prefetch; called once per layer, it also counts the rest down."""
        if self._resting:
            self._resting -= 1
            if self._resting:
                return False
            self._used = self._wasted = 0  # what was prefetched before the rest is judged already
            return True
        outcomes = self._used + self._wasted
        if outcomes >= self.window:
            bad = self._used < self.min_useful * outcomes
            self._used = self._wasted = 0
            if bad:
                self._resting = self.rest
                return False
        return True
