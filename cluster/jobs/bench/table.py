"""Tables of an experiment's record in Markdown, and the pages that contain them.

A page is hand-written Markdown. Its blocks from `<!-- table: NAME -->` to `<!-- end -->` are generated from the data
beside the page.
"""

from __future__ import annotations

import json
import re
import string
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ....errors import ConfigError
from ...report.files import writing
from ...report.results import measured_rows
from .experiment import Column, Experiment, Table
from .metrics import Spread, fill_page, markdown, paired

_CONSTANT = ("experts", "slots", "expert_bytes_peak")  # of a cell
_FULL = ("layers", "spread", "residency")  # only in a record that is not made small
_COMPARED = [
    {"title": "claim", "show": "{title} {of_key}"}, {"title": "published", "show": "{published}"},
    {"title": "ours: mean (least to most)", "show": "{ours:.3g} ({least:.3g} to {most:.3g})"},
    {"title": "cells that agree", "show": "{agree} of {cells}"},
    {"title": "verdict", "show": "{verdict}"}, {"title": "why", "show": "{why}"},
    {"title": "where the paper says so", "show": "{source}"},
]  # fmt: skip
_BUILT_IN = {  # `orders` of every experiment that serves prompts, the others of those on synthetic routing
    "orders": Table.model_validate({"from": "orders", "columns": [
        {"title": "section", "show": "{section}"}, {"title": "pairs that differ in waits and TPOT", "show": "{pairs}"},
        {"title": "of the same order in both", "show": "{same} ({share:.0%})"},
    ]}),
    "claims": Table.model_validate({"from": "comparisons", "where": {"headline": True}, "columns": _COMPARED}),
    "comparisons": Table.model_validate({"from": "comparisons", "where": {"headline": False}, "columns": _COMPARED}),
    "traces": Table.model_validate({"from": "traces", "columns": [
        {"title": "section", "show": "{section}"}, {"title": "machine", "show": "{machine}"},
        {"title": "assumed in its place", "show": "{assume}"},
        {"title": "families", "show": "{families}"}, {"title": "shapes", "show": "{shapes}"},
        {"title": "requests learnt, measured", "show": "{learn}, {measure}"},
        {"title": "prompt, decode tokens", "show": "{prompt}, {decode}"}, {"title": "seed", "show": "{seed}"},
    ]}),
    "families": Table.model_validate({"from": "families", "columns": [
        {"title": "family", "show": "{family}"}, {"title": "calibrated on", "show": "{source}"},
        {"title": "published targets", "show": "{targets}"}, {"title": "parameters", "show": "{parameters}"},
    ]}),
}  # fmt: skip
_SCALE = re.compile(r"(?P<op>\*|/|1/)(?P<factor>[0-9.e-]*) ")


def blank_page(experiment: Experiment) -> str:
    """A page of all tables and plots."""
    compared = ("claims", "run", "comparisons") if experiment.comparisons else ("run",)
    names = (*compared, *(("bars",) if experiment.needs_model else ("traces", "families")), *experiment.tables)
    blocks = [f"## {name}\n\n<!-- table: {name} -->\n<!-- end -->\n" for name in names]
    images = [f"![{name}]({name})\n" for name in experiment.plots]
    return "\n".join([f"# {experiment.title}\n", *blocks, *images])


def table_of(experiment: Experiment, name: str, record: Mapping[str, Any]) -> list[str]:
    """Lines of a table; `run` has model, hardware and settings, `bars` the bars.

    Raises:
        ConfigError: the experiment has no such table.
    """
    if name == "run":
        settings, hardware = record["settings"], record["hardware"]
        plain = {k.replace("_", " "): v for k, v in settings.items() if isinstance(v, str | int | float | bool)}
        return markdown(("", ""), [
            ("data", f"[{experiment.stem}.json]({experiment.stem}.json), by `tiermoe bench {_command(experiment)}`"),
            ("executor", record["executor"]), ("hardware", f"{hardware['model']}, {hardware['cores']} cores"),
            ("versions", ", ".join(f"{name} {version}" for name, version in record["versions"].items())),
            *((key, f"{value:g}" if isinstance(value, float) else f"{value}") for key, value in plain.items()),
        ])  # fmt: skip
    if name == "bars":
        body = (
            (bar["name"], f"{bar['op']} {bar['limit']:g}", "-" if bar["value"] is None else f"{bar['value']:.3g}",
             "holds" if bar["ok"] else "missed")
            for bar in record["bars"]
        )  # fmt: skip
        return markdown(("bar", "limit", "value", ""), body)
    if name not in experiment.tables and name not in _BUILT_IN:
        raise ConfigError(f"experiment {experiment.name} has no table '{name}'", "name one of its `tables`")
    table = experiment.tables[name] if name in experiment.tables else _BUILT_IN[name]
    counted = _counted(record) if name == "claims" else []
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for row in select(table.source, table.where, {**record, "paper": experiment.paper}):
        groups.setdefault(tuple(row.get(key) for key in table.each), []).append(row)
    lines = counted
    for group in groups.values():
        if table.heading:
            lines += [show(table.heading, group[0]), ""]
        lines += [*(_plain(table.columns, group) if table.columns else _pivot(table, group)), ""]
    return lines[:-1]


