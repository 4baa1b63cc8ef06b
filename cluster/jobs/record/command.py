"""`tiermoe record`: prompts from a file into a routing trace, and the merging of traces."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from ....errors import ConfigError, RequestError
from ...config import check_model_dir, engine_settings
from ...prompt import check_length, encode_prompt, load_model_config, load_tokenizer, sampling_params
from ...report.tables import progress_on
from ...simulate.trace import MAX_DISTANCE, TraceHeader
from ...simulate.trace_writer import merge_traces
from ..bench.serving import run_config
from ..options import AsJson, Model, Threads

_TEXT_KEYS = ("prompt", "text")
_REMEDY = 'give lines of text, or JSON lines with "prompt", "text" or "token_ids"'


def read_prompts(file: Path, model_dir: Path, limit: int | None = None) -> list[tuple[int, ...]]:
    """Token ids of each prompt of a file (`.jsonl`: JSON lines), `limit` of them at most; empty lines do not count.

    Raises:
        RequestError: the file cannot be read, has no prompt, or a line is malformed.
        CheckpointError: the model's tokenizer cannot be read.
    """
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise RequestError(f"prompts '{file}' cannot be read: {error}", "give a readable UTF-8 file") from error
    tokenizer = load_tokenizer(model_dir)
    prompts: list[tuple[int, ...]] = []
    for number, line in enumerate(lines, start=1):
        if not line.strip() or (limit is not None and len(prompts) >= limit):
            continue
        prompt = _prompt_of(line, f"{file}:{number}") if file.suffix == ".jsonl" else line
        try:
            prompts.append(encode_prompt(tokenizer, prompt) if isinstance(prompt, str) else prompt)
        except RequestError as error:
            raise RequestError(f"{file}:{number}: {error.what}", error.remedy) from error
    if not prompts:
        raise RequestError(f"'{file}' has no prompt", _REMEDY)
    return prompts


def _prompt_of(line: str, where: str) -> str | tuple[int, ...]:
    try:
        entry = json.loads(line)
    except ValueError as error:
        raise RequestError(f"{where} is no JSON: {error}", _REMEDY) from error
    if isinstance(entry, dict):
        for key in _TEXT_KEYS:
            if isinstance(entry.get(key), str):
                return str(entry[key])
        ids = entry.get("token_ids")
        if isinstance(ids, list) and ids and all(type(i) is int for i in ids):
            return tuple(ids)
    raise RequestError(f"{where} has no prompt", _REMEDY)


def record_command(
    prompts: Annotated[Path, typer.Argument(help="Text, one prompt a line, or JSON lines.", metavar="PROMPTS")],
    out: Annotated[Path, typer.Argument(help="Trace folder to make.", metavar="OUT")],
    max_tokens: Annotated[int, typer.Option(help="Tokens to generate for each prompt at most.")] = 64,
    model: Model = None,
    limit: Annotated[int | None, typer.Option(help="Prompts to take at most. (all)")] = None,
    prompt_tokens: Annotated[int | None, typer.Option(help="Cut prompts to so many tokens.")] = None,
    distances: Annotated[int, typer.Option(help="Layers ahead with next-gate predictions.")] = 4,
    budget: Annotated[str, typer.Option(help="Device memory for experts while recording.")] = "1.0",
    temperature: Annotated[float, typer.Option(help="0: greedy.")] = 0.0,
    seed: Annotated[int | None, typer.Option(help="Of sampling.")] = None,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Generate past stop tokens.")] = False,
    threads: Threads = 1,
    as_json: AsJson = False,
) -> None:
    """Write a routing trace: what the model's routers say for each prompt and what is generated after it.

    Interrupted, it leaves a valid trace of what ran.
    """
    for option, value in (("limit", limit), ("prompt-tokens", prompt_tokens)):
        if value is not None and value < 1:
            raise ConfigError(f"--{option} is {value}", "give a number of at least 1")
    if not 0 <= distances <= MAX_DISTANCE:
        raise ConfigError(f"--distances is {distances}", f"give a number from 0 to {MAX_DISTANCE}")
    sampling = sampling_params(max_tokens, temperature, 1.0, 0, seed)
    config = run_config(model, policy="on-demand", budget=budget, threads=threads, link={"gbps": None})
    engine_settings(config)
    check_model_dir(config.model_dir)
    ids = [prompt[:prompt_tokens] for prompt in read_prompts(prompts, config.model_dir, limit)]
    model_config = load_model_config(config.model_dir)
    for number, prompt in enumerate(ids, start=1):
        try:
            check_length(len(prompt), max_tokens, model_config, config.kv)
        except RequestError as error:
            raise RequestError(f"prompt {number}: {error.what}", f"{error.remedy}, or pass --prompt-tokens") from error
    from .job import record  # torch takes seconds: imported after the options are checked

    console = Console(stderr=True)
    try:
        with progress_on(console) as progress:
            header = record(config, ids, out, replace(sampling, ignore_eos=ignore_eos), distances, progress)
    except (KeyboardInterrupt, SystemExit):
        console.print(f"interrupted; '{out}' keeps what ran", highlight=False)
        raise
    _say(header, out, console, as_json)


def merge_command(
    out: Annotated[Path, typer.Argument(help="Trace folder to make.", metavar="OUT")],
    traces: Annotated[list[Path], typer.Argument(help="Traces of one model.", metavar="TRACE...")],
    as_json: AsJson = False,
) -> None:
    """Put traces of one model behind each other, in a new trace."""
    _say(merge_traces(traces, out), out, Console(stderr=True), as_json)


def _say(header: TraceHeader, out: Path, console: Console, as_json: bool) -> None:
    stored = sum(chunk.bytes for chunk in header.chunks)
    record = {
        "trace": str(out), "model": header.model, "layers": header.layers, "experts": header.experts,
        "top_k": header.top_k, "requests": header.requests, "rows": header.rows,
        "forwards": sum(chunk.forwards for chunk in header.chunks), "bytes": stored,
        "bytes_per_row": header.row_bytes, "complete": header.complete,
        "costs": None if header.costs is None else header.costs.model_dump(),
    }  # fmt: skip
    console.print(
        f"{out}: {record['rows']} rows in {record['forwards']} forwards, {stored / 1e6:.1f} MB, "
        f"{header.row_bytes} bytes a row of {header.layers} layers",
        highlight=False,
    )
    if as_json:
        print(json.dumps(record))
