"""Fills the tables of docs/results/gpu.md from gpu.json.

Between `<!-- table: NAME -->` and `<!-- end -->` the hand-written page holds tables made here: `run`, `parts`,
`limits`, and one block for each part with its rows, notes and the end of its log.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tiermoe.cluster.jobs.bench.metrics import fill_page, markdown, text_of

PAGE = "docs/results/gpu.md"
_VERDICT = {True: "holds", False: "**missed**"}
_LOG_LINES = 12
_CELL = 300  # characters

# Keys that the page shows of a kind of row; all of the other kinds.
_SHOWN = {
    "trace": ("family", "hit_rates", "recalls"),
    "reference": ("case", "batch", "tpot_ms", "ttft_ms"),
    "load": ("shape", "expert", "batch", "memory", "gbps", "gbps_minimum", "gbps_maximum", "share",
             "pin_s_per_gib"),
}  # fmt: skip


def write(out: Path, root: Path, document: Mapping[str, Any] | None) -> None:
    """Fill the folder's page; without one, a copy of the repository's."""
    fill_page(out / "gpu.md", lambda name: block(name, document), (root / PAGE).read_text(encoding="utf-8"))


def block(name: str, document: Mapping[str, Any] | None) -> list[str]:
    """The lines of a table; without data they claim nothing."""
    if document is None or not document.get("parts"):
        return ["Not run yet."]
    parts = document["parts"]
    if name == "run":
        return markdown(("run", ""), [(key, _cell(document[key])) for key in ("device_name", "sizes", "versions")])
    if name == "parts":
        outcomes = ((part, f["outcome"], f"{f['seconds']:.0f}", f.get("when", "")) for part, f in parts.items())
        return markdown(("part", "outcome", "seconds", "when"), outcomes)
    if name == "limits":
        limits = (
            (kind[:-1], bar["name"], _cell(bar["value"]), f"{bar['op']} {bar['limit']:g}", _VERDICT[bar["ok"]])
            for kind in ("checks", "goals") for found in parts.values() for bar in found.get(kind, ())
        )  # fmt: skip
        return markdown(("", "limit", "value", "", ""), limits)
    return _part(parts[name]) if name in parts else ["Not run yet."]


def _part(found: Mapping[str, Any]) -> list[str]:
    """A table for each kind of row, notes, and the end of the log of a part that failed."""
    lines = [f"Outcome: {found['outcome']}.", ""]
    for kind in dict.fromkeys(row["kind"] for row in found["rows"]):
        lines += [*_rows(kind, [row for row in found["rows"] if row["kind"] == kind]), ""]
    lines += [f"- {note}" for note in found["notes"]] + ([""] if found["notes"] else [])
    if found.get("log"):
        lines += ["```", *found["log"].strip().splitlines()[-_LOG_LINES:], "```", ""]
    return lines[:-1]


def _rows(kind: str, rows: Sequence[Mapping[str, Any]]) -> list[str]:
    keys = [key for key in dict.fromkeys(key for row in rows for key in row) if key != "kind"]
    keys = [key for key in _SHOWN.get(kind, keys) if key in keys]
    if len(rows) == 1:
        return markdown((kind, ""), [(key, _cell(rows[0][key])) for key in keys])
    return markdown(keys, [[_cell(row.get(key)) for key in keys] for row in rows])


def _cell(value: Any) -> str:
    """Text of a driver or a library may be long, of several lines, and have bars."""
    return " ".join(text_of(value).replace("|", "\\|").split())[:_CELL]
