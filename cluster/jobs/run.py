"""`tiermoe run`: one prompt, streamed, and a few lines about it; with -v the plan before and all measurements after.

The text goes to standard output, all else to standard error; with --json, one object alone goes to standard output.

    check everything -> prepare the store -> deploy -> stream -> report
    --attach:           join the Ray of a runtime    -> stream -> report
"""

from __future__ import annotations

import sys
import time
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, TextIO

import typer
from rich.console import Console

from ...actors.requests import SamplingParams
from ...actors.tokenizer import has_tokenizer
from ...errors import RequestError, reason
from ..checkpoints.generation import check_mode, read_defaults
from ..checkpoints.hub import locate
from ..config import RunConfig
from ..host import cpu, now, shown, versions
from ..llm import LLM, Completion, TextStream, say_defaults
from ..prompt import encode_prompt, load_tokenizer, sampling_params
from ..report.files import check_writable, write_timeline
from ..report.output import print_json, stdout
from ..report.results import percentiles
from ..report.runtime import placed_tables, plan_table
from ..report.status_tables import brief_table, summary_table
from ..report.tables import show
from .ending import BoundedEnd
from .options import (
    OUTPUT,
    RUNTIME,
    AsJson,
    Attach,
    Config,
    DeploymentId,
    attached,
    checked_config,
    is_attached,
    with_options,
)

_ATTACHED_DEADLINE_S = 3600.0


_SAMPLING = "Sampling"  # panel of the help


@dataclass(frozen=True)
class Asked:
    """How the text is sampled: options of `tiermoe run`.

    Raises:
        RequestError: one is out of range. ConfigError: an unknown mode of the model's own defaults.
    """

    max_tokens: Annotated[int, typer.Option(help="Most tokens to generate.", rich_help_panel=_SAMPLING)] = 64
    temperature: Annotated[
        float, typer.Option(help="Sampling temperature; 0: greedy.", rich_help_panel=_SAMPLING)
    ] = 0.0
    top_p: Annotated[
        float | None,
        typer.Option(
            help="Sample from the likeliest tokens with this total probability; default: the model's own, else 1.",
            rich_help_panel=_SAMPLING,
        ),
    ] = None
    top_k: Annotated[
        int | None,
        typer.Option(
            help="Sample from this many likeliest tokens; 0: all; default: the model's own, else 0.",
            rich_help_panel=_SAMPLING,
        ),
    ] = None
    seed: Annotated[
        int | None, typer.Option(help="Seed of sampling; default: random.", rich_help_panel=_SAMPLING)
    ] = None
    generation_config: Annotated[
        str,
        typer.Option(
            help="Penalties, top-p, top-k and min-p of the model's generation_config.json for what is not given: "
            "auto, or none.",
            rich_help_panel=_SAMPLING,
        ),
    ] = "auto"

    def __post_init__(self) -> None:
        check_mode(self.generation_config)
        self.params()

    def params(self) -> SamplingParams:
        top_p = 1.0 if self.top_p is None else self.top_p
        return sampling_params(self.max_tokens, self.temperature, top_p, self.top_k or 0, self.seed)

    @property
    def given(self) -> tuple[str, ...]:
        """Names of those that come before the model's own."""
        return tuple(name for name in ("top_p", "top_k") if getattr(self, name) is not None)


