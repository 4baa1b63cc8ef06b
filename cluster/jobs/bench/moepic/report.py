"""The result of `tiermoe bench moepic`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ..metrics import Report
from ..page_parts import rounded


@dataclass
class MoepicReport(Report):
    """A report with what the page shows besides the runs, as plain values.

    calibration: of `Calibration`. hits: of `hit_table`. footprints: of `footprint.footprints`, at the first link.
    timelines: of each missed cell. simulated: of `simulate`; None where no bar is missed.
    """

    calibration: dict[str, Any] = field(default_factory=dict)
    hits: dict[str, Any] = field(default_factory=dict)
    footprints: list[dict[str, Any]] = field(default_factory=list)
    timelines: list[dict[str, Any]] = field(default_factory=list)
    simulated: dict[str, Any] | None = None

    def as_dict(self) -> dict[str, Any]:
        more = {
            "calibration": self.calibration, "hits": self.hits, "footprints": self.footprints,
            "timelines": self.timelines, "simulated": self.simulated,
        }  # fmt: skip
        record: dict[str, Any] = rounded(super().as_dict() | more)
        return record
