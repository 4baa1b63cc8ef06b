"""Tables and figures of an experiment's record, and the page that contains them.

A page is hand-written Markdown. Its blocks from `<!-- table: NAME -->` to `<!-- end -->` are generated from the record.
`table` and `pivot` make a function from a record to the lines of a table. A cell is a format string over a row, or a
function of it; where the row lacks a value, the cell is `-`.

The same numbers give the same pixels of a figure. Each image says by which executor, on which model and machine its
numbers came. Each series has a colour and a marker of its own, in all panels; the names are below the panels.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from statistics import mean
from typing import TYPE_CHECKING, Any, Literal

from ....errors import ConfigError
from ...report.files import new_figure, room_around, series_style, write_caption, write_json
from ...report.results import measured_rows
from .metrics import Row, Spread, fill_page, markdown, paired

if TYPE_CHECKING:
    from .experiment import Experiment

Record = Mapping[str, Any]
Table = Callable[[Record], list[str]]
Cell = str | Callable[[Row], str]
Columns = Sequence[tuple[str, Cell]]  # title and content
Rows = list[dict[str, Any]]

_CONSTANT = ("experts", "slots", "expert_bytes_peak")  # of a cell
_FULL = ("layers", "spread", "residency")  # only in a record that is not made small
_CELL = ("section", "context", "budget", "link_gbps")  # what rows of one cell have in common

# -- rows --------------------------------------------------------------------------------------------------------------


def small(record: dict[str, Any]) -> dict[str, Any]:
    """The record for a file: without layers and residency, and each measure as its values over the repetitions."""
    rows = []
    for row in record["rows"]:
        brief = {key: value for key, value in row.items() if value is not None and key not in _FULL}
        if "spread" in row:
            brief["values"] = {n: s["values"] for n, s in row["spread"].items() if n not in _CONSTANT}
        rows.append(brief)
    return record | {"rows": rows}


def select(record: Record, source: str = "rows", **where: Any) -> Rows:
    """The rows of a list of the record, at a path such as `hits.rates`, that have these values, or one of a tuple.

    A row has no key of an empty value; `values` has the values of each repeated measure.
    """
    listed: Any = record
    for part in source.split("."):
        listed = listed.get(part, []) if isinstance(listed, Mapping) else []
    found = []
    for row in measured_rows(listed):
        if all(row.get(key) in (value if isinstance(value, tuple) else (value,)) for key, value in where.items()):
            spread = {name: measure["values"] for name, measure in row.get("spread", {}).items()}
            known = {key: value for key, value in row.items() if value is not None and key != "spread"}
            found.append(known | {"values": {n: v for n, v in row.get("values", spread).items() if v}})
    return found


# -- tables ------------------------------------------------------------------------------------------------------------


def show(cell: Cell, row: Row) -> str:
    """A cell's content; `-` where the row lacks a value."""
    try:
        return cell.format_map(row) if isinstance(cell, str) else cell(row)
    except KeyError:
        return "-"


def ranged(measure: str, form: str, scale: float = 1.0) -> Cell:
    """Median of a repeated measure and its range: 1.5 (1.2 to 1.9)."""

    def cell(row: Row) -> str:
        spread = Spread.of([value * scale for value in row["values"][measure]])
        return "{:{form}} ({:{form}} to {:{form}})".format(spread.median, spread.minimum, spread.maximum, form=form)

    return cell


def over(policy: str, measure: str = "tpot_s", inverse: bool = False) -> Cell:
    """This row's measure over that of a policy in the same cell, paired by repetition; or the inverse."""

    def cell(row: Row) -> str:
        same = [r for r in row["rows"] if r["policy"] == policy and all(r.get(k) == row.get(k) for k in _CELL)]
        ratio = paired(row, same[0], measure) if same else math.nan
        return "-" if math.isnan(ratio) else f"{1 / ratio if inverse else ratio:.2f}"

    return cell


def policy_ran(row: Row) -> str:
    """The policy, with what `default` became there."""
    resolved = row.get("resolved_policy")
    return f"{row['policy']} ({resolved})" if resolved else str(row["policy"])


def yes_no(key: str) -> Cell:
    return lambda row: "yes" if row[key] else "no"


def lossy_marked(key: str) -> Cell:
    return lambda row: row[key] if row["lossless"] else f"{row[key]} (lossy)"


