"""The `tiermoe bench` commands: tables on stderr, with `--json` one object on stdout, with `--check` an exit code.

`--out FILE`, also written `--json FILE.json`, puts the object into a file, for jobs whose standard output is mixed with
other lines.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Protocol, TypeVar

import typer
from rich.console import Console
from rich.progress import Progress

from ....actors.policies.sharding import Ownership
from ....errors import ConfigError
from ...report.json_file import write_json
from ...report.progress import progress_on
from ...report.timeline import check_writable
from . import compare_command
from .compare.kept import Kept
from .compare.partial import partial_file
from .harness import Report, print_report
from .json_option import JsonCommand

Model = Annotated[str | None, typer.Option(help="Checkpoint folder; default: the model of the project.")]
Repeats = Annotated[int, typer.Option(min=1, help="Counted repetitions of each case.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout; --json FILE.json: as --out.")]
Check = Annotated[bool, typer.Option("--check", help="Exit with 1 when a bar does not hold.")]

Out = Annotated[Path | None, typer.Option(help="Write the JSON object into this file.")]
Config = Annotated[str | None, typer.Option(help="YAML file, or a name in configs/clusters: what is not fixed here.")]

PageReport = TypeVar("PageReport", bound=Report)

bench_app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)


class Discarded(Protocol):
    """What is kept of an unfinished benchmark."""

    def discard(self) -> None: ...


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

    _say_overridden(config, OWN_KEYS)
    _finish(lambda progress: bench_overhead(model, repeats, progress, config), as_json, check, out)


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

    _say_overridden(config, OWN_KEYS)
    _finish(lambda progress: bench_prefetch(model, repeats, budget, link_gbps, progress, config), as_json, check, out)


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

    _say_overridden(config, OWN_KEYS)
    work = Workload(policy, budget, link_gbps, tuple(dict.fromkeys(batch or BATCHES)), prompts, ownership)
    _finish(lambda progress: bench_scale(model, repeats, work, progress, config), as_json, check, out)


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
    _say_overridden(config, compare_command.OWN_KEYS)
    kept: list[Kept] = []

    def measure(progress: Progress) -> Report:
        report, found = compare_command.measure(
            model, config, out, progress, policies=policies, budgets=budgets, links=links, prompts=prompts, warm=warm,
            repeats=repeats, max_tokens=max_tokens, batch=batch, prompt_tokens=prompt_tokens, fresh=fresh,
            quality_documents=quality_documents,
        )  # fmt: skip
        kept.append(found)
        return report

    with _telling_what_is_kept([] if out is None else [out]):
        _finish(measure, as_json, check, out, lambda: kept[0].discard())


@bench_app.command(cls=JsonCommand)
def ndp(
    model: Model = None,
    documents: Annotated[int | None, typer.Option(min=1, help="Held-out documents to score; default: all.")] = None,
    windows: Annotated[int, typer.Option(min=1, help="Windows of each document.")] = 2,
    repeats: Repeats = 5,
    config: Config = None,
    out: Annotated[Path | None, typer.Option(help="FILE.json: the object; a folder: page, data and plot.")] = None,
    as_json: Json = False,
    check: Check = False,
) -> None:
    """Quality of near-data execution by precision and placement; similarity of prefill and decode; overlap."""
    from ..evaluate.options import EvaluationOptions
    from .ndp import OWN_KEYS, bench_ndp
    from .ndp_page import write_page

    _say_overridden(config, OWN_KEYS)
    file, folder = _file_or_folder(out)

    def measure(progress: Progress) -> Report:
        report = bench_ndp(model, EvaluationOptions(documents=documents, windows=windows), repeats, progress, config)
        if folder is not None:
            write_page(report, folder)
        return report

    _finish(measure, as_json, check, file)


@bench_app.command(cls=JsonCommand)
def fmoe(
    model: Model = None,
    repeats: Repeats = 5,
    prompts: Annotated[int, typer.Option(help="Held-out prompts, 70% of them to learn from.")] = 34,
    prompt_tokens: Annotated[int, typer.Option(help="Of each prompt.")] = 32,
    max_tokens: Annotated[int, typer.Option(help="Generated after each prompt.")] = 8,
    trace_tokens: Annotated[int, typer.Option(help="Generated after each prompt of the recorded trace.")] = 96,
    config: Config = None,
    out: Annotated[Path | None, typer.Option(help="FILE.json: the object; a folder: page, data and plots.")] = None,
    as_json: Json = False,
    check: Check = False,
) -> None:
    """fMoE against its baselines: hit rate, TTFT, TPOT, bytes; expert maps by distance and capacity."""
    from .fmoe.job import OWN_KEYS, FmoeReport, Workload, bench_fmoe, sweep_files
    from .fmoe.page import write_page

    _say_overridden(config, OWN_KEYS)
    work = Workload(prompts, prompt_tokens, max_tokens, trace_tokens=trace_tokens)

    def measure(beside: Path | None, progress: Progress) -> tuple[FmoeReport, Sequence[Discarded]]:
        return bench_fmoe(model, repeats, work, beside, progress, config)

    _finish_page(measure, write_page, sweep_files, out, as_json, check)


@bench_app.command(cls=JsonCommand)
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
    out: Annotated[Path | None, typer.Option(help="FILE.json: the object; a folder: page, data and plots.")] = None,
    as_json: Json = False,
    check: Check = False,
) -> None:
    """MoEpic against its baselines: TTFT and TPOT by budget and link, ablation, sensitivity, hit rates, memory."""
    from .moepic.job import OWN_KEYS, bench_moepic
    from .moepic.page import write_page
    from .moepic.report import MoepicReport
    from .moepic.sweeps import sweep_files
    from .moepic.work import Workload

    _say_overridden(config, OWN_KEYS)
    work = Workload(
        compare_command.parts(budgets), compare_command.numbers("ratios", ratios),
        compare_command.numbers("links", links), prompt_tokens, max_tokens, warm, prompts, tau,
        trace_tokens=trace_tokens, quality_documents=quality_documents,
    )  # fmt: skip

    def measure(beside: Path | None, progress: Progress) -> tuple[MoepicReport, Sequence[Discarded]]:
        return bench_moepic(model, repeats, work, beside, progress, config)

    _finish_page(measure, write_page, sweep_files, out, as_json, check)


@bench_app.command(cls=JsonCommand)
def activeevict(
    model: Model = None,
    budgets: compare_command.Budgets = "0.25,0.5",
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
    out: Annotated[Path | None, typer.Option(help="FILE.json: the object; a folder: page, data and plots.")] = None,
    as_json: Json = False,
    check: Check = False,
) -> None:
    """ActiveEvict against its baselines: blocking and total I/O, transfers, ablation; recorded traces, real runs."""
    from .activeevict.job import OWN_KEYS, bench_activeevict, kept_files
    from .activeevict.page import write_page
    from .activeevict.work import Workload

    _say_overridden(config, OWN_KEYS)
    work = Workload(
        (("short", short_tokens), ("long", long_tokens)), warm, prompts, max_tokens,
        compare_command.numbers("budgets", budgets), ratios=compare_command.numbers("ratios", ratios),
        parts=compare_command.parts(parts), repeats=repeats, prompts_each=prompts_each,
    )  # fmt: skip
    earlier = out if out is None or out.suffix == ".json" else out / "activeevict.json"

    def measure(beside: Path | None, progress: Progress) -> tuple[Report, Sequence[Discarded]]:
        return bench_activeevict(model, work, beside, earlier, progress, config)

    _finish_page(measure, write_page, lambda folder: kept_files(folder, work), out, as_json, check)


@bench_app.command(cls=JsonCommand)
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
    out: Annotated[Path | None, typer.Option(help="FILE.json: the object; a folder: page, data and plots.")] = None,
    as_json: Json = False,
    check: Check = False,
) -> None:
    """BuddyMoE against random replacement and dropping: quality and speed at three cache rates."""
    from ..evaluate.options import EvaluationOptions
    from .buddymoe.job import OWN_KEYS, bench_buddymoe, kept_files
    from .buddymoe.page import write_page
    from .buddymoe.report import BuddyReport
    from .buddymoe.work import Workload

    _say_overridden(config, OWN_KEYS)
    quality = EvaluationOptions(documents, items=items, prefix=prefix, continuation=continuation, rows=1)
    work = Workload(
        compare_command.parts(rates), ratio, link, prompt_tokens, max_tokens, warm, prompts, quality,
    )  # fmt: skip

    def measure(beside: Path | None, progress: Progress) -> tuple[BuddyReport, Sequence[Discarded]]:
        return bench_buddymoe(model, repeats, work, beside, progress, config)

    _finish_page(measure, write_page, kept_files, out, as_json, check)


@bench_app.command()
def gpu(
    out: Annotated[Path, typer.Option(help="Folder of gpu.json and gpu.md.")] = Path("docs/results"),
    parts: Annotated[str, typer.Option(help="Only these, separated by commas; see docs/gpu.md.")] = "",
    seconds: Annotated[float, typer.Option(help="For all parts together.")] = 445.0,
    device: Annotated[str, typer.Option(help="cuda; cpu: the stand-in, to try the script.")] = "cuda",
    sizes: Annotated[str, typer.Option(help="real; toy: seconds of work.")] = "real",
) -> None:
    """Every check and measurement that needs a GPU, in under eight minutes; exits with 1 when a check fails."""
    from .gpu.__main__ import main

    given = ["--out", str(out), "--parts", parts, "--seconds", str(seconds), "--device", device, "--sizes", sizes]
    raise typer.Exit(main(given))


@bench_app.command(cls=JsonCommand)
def quantize(model: Model = None, out: Out = None, as_json: Json = False, check: Check = False) -> None:
    """Error of quantized experts on held-out inputs: GPTQ against round-to-nearest, torchao and HQQ."""
    from .quantize import bench_quantize

    _finish(lambda progress: bench_quantize(model, progress), as_json, check, out)


@bench_app.command(cls=JsonCommand)
def channel(repeats: Repeats = 7, out: Out = None, as_json: Json = False, check: Check = False) -> None:
    """Round trips between two processes: shared memory, gRPC, a bare gRPC stream, a Ray actor call."""
    from .channel import bench_channel

    _finish(lambda progress: bench_channel(repeats, progress), as_json, check, out)


@bench_app.command(cls=JsonCommand)
def transfer(repeats: Repeats = 7, out: Out = None, as_json: Json = False, check: Check = False) -> None:
    """Experts from another node's store: our channel and Ray object refs, against a copy in memory."""
    from .transfer import bench_transfer

    _finish(lambda progress: bench_transfer(repeats, progress), as_json, check, out)


