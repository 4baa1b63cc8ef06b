"""`tiermoe report`: result files as one HTML page."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from ...errors import ConfigError, exit_code, told
from ..report import tables
from ..report.files import check_folder, writing
from ..report.page import report_page
from ..report.results import read_results

_NAME = "report.html"


def report_command(
    results: Annotated[
        list[Path],
        typer.Argument(help="JSON files that run, bench, bench serve, eval or replay wrote.", metavar="RESULT.json"),
    ],
    out: Annotated[Path, typer.Option(help=f"Folder to write {_NAME} to.")],
) -> None:
    """Write one HTML page that compares results: speed against memory, hits, waits, quality, residency, latency.

    Files that compare no policies are named, and the others are shown.
    """
    check_folder(out, "--out")
    refused: list[ConfigError] = []
    page = report_page(read_results(results, refused.append))
    with writing(out, "give another folder"):
        out.mkdir(parents=True, exist_ok=True)
        (out / _NAME).write_text(page, encoding="utf-8")
    tables.show(tables.results(), f"{out / _NAME}: {tables.size(len(page.encode()))}")
    if refused:
        tables.show(Console(stderr=True), *(f"not shown: {told(error)}" for error in refused))
        raise typer.Exit(exit_code(refused[0]))
