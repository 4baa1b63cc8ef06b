"""Options that the `tiermoe bench` commands share, and the output and check of a report."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import Progress

from ...commands import Command
from ...config import RunConfig
from ...report.files import check_writable, write_json, writing
from ...report.output import print_json
from ...report.results import exit_code_of
from ...report.tables import progress_on, results, show
from ..options import option_of
from .metrics import Report, print_report

Model = Annotated[str | None, option_of(RunConfig, "model")]
Json = Annotated[
    bool, typer.Option("--json", help="Print one JSON object on stdout; --json FILE.json: --out FILE.json.")
]
Check = Annotated[bool, typer.Option("--check", help="Exit with 1 when a bar does not hold.")]
Out = Annotated[
    Path | None, typer.Option(help="FILE.json: write the object; a folder: also fill the tables of NAME.md.")
]
Address = Annotated[
    str | None,
    typer.Option(
        help="HOST:PORT of a Ray cluster, or auto: run cells on its nodes; default in a Ray job: its cluster."
    ),
]
Config = Annotated[
    str | None,
    typer.Option(help="Configuration: a YAML file, or a name in configs/clusters."),
]


def finish(
    measure: Callable[[Progress], Report], as_json: bool, check: bool, out: Path | None = None,
    written: Callable[[Report], None] = lambda _: None,
) -> None:  # fmt: skip
    """Measure, print tables, and apply `--out`, `--json` and `--check`.

    Args:
        written: called with the report after it is printed and in its file.

    Raises:
        Exit: with the code of what was refused in a part of the report; with 1, if `check` and a bar is missed.
    """
    if out is not None:
        check_writable(out, "--out")
    console = Console(stderr=True)
    with progress_on(console) as progress:
        report = measure(progress)
    print_report(report, results(as_json))
    if out is not None:
        write_json(out, report.as_dict())
    if as_json:
        print_json(report.as_dict())
    written(report)
    if code := exit_code_of(report.refused):
        raise typer.Exit(code)
    if check and not report.ok:
        raise typer.Exit(1)


def file_or_folder(out: Path | None) -> tuple[Path | None, Path | None]:
    """`--out` as the file of the JSON object, or as the folder of page and data, which is made if it is absent.

    Raises:
        ConfigError: the folder cannot be made or written; this is said before anything is measured.
    """
    if out is None or out.suffix == ".json":
        return out, None
    with writing(out, "give another folder"):
        out.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=out):
            pass
    return None, out


def say_overridden(config: str | None, fixed: Collection[str]) -> None:
    """Print the keys of a configuration file that the benchmark sets itself. Raises as `overridden`."""
    if config is None:
        return
    from .serving import overridden

    if keys := overridden(config, fixed):
        show(Console(stderr=True), f"note: not taken from '{config}', this benchmark sets: {', '.join(keys)}")


class JsonCommand(Command):
    """A command with the flag `--json` and the option `--out`.

    `--json FILE.json` and `--json=FILE` mean `--out FILE`. Any other word after `--json` stays an error.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        words, spelled = list(args), list[str]()
        while words:
            word = words.pop(0)
            if word.startswith("--json="):
                spelled += ["--out", word.removeprefix("--json=")]
            elif word == "--json" and words and words[0].endswith(".json") and not words[0].startswith("-"):
                spelled += ["--out", words.pop(0)]
            else:
                spelled.append(word)
        return super().parse_args(ctx, spelled)
