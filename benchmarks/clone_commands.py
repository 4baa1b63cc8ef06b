"""The commands that a clone adds to `tiermoe bench`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tiermoe.cluster.commands import Command
from tiermoe.cluster.jobs.bench.bench_commands import PageOut, experiment_command
from tiermoe.cluster.jobs.bench.cases import command
from tiermoe.cluster.jobs.bench.finish import Address, Check, Json, JsonCommand, file_or_folder, finish
from tiermoe.cluster.jobs.bench.options import parts
from tiermoe.cluster.report.files import check_folder
from tiermoe.cluster.report.tables import results, show
from tiermoe.errors import ConfigError

from .cases import CASES
from .papers import experiment_names, judged_again, module_of, paper_names, run_papers

_FIRST = ("overhead", "host", "ttft", "turns", "scale", "streams")  # in the help

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)

for _name in _FIRST:
    app.command(cls=JsonCommand)(command(_name, CASES[_name]))
for _name in experiment_names():
    if _name.removeprefix("paper-") == _name:
        app.command(cls=JsonCommand)(experiment_command(_name, module_of(_name).experiment, _name != "presets"))


@app.command(cls=JsonCommand)
def papers(
    only: Annotated[str, typer.Option(help="Papers, separated by commas; default: all.")] = "",
    quick: Annotated[bool, typer.Option("--quick", help="A small slice of each, to try it.")] = False,
    jobs: Annotated[int, typer.Option(min=1, help="Papers at a time, on each node.")] = 2,
    out: PageOut = None,
    as_json: Json = False,
    check: Check = False,
    address: Address = None,
) -> None:
    """The papers' tables on synthetic routing and stated machines: published figure, ours, and their ratio."""
    file, folder = file_or_folder(out)
    names = list(parts(only)) if only else paper_names()
    finish(lambda progress: run_papers(names, quick, folder, jobs, progress, address), as_json, check, file)


@app.command(cls=Command)
def redraw(
    files: Annotated[list[Path], typer.Argument(help="Files that --out wrote.", metavar="RESULT.json...")],
) -> None:
    """Write the figures, verdicts and page tables of results again, beside them, without measuring anything."""
    from tiermoe.cluster.jobs.bench.page import write_folder
    from tiermoe.cluster.report.results import read_json

    for file in files:
        record = dict(read_json(file))
        if record.get("name") not in experiment_names() or "rows" not in record:
            raise ConfigError(f"'{file}' has no figures", "give the result of an experiment")
        module = module_of(record["name"])
        experiment = module.experiment()
        if file.name != f"{experiment.stem}.json":  # another result would be written over
            raise ConfigError(f"'{file}' is a result of '{experiment.stem}'", f"name it {experiment.stem}.json")
        write_folder(experiment, judged_again(module, record), file.parent)
        show(results(), str(file))


@app.command(cls=Command)
def gpu(
    out: Annotated[Path, typer.Option(help="Folder of gpu.json and gpu.md.")] = Path("docs/results"),
    parts: Annotated[str, typer.Option(help="Parts to run, by commas; default: all (docs/gpu-measurements.md).")] = "",
    seconds: Annotated[float, typer.Option(help="Time limit of all parts together.")] = 445.0,
    device: Annotated[str, typer.Option(help="cuda, or cpu: the stand-in, to try the script.")] = "cuda",
    sizes: Annotated[str, typer.Option(help="real, or toy: seconds of work, to try the script.")] = "real",
) -> None:
    """Every check and measurement that needs a GPU, in under eight minutes; exits with 1 when a check fails."""
    check_folder(out, "--out")
    from .gpu.run_parts import main

    given = ["--out", str(out), "--parts", parts, "--seconds", str(seconds), "--device", device, "--sizes", sizes]
    raise typer.Exit(main(given))


for _name in CASES:
    if _name not in _FIRST:
        app.command(cls=JsonCommand)(command(_name, CASES[_name]))
