"""Figures of a comparison's rows that several pages show."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

Row = Mapping[str, Any]  # of `compare.report.report_of`, with the name of its sweep under "setting"


@dataclass(frozen=True)
class PerToken:
    """Of one cell, for each generated token; what its prompts cost is in it.

    loaded_mb: bytes that copies brought. wasted: part of the prefetched bytes that left unused. late: part of the
    misses whose prefetch was on its way. blocked_ms: the compute waited for copies. rest_ms: what TPOT has besides.
    """

    hit_rate: float
    tpot_ms: float
    loaded_mb: float
    wasted: float
    late: float
    blocked_ms: float
    rest_ms: float


def per_token(row: Row, tokens: int) -> PerToken:
    """Medians of a cell over its repetitions of `tokens` generated tokens each."""
    prefetched, misses = median_of(row, "bytes_loaded_prefetch"), median_of(row, "misses")
    blocked_ms = 1e3 * median_of(row, "blocked_io_s") / tokens
    return PerToken(
        row["hit_rate"], row["tpot_ms"], median_of(row, "bytes_loaded") / 1e6 / tokens,
        median_of(row, "bytes_wasted") / prefetched if prefetched else 0.0,
        median_of(row, "late_prefetches") / misses if misses else 0.0,
        blocked_ms, row["tpot_ms"] - blocked_ms,
    )  # fmt: skip


def paired(row: Row, other: Row, measure: str) -> float:
    """Median over repetitions of row / other, both in the same repetition; not a number where other is zero."""
    pairs = zip(row["spread"][measure]["values"], other["spread"][measure]["values"], strict=True)
    ratios = [a / b for a, b in pairs if b]
    return median(ratios) if ratios else float("nan")


def cells(rows: Sequence[Row], setting: str) -> dict[tuple[str, float], dict[str, Row]]:
    """By budget and link, by policy."""
    found: dict[tuple[str, float], dict[str, Row]] = {}
    for row in rows:
        if row["setting"] == setting:
            found.setdefault((row["budget"], row["link_gbps"]), {})[row["policy"]] = row
    return found


def median_of(row: Row, measure: str) -> float:
    """Of a counter, over the repetitions; a counter that the row has not was zero."""
    return float(row["spread"][measure]["median"]) if measure in row["spread"] else 0.0
