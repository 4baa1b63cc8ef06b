"""`tiermoe run`: one prompt, streamed, with the plan before and the measurements after.

    check everything -> prepare the store -> deploy -> stream -> report
"""

from __future__ import annotations

import json
import os
import sys
import uuid
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, TextIO

import typer
from rich.console import Console
from tokenizers import Tokenizer

from ...actors.budget import budget_bytes
from ...actors.engine.stats import EngineStats
from ...actors.requests import Generation, GenerationRequest, SamplingParams
from ...actors.settings import EngineSettings
from ...actors.store_format import read_manifest
from ...errors import BudgetError, ConfigError, RequestError
from ..config import RunConfig, check_model_dir, engine_settings, load_run_config
from ..prompt import (
    IncrementalText,
    check_length,
    encode_prompt,
    load_model_config,
    load_tokenizer,
    sampling_params,
)
from ..report.plan import plan_table
from ..report.summary import summary_table
from ..report.timeline import check_writable, write_timeline
from ..topology.settings import ClusterConfig
from ..versions import versions

_GPU_FILES = ("/dev/nvidiactl", "/dev/dxg", "/dev/nvhost-gpu", "/dev/nvidia0")  # of the drivers, WSL and Tegra


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
    generation: Generation
    text: str
    stats: EngineStats
    startup_s: float


def checked_job(config: RunConfig, prompt: str, sampling: SamplingParams, trace: Path | None) -> RunJob:
    """Check all inputs against each other without starting anything.

    Raises:
        TierMoeError: the first thing that is wrong, with its remedy.
    """
    settings = engine_settings(config, trace=trace is not None)
    if config.cluster != ClusterConfig():
        raise ConfigError(
            "the configuration's cluster section is only planned so far (`tiermoe plan`), not carried out",
            "leave it out: one GPU worker, one store and one NDP worker are started",
        )
    model_dir = config.model_dir
    check_model_dir(model_dir)
    if config.device == "cuda" and config.ray.address is None and not any(map(os.path.exists, _GPU_FILES)):
        raise ConfigError("this machine has no CUDA device", "use --device cpu, or join a cluster that has one")
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
    from ..deploy import Deployment  # Ray: half a second that a refused run need not pay
    from .prepare import ensure_prepared, ensure_replicas

    config = job.config
    notices = Console(stderr=True)
    out_dir = Path(config.store).expanduser() if config.store is not None else None
    store = ensure_prepared(config.model_dir, out_dir, progress=notices.is_terminal)
    check_budget(job.settings, store)
    widths = job.settings.policy.replica_widths
    if widths:
        ensure_replicas(store, config.model_dir, widths, config.ndp.group_size, progress=notices.is_terminal)
    with ExitStack() as stack:
        with notices.status("starting Ray and loading the model ..."):
            deployment = stack.enter_context(Deployment(config, job.settings, str(store)))
        report.print(plan_table(deployment.plan))
        generation, text = _stream(deployment, job, text_out)
        stats = deployment.stats()
        if job.trace is not None:
            write_timeline(job.trace, deployment.trace_events())
    return RunResult(deployment.plan, generation, text, stats, deployment.startup_s)


def check_budget(settings: EngineSettings, store: Path) -> None:
    """Refuse a budget that the worker would refuse, before Ray starts.

    A dtype that only the worker's device decides is taken for the smaller one, and the worker has the last word.

    Raises:
        BudgetError: it holds no expert, or not all of them where the policy keeps all.
    """
    manifest = read_manifest(store)
    dtype = settings.dtype if settings.dtype != "auto" else ("float32" if settings.device == "cpu" else "bfloat16")
    slot_bytes = manifest.experts.nbytes(4 if dtype == "float32" else 2)
    experts = len(manifest.layers) * manifest.experts.num_experts
    held = budget_bytes(settings.budget, slot_bytes, experts)
    if settings.policy.preload == "all" and held < experts * slot_bytes:
        raise BudgetError(
            f"policy '{settings.policy.name}' keeps all experts resident, {experts * slot_bytes} bytes in {dtype}; "
            f"the budget is {held}",
            "pass --budget 1.0, or choose a policy that loads on demand",
        )


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
        "versions": versions(),
    }