AT: Columns = (("budget", "{budget}"), ("GB/s", "{link_gbps:g}"), ("policy", policy_ran))
TPOT = ranged("tpot_s", ".2f", 1e3)
COPIES: Columns = (
    ("blocked I/O (s)", "{blocked_io_s:.3f}"), ("loaded (MB)", "{mb_loaded:.0f}"), ("wasted (MB)", "{mb_wasted:.0f}"),
)  # fmt: skip


def table(columns: Columns, each: Sequence[str] = (), heading: Cell = "", source: str = "rows", **where: Any) -> Table:
    """A line for each selected row; with `each` a table for each value of these keys, below its heading."""

    def lines(rows: Rows) -> list[str]:
        return markdown(
            [title for title, _ in columns],
            ([show(cell, {**row, "rows": rows}) for _, cell in columns] for row in rows),
        )

    return lambda record: _grouped(select(record, source, **where), each, heading, lines)


def pivot(
    index: Columns, across: Cell, cell: Cell, each: Sequence[str] = (), heading: Cell = "", source: str = "rows",
    **where: Any,
) -> Table:  # fmt: skip
    """A line for each content of the `index` columns, and a column for each content of `across`."""

    def lines(rows: Rows) -> list[str]:
        titles = list(dict.fromkeys(show(across, row) for row in rows))
        found: dict[tuple[str, ...], dict[str, str]] = {}
        for row in rows:
            key = tuple(show(part, row) for _, part in index)
            found.setdefault(key, {})[show(across, row)] = show(cell, row)
        body = ((*key, *(of.get(title, "-") for title in titles)) for key, of in found.items())
        return markdown((*(title for title, _ in index), *titles), body)

    return lambda record: _grouped(select(record, source, **where), each, heading, lines)


def fixed(head: Sequence[str], body: Sequence[Sequence[Any]]) -> Table:
    """Published figures, of no record."""
    return lambda record: markdown(head, body)


def _grouped(rows: Rows, each: Sequence[str], heading: Cell, lines_of: Callable[[Rows], list[str]]) -> list[str]:
    groups: dict[tuple[Any, ...], Rows] = {}
    for row in rows:
        groups.setdefault(tuple(row.get(key) for key in each), []).append(row)
    lines = []
    for group in groups.values():
        lines += [*([show(heading, group[0]), ""] if heading else []), *lines_of(group), ""]
    return lines[:-1]


ORDERS = table(
    [("section", "{section}"), ("pairs that differ in waits and TPOT", "{pairs}"),
     ("of the same order in both", "{same} ({share:.0%})")],
    source="orders",
)  # fmt: skip


def bars_table(record: Record) -> list[str]:
    body = (
        (bar["name"], f"{bar['op']} {bar['limit']:g}", "-" if bar["value"] is None else f"{bar['value']:.3g}",
         "holds" if bar["ok"] else "missed")
        for bar in record["bars"]
    )  # fmt: skip
    return markdown(("bar", "limit", "value", ""), body)


def run_table(experiment: Experiment, record: Record) -> list[str]:
    """The command, model, hardware and settings."""
    settings, hardware, stem = record["settings"], record["hardware"], experiment.stem
    plain = {k.replace("_", " "): v for k, v in settings.items() if isinstance(v, str | int | float | bool)}
    return markdown(("", ""), [
        ("data", f"[{stem}.json]({stem}.json), by `tiermoe bench {experiment.command}`"),
        ("executor", record["executor"]), ("hardware", f"{hardware['model']}, {hardware['cores']} cores"),
        ("versions", ", ".join(f"{name} {version}" for name, version in record["versions"].items())),
        *((key, f"{value:g}" if isinstance(value, float) else f"{value}") for key, value in plain.items()),
    ])  # fmt: skip


def table_of(experiment: Experiment, name: str, record: Record) -> list[str]:
    """Lines of a table of the page.

    Raises:
        ConfigError: the experiment has no such table.
    """
    if name == "run":
        return run_table(experiment, record)
    tables = {"bars": bars_table, "orders": ORDERS, **experiment.tables}
    if name not in tables:
        raise ConfigError(f"experiment {experiment.name} has no table '{name}'", "name one of its `tables`")
    return tables[name](record)


def write_folder(experiment: Experiment, record: dict[str, Any], folder: Path) -> None:
    """Write NAME.json, the figures, and the table blocks of NAME.md; a page that is absent has all tables and figures.

    Raises:
        ConfigError: the folder is not writable, or the page has an unknown block.
    """
    record = small(record)
    write_json(folder / f"{experiment.stem}.json", record)
    names = ("run", *(("bars",) if experiment.needs_model else ()), *experiment.tables)
    blocks = [f"## {name}\n\n<!-- table: {name} -->\n<!-- end -->\n" for name in names]
    blank = "\n".join([f"# {experiment.title}\n", *blocks, *(f"![{name}]({name})\n" for name in experiment.figures)])
    fill_page(folder / f"{experiment.stem}.md", lambda name: table_of(experiment, name, record), blank)
    for name, figure in experiment.figures.items():
        plot(folder / name, figure, record)


