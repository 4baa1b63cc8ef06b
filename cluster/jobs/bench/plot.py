"""Plots of an experiment's record. The same numbers give the same pixels.

Each image says by which executor, on which model and machine its numbers came. Each series of an image has a colour and
a marker of its own, in all panels; the names are below the panels, so that no point is behind them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path
from statistics import mean
from typing import Any

from ...report.files import new_figure, room_around, series_style, write_caption
from .experiment import Panel, Plot
from .metrics import Spread
from .table import select, show

_OWN, _OTHER = "#c0504d", "#4878a8"
_VALUES_ON = 12  # bars of a panel that have their values written on them
_EXPLAINED = {
    "emulated": "emulated: the CPU stands in for a GPU", "simulated": "simulated on a virtual clock", "real": "real",
}  # fmt: skip
Point = tuple[Any, float, float, float]  # x, y, and the y range
Rows = list[dict[str, Any]]


def plot(path: Path, figure: Plot, record: Mapping[str, Any]) -> None:
    """Write a figure as a PNG.

    Raises:
        ConfigError: the file cannot be written.
    """
    if (lines := _panels(figure, record)) and lines[0]:
        width, height = figure.size
        canvas, save = new_figure(path, (width * max(map(len, lines)), height * len(lines) + _CAPTION_INCHES))
        draw(canvas, figure, record)
        save(caption(figure, record))


_CAPTION_INCHES = 0.5  # of the caption and the names


def draw(canvas: Any, figure: Plot, record: Mapping[str, Any]) -> None:
    """Draw all panels of a figure, the names of its series, and its caption."""
    lines = _panels(figure, record)
    axes = canvas.subplots(len(lines), max(map(len, lines)), squeeze=False)
    shown = list(chain(*lines))
    names = list(dict.fromkeys(_name(panel, row) for panel, _, rows in shown for row in rows))
    own = [name for name in names if name in figure.highlight]
    styles = {name: series_style(number) for number, name in enumerate(n for n in names if n not in own)}
    styles |= {name: series_style(number, own=True) for number, name in enumerate(own)}
    apart = len({executor_of(panel, rows, record) for panel, _, rows in shown}) > 1
    for row, line in zip(axes, lines, strict=True):
        for cell, (panel, title, rows) in zip(row, line, strict=False):
            said = [title, f"({executor_of(panel, rows, record)})" if apart else ""]
            _draw(cell, panel, " ".join(filter(None, said)), rows, figure.highlight, styles)
    handles: dict[str, Any] = {}
    for cell in canvas.axes:
        handles |= {label: handle for handle, label in zip(*cell.get_legend_handles_labels(), strict=True)}
    if handles:
        columns = max(2, int(canvas.get_figwidth() / 2.4))
        canvas.legend(handles.values(), handles, fontsize=7, ncols=columns, loc="outside lower center", frameon=False)
    write_caption(canvas, caption(figure, record))


def caption(figure: Plot, record: Mapping[str, Any]) -> str:
    """Executors, model and machine of a figure."""
    settings, hardware = record["settings"], record["hardware"]
    shown = chain(*_panels(figure, record))
    executors = dict.fromkeys(executor_of(panel, rows, record) for panel, _, rows in shown)
    how = "; ".join(_EXPLAINED.get(name, name) for name in executors)
    what = settings.get("model") or f"a model of {settings['shape']}'s shape"
    machine = settings.get("machine")  # a mapping: costs that were measured here
    where = f"{hardware['model']}, {hardware['cores']} cores" if not isinstance(machine, str) else f"machine {machine}"
    return f"{how} | {what} | {where}"


def executor_of(panel: Panel, rows: Sequence[Mapping[str, Any]], record: Mapping[str, Any]) -> str:
    """By which executor a panel's numbers came: as the panel states, as its rows say, else the record's."""
    said = dict.fromkeys(str(row["executor"]) for row in rows if "executor" in row)
    return panel.executor or ", ".join(said) or str(record["executor"])


def _panels(figure: Plot, record: Mapping[str, Any]) -> list[list[tuple[Panel, str, Rows]]]:
    """Panel, title and rows of the record, by row and column of the figure."""
    grid = [_split(panel, select(panel.source, panel.where, record)) for panel in figure.panels]
    lines = [line for panel in grid for line in panel]
    return [list(column) for column in zip(*lines, strict=True)] if figure.beside else lines


def _name(panel: Panel, row: Mapping[str, Any]) -> str:
    """The name of a row's series; empty: the panel has one series without a name."""
    return str(row.get(panel.series, ""))


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


def _draw(
    axes: Any, panel: Panel, title: str, rows: Rows, highlight: tuple[str, ...], styles: Mapping[str, Any]
) -> None:
    names = dict.fromkeys(_name(panel, row) for row in rows)
    for name in names:
        mine = [row for row in rows if _name(panel, row) == name]
        points = [point for row in mine if (point := _point(panel, row)) is not None]
        if not points:
            continue
        x, y = [p[0] for p in points], [p[1] for p in points]
        ends = [[max(p[1] - p[2], 0.0) for p in points], [max(p[3] - p[1], 0.0) for p in points]]
        own = {name, *(str(row.get(panel.series)) for row in mine)} & set(highlight)
        if panel.kind == "bar":
            colours = [_OWN if own or str(value) in highlight else _OTHER for value in x]
            bars = axes.bar([str(value) for value in x], y, yerr=ends, color=colours, error_kw={"linewidth": 0.8})
            if len(x) <= _VALUES_ON:
                axes.bar_label(bars, fmt="%.3g", fontsize=6, padding=1)
        elif name in panel.level:
            axes.axhline(mean(y), label=name, linestyle="--", lw=1.4, color=styles[name]["color"])
        else:
            style = {"lw": 2.6, "ms": 6} if own else {"lw": 1.2, "ms": 4.5}
            style |= {"lw": 0} if panel.kind == "point" else {}
            axes.errorbar(x, y, yerr=ends, label=name or None, capsize=2, elinewidth=0.7, **styles[name] | style)
        if panel.mean:
            axes.axhline(mean(y), color="black", linestyle="--", linewidth=1, label=f"mean {mean(y):.2f}")
    if panel.kind == "bar":
        axes.tick_params(axis="x", rotation=70 if len(rows) > 4 and panel.series == "" else 0)
    axes.set_title(title, fontsize=9)
    axes.set_xlabel(panel.x_label or panel.x, fontsize=8)
    axes.set_ylabel(panel.y_label or panel.y, fontsize=8)
    axes.tick_params(labelsize=7)
    room_around(axes, from_zero=panel.from_zero or panel.kind == "bar")


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