def _counted(record: Mapping[str, Any]) -> list[str]:
    """The number of claims by verdict."""
    claims = [line["verdict"] for line in record.get("comparisons", []) if line["headline"]]
    parts = (f"{name} {claims.count(name)}" for name in ("holds", "tie", "does not hold"))
    return [f"{len(claims)} claims: {', '.join(parts)}", ""]


def _command(experiment: Experiment) -> str:
    paper = experiment.name.removeprefix("paper-")
    if paper != experiment.name:
        return f"papers --only {paper}"
    random = experiment.random.model
    model = "" if random is None else f" --model {random.name} --form {random.form} --layers {random.layers}"
    return experiment.name + model


class _Cells(string.Formatter):
    """Format strings over a row; see `show`."""

    def get_field(self, field_name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        try:
            return super().get_field(field_name, args, kwargs)
        except (KeyError, TypeError, IndexError, AttributeError):
            return None, field_name

    def format_field(self, value: Any, format_spec: str) -> str:
        if value is None or (isinstance(value, float) and value != value):
            return "-"
        if isinstance(value, bool) and "/" in format_spec:
            return format_spec.split("/")[not value]
        if scaled := _SCALE.match(format_spec):
            op, factor = scaled["op"], float(scaled["factor"] or 1)
            value = value * factor if op == "*" else value / factor if op == "/" else 1 / value
            format_spec = format_spec[scaled.end() :]
        return str(super().format_field(value, format_spec))


def show(form: str, row: Mapping[str, Any]) -> str:
    """A format string over a row; a missing value is `-`.

    `{tpot_s:*1e3 .2f}` multiplies first, `{bytes:/1e6 .1f}` divides, `{tpot_s:1/ .1f}` takes the reciprocal;
    `{lossless:yes/no}` gives a word for true and for false.
    """
    return _Cells().vformat(form, (), row)


def small(record: dict[str, Any]) -> dict[str, Any]:
    """The record for a file: without layers and residency, and each measure as its values over the repetitions."""
    rows = []
    for row in record["rows"]:
        brief = {key: value for key, value in row.items() if value is not None and key not in _FULL}
        if "spread" in row:
            brief["values"] = {n: s["values"] for n, s in row["spread"].items() if n not in _CONSTANT}
        rows.append(brief)
    return record | {"rows": rows}


def select(source: str, where: Mapping[str, Any], record: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The rows at a path of the record (of a run or a file) that have these values, or one of those in a list.

    Each row's `spread` holds a `Spread` for each repeated measure.
    """
    listed: Any = record
    for part in source.split("."):
        listed = listed.get(part, []) if isinstance(listed, Mapping) else []
    found = []
    for row in measured_rows(listed):
        if all(row.get(key) in (value if isinstance(value, list) else [value]) for key, value in where.items()):
            values = row["values"] if "values" in row else {k: s["values"] for k, s in row.get("spread", {}).items()}
            found.append({**row, "spread": {name: Spread.of(v) for name, v in values.items() if v}})
    return found


def _plain(columns: Sequence[Column], rows: Sequence[dict[str, Any]]) -> list[str]:
    def values(row: Mapping[str, Any]) -> dict[str, Any]:
        return {"values": {name: spread.values for name, spread in row["spread"].items()}}

    def cell(column: Column, row: dict[str, Any]) -> str:
        resolved = row.get("resolved_policy")
        named = row | {"policy": f"{row['policy']} ({resolved})"} if resolved else row
        if column.of is None:
            return show(column.show, named)
        same = ("section", "context", "budget", "link_gbps")
        others = [r for r in rows if r["policy"] == column.of and all(r.get(k) == row.get(k) for k in same)]
        over = paired(values(row), values(others[0]), column.measure) if others else None
        return show(column.show, named | {"paired": over})

    return markdown([c.title for c in columns], ([cell(c, row) for c in columns] for row in rows))


def _pivot(table: Table, rows: Sequence[dict[str, Any]]) -> list[str]:
    across = list(dict.fromkeys(show(table.across, row) for row in rows))
    lines: dict[tuple[str, ...], dict[str, str]] = {}
    for row in rows:
        key = tuple(show(form, row) for form in table.rows.values())
        lines.setdefault(key, {})[show(table.across, row)] = show(table.cell, row)
    return markdown((*table.rows, *across), ((*key, *(of.get(a, "-") for a in across)) for key, of in lines.items()))


def write_folder(experiment: Experiment, record: dict[str, Any], folder: Path) -> None:
    """Write NAME.json, the plots, and the table blocks of NAME.md.

    Raises:
        ConfigError: the folder is not writable, or the page has an unknown block.
    """
    from .plot import plot

    record = small(record)
    with writing(folder, "give another folder"):
        (folder / f"{experiment.stem}.json").write_text(json.dumps(record) + "\n", encoding="utf-8")
    page = folder / f"{experiment.stem}.md"
    fill_page(page, lambda name: table_of(experiment, name, record), blank_page(experiment))
    for name, figure in experiment.plots.items():
        plot(folder / name, figure, record)
