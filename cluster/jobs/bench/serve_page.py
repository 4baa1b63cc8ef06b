"""The page of `bench serve`: what the clients saw, what each process did, what was lost, and a plot over the time."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ...report.tables import size
from .metrics import Report, Row, fill_page, markdown, text_of
from .page import Figure, Panel, Record, bars_table, plot

_PANELS = (
    Panel(title="tokens that came", source="clients", x="t_s", y="tokens_per_s", series="server", from_zero=True,
          x_label="s", y_label="tokens/s"),
    Panel(title="requests under way", source="clients", x="t_s", y="running", series="server", from_zero=True,
          x_label="s", y_label="requests"),
    Panel(title="link of each GPU", source="workers", x="t_s", y="rates.total_io_s", series="worker", from_zero=True,
          x_label="s", y_label="share of the time"),
    Panel(title="computing near data, and for other GPUs", source="workers", x="t_s", y="rates.busy_s", series="worker",
          from_zero=True, x_label="s", y_label="share of the time"),
    Panel(title="the lead waits for copies", source="workers", x="t_s", y="rates.blocked_io_s", series="worker",
          from_zero=True, x_label="s", y_label="share of the time"),
    Panel(title="resident experts among those needed", source="workers", x="t_s", y="shares.hit", series="worker",
          from_zero=True, x_label="s", y_label="share"),
    Panel(title="processor", source="workers", x="t_s", y="cpu", series="worker", from_zero=True, x_label="s",
          y_label="cores"),
    Panel(title="resident memory", source="workers", x="t_s", y="rss_mib", series="worker", from_zero=True,
          x_label="s", y_label="MiB"),
)  # fmt: skip
_SHARES = {  # counters of seconds as shares of a process's time, by column
    "link": "total_io_s", "busy": "busy_s", "waits for copies": "blocked_io_s", "for NDP": "ndp_wait_s",
    "for GPUs": "shard_wait_s",
}  # fmt: skip
_PERCENTILES = ("ttft", "tpot", "e2e")


def write_page(page: Path, report: Report) -> None:
    """Write tables and plots beside the JSON; the words of a page that is there stay.

    Raises:
        ConfigError: the folder is not writable.
    """
    record = report.as_dict()
    tables: dict[str, Callable[[Record], list[str]]] = {
        "run": _run, "load": _load, "errors": _errors, "nodes": _nodes, "workers": _workers, "peers": _peers,
        "lost": _lost,
    }  # fmt: skip
    tables |= {"bars": bars_table} if record["bars"] else {}
    found = {name: lines for name, table in tables.items() if len(lines := table(record)) > 2}
    shown = tuple(panel for panel in _PANELS if any(_has(row, panel.y) for row in record[panel.source]))
    figure = page.with_suffix(".png")
    blank = "\n".join([
        "# bench serve\n", *(f"## {name}\n\n<!-- table: {name} -->\n<!-- end -->\n" for name in found),
        *([f"![what each process did]({figure.name})\n"] if shown else []),
    ])  # fmt: skip
    fill_page(page, lambda name: found.get(name, []), blank)
    if shown:
        plot(figure, Figure(shown, size=(7.0, 2.2)), record)


def _has(row: Row, path: str) -> bool:
    part, _, name = path.partition(".")
    return name in row.get(part, {}) if name else part in row


def _run(record: Record) -> list[str]:
    given = {key: value for key, value in record["settings"].items() if value not in (None, [], False)}
    versions = ", ".join(f"{name} {version}" for name, version in record["versions"].items())
    return markdown(("", ""), [
        ("executor", record["executor"]), ("date", record["date"]), ("versions", versions),
        ("clients on", f"{record['hardware']['model']}, {record['hardware']['cores']} cores"),
        *((key.replace("_", " "), text_of(value)) for key, value in given.items()),
    ])  # fmt: skip


def _rows(record: Record) -> list[dict[str, Any]]:
    return [row for row in record["rows"] if "refused" not in row]


def _ranged(row: Row, name: str) -> str:
    """A mean with its 95% interval."""
    if row.get(name) is None:
        return "-"
    low, high = row.get(f"{name}_low"), row.get(f"{name}_high")
    shown = f"{row[name]:.4g}"
    return shown if low is None or high is None else f"{shown} ({low:.4g} to {high:.4g})"


def _load(record: Record) -> list[str]:
    goodput = any("goodput" in row for row in _rows(record))
    head = ["server", "load", "tokens/s", *(f"{name.upper()} p50, p99 (ms)" for name in _PERCENTILES),
            *(["goodput (requests/s)", "good"] if goodput else []), "answered", "failed"]  # fmt: skip
    body = []
    for row in _rows(record):
        times = [f"{_ranged(row, f'{name}_p50_ms')}; {_ranged(row, f'{name}_p99_ms')}" for name in _PERCENTILES]
        good = [_ranged(row, "goodput"), f"{row.get('good_share', 0.0):.0%}"] if goodput else []
        body.append([row["server"], row["load"], _ranged(row, "tokens_per_s"), *times, *good, row["requests"],
                     row["failed"]])  # fmt: skip
    return markdown(head, body)


def _errors(record: Record) -> list[str]:
    body = [(row["server"], row["load"], kind, count) for row in record["rows"]
            for kind, count in (row.get("errors") or {}).items()]  # fmt: skip
    body += [(row["server"], row["load"], row["refused"], "") for row in record["rows"] if "refused" in row]
    return markdown(("server", "load", "error", "requests"), body)


def _nodes(record: Record) -> list[str]:
    body = []
    for node in record["nodes"]:
        resources = ", ".join(f"{name} {amount:g}" for name, amount in node["resources"].items() if name != "memory")
        if (problem := node.get("problem")) is not None:
            body.append((node["node"], resources, problem, "", ""))
            continue
        chip, versions = node["hardware"], node["versions"]
        body.append((
            node["node"], resources, f"{chip['model']}, {chip['cores']} cores", size(node["memory_bytes"]),
            ", ".join(f"{name} {version}" for name, version in versions.items()),
        ))  # fmt: skip
    return markdown(("node", "resources", "processor", "memory", "versions"), body)


def _workers(record: Record) -> list[str]:
    """Means over the time of each process; memory at most."""
    head = ("worker", "node", "rows/s", "loaded (MB/s)", *_SHARES, "host", "hit, waited, loaded, near data, other GPU",
            "processor", "memory (MiB)")  # fmt: skip
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in record["workers"]:
        groups.setdefault((row["worker"], row["node"]), []).append(row)
    body = []
    for (worker, node), rows in groups.items():
        causes = ("demand", "prefetch", "migration")
        loaded = sum(_mean(rows, f"bytes_loaded_{cause}", "rates") for cause in causes)
        needed = [row for row in rows if "shares" in row]
        ways = ", ".join(f"{_mean(needed, way, 'shares'):.0%}" for way in (needed[0]["shares"] if needed else ()))
        body.append((
            worker, node, _blank(_mean(rows, "rows", "rates"), "{:.0f}"), _blank(loaded / 1e6, "{:.1f}"),
            *(_blank(_mean(rows, name, "rates"), "{:.0%}") for name in _SHARES.values()),
            _blank(_mean(rows, "host"), "{:.0%}"), ways,
            f"{_mean(rows, 'cpu'):.2f}", f"{max(row['rss_mib'] for row in rows):.0f}",
        ))  # fmt: skip
    return markdown(head, body)


def _blank(value: float, form: str) -> str:
    return form.format(value) if value else ""


def _peers(record: Record) -> list[str]:
    """Means over the time of each pair of processes."""
    head = ("from", "to", "rows/s there", "rows/s back", "MB/s there", "MB/s back", "waited")
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in record["peers"]:
        groups.setdefault((row["worker"], row["peer"]), []).append(row)
    body = [
        (*pair, *(_blank(_mean(rows, name, "rates") * scale, form) for name, scale, form in (
            ("rows_sent", 1.0, "{:.0f}"), ("rows_received", 1.0, "{:.0f}"), ("bytes_sent", 1e-6, "{:.2f}"),
            ("bytes_received", 1e-6, "{:.2f}"), ("waited_s", 1.0, "{:.0%}"),
        )))
        for pair, rows in groups.items()
    ]  # fmt: skip
    return markdown(head, body)


def _mean(rows: Sequence[Row], name: str, part: str | None = None) -> float:
    """Of what the rows have, or one of their parts has, over the time that each is of."""
    values = [(row if part is None else row[part]).get(name, 0.0) for row in rows]
    return statistics.fmean(values, [row["over_s"] for row in rows])


def _lost(record: Record) -> list[str]:
    body = [(f"{one['t_s']:.1f}", one["worker"], one["node"], one["what"]) for one in record["lost"]]
    return markdown(("s", "worker", "node", "what"), body)
