"""The `tiermoe bench` commands: tables on stderr, with `--json` one object on stdout, with `--check` an exit code.

`--out FILE`, also written `--json FILE.json`, puts the object into a file, for jobs whose standard output is mixed with
other lines. Here are those of the system as a whole; `paper_commands` and `part_commands` have the others.
"""

from __future__ import annotations

from typing import Annotated

import typer
from rich.progress import Progress

from ....actors.policies.sharding import Ownership
from . import compare_command, paper_commands, part_commands
from .compare.kept import Kept
from .finish import Check, Config, Json, Model, Out, Repeats, finish, say_overridden, telling_what_is_kept
from .json_option import JsonCommand
from .metrics import Report

bench_app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)


@bench_app.callback()
def _bench() -> None:
    """Measure the system. Figures are medians of interleaved repetitions in this process."""


@bench_app.command(cls=JsonCommand)
def overhead(
    model: Model = None,
    repeats: Repeats = 7,
    config: Config = None,
    out: Out = None,
    as_json: Json = False,
    check: Check = False,
) -> None:
    """Decode time with everything resident, against transformers' continuous batching."""
    from .overhead import OWN_KEYS, bench_overhead

    say_overridden(config, OWN_KEYS)
    finish(lambda progress: bench_overhead(model, repeats, progress, config), as_json, check, out)


@bench_app.command(cls=JsonCommand)
def prefetch(
    model: Model = None,
    repeats: Repeats = 5,
    budget: Annotated[str, typer.Option(help="Device memory for experts.")] = "0.25",
    link_gbps: Annotated[float, typer.Option(min=0.001, help="Emulated link, 1e9 bytes per second.")] = 2.0,
    config: Config = None,
    out: Out = None,
    as_json: Json = False,
    check: Check = False,
) -> None:
    """Blocked I/O with and without next-gate prefetch."""
    from .prefetch import OWN_KEYS, bench_prefetch

    say_overridden(config, OWN_KEYS)
    finish(lambda progress: bench_prefetch(model, repeats, budget, link_gbps, progress, config), as_json, check, out)


@bench_app.command(cls=JsonCommand)
def scale(
    model: Model = None,
    repeats: Repeats = 4,
    policy: Annotated[str, typer.Option(help="Of all GPUs.")] = "on-demand",
    budget: Annotated[str, typer.Option(help="Device memory for experts of one GPU, a share of all.")] = "0.125",
    link_gbps: Annotated[float, typer.Option(min=0.001, help="Emulated link of each GPU, 1e9 bytes/s.")] = 2.0,
    batch: Annotated[
        list[int] | None, typer.Option(min=1, help="Prompts in flight together; repeat it.", show_default="1, 4, 8, 16")
    ] = None,
    prompts: Annotated[int, typer.Option(min=1, help="Held-out prompts for each batch size, at least.")] = 20,
    ownership: Annotated[Ownership, typer.Option(help="Rule by which experts belong to GPUs.")] = "layer-expert",
    config: Config = None,
    out: Out = None,
    as_json: Json = False,
    check: Check = False,
) -> None:
    """The same requests on 1, 2 and 4 GPUs: throughput, bytes per GPU, time lost to copies."""
    from .scale import BATCHES, OWN_KEYS, Workload, bench_scale

    say_overridden(config, OWN_KEYS)
    work = Workload(policy, budget, link_gbps, tuple(dict.fromkeys(batch or BATCHES)), prompts, ownership)
    finish(lambda progress: bench_scale(model, repeats, work, progress, config), as_json, check, out)


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
bench_app.command()(part_commands.gpu)
bench_app.command(cls=JsonCommand)(part_commands.quantize)
bench_app.command(cls=JsonCommand)(part_commands.channel)
bench_app.command(cls=JsonCommand)(part_commands.transfer)
bench_app.command(cls=JsonCommand)(part_commands.kernel)
bench_app.command(cls=JsonCommand)(part_commands.matcher)
bench_app.command(cls=JsonCommand)(part_commands.substitute)