@bench_app.command(cls=JsonCommand)
def kernel(
    repeats: Repeats = 7,
    group: Annotated[int, typer.Option(help="Quantization group: 32, 64 or 128.")] = 64,
    instruction_set: Annotated[str | None, typer.Option(help="Of our kernels; default: the best here.")] = None,
    ggml: Annotated[Path | None, typer.Option(help="libggml-cpu*.so; default: that of an installed wheel.")] = None,
    threads: Annotated[
        int | None, typer.Option(min=1, max=1024, help="1 to 4 bits on so many cores against their bandwidth alone.")
    ] = None,
    out: Out = None,
    as_json: Json = False,
    check: Check = False,
) -> None:
    """Packed experts on one core against memory bandwidth, torch and ggml; or on many against bandwidth."""
    from .kernel import bench_kernel
    from .kernel_threads import bench_kernel_threads

    if threads is not None:
        if ggml is not None:
            raise ConfigError("--ggml is compared with on one thread", "leave out --ggml, or --threads")
        _finish(
            lambda progress: bench_kernel_threads(threads, repeats, group, instruction_set, progress),
            as_json, check, out,
        )  # fmt: skip
        return
    _finish(lambda progress: bench_kernel(repeats, group, instruction_set, ggml, progress), as_json, check, out)


