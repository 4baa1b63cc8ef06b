"""`tiermoe bench` of a method of the literature against its baselines: each writes a page of docs/results."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.progress import Progress

from . import compare_command
from .finish import Check, Config, Discarded, Json, Model, PageOut, Repeats, finish_page, say_overridden
from .metrics import Report


def ndp(
    model: Model = None,
    documents: Annotated[int | None, typer.Option(min=1, help="Held-out documents to score; default: all.")] = None,
    windows: Annotated[int, typer.Option(min=1, help="Windows of each document.")] = 2,
    repeats: Repeats = 5,
    config: Config = None,
    out: PageOut = None,
    as_json: Json = False,
    check: Check = False,
) -> None:
    """Quality of near-data execution by precision and placement; similarity of prefill and decode; overlap."""
    from ..evaluate.quality import EvaluationOptions
    from .ndp import OWN_KEYS, NdpReport, bench_ndp
    from .ndp_page import write_page

    say_overridden(config, OWN_KEYS)
    options = EvaluationOptions(documents=documents, windows=windows)

    def measure(beside: Path | None, progress: Progress) -> tuple[NdpReport, Sequence[Discarded]]:
        return bench_ndp(model, options, repeats, progress, config), ()  # it begins anew where it was interrupted

    finish_page(measure, write_page, lambda folder: (), out, as_json, check)


def fmoe(
    model: Model = None,
    repeats: Repeats = 5,
    prompts: Annotated[int, typer.Option(help="Held-out prompts, 70% of them to learn from.")] = 34,
    prompt_tokens: Annotated[int, typer.Option(help="Of each prompt.")] = 32,
    max_tokens: Annotated[int, typer.Option(help="Generated after each prompt.")] = 8,
    trace_tokens: Annotated[int, typer.Option(help="Generated after each prompt of the recorded trace.")] = 96,
    config: Config = None,
    out: PageOut = None,
    as_json: Json = False,
    check: Check = False,
) -> None:
    """fMoE against its baselines: hit rate, TTFT, TPOT, bytes; expert maps by distance and capacity."""
    from .fmoe.job import OWN_KEYS, FmoeReport, Workload, bench_fmoe, sweep_files
    from .fmoe.page import write_page

    say_overridden(config, OWN_KEYS)
    work = Workload(prompts, prompt_tokens, max_tokens, trace_tokens=trace_tokens)

    def measure(beside: Path | None, progress: Progress) -> tuple[FmoeReport, Sequence[Discarded]]:
        return bench_fmoe(model, repeats, work, beside, progress, config)

    finish_page(measure, write_page, sweep_files, out, as_json, check)


def moepic(
    model: Model = None,
    repeats: Repeats = 5,
    budgets: compare_command.Budgets = "0.125,0.25,0.5,0.75",
    ratios: Annotated[
        str, typer.Option(help="Of each emulated link: loading over computing. The first is that of ablation etc.")
    ] = "2.5,1",
    links: Annotated[str, typer.Option(help="Emulated links in 1e9 bytes per second, in place of --ratios.")] = "",
    prompts: Annotated[int, typer.Option(help="Held-out prompts of a repetition, each met once.")] = 2,
    warm: Annotated[int, typer.Option(help="Prompts served first, uncounted.")] = 6,
    prompt_tokens: Annotated[int, typer.Option(help="Of each prompt.")] = 32,
    max_tokens: compare_command.MaxTokens = 20,
    tau: Annotated[int, typer.Option(help="Tokens between two cache configurations.")] = 240,
    trace_tokens: Annotated[int, typer.Option(help="Generated after each prompt of the recorded trace.")] = 64,
    quality_documents: compare_command.QualityDocuments = 2,
    config: Config = None,
    out: PageOut = None,
    as_json: Json = False,
    check: Check = False,
) -> None:
    """MoEpic against its baselines: TTFT and TPOT by budget and link, ablation, sensitivity, hit rates, memory."""
    from .moepic.job import OWN_KEYS, bench_moepic
    from .moepic.page import write_page
    from .moepic.report import MoepicReport
    from .moepic.sweeps import sweep_files
    from .moepic.work import Workload

    say_overridden(config, OWN_KEYS)
    work = Workload(
        compare_command.parts(budgets), compare_command.numbers("ratios", ratios),
        compare_command.numbers("links", links), prompt_tokens, max_tokens, warm, prompts, tau,
        trace_tokens=trace_tokens, quality_documents=quality_documents,
    )  # fmt: skip

    def measure(beside: Path | None, progress: Progress) -> tuple[MoepicReport, Sequence[Discarded]]:
        return bench_moepic(model, repeats, work, beside, progress, config)

    finish_page(measure, write_page, sweep_files, out, as_json, check)


def activeevict(
    model: Model = None,
    budgets: Annotated[str, typer.Option(help="Shares of the experts that fit, separated by commas.")] = "0.25,0.5",
    ratios: Annotated[
        str, typer.Option(help="Of each simulated link: loading over computing. The first is the emulated one too.")
    ] = "1,2.5",
    short_tokens: Annotated[int, typer.Option(help="Of each prompt of short context.")] = 32,
    long_tokens: Annotated[int, typer.Option(help="Of each prompt of long context.")] = 256,
    prompts: Annotated[int, typer.Option(help="Held-out prompts that are counted in replays, of each context.")] = 8,
    warm: Annotated[int, typer.Option(help="Prompts served first, uncounted.")] = 4,
    max_tokens: compare_command.MaxTokens = 48,
    repeats: Repeats = 5,
    prompts_each: Annotated[int, typer.Option(help="Held-out prompts of an emulated repetition, each met once.")] = 1,
    parts: Annotated[
        str, typer.Option(help="simulated, emulated or both; emulated alone keeps the simulated rows found in --out.")
    ] = "simulated,emulated",
    config: Config = None,
    out: PageOut = None,
    as_json: Json = False,
    check: Check = False,
) -> None:
    """ActiveEvict against its baselines: blocking and total I/O, transfers, ablation; recorded traces, real runs."""
    from .activeevict.job import OWN_KEYS, bench_activeevict, kept_files
    from .activeevict.page import write_page
    from .activeevict.work import Workload

    say_overridden(config, OWN_KEYS)
    work = Workload(
        (("short", short_tokens), ("long", long_tokens)), warm, prompts, max_tokens,
        compare_command.numbers("budgets", budgets), ratios=compare_command.numbers("ratios", ratios),
        parts=compare_command.parts(parts), repeats=repeats, prompts_each=prompts_each,
    )  # fmt: skip
    earlier = out if out is None or out.suffix == ".json" else out / "activeevict.json"

    def measure(beside: Path | None, progress: Progress) -> tuple[Report, Sequence[Discarded]]:
        return bench_activeevict(model, work, beside, earlier, progress, config)

    finish_page(measure, write_page, lambda folder: kept_files(folder, work), out, as_json, check)


def buddymoe(
    model: Model = None,
    repeats: Repeats = 5,
    rates: Annotated[str, typer.Option(help="Cache rates: shares of the experts that fit, separated by commas.")] = (
        "0.75,0.5,0.375"
    ),
    ratio: Annotated[float, typer.Option(help="Of the emulated link: loading over computing.")] = 2.5,
    link: Annotated[float | None, typer.Option(help="Emulated link in 1e9 bytes per second, in place of it.")] = None,
    prompts: Annotated[int, typer.Option(help="Held-out prompts of a repetition, each met once.")] = 1,
    warm: Annotated[int, typer.Option(help="Prompts served first, uncounted.")] = 2,
    prompt_tokens: Annotated[int, typer.Option(help="Of each prompt.")] = 32,
    max_tokens: compare_command.MaxTokens = 24,
    documents: Annotated[int, typer.Option(help="Held-out documents on which quality is scored.")] = 36,
    items: Annotated[int, typer.Option(help="Choices of each document at most.")] = 1,
    prefix: Annotated[int, typer.Option(help="Tokens of a document before those that are scored.")] = 32,
    continuation: Annotated[int, typer.Option(help="Tokens of each document that are scored.")] = 40,
    config: Config = None,
    out: PageOut = None,
    as_json: Json = False,
    check: Check = False,
) -> None:
    """BuddyMoE against random replacement and dropping: quality and speed at three cache rates."""
    from ..evaluate.quality import EvaluationOptions
    from .buddymoe.job import OWN_KEYS, bench_buddymoe, kept_files
    from .buddymoe.page import write_page
    from .buddymoe.report import BuddyReport
    from .buddymoe.work import Workload

    say_overridden(config, OWN_KEYS)
    quality = EvaluationOptions(documents, items=items, prefix=prefix, continuation=continuation, rows=1)
    work = Workload(
        compare_command.parts(rates), ratio, link, prompt_tokens, max_tokens, warm, prompts, quality,
    )  # fmt: skip

    def measure(beside: Path | None, progress: Progress) -> tuple[BuddyReport, Sequence[Discarded]]:
        return bench_buddymoe(model, repeats, work, beside, progress, config)

    finish_page(measure, write_page, kept_files, out, as_json, check)
