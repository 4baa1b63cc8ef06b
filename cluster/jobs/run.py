"""`tiermoe run --attach`: one prompt to a runtime that `tiermoe up` keeps.

`tiermoe run`: one prompt, streamed, with the plan before and the measurements after.

    check everything -> prepare the store -> deploy -> stream -> report
"""

from __future__ import annotations

import json
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, TextIO

import typer
from rich.console import Console
from tokenizers import Tokenizer

from ...actors.engine.stats import EngineStats
from ...actors.requests import Generation, GenerationRequest, SamplingParams, TokenEvent
from ...actors.settings import EngineSettings
from ...errors import RequestError
from ..config import RunConfig
from ..host import versions
from ..prompt import IncrementalText, check_length, encode_prompt, load_model_config, load_tokenizer, sampling_params
from ..ray_auth import adopt_mode
from ..report.files import check_writable, write_timeline
from ..report.runtime import placed_tables, plan_table, summary_table
from ..topology.estimate import PlanResult
from .options import (
    Budget,
    Config,
    Device,
    Dtype,
    LinkGbps,
    LinkLatency,
    Model,
    NdpHardware,
    NdpPace,
    NdpThreads,
    NdpWorkers,
    Policy,
    Shards,
    Store,
    Threads,
    checked_config,
    checked_settings,
    prepared_for,
    refuse_runtime_options,
    runtime_options,
)

_REQUEST_DEADLINE_S = 3600.0


@dataclass(frozen=True)
class GuestJob:
    """A prompt for a runtime.

    Attributes:
        address: HOST:PORT of its Ray.
        deployment: its id; None where there is only one.
        model: folder with tokenizer.json; None: the runtime's expert store, if it is on this machine.
    """

    address: str
    deployment: str | None
    prompt: str
    sampling: SamplingParams
    model: str | None = None


def run_as_guest(job: GuestJob, text_out: TextIO) -> dict[str, Any]:
    """Attach, generate, leave; the record of `tiermoe run --json`.

    Its counters are the runtime's since it started, whoever sent the requests; `attached_to` says which.

    Raises:
        RuntimeFailure: there is no such runtime, or it failed. RequestError: the prompt does not fit.
    """
    begin_s = time.monotonic()
    adopt_mode(job.address)
    from ..attach import Attachment  # Ray, which reads the mode when it is imported

    with Attachment(job.address) as attachment:
        deployment = attachment.choose(job.deployment)
        plan = attachment.ask(deployment, "plan")
        tokenizer = load_tokenizer(_tokenizer_dir(plan, job.model))
        ids = encode_prompt(tokenizer, job.prompt)
        _check_length(len(ids), job.sampling.max_tokens, plan)
        startup_s = time.monotonic() - begin_s
        request = GenerationRequest(uuid.uuid4().hex, ids, job.sampling)
        generation, text = stream_text(
            lambda asked: attachment.generate(deployment, asked, _REQUEST_DEADLINE_S),
            tokenizer, job.prompt, request, text_out,
        )  # fmt: skip
        stats = attachment.ask(deployment, "stats")
    return {
        "attached_to": deployment,
        "model": str(plan["model"]),
        "policy": plan["policy"],
        "lossless": plan["lossless"],
        "prompt": job.prompt,
        "prompt_tokens": len(ids),
        "generated_tokens": len(generation.token_ids),
        "token_ids": generation.token_ids,
        "text": text,
        "finish": generation.finish,
        "ttft_s": generation.ttft_s,
        "tpot_s": generation.tpot_s,
        "startup_s": startup_s,
        "sampling": asdict(job.sampling),
        **stats.as_dict(),
        "plan": plan,
        "versions": versions(),
    }


def stream_text(
    generate: Callable[[GenerationRequest], Iterator[TokenEvent]],
    tokenizer: Tokenizer,
    prompt: str,
    request: GenerationRequest,
    out: TextIO,
) -> tuple[Generation, str]:
    """Write the prompt and its continuation as it comes; all events and the text of the continuation."""
    generation, text = Generation(request.request_id), IncrementalText(tokenizer)
    out.write(prompt)
    for event in generate(request):
        generation.add(event)
        out.write(text.add(event.token_ids))
        out.flush()
    out.write(text.finish() + "\n")
    out.flush()
    return generation, text.text


