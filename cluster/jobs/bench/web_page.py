"""An experiment's record as one HTML page that needs nothing else: tables, ranges as SVG, plots inside the page."""

from __future__ import annotations

import base64
import re
import tempfile
from collections.abc import Iterator, Mapping
from html import escape
from pathlib import Path
from typing import Any

from .experiment import Experiment
from .metrics import Row, cells_of
from .table import select, small, table_of

_MEASURE, _TITLE = "tpot_s", "Time per output token, ms: median, least and greatest of the repetitions"
_LABEL, _WIDTH, _LINE = 210, 520, 22  # pixels: names of policies, axis, height of a line
_LINK = re.compile(r"\[([^\]]*)\]\([^)]*\)")
_STYLE = """
:root { color-scheme: light dark; font: 15px/1.5 system-ui, sans-serif; }
body { max-width: 72rem; margin: 2rem auto; padding: 0 1rem; }
table { border-collapse: collapse; margin: 1rem 0; }
th, td { border: 1px solid #8886; padding: .25rem .6rem; text-align: left; font-variant-numeric: tabular-nums; }
svg { display: block; margin: .5rem 0 1.5rem; font-size: 13px; fill: currentColor; stroke: currentColor; }
svg text { stroke: none; }
img { max-width: 100%; background: white; }
"""


def html_page(experiment: Experiment, record: dict[str, Any]) -> str:
    """The page.

    Args:
        record: `Report.as_dict` of a run, with each measure's spread.

    Raises:
        ConfigError: the experiment has plots, and matplotlib is not installed.
    """
    from markdown_it import MarkdownIt

    record, render = small(record), MarkdownIt("commonmark", {"html": False}).enable("table").render
    parts = [f"<h1>{escape(experiment.title)}</h1>", f"<p>{escape(experiment.summary)}</p>", *_ranges(record)]
    for name in (*experiment.tables, *(("bars",) if record["bars"] else ()), "run"):
        lines = "\n".join(table_of(experiment, name, record))
        if lines:
            parts += [f"<h2>{escape(name)}</h2>", render(_LINK.sub(r"\1", lines))]
    parts += _plots(experiment, record)
    title = escape(experiment.title)
    return (
        f'<!doctype html>\n<html lang="en">\n<head><meta charset="utf-8"><title>{title}</title>'
        f"<style>{_STYLE}</style></head>\n<body>\n" + "\n".join(parts) + "\n</body>\n</html>\n"
    )


def _ranges(record: Mapping[str, Any]) -> Iterator[str]:
    """For each context, budget and link: a line for each policy, from its least to its greatest repetition."""
    rows = [row for row in select("rows", {}, record) if _MEASURE in row["spread"]]
    if rows:
        yield f"<h2>{_TITLE}</h2>"
    for section in dict.fromkeys(row["section"] for row in rows):
        for (context, budget, link), of in cells_of(rows, section).items():
            speed = "no emulated link" if link is None else f"{link:g} GB/s"
            named = ", ".join(part for part in (section, context, f"budget {budget}", speed) if part)
            yield f"<h3>{escape(named)}</h3>\n{_chart(of)}"


def _chart(rows: Mapping[str, Row]) -> str:
    greatest = max(row["spread"][_MEASURE].maximum for row in rows.values())
    height = _LINE * len(rows)
    lines = [f'<svg width="{_LABEL + _WIDTH + 190}" height="{height}" role="img">']
    for number, (policy, row) in enumerate(rows.items()):
        spread, y = row["spread"][_MEASURE], _LINE * number + _LINE // 2
        low, middle, high = (
            _LABEL + _WIDTH * value / greatest for value in (spread.minimum, spread.median, spread.maximum)
        )
        shown = f"{spread.median * 1e3:.2f} ({spread.minimum * 1e3:.2f} to {spread.maximum * 1e3:.2f})"
        lines += [
            f'<text x="{_LABEL - 10}" y="{y + 4}" text-anchor="end">{escape(policy)}</text>',
            f'<line x1="{_LABEL}" x2="{_LABEL + _WIDTH}" y1="{y}" y2="{y}" opacity=".15"/>',
            f'<line x1="{low:.1f}" x2="{high:.1f}" y1="{y}" y2="{y}" stroke-width="4" opacity=".5"/>',
            f'<circle cx="{middle:.1f}" cy="{y}" r="4" stroke="none"/>',
            f'<text x="{_LABEL + _WIDTH + 10}" y="{y + 4}">{shown}</text>',
        ]
    return "\n".join([*lines, "</svg>"])


def _plots(experiment: Experiment, record: Mapping[str, Any]) -> Iterator[str]:
    from .plot import plot

    with tempfile.TemporaryDirectory(prefix="tiermoe-plots-") as folder:
        for name, figure in experiment.plots.items():
            path = Path(folder) / name
            plot(path, figure, record)
            if path.exists():  # a figure without rows is not drawn
                data = base64.b64encode(path.read_bytes()).decode("ascii")
                yield f'<p><img alt="{escape(name)}" src="data:image/png;base64,{data}"></p>'
