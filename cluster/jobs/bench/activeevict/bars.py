"""The bars of `tiermoe bench activeevict`: blocking I/O over the best prefetching baseline's, and exact fetches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..metrics import Bar
from .measures import median_ratio
from .work import LOSSY, OWN, PREFETCHING

LESS = 0.7  # of a baseline's blocking I/O: the paper has 31% to 46% less
Row = dict[str, Any]


def bars_of(rows: Sequence[Row]) -> list[Bar]:
    """Of each context the least blocking I/O of the lossless preset over that of the best prefetching baseline of the
    same budget and link: as the presets are, and where nobody writes back; simulated, then emulated where that was run.

    Of emulated rows the ratio is the median over repetitions, which the rows had with the same prompts.
    """
    found = [bar for context in _contexts(rows, "table") for bar in _bars(rows, "table", context, context)]
    for context in _contexts(rows, "emulated"):
        found += _bars(rows, "emulated", context, f"{context}, emulated")
    return found


def _bars(rows: Sequence[Row], section: str, context: str, title: str) -> list[Bar]:
    mine = [row for row in rows if row["context"] == context and row["section"] == section]
    bars = []
    for swaps, of in ((True, "as the baselines are, which write back"), (False, "where nobody writes back")):
        ratios = []
        for own in (row for row in mine if row["policy"] == OWN and not row["writes_back"]):
            over = [
                _over(own, row)
                for row in mine
                if row["preset"] in PREFETCHING and row["writes_back"] == swaps
                and (row["budget"], row["ratio"]) == (own["budget"], own["ratio"])
            ]  # fmt: skip
            if over and None not in over:
                ratios.append(max(ratio for ratio in over if ratio is not None))
        bars.append(Bar(f"{title}: blocking I/O, {of}", min(ratios, default=float("nan")), "<=", LESS))
    exact = [_least(row, name) for row in mine if row["preset"] in (OWN, LOSSY) for name in ("precision", "recall")]
    bars.append(Bar(f"{title}: fetch precision and recall", min(exact, default=float("nan")), ">=", 1.0))
    return bars


def _over(own: Row, other: Row) -> float | None:
    """Blocking I/O over the other's, see `median_ratio`."""
    mine, others = (row.get("values", {}).get("blocking_ms", [row["blocking_ms"]]) for row in (own, other))
    return median_ratio(mine, others)


def _least(row: Row, measure: str) -> float:
    """Of the repetitions, where there were any."""
    return float(min(row["values"][measure]) if "values" in row else row[measure])


def _contexts(rows: Sequence[Row], section: str) -> list[str]:
    return list(dict.fromkeys(row["context"] for row in rows if row["section"] == section))