def _tokenizer_dir(plan: dict[str, Any], model: str | None) -> Path:
    folder = Path(model).expanduser() if model is not None else Path(plan["store_path"])
    if not (folder / "tokenizer.json").is_file():
        raise RequestError(
            f"no tokenizer.json in '{folder}' on this machine",
            f"pass --model the folder of {plan['model']}'s checkpoint",
        )
    return folder


def _check_length(prompt_tokens: int, max_tokens: int, plan: dict[str, Any]) -> None:
    limit = plan["max_prompt_tokens"]
    if prompt_tokens + max_tokens > limit:
        raise RequestError(
            f"{prompt_tokens} prompt tokens and {max_tokens} to generate exceed the runtime's {limit}",
            "shorten the prompt or lower --max-tokens",
        )


@dataclass(frozen=True)
class RunJob:
    """A run whose inputs have all been checked."""

    config: RunConfig
    settings: EngineSettings
    tokenizer: Tokenizer
    prompt: str
    prompt_ids: tuple[int, ...]
    sampling: SamplingParams
    trace: Path | None


@dataclass(frozen=True)
class RunResult:
    """What came out of a run."""

    plan: dict[str, Any]
    planned: PlanResult
    generation: Generation
    text: str
    stats: EngineStats
    startup_s: float


def checked_job(config: RunConfig, prompt: str, sampling: SamplingParams, trace: Path | None) -> RunJob:
    """Check all inputs against each other without starting anything.

    Raises:
        TierMoeError: the first thing that is wrong, with its remedy.
    """
    settings = checked_settings(config, trace=trace is not None)
    model_dir = config.model_dir
    if trace is not None:
        check_writable(trace)
    tokenizer = load_tokenizer(model_dir)
    ids = encode_prompt(tokenizer, prompt)
    check_length(len(ids), sampling.max_tokens, load_model_config(model_dir), config.kv)
    return RunJob(config, settings, tokenizer, prompt, ids, sampling, trace)


def run(job: RunJob, text_out: TextIO, report: Console) -> RunResult:
    """Prepare, deploy, generate.

    Args:
        job: what to run.
        text_out: where the text goes as it comes.
        report: where the plan goes.

    Raises:
        RuntimeFailure: Ray or an actor failed, or a deadline passed.
        TierMoeError: the checkpoint, the store or the budget was refused.
    """
    config = job.config
    if config.ray.address is not None:
        adopt_mode(config.ray.address)
    from ..deploy import Deployment  # Ray: half a second that a refused run need not pay

    notices = Console(stderr=True)
    store = prepared_for(config, job.settings, progress=notices.is_terminal)
    with ExitStack() as stack:
        with notices.status("starting Ray and loading the model ..."):
            tell = partial(notices.print, markup=False, soft_wrap=True)
            deployment = stack.enter_context(Deployment(config, job.settings, str(store), tell=tell))
        report.print(plan_table(deployment.plan), *placed_tables(deployment.planned.as_dict()))
        generation, text = stream_text(deployment.generate, job.tokenizer, job.prompt, request_of(job), text_out)
        stats = deployment.stats()
        if job.trace is not None:
            write_timeline(job.trace, deployment.trace_events())
    return RunResult(deployment.plan, deployment.planned, generation, text, stats, deployment.startup_s)


def as_record(job: RunJob, result: RunResult) -> dict[str, Any]:
    """The result as one flat JSON object; the plan, layers and versions are nested in it."""
    plan, generation = result.plan, result.generation
    return {
        "model": str(plan["model"]),
        "policy": plan["policy"],
        "lossless": plan["lossless"],
        "prompt": job.prompt,
        "prompt_tokens": len(job.prompt_ids),
        "generated_tokens": len(generation.token_ids),
        "token_ids": generation.token_ids,
        "text": result.text,
        "finish": generation.finish,
        "ttft_s": generation.ttft_s,
        "tpot_s": generation.tpot_s,
        "startup_s": result.startup_s,
        "sampling": asdict(job.sampling),
        **result.stats.as_dict(),
        "plan": plan,
        "topology": result.planned.topology.as_dict() | {"notes": list(result.planned.notes)},
        "prediction": result.planned.prediction.as_dict(),
        "versions": versions(),
    }


