"""A timeline of compute, copies and waits, in Chrome's trace event format."""

from __future__ import annotations

from typing import Any

TRACKS = {"compute": 1, "wait": 2, "copy": 3, "prefetch": 4, "ndp": 5}


class Timeline:
    """Spans in `time.perf_counter` seconds; recording is a tuple append.

    Callers ask `enabled` before they build a span's name, so that off it costs one test.
    At most `limit` spans are kept; later ones are counted in `dropped`.
    """

    def __init__(self, enabled: bool, limit: int = 1_000_000) -> None:
        self.enabled = enabled
        self.dropped = 0
        self._limit = limit
        self._spans: list[tuple[str, str, float, float]] = []

    def span(self, track: str, name: str, start_s: float, end_s: float) -> None:
        if not self.enabled:
            return
        if len(self._spans) >= self._limit:
            self.dropped += 1
            return
        self._spans.append((track, name, start_s, end_s))

    def clear(self) -> None:
        self._spans.clear()
        self.dropped = 0

    def events(self) -> list[dict[str, Any]]:
        """Chrome trace events: microseconds from the first span, one thread row per track."""
        spans = list(self._spans)
        origin_s = min((s[2] for s in spans), default=0.0)
        rows: list[dict[str, Any]] = [
            {"ph": "M", "name": "thread_name", "pid": 1, "tid": tid, "args": {"name": track}}
            for track, tid in TRACKS.items()
        ]
        if self.dropped:
            rows.append({"ph": "M", "name": "dropped_spans", "pid": 1, "tid": 0, "args": {"count": self.dropped}})
        rows += [
            {
                "ph": "X",
                "pid": 1,
                "tid": TRACKS[track],
                "name": name,
                "ts": (start_s - origin_s) * 1e6,
                "dur": (end_s - start_s) * 1e6,
            }
            for track, name, start_s, end_s in spans
        ]
        return rows