@bench_app.command()
def matcher(repeats: Repeats = 5, out: Out = None, as_json: Json = False, check: Check = False) -> None:
    """Expert maps: time of a search and an update, memory, and what publishing costs the lead."""
    from .matcher import bench_matcher

    _finish(lambda progress: bench_matcher(repeats, progress), as_json, check, out)


@bench_app.command(cls=JsonCommand)
def substitute(repeats: Repeats = 9, out: Out = None, as_json: Json = False, check: Check = False) -> None:
    """Buddy substitution: microseconds to decide one layer."""
    from .substitute import bench_substitute

    _finish(lambda progress: bench_substitute(repeats, progress), as_json, check, out)


def _finish_page(
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

    with _telling_what_is_kept([] if beside is None else kept_beside(beside)):
        _finish(run, as_json, check, file, discard)


def _file_or_folder(out: Path | None) -> tuple[Path | None, Path | None]:
    """What `--out` names: a file for the object, or a folder for a page, which is refused here if it cannot be had."""
    if out is None or out.suffix == ".json":
        return out, None
    from .ndp_page import check_folder

    check_folder(out)
    return None, out


def _say_overridden(config: str | None, fixed: Collection[str]) -> None:
    if config is None:
        return
    from .serving import overridden

    if keys := overridden(config, fixed):
        Console(stderr=True).print(f"note: not taken from '{config}', this benchmark sets: {', '.join(keys)}")


@contextmanager
def _telling_what_is_kept(results: Sequence[Path]) -> Iterator[None]:
    """Whoever interrupts a comparison learns that it can go on."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit):
        for path in filter(Path.exists, map(partial_file, results)):
            Console(stderr=True).print(f"'{path}' keeps what is finished: the same command goes on", highlight=False)
        raise


def _finish(
    measure: Callable[[Progress], Report],
    as_json: bool,
    check: bool,
    out: Path | None = None,
    written: Callable[[], None] | None = None,
) -> None:
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
