"""Figure 8: the least expert memory that reaches a TPOT, by policy, interpolated from a sweep over budgets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from ..figures import Row, median_of

Point = tuple[float, float]  # bytes of the budget, TPOT in milliseconds


@dataclass(frozen=True)
class Least:
    """The least budget that reaches a target.

    nbytes: None where no measured budget does. at_most: the smallest measured budget does, so that a smaller one may.
    """

    nbytes: float | None
    at_most: bool = False


def points_of(rows: Sequence[Row], setting: str, gbps: float) -> dict[str, list[Point]]:
    """By policy, budgets in rising order."""
    found: dict[str, list[Point]] = {}
    for row in rows:
        if (row["setting"], row["link_gbps"]) == (setting, gbps):
            point = (median_of(row, "expert_budget_bytes"), float(row["tpot_ms"]))
            found.setdefault(row["policy"], []).append(point)
    return {policy: sorted(points) for policy, points in found.items()}


def targets_of(points: Mapping[str, Sequence[Point]], count: int = 5) -> list[float]:
    """Milliseconds, evenly from the lowest TPOT of all to the middle policy's at the smallest budget, rounded up."""
    low = min(tpot for found in points.values() for _, tpot in found)
    smallest = sorted(found[0][1] for found in points.values())
    high = max(smallest[len(smallest) // 2], low)
    steps = [low + (high - low) * (i + 1) / count for i in range(count)]
    return sorted({float(f"{step + 0.05:.1f}") for step in steps})


def least_budget(points: Sequence[Point], target_ms: float) -> Least:
    """Linear between measured budgets; more memory can always do what less did, so that TPOT never rises with it."""
    reached: list[Point] = []
    best = float("inf")
    for nbytes, tpot in points:
        best = min(best, tpot)
        reached.append((nbytes, best))
    if reached[0][1] <= target_ms:
        return Least(reached[0][0], at_most=True)
    for (small, above), (large, below) in pairwise(reached):
        if below <= target_ms:
            return Least(small + (large - small) * (above - target_ms) / (above - below))
    return Least(None)


def footprints(points: Mapping[str, Sequence[Point]], targets: Sequence[float]) -> list[dict[str, Any]]:
    """As plain values: policy, target_ms, bytes, at_most."""
    rows = []
    for policy, found in points.items():
        for target in targets:
            least = least_budget(found, target)
            rows.append({
                "policy": policy, "target_ms": target, "bytes": least.nbytes, "at_most": least.at_most,
            })  # fmt: skip
    return rows
