"""What pages of results are made of: tables, paragraphs, a record that is small enough for a file."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ....errors import ConfigError

_CONSTANT = ("experts", "slots", "expert_budget_bytes", "expert_bytes_peak")  # of a cell


def write_record(folder: Path, name: str, record: dict[str, Any], page: str) -> None:
    """Write NAME.json, without what is constant or follows from the rest, and NAME.md.

    Raises:
        ConfigError: the folder cannot be written.
    """
    try:
        (folder / f"{name}.json").write_text(json.dumps(small(record)) + "\n", encoding="utf-8")
        (folder / f"{name}.md").write_text(page, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"'{folder}' cannot be written: {error}", "give another folder") from error


def table(head: Sequence[Any], body: Iterable[Sequence[Any]]) -> list[str]:
    """A table in Markdown, line by line."""
    lines = [head, *body]
    shown = ["| " + " | ".join(map(str, line)) + " |" for line in lines]
    return [shown[0], "|" + "---|" * len(head), *shown[1:]]


def serving_cells(budget: str, gbps: float, name: str, row: Mapping[str, Any], over: str) -> tuple[str, ...]:
    """A table's line on one policy's run: times, hit rate and bytes of a sweep's row; `over`: its ratio to another."""
    tpot = row["spread"]["tpot_s"]
    return (
        budget, f"{gbps:g}", name, f"{row['hit_rate']:.1%}", f"{row['ttft_ms']:.1f}",
        f"{row['tpot_ms']:.2f} ({1e3 * tpot['minimum']:.2f} to {1e3 * tpot['maximum']:.2f})", over,
        f"{row['blocked_io_s']:.3f}", f"{row['mb_loaded']:.0f}", f"{row['mb_wasted']:.0f}",
    )  # fmt: skip


def paragraphs(*texts: str | None) -> list[str]:
    """Those that are there, each with an empty line after it."""
    return [line for text in texts if text is not None for line in (text, "")]


def small(record: dict[str, Any]) -> dict[str, Any]:
    """The record for a file: of each measure the repetitions' values, from which the rest follows; no layers."""
    rows = [
        {key: value for key, value in row.items() if value is not None and key not in ("layers", "spread")}
        | {"values": {name: spread["values"] for name, spread in row["spread"].items() if name not in _CONSTANT}}
        for row in record["rows"]
    ]
    return record | {"rows": rows}


def rounded(value: Any) -> Any:
    """Six digits: a page's data need no more, and it keeps the file small."""
    if isinstance(value, dict):
        return {key: rounded(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [rounded(part) for part in value]
    return float(f"{value:.6g}") if isinstance(value, float) else value
