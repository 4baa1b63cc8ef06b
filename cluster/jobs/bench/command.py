"""The `tiermoe bench` commands: tables on stderr, with `--json` one object on stdout, with `--check` an exit code.

`--out FILE`, also written `--json FILE.json`, puts the object into a file, for jobs whose standard output is mixed with
other lines. `micro` has the options of the micro-benchmarks, `paper_commands` those of the papers' benchmarks.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.progress import Progress

from . import compare_command, micro, paper_commands
from .compare.kept import Kept
from .finish import Check, Config, Json, Model, Out, finish, say_overridden, telling_what_is_kept
from .json_option import JsonCommand
from .metrics import Report

bench_app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)


@bench_app.callback()
def _bench() -> None:
    """Measure the system. Figures are medians of interleaved repetitions in this process."""


for _name in ("overhead", "prefetch", "scale"):
    bench_app.command(cls=JsonCommand)(micro.command(_name))


@bench_app.command(cls=JsonCommand)
def compare(
    policies: compare_command.Policies,
    prompts: compare_command.Prompts,
    budgets: compare_command.Budgets = "0.25",
    links: compare_command.Links = "16",
    repeats: compare_command.Repeat = 5,
    max_tokens: compare_command.MaxTokens = 32,
    warm: compare_command.Warm = None,
    batch: compare_command.Batch = 1,
    prompt_tokens: compare_command.PromptTokens = None,
    fresh: compare_command.Fresh = False,
    quality_documents: compare_command.QualityDocuments = 6,
    model: Model = None,
    config: Config = None,
    out: Out = None,
    as_json: Json = False,
    check: Check = False,
) -> None:
    """Policies side by side on the same prompts, at every budget and link; run again, an interrupted one goes on."""
    say_overridden(config, compare_command.OWN_KEYS)
    kept: list[Kept] = []

    def measure(progress: Progress) -> Report:
        report, found = compare_command.measure(
            model, config, out, progress, policies=policies, budgets=budgets, links=links, prompts=prompts, warm=warm,
            repeats=repeats, max_tokens=max_tokens, batch=batch, prompt_tokens=prompt_tokens, fresh=fresh,
            quality_documents=quality_documents,
        )  # fmt: skip
        kept.append(found)
        return report

    with telling_what_is_kept([] if out is None else [out]):
        finish(measure, as_json, check, out, lambda: kept[0].discard())


# in the order of the help
bench_app.command(cls=JsonCommand)(paper_commands.ndp)
bench_app.command(cls=JsonCommand)(paper_commands.fmoe)
bench_app.command(cls=JsonCommand)(paper_commands.moepic)
bench_app.command(cls=JsonCommand)(paper_commands.activeevict)
bench_app.command(cls=JsonCommand)(paper_commands.buddymoe)


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


for _name in ("quantize", "channel", "transfer", "kernel", "matcher", "substitute"):
    bench_app.command(cls=JsonCommand)(micro.command(_name))
