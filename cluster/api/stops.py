"""Stop strings in text that arrives in pieces."""

from __future__ import annotations

from collections.abc import Sequence


class StopMatcher:
    """Gives out text that can no longer be part of a stop string, and ends at the first one.

    The earliest place wins, and of several there the one that is listed first. What ends in the beginning of a stop
    string is held back until it is known not to become one.

    Args:
        stops: the strings, none of them empty.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self.matched: str | None = None

    def feed(self, text: str) -> str:
        """What may be shown once `text` has come; up to the stop string where that completes one."""
        if self.matched is not None:
            return ""
        self._held += text
        found = [(place, i) for i, stop in enumerate(self._stops) if (place := self._held.find(stop)) >= 0]
        if found:
            place, i = min(found)
            self.matched = self._stops[i]
            shown, self._held = self._held[:place], ""
            return shown
        keep = max((_overlap(self._held, stop) for stop in self._stops), default=0)
        shown, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        return shown

    def finish(self) -> str:
        """What was held back, when no more text comes."""
        rest, self._held = self._held, ""
        return rest


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that `stop` begins with, and is longer than."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
