"""The `tiermoe bench` commands: tables; with `--json` one object on stdout; with `--check` an exit code.

`--out FILE`, or `--json FILE.json`, writes the object into a file. `micro` has the micro-benchmarks. Any experiment
file is a command whose options are the fields that it lists: `tiermoe bench NAME` is `tiermoe bench
configs/experiments/NAME.yaml`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import Progress
from typer.core import TyperGroup

from ....errors import ConfigError
from ...report.files import check_writable
from ...report.tables import show
from ..options import as_command
from . import micro
from .experiment import (
    Experiment,
    Option,
    Plot,
    experiment_names,
    field_at,
    load_experiment,
    options_of,
    parts,
    read_experiment,
)
from .finish import Check, Config, Json, JsonCommand, Model, check_folder, finish, say_overridden
from .metrics import Report

if TYPE_CHECKING:
    from .cells import Cell, Cells, Measured

EXPERIMENTS = (
    "default", "compare", "ndp", "fmoe", "moepic", "activeevict", "buddymoe", "presets", "auto-emulated", "quality",
)  # fmt: skip
_PageOut = Annotated[Path | None, typer.Option(help="FILE.json: the object; a folder: page, data and plots.")]
_Html = Annotated[Path | None, typer.Option(help="FILE.html: the page of `tiermoe report`.")]
_Address = Annotated[
    str | None,
    typer.Option(help="HOST:PORT of a Ray cluster, or auto: cells run on its nodes. A Ray job uses its own."),
]


class _Group(TyperGroup):
    """Benchmarks by name, and experiments by the path of their file."""

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name.endswith((".yaml", ".yml")):
            app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
            app.command(cls=JsonCommand)(experiment_command(cmd_name))
            return typer.main.get_command(app)
        return super().get_command(ctx, cmd_name)


bench_app = typer.Typer(cls=_Group, no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)


@bench_app.callback()
def _bench() -> None:
    """Measure the system. Figures are medians of interleaved repetitions in this process."""


def experiment_command(source: str) -> Callable[..., None]:
    """The function of an experiment's command for typer: its own options, then those of every experiment.

    Args:
        source: name in configs/experiments, or path of a YAML file.
    """
    raw = read_experiment(source)
    options = options_of(raw)

    def run(
        out: Path | None, html: Path | None, as_json: bool, check: bool, address: str | None, model: str | None = None,
        config: str | None = None, **given: Any,
    ) -> None:  # fmt: skip
        changed = {name: given[name.replace("-", "_")] for name in options}
        experiment = load_experiment(source, changed)
        _run(experiment, model, config, out, html, as_json, check, address)

    common: dict[str, Any] = {"model": (Model, None), "config": (Config, None)} if raw.needs_model else {}
    common |= {"out": (_PageOut, None), "html": (_Html, None), "as_json": (Json, False), "check": (Check, False),
               "address": (_Address, None)}  # fmt: skip
    own = {name.replace("-", "_"): _option(name, option, raw) for name, option in options.items()}
    return as_command(run, Path(source).stem, raw.summary, own | common)


def _option(name: str, option: Option, experiment: Experiment) -> tuple[Any, Any]:
    """Type (with help) and default of a field's option; a list is text, and a required one has no default."""

    def text(value: Any) -> str:
        if value is None:
            return "none"
        return f"{value:g}" if isinstance(value, float) else str(getattr(value, "name", value))

    found = field_at(experiment, option.fields[0])
    default, kind = found.value, found.kind
    if kind is None:
        default, kind = ",".join(text(part) for part in found.value), str
    required = (default in ("", None)) and option.required
    shown: Any = typer.Option(
        *(f"--{n}" for n in (name, *option.also)), help=option.help or found.description, show_default=not required
    )
    return Annotated[kind if required else kind | None, shown], inspect.Parameter.empty if required else default


