"""The `tiermoe bench` commands: tables; with `--json` one object on stdout; with `--check` an exit code.

`--out FILE`, or `--json FILE.json`, writes the object into a file. The options of an experiment are the parameters of
its function. The package has what a user measures on his machine; in a clone, `benchmarks/` adds the rest.
"""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import Progress

from ....errors import ConfigError
from ...commands import Group
from ...report.tables import show
from ..options import as_command
from .cases import Serve, command
from .clone import in_a_ray_job, load
from .compare import experiment as compare
from .experiment import Experiment
from .finish import Address, Check, Config, Json, JsonCommand, Model, file_or_folder, finish, say_overridden
from .metrics import Report, fill_report_page

if TYPE_CHECKING:
    from .cells import Cell, Cells, Measured

_OF_SWEEP = ("rows", "refused")  # blocks of its page
PageOut = Annotated[
    Path | None, typer.Option(help="FILE.json: write the object; a folder: write page, data and plots.")
]


class _Group(Group):
    """Benchmarks by name, those of a clone too."""

    def list_commands(self, ctx: Any) -> list[str]:
        return [*super().list_commands(ctx), *(() if (more := _of_clone()) is None else more.list_commands(ctx))]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Raises ConfigError: there is no such benchmark, or only in a clone."""
        if (own := super().get_command(ctx, cmd_name)) is not None:
            return own
        if (more := _of_clone()) is not None:
            if (found := more.get_command(ctx, cmd_name)) is not None:
                return found
            raise ConfigError(f"there is no benchmark '{cmd_name}'", f"give {', '.join(self.list_commands(ctx))}")
        known = ", ".join(super().list_commands(ctx))
        remedy = f"give {known}; others run from a clone of the repository: see its benchmarks/"
        raise ConfigError(f"the installed package has no benchmark '{cmd_name}'", remedy)


@cache
def _of_clone() -> Any:
    """The commands of `benchmarks/`, as a click group; None: this is not a clone."""
    module = load("clone_commands")
    return None if module is None else typer.main.get_command(module.app)


bench_app = typer.Typer(cls=_Group, no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)


@bench_app.callback()
def _bench() -> None:
    """Measure the system. Figures are medians of interleaved repetitions in this process."""


def experiment_command(name: str, define: Callable[..., Experiment], needs_model: bool = True) -> Callable[..., None]:
    """The function of an experiment's command for typer: the parameters of `define`, then options of all experiments.

    Args:
        define: returns the experiment; its docstring is the command's help.
        needs_model: it has the options of the model and its configuration.
    """

    def run(
        out: Path | None, as_json: bool, check: bool, address: str | None, model: str | None = None,
        config: str | None = None, **given: Any,
    ) -> None:  # fmt: skip
        _run(define(**given), model, config, out, as_json, check, address)

    hints = typing.get_type_hints(define, include_extras=True)
    own = {key: (hints[key], parameter.default) for key, parameter in inspect.signature(define).parameters.items()}
    common: dict[str, Any] = {"model": (Model, None), "config": (Config, None)} if needs_model else {}
    common |= {"out": (PageOut, None), "as_json": (Json, False), "check": (Check, False), "address": (Address, None)}
    return as_command(run, name, define.__doc__, own | common)


def _run(
    experiment: Experiment, model: str | None, config: str | None, out: Path | None, as_json: bool, check: bool,
    address: str | None,
) -> None:  # fmt: skip
    from .run import run_experiment

    say_overridden(config, experiment.own_keys)
    experiment = experiment.of_model(model)
    file, folder = file_or_folder(out)
    result = file if folder is None else folder / f"{experiment.stem}.json"
    discard: list[Callable[[], None]] = []

    def measure(progress: Progress) -> Report:
        with _cells(address, progress) as cells:
            report, journal = run_experiment(experiment, model, config, result, progress, cells)
        if experiment.printed is not None:
            from .page import table_of

            report.printed = table_of(experiment, experiment.printed, report.as_dict())
        discard.append(journal.discard)
        return report

    def draw(report: Report) -> None:
        """Figures come after the results are printed and in their file."""
        if folder is not None:
            from .page import write_folder

            write_folder(experiment, report.as_dict(), folder)
        discard[0]()

    with _resumable(result):
        finish(measure, as_json, check, file, draw)


@contextmanager
def _resumable(result: Path | None) -> Iterator[None]:
    """Say where the finished part of a result is, if the block is interrupted."""
    from .cells import journal_file

    try:
        yield
    except (KeyboardInterrupt, SystemExit):
        if result is not None and journal_file(result).exists():
            said = f"'{journal_file(result)}' has the finished part: the same command resumes"
            show(Console(stderr=True), said)
        raise


@contextmanager
def _cells(address: str | None, progress: Progress) -> Iterator[Cells | None]:
    """The nodes of the named Ray cluster, or of this Ray job; None: this process."""
    from .cells import measure_cell
    from .nodes import joined, over_nodes

    address = address or ("auto" if in_a_ray_job() else None)
    if address is None:
        yield None
        return
    with joined(address):

        def run(cells: Sequence[Cell]) -> Iterator[tuple[int, Measured]]:
            task = progress.add_task("cells on the cluster's nodes", total=len(cells))
            base = cells[0].base
            for number, found, node in over_nodes(measure_cell, cells, base.worker_threads, base.device != "cpu"):
                found.node = node
                progress.advance(task)
                yield number, found

        yield run


bench_app.command(cls=JsonCommand)(command("serve", Serve))


@bench_app.command(cls=JsonCommand)
def sweep(
    file: Annotated[Path, typer.Argument(help="YAML: config, load, repeats, cells, baseline.", metavar="SWEEP.yaml")],
    out: PageOut = None,
    as_json: Json = False,
    check: Check = False,
) -> None:
    """What a cluster serves by configuration and load: deploys each cell in turn; run again, it resumes."""
    from .cells import Journal
    from .sweep import cells_of, fingerprint, read_sweep, run_sweep, visited

    chosen = read_sweep(file)
    cells = cells_of(chosen)
    result, folder = file_or_folder(out)
    if folder is not None:
        result = folder / f"{file.stem}.json"
    journal = Journal(result, fingerprint(chosen, cells))

    def written(report: Report) -> None:
        if folder is not None:
            blank = f"# {file.stem}\n\n" + "\n".join(f"<!-- table: {name} -->\n<!-- end -->\n" for name in _OF_SWEEP)
            fill_report_page(folder / f"{file.stem}.md", report, blank)
        if not report.refused:  # else the same command tries again what failed
            journal.discard()

    with _resumable(result):
        finish(lambda progress: run_sweep(chosen, cells, visited, journal, progress), as_json, check, result, written)


bench_app.command(cls=JsonCommand)(experiment_command("compare", compare))
