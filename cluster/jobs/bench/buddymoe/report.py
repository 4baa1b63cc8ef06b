"""The result of `tiermoe bench buddymoe`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ..metrics import Report
from ..page_parts import rounded


@dataclass
class BuddyReport(Report):
    """A report with what the page shows besides the runs, as plain values.

    calibration: of `Calibration`. comparisons: of `findings.comparisons`. profile: of `redundancy`.
    """

    calibration: dict[str, Any] = field(default_factory=dict)
    comparisons: list[dict[str, Any]] = field(default_factory=list)
    profile: dict[str, Any] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        more = {"calibration": self.calibration, "comparisons": self.comparisons, "profile": self.profile}
        record: dict[str, Any] = rounded(super().as_dict() | more)
        return record