def _stream(deployment: Any, job: RunJob, out: TextIO) -> tuple[Generation, str]:
    request = GenerationRequest(uuid.uuid4().hex, job.prompt_ids, job.sampling)
    generation, text = Generation(request.request_id), IncrementalText(job.tokenizer)
    out.write(job.prompt)
    for event in deployment.generate(request):
        generation.add(event)
        out.write(text.add(event.token_ids))
        out.flush()
    out.write(text.finish() + "\n")
    out.flush()
    return generation, text.text


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
    model: Annotated[str | None, typer.Option(help="Checkpoint folder; default: the model of the project.")] = None,
    config: Annotated[str | None, typer.Option(help="YAML file, or a name in configs/clusters.")] = None,
    policy: Annotated[str | None, typer.Option(help="Name in configs/policies, or a YAML file. (next-gate)")] = None,
    budget: Annotated[str | None, typer.Option(help="Device memory for experts: 0.25, 25%, 512MiB. (0.25)")] = None,
    max_tokens: Annotated[int, typer.Option(help="Tokens to generate at most.")] = 64,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    top_p: Annotated[float, typer.Option(help="Sample from the likeliest tokens with this total.")] = 1.0,
    top_k: Annotated[int, typer.Option(help="Sample from this many tokens; 0: all.")] = 0,
    seed: Annotated[int | None, typer.Option(help="Makes sampling repeatable.")] = None,
    device: Annotated[str | None, typer.Option(help="auto, cpu or cuda. (auto)")] = None,
    dtype: Annotated[str | None, typer.Option(help="auto, float32, bfloat16 or float16. (auto)")] = None,
    threads: Annotated[int | None, typer.Option(help="Threads of the worker. (cores - 1)")] = None,
    link_gbps: Annotated[float | None, typer.Option(help="Emulated link, 1e9 bytes/s; CPU only. (16)")] = None,
    link_latency_us: Annotated[float | None, typer.Option(help="Emulated link latency; CPU only. (10)")] = None,
    ndp_threads: Annotated[int | None, typer.Option(help="Threads of the NDP worker. (1)")] = None,
    ndp_hardware: Annotated[str | None, typer.Option(help="Modelled NDP device, configs/hardware. (paper-ndp)")] = None,
    ndp_pace: Annotated[bool | None, typer.Option(help="Answer no sooner than the modelled NDP device would.")] = None,
    store: Annotated[str | None, typer.Option(help="Folder of the expert store. (in the cache)")] = None,
    trace: Annotated[Path | None, typer.Option(help="Write a timeline for ui.perfetto.dev.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object; all else on stderr.")] = False,
) -> None:
    """Generate text for one prompt and report what it took."""
    link = {"gbps": link_gbps, "latency_us": link_latency_us}
    options = {
        "model": model, "policy": policy, "budget": budget, "device": device, "dtype": dtype, "threads": threads,
        "store": store, "link": link,
        "ndp": {"threads": ndp_threads, "hardware": ndp_hardware, "pace": ndp_pace},
    }  # fmt: skip
    settings = load_run_config(config, options)
    if settings.device == "cuda" and any(value is not None for value in link.values()):
        raise ConfigError(
            "--link-gbps and --link-latency-us emulate a link, but device is cuda",
            "leave them out, or use --device cpu",
        )
    sampling = sampling_params(max_tokens, temperature, top_p, top_k, seed)
    job = checked_job(settings, _prompt_text(prompt, prompt_file), sampling, trace)
    report = Console(stderr=as_json)
    result = run(job, sys.stderr if as_json else sys.stdout, report)
    record = as_record(job, result)
    report.print(summary_table(record))
    if as_json:
        print(json.dumps(record))