@with_options(*RUNTIME)
def run_command(
    options: dict[str, Any],
    asked: Asked,
    prompt: Annotated[str | None, typer.Argument(help="Text to continue.")] = None,
    prompt_file: Annotated[Path | None, typer.Option(help="Read the prompt from a file.")] = None,
    config: Config = None,
    attach: Attach = None,
    deployment: DeploymentId = None,
    trace: Annotated[
        Path | None,
        typer.Option(help="Write a timeline to this file, for ui.perfetto.dev.", rich_help_panel=OUTPUT),
    ] = None,
    verbose: Annotated[
        bool,
        typer.Option(
            "--verbose", "-v", help="Print the effective plan before the run and all counters after it.",
            rich_help_panel=OUTPUT,
        ),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Generate text for one prompt, on standard output; report time and bytes in a few lines, on standard error."""
    report, text_out = Console(stderr=True), sys.stderr if as_json else stdout()
    if is_attached(attach, deployment, options | {"config": config, "trace": trace}):
        assert attach is not None
        text = _prompt_text(prompt, prompt_file)
        record = _run_attached(attach, deployment, text, asked, options.get("model"), text_out)
    else:
        chosen = checked_config(config, options)
        text, planned = _prompt_text(prompt, prompt_file), report if verbose else None
        record = _run_here(chosen, text, asked, trace, text_out, planned)
    show(report, "", summary_table(record) if verbose else brief_table(record))
    if as_json:
        print_json(record)


def _run_here(
    config: RunConfig, prompt: str, asked: Asked, trace: Path | None, text_out: TextIO,
    plan_to: Console | None,
) -> dict[str, Any]:
    """Check all inputs against each other, prepare, deploy, generate; the record of `tiermoe run --json`.

    The text goes to `text_out` as it comes, and the plan to `plan_to`; None: nowhere.
    """
    if trace is not None:
        check_writable(trace)
    llm = LLM.of(config, Console(stderr=True), timeline=trace is not None, generation_config=asked.generation_config)
    stream = llm.stream_of(prompt, asked.params(), asked.given)
    with BoundedEnd(llm.abandon, terminated=143) as ending, llm:
        deployment = llm.start()
        ending.serving()
        planned = deployment.planned.as_dict()
        if plan_to is not None:
            show(plan_to, plan_table(llm.plan), *placed_tables(planned))
        _write_text(prompt, stream, text_out)
        stats = llm.stats() | {"residency": llm.residency()}
        if trace is not None:
            write_timeline(trace, llm.timeline())
    record = _record(deployment.plan, prompt, stream.sampling, stream.completion, stats, deployment.startup_s)
    return record | {
        "startup_steps_s": llm.startup_steps_s,
        "topology": planned["topology"] | {"notes": planned["notes"]},
        "prediction": planned["prediction"],
        "versions": versions(),
    }


def _run_attached(
    address: str, wanted: str | None, prompt: str, asked: Asked, model: str | None, text_out: TextIO
) -> dict[str, Any]:
    """Attach to a runtime, generate, leave; the record of `tiermoe run --json`.

    Its counters are the runtime's since it started, for the requests of all clients. Without `model` the tokenizer is
    that of the runtime's expert store, if the store is on this machine.
    """
    begin_s = time.monotonic()
    with BoundedEnd(lambda: False, terminated=143), attached(address) as attachment:
        from ..attach import lead_of  # Ray

        deployment = attachment.choose(wanted)
        plan = attachment.ask(deployment, "plan")
        folder = locate(model) if model is not None else Path(plan["store_path"])
        if not has_tokenizer(folder):
            raise RequestError(
                f"no tokenizer.json in '{shown(folder)}' on this machine, and no other tokenizer",
                f"pass --model the folder of {plan['model']}'s checkpoint",
            )
        defaults = read_defaults(folder, asked.generation_config)
        say_defaults(defaults, Console(stderr=True))
        sampling = defaults.completed(asked.params(), asked.given)
        tokenizer = load_tokenizer(folder)
        ids, limit = encode_prompt(tokenizer, prompt), plan["max_prompt_tokens"]
        if len(ids) + sampling.max_tokens > limit:
            raise RequestError(
                f"{len(ids)} prompt tokens and {sampling.max_tokens} to generate exceed the runtime's {limit}",
                "shorten the prompt or lower --max-tokens",
            )
        startup_s = time.monotonic() - begin_s
        generate = partial(lead_of(deployment).generate, deadline_s=_ATTACHED_DEADLINE_S)
        stream = TextStream(generate, tokenizer, ids, sampling)
        _write_text(prompt, stream, text_out)
        stats = attachment.ask(deployment, "stats").as_dict()
    record = _record(plan, prompt, sampling, stream.completion, stats, startup_s)
    return {"attached_to": deployment} | record | {"versions": versions()}


def _write_text(prompt: str, stream: TextStream, out: TextIO) -> None:
    """Write the prompt and its continuation as it comes."""
    out.write(prompt)
    for piece in stream:
        out.write(piece)
        out.flush()
    out.write("\n")
    out.flush()


def _record(
    plan: dict[str, Any], prompt: str, sampling: SamplingParams, done: Completion, stats: dict[str, Any],
    startup_s: float,
) -> dict[str, Any]:
    """The result as one flat JSON object; the plan and the layers are nested in it."""
    return {
        "name": "run",
        "hardware": cpu(),
        "date": now(),
        "model": str(plan["model"]),
        "policy": plan["policy"],
        "lossless": plan["lossless"],
        "prompt": prompt,
        "prompt_tokens": len(done.prompt_token_ids),
        "generated_tokens": len(done.token_ids),
        "token_ids": done.token_ids,
        "text": done.text,
        "finish": done.finish,
        "ttft_s": done.ttft_s,
        "tpot_s": done.tpot_s,
        "between_ms": percentiles([1e3 * seconds for seconds in done.between_s]),
        "startup_s": startup_s,
        "sampling": asdict(sampling),
        **stats,
        "plan": plan,
    }


def _prompt_text(prompt: str | None, prompt_file: Path | None) -> str:
    if (prompt is None) == (prompt_file is None):
        given = "no prompt" if prompt is None else "both PROMPT and --prompt-file are given"
        raise RequestError(given, "pass either PROMPT or --prompt-file")
    if prompt_file is None:
        return prompt or ""
    try:
        return prompt_file.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise RequestError(f"prompt file '{prompt_file}': {reason(error)}", "give a readable UTF-8 file") from error
