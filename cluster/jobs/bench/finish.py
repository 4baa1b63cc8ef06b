"""What the `tiermoe bench` commands share: their options, and how a measured report is shown, written and checked."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Protocol, TypeVar

import typer
from rich.console import Console
from rich.progress import Progress

from ....errors import ConfigError
from ...report.files import check_writable, write_json
from ...report.tables import progress_on
from .compare.partial import partial_file
from .metrics import Report, print_report

Model = Annotated[str | None, typer.Option(help="Checkpoint folder; default: the model of the project.")]
Repeats = Annotated[int, typer.Option(min=1, help="Counted repetitions of each case.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout; --json FILE.json: as --out.")]
Check = Annotated[bool, typer.Option("--check", help="Exit with 1 when a bar does not hold.")]
Out = Annotated[Path | None, typer.Option(help="Write the JSON object into this file.")]
PageOut = Annotated[Path | None, typer.Option(help="FILE.json: the object; a folder: page, data and plots.")]
Config = Annotated[str | None, typer.Option(help="YAML file, or a name in configs/clusters: what is not fixed here.")]

PageReport = TypeVar("PageReport", bound=Report)


class Discarded(Protocol):
    """What is kept of an unfinished benchmark."""

    def discard(self) -> None: ...


def finish(
    measure: Callable[[Progress], Report],
    as_json: bool,
    check: bool,
    out: Path | None = None,
    written: Callable[[], None] | None = None,
) -> None:
    """Measure, print tables, and do what `--out`, `--json` and `--check` ask for.

    Args:
        written: called once the object is in its file.

    Raises:
        Exit: with 1, where a bar does not hold that is to be checked.
    """
    if out is not None:
        check_writable(out, "--out")
    console = Console(stderr=True)
    with progress_on(console) as progress:
        report = measure(progress)
    print_report(report, console)
    if out is not None:
        write_json(out, report.as_dict())
    if written is not None:
        written()
    if as_json:
        print(json.dumps(report.as_dict()))
    if check and not report.ok:
        raise typer.Exit(1)


def finish_page(
    measure: Callable[[Path | None, Progress], tuple[PageReport, Sequence[Discarded]]],
    write_page: Callable[[PageReport, Path], None],
    kept_beside: Callable[[Path], Sequence[Path]],
    out: Path | None,
    as_json: bool,
    check: bool,
) -> None:
    """Of a benchmark with a page, that goes on where it was interrupted.

    Args:
        measure: with the folder where it keeps what is finished; the report, and what is kept until it is written.
        kept_beside: the results in a folder beside which something is kept.
    """
    file, folder = _file_or_folder(out)
    beside = folder if folder is not None else file.parent if file is not None else None
    kept: list[Discarded] = []

    def run(progress: Progress) -> Report:
        report, found = measure(beside, progress)
        if folder is not None:
            write_page(report, folder)
        kept.extend(found)
        return report

    def discard() -> None:
        for part in kept:
            part.discard()

    with telling_what_is_kept([] if beside is None else kept_beside(beside)):
        finish(run, as_json, check, file, discard)


def _file_or_folder(out: Path | None) -> tuple[Path | None, Path | None]:
    """What `--out` names: a file for the object, or a folder for a page, which is refused here if it cannot be had."""
    if out is None or out.suffix == ".json":
        return out, None
    _check_folder(out)
    return None, out


def _check_folder(folder: Path) -> None:
    """Refuse a folder that cannot be written, before anything is measured.

    Raises:
        ConfigError: it cannot.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ConfigError(f"'{folder}' cannot be written: {error.strerror}", "give another folder") from error


def say_overridden(config: str | None, fixed: Collection[str]) -> None:
    """Name the keys of a configuration that the benchmark sets itself."""
    if config is None:
        return
    from .serving import overridden

    if keys := overridden(config, fixed):
        Console(stderr=True).print(f"note: not taken from '{config}', this benchmark sets: {', '.join(keys)}")


@contextmanager
def telling_what_is_kept(results: Sequence[Path]) -> Iterator[None]:
    """Whoever interrupts a comparison learns that it can go on."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit):
        for path in filter(Path.exists, map(partial_file, results)):
            Console(stderr=True).print(f"'{path}' keeps what is finished: the same command goes on", highlight=False)
        raise