def request_of(job: RunJob) -> GenerationRequest:
    """The job's prompt as a request with an id of its own."""
    return GenerationRequest(uuid.uuid4().hex, job.prompt_ids, job.sampling)


def _prompt_text(prompt: str | None, prompt_file: Path | None) -> str:
    """The prompt from exactly one of its two sources.

    Raises:
        RequestError: none or both are given, or the file cannot be read.
    """
    if (prompt is None) == (prompt_file is None):
        given = "no prompt" if prompt is None else "both PROMPT and --prompt-file are given"
        raise RequestError(given, "pass either PROMPT or --prompt-file")
    if prompt_file is None:
        return prompt or ""
    try:
        return prompt_file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise RequestError(f"prompt file '{prompt_file}': {error}", "give a readable UTF-8 file") from error


def run_command(
    prompt: Annotated[str | None, typer.Argument(help="The text to continue.")] = None,
    prompt_file: Annotated[Path | None, typer.Option(help="Read the prompt from a file.")] = None,
    model: Model = None,
    config: Config = None,
    policy: Policy = None,
    budget: Budget = None,
    max_tokens: Annotated[int, typer.Option(help="Tokens to generate at most.")] = 64,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    top_p: Annotated[float, typer.Option(help="Sample from the likeliest tokens with this total.")] = 1.0,
    top_k: Annotated[int, typer.Option(help="Sample from this many tokens; 0: all.")] = 0,
    seed: Annotated[int | None, typer.Option(help="Makes sampling repeatable.")] = None,
    device: Device = None,
    dtype: Dtype = None,
    threads: Threads = None,
    link_gbps: LinkGbps = None,
    link_latency_us: LinkLatency = None,
    ndp_threads: NdpThreads = None,
    ndp_hardware: NdpHardware = None,
    ndp_pace: NdpPace = None,
    shards: Shards = None,
    ndp_workers: NdpWorkers = None,
    store: Store = None,
    attach: Annotated[str | None, typer.Option(help="HOST:PORT of a runtime that `tiermoe up` keeps: use it.")] = None,
    deployment: Annotated[str | None, typer.Option(help="Id of the runtime there, if it has several.")] = None,
    trace: Annotated[Path | None, typer.Option(help="Write a timeline for ui.perfetto.dev.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object; all else on stderr.")] = False,
) -> None:
    """Generate text for one prompt and report what it took."""
    options = runtime_options(
        model=model, policy=policy, budget=budget, device=device, dtype=dtype, threads=threads, store=store,
        link_gbps=link_gbps, link_latency_us=link_latency_us, ndp_threads=ndp_threads, ndp_hardware=ndp_hardware,
        ndp_pace=ndp_pace, shards=shards, ndp_workers=ndp_workers,
    )  # fmt: skip
    sampling = sampling_params(max_tokens, temperature, top_p, top_k, seed)
    report, text_out = Console(stderr=as_json), sys.stderr if as_json else sys.stdout
    if attach is not None:
        refuse_runtime_options(options | {"config": config, "trace": trace})
        guest_job = GuestJob(attach, deployment, _prompt_text(prompt, prompt_file), sampling, model)
        record = run_as_guest(guest_job, text_out)
    elif deployment is not None:
        raise RequestError("--deployment names a runtime that runs already", "pass --attach HOST:PORT with it")
    else:
        job = checked_job(checked_config(config, options), _prompt_text(prompt, prompt_file), sampling, trace)
        record = as_record(job, run(job, text_out, report))
    report.print(summary_table(record))
    if as_json:
        print(json.dumps(record))
