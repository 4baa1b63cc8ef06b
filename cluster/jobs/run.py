"""`tiermoe run`: one prompt, streamed, with the plan before and the measurements after.

    check everything -> prepare the store -> deploy -> stream -> report
    --attach:           join the Ray of a runtime    -> stream -> report
"""

from __future__ import annotations

import json
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Annotated, Any, TextIO

import typer
from rich.console import Console
from tokenizers import Tokenizer

from ...actors.engine.stats import EngineStats
from ...actors.requests import Generation, GenerationRequest, SamplingParams, TokenEvent
from ...errors import RequestError
from ..config import RunConfig
from ..host import versions
from ..hub import locate
from ..prompt import IncrementalText, check_length, encode_prompt, load_model_config, load_tokenizer, sampling_params
from ..report.files import check_writable, write_timeline
from ..report.runtime import placed_tables, plan_table
from ..report.status import summary_table
from .options import (
    RUNTIME,
    AsJson,
    Attach,
    Config,
    DeploymentId,
    attached,
    checked_config,
    checked_settings,
    deployed,
    refuse_runtime_options,
    with_options,
)
from .prediction import with_routing

_ATTACHED_DEADLINE_S = 3600.0


@with_options(*RUNTIME)
def run_command(
    options: dict[str, Any],
    prompt: Annotated[str | None, typer.Argument(help="The text to continue.")] = None,
    prompt_file: Annotated[Path | None, typer.Option(help="Read the prompt from a file.")] = None,
    config: Config = None,
    max_tokens: Annotated[int, typer.Option(help="Tokens to generate at most.")] = 64,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    top_p: Annotated[float, typer.Option(help="Sample from the likeliest tokens with this total.")] = 1.0,
    top_k: Annotated[int, typer.Option(help="Sample from this many tokens; 0: all.")] = 0,
    seed: Annotated[int | None, typer.Option(help="Makes sampling repeatable.")] = None,
    attach: Attach = None,
    deployment: DeploymentId = None,
    trace: Annotated[Path | None, typer.Option(help="Write a timeline for ui.perfetto.dev.")] = None,
    as_json: AsJson = False,
) -> None:
    """Generate text for one prompt and report what it took."""
    sampling = sampling_params(max_tokens, temperature, top_p, top_k, seed)
    report, text_out = Console(stderr=as_json), sys.stderr if as_json else sys.stdout
    if attach is not None:
        refuse_runtime_options(options | {"config": config, "trace": trace})
        text = _prompt_text(prompt, prompt_file)
        record = _run_attached(attach, deployment, text, sampling, options.get("model"), text_out)
    elif deployment is not None:
        raise RequestError("--deployment names a runtime that runs already", "pass --attach HOST:PORT with it")
    else:
        chosen = checked_config(config, options)
        record = _run_here(chosen, _prompt_text(prompt, prompt_file), sampling, trace, text_out, report)
    report.print(summary_table(record))
    if as_json:
        print(json.dumps(record))


def _run_here(
    config: RunConfig, prompt: str, sampling: SamplingParams, trace: Path | None, text_out: TextIO, report: Console
) -> dict[str, Any]:
    """Check all inputs against each other, prepare, deploy, generate; the record of `tiermoe run --json`.

    The text goes to `text_out` as it comes, and the plan to `report`.
    """
    config, settings = checked_settings(config, trace=trace is not None)
    if trace is not None:
        check_writable(trace)
    tokenizer = load_tokenizer(config.model_dir)
    ids = encode_prompt(tokenizer, prompt)
    check_length(len(ids), sampling.max_tokens, load_model_config(config.model_dir), config.kv)
    notices = Console(stderr=True)
    deployment = deployed(config, settings, notices)
    with ExitStack() as stack:
        with notices.status("starting Ray and loading the model ..."):
            stack.enter_context(deployment)
        planned = with_routing(deployment.planned, config).as_dict()
        report.print(plan_table(deployment.plan), *placed_tables(planned))
        generation, text = _stream_text(deployment.generate, tokenizer, prompt, ids, sampling, text_out)
        stats = deployment.stats()
        if trace is not None:
            write_timeline(trace, deployment.trace_events())
    record = _record(deployment.plan, prompt, ids, sampling, generation, text, stats, deployment.startup_s)
    return record | {
        "topology": planned["topology"] | {"notes": planned["notes"]},
        "prediction": planned["prediction"],
        "versions": versions(),
    }


