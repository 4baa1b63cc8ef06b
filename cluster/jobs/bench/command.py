"""The `tiermoe bench` commands: tables on stderr, with `--json` one object on stdout, with `--check` an exit code."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import Progress

from .harness import Report, print_report

Model = Annotated[str | None, typer.Option(help="Checkpoint folder; default: the model of the project.")]
Repeats = Annotated[int, typer.Option(min=1, help="Counted repetitions of each case.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout.")]
Check = Annotated[bool, typer.Option("--check", help="Exit with 1 when a bar does not hold.")]

bench_app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)


@bench_app.callback()
def _bench() -> None:
    """Measure the system. Figures are medians of interleaved repetitions in this process."""


@bench_app.command()
def overhead(model: Model = None, repeats: Repeats = 7, as_json: Json = False, check: Check = False) -> None:
    """Decode time with everything resident, against transformers' continuous batching."""
    from .overhead import bench_overhead

    _finish(lambda progress: bench_overhead(model, repeats, progress), as_json, check)


@bench_app.command()
def prefetch(
    model: Model = None,
    repeats: Repeats = 5,
    budget: Annotated[str, typer.Option(help="Device memory for experts.")] = "0.25",
    link_gbps: Annotated[float, typer.Option(min=0.001, help="Emulated link, 1e9 bytes per second.")] = 2.0,
    as_json: Json = False,
    check: Check = False,
) -> None:
    """Blocked I/O with and without next-gate prefetch."""
    from .prefetch import bench_prefetch

    _finish(lambda progress: bench_prefetch(model, repeats, budget, link_gbps, progress), as_json, check)


def _finish(measure: Callable[[Progress], Report], as_json: bool, check: bool) -> None:
    console = Console(stderr=True)
    with Progress(console=console, transient=True) as progress:
        report = measure(progress)
    print_report(report, console)
    if as_json:
        print(json.dumps(report.as_dict()))
    if check and not report.ok:
        raise typer.Exit(1)
