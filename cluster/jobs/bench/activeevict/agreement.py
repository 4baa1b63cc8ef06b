"""Whether the engine on a throttled link and a replay of the same prompts agree, in sentences from the counters."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations
from statistics import mean, median
from typing import Any

from .measures import median_ratio
from .work import PREFETCHING

Row = Mapping[str, Any]
_SAME = 0.05  # part by which total I/O may differ where bytes are called the same
_DIFFERS = (
    "how many guesses are brought in depends on when they come up, a trace has a prediction's top K only, and a lossy "
    "row routes anew"
)


def over_replay(row: Row, measure: str) -> float | None:
    """What was measured over what the replay of the same prompts gives, see `median_ratio`."""
    return median_ratio(row["values"][measure], row["replayed"][measure])


def agreement(rows: Sequence[Row], settings: Mapping[str, Any]) -> Iterator[str]:
    """How far blocking I/O differs, and what of it the link's clocks explain.

    Args:
        rows: the emulated ones. settings: of that part.
    """
    blocking = _by_ratio(rows, "blocking_ms")
    if not blocking:
        yield "No replay of these prompts blocks at all, so that there is nothing to compare with."
        return
    alike, pairs = _same_order(rows)
    (least, least_row), (most, most_row) = blocking[0], blocking[-1]
    yield (
        f"**The engine blocks {median(r for r, _ in blocking):.2f} times as long as a replay of the same prompts on "
        f"the same link** in the median row, from {least:.2f} ({_name(least_row)}) to {most:.2f} ({_name(most_row)}). "
        f"Of {pairs} pairs of rows with one context and budget {alike} have the same order of blocking I/O in both."
    )
    moved = _by_ratio(rows, "total_ms")
    if moved:
        (least, least_row), (most, most_row) = moved[0], moved[-1]
        same = least >= 1 - _SAME and most <= 1 + _SAME
        yield (
            f"What is moved {'is the same' if same else 'differs'}: total I/O, by the link's own clock, is "
            f"{least:.2f} ({_name(least_row)}) to {most:.2f} ({_name(most_row)}) times the replay's"
            + ("." if same else f"; {_DIFFERS}.")
        )
    yield (
        f"A forward of one token computes {settings['step_ms']:.3g} ms in this run, and "
        f"{settings['replayed_step_ms']:.3g} in a replay."
    )
    for title, guesses in (("fetch after the gate", False), ("prefetch", True)):
        if mine := [row for row in rows if (row["preset"] in PREFETCHING) == guesses]:
            yield f"Rows that {title} block {_why(mine, guesses, settings['slot_bytes'])}"


def _why(rows: Sequence[Row], guesses: bool, slot_bytes: int) -> str:
    """Means over the rows, in milliseconds a token, of what the engine blocks beyond the replay and of its causes."""
    more, link = (mean(_mean(row, name) - mean(row["replayed"][name]) for row in rows)
                  for name in ("blocking_ms", "total_ms"))  # fmt: skip
    late = mean(_mean(row, "late_ms") for row in rows)
    text = (
        f"{_signed(more)} a token than the replay (mean over the rows). The link's copies take {_signed(link)} by its "
        f"own clock, and end {late:.2g} ms later than at the stated rate, where the thread that copies waits for a "
        "core or for Python's lock"
    )
    if guesses:
        return text + "; computing hides what of this is not waited for."
    copies, rest = mean(_mean(row, "loaded_mb") for row in rows) * 1e6 / slot_bytes, more - link - late
    each = f" ({1e3 * abs(rest) / copies:.0f} us a copy)" if copies else ""
    why = "a forward that waited goes on once it has a core" if rest > 0 else "computing hides more than in the replay"
    return text + f". The rest, {_signed(rest)}{each}, is in no copy: {why}."


def _signed(ms: float) -> str:
    return f"{abs(ms):.2g} ms {'more' if ms >= 0 else 'less'}"


def _by_ratio(rows: Sequence[Row], measure: str) -> list[tuple[float, Row]]:
    found = [(ratio, row) for row in rows if (ratio := over_replay(row, measure)) is not None]
    return sorted(found, key=lambda pair: pair[0])


def _same_order(rows: Sequence[Row]) -> tuple[int, int]:
    """How many pairs of rows that differ in both, and how many differ the same way."""
    signs = [
        (a["blocking_ms"] - b["blocking_ms"])
        * (median(a["replayed"]["blocking_ms"]) - median(b["replayed"]["blocking_ms"]))
        for a, b in combinations(rows, 2)
        if (a["context"], a["budget"]) == (b["context"], b["budget"])
    ]
    return sum(sign > 0 for sign in signs), sum(sign != 0 for sign in signs)


def _mean(row: Row, measure: str) -> float:
    return mean(row["values"][measure])


def _name(row: Row) -> str:
    back = "" if not row["writes_back"] else ", writing back"
    return f"{row['policy']}{back}, {row['context']}, budget {row['budget']:g}"
