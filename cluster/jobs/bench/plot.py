"""Plots of an experiment's record. The same numbers give the same pixels."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from statistics import mean
from typing import Any

from ...report.files import new_figure
from .experiment import Panel, Plot
from .metrics import Spread
from .table import select, show

_OWN, _OTHER = "#c0504d", "#4878a8"
_CROWDED = 9  # labels of a legend, beyond which it would cover the plot
Point = tuple[Any, float, float, float]  # x, y, and the y range


def plot(path: Path, figure: Plot, record: Mapping[str, Any]) -> None:
    """Write a figure as a PNG.

    Raises:
        ConfigError: matplotlib is not installed, or the file cannot be written.
    """
    grid = [_split(panel, select(panel.source, panel.where, record)) for panel in figure.panels]
    lines = [line for panel in grid for line in panel]  # [rows][columns] of (panel, title, rows of the record)
    if figure.beside:
        lines = [list(column) for column in zip(*lines, strict=True)]
    if not lines or not lines[0]:
        return
    width, height = figure.size
    canvas, save = new_figure(path, (width * max(map(len, lines)), height * len(lines)))
    axes = canvas.subplots(len(lines), max(map(len, lines)), squeeze=False)
    for row, line in zip(axes, lines, strict=True):
        for cell, (panel, title, rows) in zip(row, line, strict=False):
            _draw(cell, panel, title, rows, figure.highlight)
    for cell in axes.flat:
        handles, labels = cell.get_legend_handles_labels()
        if len(labels) > _CROWDED:  # one legend below all plots
            canvas.legend(handles, labels, fontsize=6, ncols=4, loc="outside lower center")
            break
        if labels:
            cell.legend(fontsize=6)
    save()


def _split(panel: Panel, rows: list[dict[str, Any]]) -> list[list[tuple[Panel, str, list[dict[str, Any]]]]]:
    """Rows of the record by the second key of `each` (down) and the first (across)."""
    first, second = (*panel.each, "", "")[:2]
    across, down = (list(dict.fromkeys(row.get(key) for row in rows)) if key else [None] for key in (first, second))
    found = []
    for below in down:
        mine = [row for row in rows if not second or row.get(second) == below]
        parts = [[row for row in mine if not first or row.get(first) == value] for value in across]
        found.append([(panel, show(panel.title, part[0]) if part else "", part) for part in parts])
    return found


def _draw(axes: Any, panel: Panel, title: str, rows: list[dict[str, Any]], highlight: tuple[str, ...]) -> None:
    names = dict.fromkeys(str(row.get(panel.series, "")) for row in rows)
    for number, name in enumerate(names):
        found = [_point(panel, row) for row in rows if str(row.get(panel.series, "")) == name]
        points = [point for point in found if point is not None]
        if not points:
            continue
        x, y = [p[0] for p in points], [p[1] for p in points]
        ends = [[max(p[1] - p[2], 0.0) for p in points], [max(p[3] - p[1], 0.0) for p in points]]
        own = name in highlight
        if panel.kind == "bar":
            colours = [_OWN if str(value) in highlight or own else _OTHER for value in x]
            axes.bar([str(value) for value in x], y, yerr=ends, color=colours, error_kw={"linewidth": 0.8})
        else:
            style = {"lw": 2.2, "color": "black"} if own else {"lw": 1.0}
            style |= {"lw": 0} if panel.kind == "point" else {}
            style |= {"marker": "os"[number // 10 % 2], "ms": 3, "capsize": 2, "elinewidth": 0.6}
            axes.errorbar(x, y, yerr=ends, label=name or None, **style)
        if panel.mean:
            axes.axhline(mean(y), color="black", linestyle="--", linewidth=1, label=f"mean {mean(y):.2f}")
    if panel.kind == "bar":
        axes.tick_params(axis="x", rotation=70 if len(rows) > 4 and panel.series == "" else 0)
    axes.set_title(title, fontsize=9)
    axes.set_xlabel(panel.x_label or panel.x, fontsize=8)
    axes.set_ylabel(panel.y_label or panel.y, fontsize=8)
    axes.tick_params(labelsize=7)
    if panel.log_x:
        axes.set_xscale("log", base=2)
    if panel.from_zero:
        axes.set_ylim(bottom=0)


def _point(panel: Panel, row: Mapping[str, Any]) -> Point | None:
    """None: the row lacks x or y."""
    x, y = _at(row, panel.x), _at(row, panel.y)
    if x is None or y is None:
        return None
    x = x.median if isinstance(x, Spread) else x
    x = x * panel.x_scale if isinstance(x, int | float) and panel.x_scale != 1.0 else x
    scale = panel.y_scale
    if isinstance(y, Spread):
        return x, y.median * scale, y.minimum * scale, y.maximum * scale
    low, high = (_at(row, f"{panel.y}_{end}") for end in ("low", "high"))
    return x, y * scale, (y if low is None else low) * scale, (y if high is None else high) * scale


def _at(row: Mapping[str, Any], path: str) -> Any:
    """A repeated measure's `Spread`, a key of the row, or a path below a key such as `quality.kl_nats`."""
    if path in row["spread"]:
        return row["spread"][path]
    found: Any = row
    for part in path.split("."):
        found = found.get(part) if isinstance(found, Mapping) else None
    return found
