"""`tiermoe report`: result files as one HTML page."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ...errors import ConfigError, reason
from ..report import tables
from ..report.page import report_page
from ..report.results import read_results
from ..report.tables import show, size

_NAME = "report.html"


def report_command(
    results: Annotated[
        list[Path],
        typer.Argument(help="JSON files that run, bench, bench serve, eval or replay wrote.", metavar="RESULT.json"),
    ],
    out: Annotated[Path, typer.Option(help=f"Folder to write {_NAME} to.")],
) -> None:
    """Write one HTML page that compares results: speed against memory, hits, waits, quality, residency, latency."""
    page = report_page(read_results(results))
    try:
        out.mkdir(parents=True, exist_ok=True)
        (out / _NAME).write_text(page, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"'{out}' cannot be written: {reason(error)}", "give another folder") from error
    show(tables.results(), f"{out / _NAME}: {size(len(page.encode()))}")