# -- figures -----------------------------------------------------------------------------------------------------------

_OWN, _OTHER = "#c0504d", "#4878a8"
_CAPTION_INCHES = 0.5  # of the caption and the names
_VALUES_ON = 12  # bars of a panel that have their values written on them
_EXPLAINED = {
    "emulated": "emulated: the CPU stands in for a GPU", "simulated": "simulated on a virtual clock", "real": "real",
}  # fmt: skip
Point = tuple[Any, float, float, float]  # x, y, and the y range


@dataclass(frozen=True, kw_only=True)
class Panel:
    """One plot of a figure: selected rows of the record as lines, bars or points.

    each: one panel for each value of these keys; the first gives columns, the second rows. x, y: keys of a row, or
    paths such as `quality.kl_nats`; a repeated measure also shows its range. mean: a line at the mean. level: series
    that are a line across, as they do not depend on x. executor: by which the numbers came, where neither rows nor
    record say it.
    """

    x: str
    y: str
    title: str = ""
    source: str = "rows"
    where: Mapping[str, Any] = field(default_factory=dict)
    kind: Literal["line", "bar", "point"] = "line"
    each: tuple[str, ...] = ()
    series: str = ""
    level: tuple[str, ...] = ()
    executor: str = ""
    x_label: str = ""
    y_label: str = ""
    x_scale: float = 1.0
    y_scale: float = 1.0
    from_zero: bool = False
    mean: bool = False


@dataclass(frozen=True)
class Figure:
    """A PNG file of panels, one below the other or `beside` each other.

    size: of a panel, in inches. highlight: emphasized series.
    """

    panels: tuple[Panel, ...]
    size: tuple[float, float] = (4.2, 3.2)
    highlight: tuple[str, ...] = ()
    beside: bool = False


def plot(path: Path, figure: Figure, record: Record) -> None:
    """Write a figure as a PNG.

    Raises:
        ConfigError: the file cannot be written.
    """
    if (lines := _panels(figure, record)) and lines[0]:
        width, height = figure.size
        canvas, save = new_figure(path, (width * max(map(len, lines)), height * len(lines) + _CAPTION_INCHES))
        draw(canvas, figure, record)
        save(caption(figure, record))


def draw(canvas: Any, figure: Figure, record: Record) -> None:
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


def caption(figure: Figure, record: Record) -> str:
    """Executors, model and machine of a figure."""
    settings, hardware = record["settings"], record["hardware"]
    shown = chain(*_panels(figure, record))
    executors = dict.fromkeys(executor_of(panel, rows, record) for panel, _, rows in shown)
    how = "; ".join(_EXPLAINED.get(name, name) for name in executors)
    what = settings.get("model") or f"a model of {settings['shape']}'s shape"
    machine = settings.get("machine")  # a mapping: costs that were measured here
    where = f"{hardware['model']}, {hardware['cores']} cores" if not isinstance(machine, str) else f"machine {machine}"
    return f"{how} | {what} | {where}"


def executor_of(panel: Panel, rows: Sequence[Mapping[str, Any]], record: Record) -> str:
    """By which executor a panel's numbers came: as the panel states, as its rows say, else the record's."""
    said = dict.fromkeys(str(row["executor"]) for row in rows if "executor" in row)
    return panel.executor or ", ".join(said) or str(record["executor"])


def _panels(figure: Figure, record: Record) -> list[list[tuple[Panel, str, Rows]]]:
    """Panel, title and rows of the record, by row and column of the figure."""
    grid = [_split(panel, select(record, panel.source, **panel.where)) for panel in figure.panels]
    lines = [line for panel in grid for line in panel]
    return [list(column) for column in zip(*lines, strict=True)] if figure.beside else lines


def _name(panel: Panel, row: Mapping[str, Any]) -> str:
    """The name of a row's series; empty: the panel has one series without a name."""
    return str(row.get(panel.series, ""))


def _split(panel: Panel, rows: Rows) -> list[list[tuple[Panel, str, Rows]]]:
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
    if path in row["values"]:
        return Spread.of(row["values"][path])
    found: Any = row
    for part in path.split("."):
        found = found.get(part) if isinstance(found, Mapping) else None
    return found
