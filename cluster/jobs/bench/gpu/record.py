"""What a part has found so far, written to its file after every finding."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ....report.files import write_json
from ..metrics import Bar
from ..page_parts import rounded


@dataclass
class Record:
    """Of one part.

    rows: what was measured, each with its `kind`. checks: they fail the run where they do not hold. goals: they do not.
    notes: what a reader must know. On the stand-in nothing about speed is judged.
    """

    part: str
    file: Path | None
    judged: bool = True
    rows: list[dict[str, Any]] = field(default_factory=list)
    checks: list[dict[str, Any]] = field(default_factory=list)
    goals: list[dict[str, Any]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def row(self, kind: str, **values: Any) -> None:
        """One more measurement."""
        self.rows.append({"kind": kind} | values)
        self.write()

    def note(self, text: str) -> None:
        """One more sentence; none twice."""
        if text not in self.notes:
            self.notes.append(text)
            self.write()

    def check(self, name: str, value: float, op: str, limit: float, always: bool = False) -> None:
        """A limit that must hold. always: on the stand-in too."""
        if self.judged or always:
            bar = Bar(name, float(value), op, limit)
            self.checks.append({"name": name, "value": bar.value, "op": op, "limit": limit, "ok": bar.ok})
            self.write()

    def goal(self, name: str, value: float, op: str, limit: float) -> None:
        """A limit that is aimed at."""
        if self.judged:
            bar = Bar(name, float(value), op, limit)
            self.goals.append({"name": name, "value": bar.value, "op": op, "limit": limit, "ok": bar.ok})
            self.write()

    def as_dict(self) -> dict[str, Any]:
        """Plain values."""
        found: dict[str, Any] = rounded(
            {"rows": self.rows, "checks": self.checks, "goals": self.goals, "notes": self.notes}
        )
        for bar in (*found["checks"], *found["goals"]):
            bar["value"] = None if math.isnan(bar["value"]) else bar["value"]  # JSON has no such number
        return found

    def write(self) -> None:
        """Replace the file; whoever reads it finds it whole."""
        if self.file is not None:
            write_json(self.file, self.as_dict())