def _run(
    experiment: Experiment, model: str | None, config: str | None, out: Path | None, html: Path | None, as_json: bool,
    check: bool, address: str | None,
) -> None:  # fmt: skip
    from .cells import journal_file
    from .run import run_experiment

    say_overridden(config, experiment.own_keys)
    experiment = experiment.of_model(model)
    file, folder = (out, None) if out is None or out.suffix == ".json" else (None, out)
    if folder is not None:
        check_folder(folder)
    if html is not None:
        check_writable(html, "--html")
    result = file if folder is None else folder / f"{experiment.stem}.json"
    discard: list[Callable[[], None]] = []

    def measure(progress: Progress) -> Report:
        with _cells(address, progress) as cells:
            report, journal = run_experiment(experiment, model, config, result, progress, cells, earlier=result)
        if folder is not None:
            from .table import write_folder

            write_folder(experiment, report.as_dict(), folder)
        if html is not None:
            from ...report.page import report_page
            from ...report.results import measurements

            html.write_text(report_page(measurements(report.as_dict(), "this run"), experiment.title), encoding="utf-8")
        if experiment.printed is not None:
            from .table import table_of

            report.printed = table_of(experiment, experiment.printed, report.as_dict())
        discard.append(journal.discard)
        return report

    try:
        finish(measure, as_json, check, file, lambda _: discard[0]())
    except (KeyboardInterrupt, SystemExit):
        if result is not None and journal_file(result).exists():
            said = f"'{journal_file(result)}' has the finished part: the same command resumes"
            show(Console(stderr=True), said)
        raise


@contextmanager
def _cells(address: str | None, progress: Progress) -> Iterator[Cells | None]:
    """The nodes of the named Ray cluster, or of this Ray job; None: this process."""
    from .cells import measure_cell
    from .nodes import in_a_ray_job, joined, over_nodes

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


_FIRST = ("overhead", "host", "prefetch", "ttft", "turns", "serve", "scale")  # in the help
for _name in _FIRST:
    bench_app.command(cls=JsonCommand)(micro.command(_name))
for _name in EXPERIMENTS:
    bench_app.command(cls=JsonCommand)(experiment_command(_name))


@bench_app.command(cls=JsonCommand)
def papers(
    only: Annotated[str, typer.Option(help="Papers, separated by commas; none: all of configs/papers.")] = "",
    quick: Annotated[bool, typer.Option("--quick", help="A small slice of each, to try it.")] = False,
    jobs: Annotated[int, typer.Option(min=1, help="Processes.")] = 2,
    out: _PageOut = None,
    as_json: Json = False,
    check: Check = False,
) -> None:
    """The papers' tables on synthetic routing and stated machines: published figure, ours, and their ratio."""
    from .papers import paper_names, run_papers

    file, folder = (out, None) if out is None or out.suffix == ".json" else (None, out)
    if folder is not None:
        check_folder(folder)
    names = list(parts(only)) if only else paper_names()
    finish(lambda progress: run_papers(names, quick, folder, jobs, progress), as_json, check, file)


@bench_app.command()
def redraw(
    results: Annotated[list[Path], typer.Argument(help="Files that --out wrote.", metavar="RESULT.json...")],
) -> None:
    """Draw the figures of results again, beside them, without measuring anything."""
    from ...report.results import read_json
    from .plot import plot

    for file in results:
        record = read_json(file)
        name, settings = str(record.get("name")), record.get("settings", {})
        if name in experiment_names():
            plots: Mapping[str, Plot] = read_experiment(name).plots
        else:
            plots = micro.CASES[name].plots(settings) if name in micro.CASES else {}
        if not plots or "rows" not in record:
            raise ConfigError(f"'{file}' has no figures", "give the result of a benchmark whose page has some")
        for image, figure in plots.items():
            plot(file.with_name(image), figure, record)
            show(Console(), str(file.with_name(image)))


@bench_app.command()
def gpu(
    out: Annotated[Path, typer.Option(help="Folder of gpu.json and gpu.md.")] = Path("docs/results"),
    parts: Annotated[str, typer.Option(help="Only these, separated by commas; see docs/gpu.md.")] = "",
    seconds: Annotated[float, typer.Option(help="For all parts together.")] = 445.0,
    device: Annotated[str, typer.Option(help="cuda; cpu: the stand-in, to try the script.")] = "cuda",
    sizes: Annotated[str, typer.Option(help="real; toy: seconds of work.")] = "real",
) -> None:
    """Every check and measurement that needs a GPU, in under eight minutes; exits with 1 when a check fails."""
    from .gpu.job import main

    given = ["--out", str(out), "--parts", parts, "--seconds", str(seconds), "--device", device, "--sizes", sizes]
    raise typer.Exit(main(given))


for _name in micro.CASES:
    if _name not in _FIRST:
        bench_app.command(cls=JsonCommand)(micro.command(_name))