def _run_attached(
    address: str, wanted: str | None, prompt: str, sampling: SamplingParams, model: str | None, text_out: TextIO
) -> dict[str, Any]:
    """Attach to a runtime, generate, leave; the record of `tiermoe run --json`.

    Its counters are the runtime's since it started, for the requests of all clients. Without `model` the tokenizer is
    that of the runtime's expert store, if the store is on this machine.
    """
    begin_s = time.monotonic()
    with attached(address) as attachment:
        from ..attach import lead_of  # Ray

        deployment = attachment.choose(wanted)
        plan = attachment.ask(deployment, "plan")
        folder = locate(model) if model is not None else Path(plan["store_path"])
        if not (folder / "tokenizer.json").is_file():
            raise RequestError(
                f"no tokenizer.json in '{folder}' on this machine",
                f"pass --model the folder of {plan['model']}'s checkpoint",
            )
        tokenizer = load_tokenizer(folder)
        ids, limit = encode_prompt(tokenizer, prompt), plan["max_prompt_tokens"]
        if len(ids) + sampling.max_tokens > limit:
            raise RequestError(
                f"{len(ids)} prompt tokens and {sampling.max_tokens} to generate exceed the runtime's {limit}",
                "shorten the prompt or lower --max-tokens",
            )
        startup_s = time.monotonic() - begin_s
        generate = partial(lead_of(deployment).generate, deadline_s=_ATTACHED_DEADLINE_S)
        generation, text = _stream_text(generate, tokenizer, prompt, ids, sampling, text_out)
        stats = attachment.ask(deployment, "stats")
    record = _record(plan, prompt, ids, sampling, generation, text, stats, startup_s)
    return {"attached_to": deployment} | record | {"versions": versions()}


def _stream_text(
    generate: Callable[[GenerationRequest], Iterator[TokenEvent]],
    tokenizer: Tokenizer,
    prompt: str,
    ids: tuple[int, ...],
    sampling: SamplingParams,
    out: TextIO,
) -> tuple[Generation, str]:
    """Write the prompt and its continuation as it comes; all events and the text of the continuation."""
    request = GenerationRequest(uuid.uuid4().hex, ids, sampling)
    generation, text = Generation(request.request_id), IncrementalText(tokenizer)
    out.write(prompt)
    for event in generate(request):
        generation.add(event)
        out.write(text.add(event.token_ids))
        out.flush()
    out.write(text.finish() + "\n")
    out.flush()
    return generation, text.text


def _record(
    plan: dict[str, Any],
    prompt: str,
    ids: tuple[int, ...],
    sampling: SamplingParams,
    generation: Generation,
    text: str,
    stats: EngineStats,
    startup_s: float,
) -> dict[str, Any]:
    """The result as one flat JSON object; the plan and the layers are nested in it."""
    return {
        "model": str(plan["model"]),
        "policy": plan["policy"],
        "lossless": plan["lossless"],
        "prompt": prompt,
        "prompt_tokens": len(ids),
        "generated_tokens": len(generation.token_ids),
        "token_ids": generation.token_ids,
        "text": text,
        "finish": generation.finish,
        "ttft_s": generation.ttft_s,
        "tpot_s": generation.tpot_s,
        "startup_s": startup_s,
        "sampling": asdict(sampling),
        **stats.as_dict(),
        "plan": plan,
    }


def _prompt_text(prompt: str | None, prompt_file: Path | None) -> str:
    if (prompt is None) == (prompt_file is None):
        given = "no prompt" if prompt is None else "both PROMPT and --prompt-file are given"
        raise RequestError(given, "pass either PROMPT or --prompt-file")
    if prompt_file is None:
        return prompt or ""
    try:
        return prompt_file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise RequestError(f"prompt file '{prompt_file}': {error}", "give a readable UTF-8 file") from error
