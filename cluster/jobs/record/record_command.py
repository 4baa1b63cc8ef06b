"""`tiermoe record`: prompts from a file into a routing trace, and the merging of traces."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from ....actors.requests import SamplingParams
from ....errors import ConfigError, RequestError, TraceError, reason
from ...config import check_model_dir, engine_settings, on_this_machine
from ...prompt import check_length, encode_prompt, load_model_config, load_tokenizer, sampling_params
from ...report.files import check_folder
from ...report.output import print_json
from ...report.tables import progress_on, results, share, show, size
from ...simulate.trace import MAX_DISTANCE, TraceHeader
from ...simulate.trace_writer import MOST_REPEATED, NGRAM, Repeats, merge_traces
from ..local_worker import run_config
from ..options import AsJson, Model, Threads, with_options

_TEXT_KEYS = ("prompt", "text")
_REMEDY = 'give lines of text, or JSON lines with "prompt", "text" or "token_ids"'


def read_prompts(file: Path, model_dir: Path, limit: int | None = None) -> list[tuple[int, ...]]:
    """Token ids of each prompt of a file (`.jsonl`: JSON lines), `limit` of them at most; empty lines do not count.

    Raises:
        RequestError: the file cannot be read, has no prompt, or a line is malformed.
        CheckpointError: the model's tokenizer cannot be read.
    """
    try:
        lines = file.read_text(encoding="utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise RequestError(f"prompts '{file}' cannot be read: {reason(error)}", "give a readable UTF-8 file") from error
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
        raise RequestError(f"{where} is not JSON: {error}", _REMEDY) from error
    if isinstance(entry, dict):
        for key in _TEXT_KEYS:
            if isinstance(entry.get(key), str):
                return str(entry[key])
        ids = entry.get("token_ids")
        if isinstance(ids, list) and ids and all(type(i) is int for i in ids):
            return tuple(ids)
    raise RequestError(f"{where} has no prompt", _REMEDY)


@dataclass(frozen=True)
class Recording:
    """What of the prompts is run, and how: options of `tiermoe record`.

    Raises:
        ConfigError, RequestError: one is out of range, or does not go with another.
    """

    max_tokens: Annotated[int, "Most tokens to decode after each prompt."] = 64
    limit: Annotated[int | None, "Most prompts to use; default: all."] = None
    prompt_tokens: Annotated[int | None, "Tokens to prefill; default: half the text; with --sample, all."] = None
    distances: Annotated[int, "Layers ahead to record next-gate predictions for."] = 4
    sample: Annotated[
        float | None, "Decode tokens sampled at this temperature, 0.8 or more, instead of the text."
    ] = None
    seed: Annotated[int | None, "Seed of --sample."] = None
    ignore_eos: Annotated[
        bool, typer.Option("--ignore-eos", help="With --sample: continue after stop tokens.")
    ] = False
    allow_loops: Annotated[bool, typer.Option("--allow-loops", help="Accept prompts whose output loops.")] = False

    def __post_init__(self) -> None:
        for option, value in (("limit", self.limit), ("prompt-tokens", self.prompt_tokens)):
            if value is not None and value < 1:
                raise ConfigError(f"--{option} is {value}", "give a number of at least 1")
        if not 0 <= self.distances <= MAX_DISTANCE:
            raise ConfigError(f"--distances is {self.distances}", f"give a number from 0 to {MAX_DISTANCE}")
        if self.sample is None and (self.seed is not None or self.ignore_eos):
            raise ConfigError("--seed and --ignore-eos are for sampled tokens", "leave them out, or pass --sample 0.8")
        self.sampling()

    def sampling(self) -> SamplingParams:
        """How tokens are drawn; text is taken as it stands."""
        try:
            found = sampling_params(self.max_tokens, self.sample or 0.0, 1.0, 0, self.seed)
        except RequestError as error:
            raise RequestError(error.what.replace("--temperature", "--sample"), error.remedy) from error
        return replace(found, ignore_eos=self.ignore_eos)


@with_options()
def record_command(
    prompts: Annotated[
        Path, typer.Argument(help="File of prompts: text, one a line, or JSON lines.", metavar="PROMPTS")
    ],
    out: Annotated[Path, typer.Argument(help="Trace folder to write.", metavar="OUT")],
    asked: Recording,
    model: Model = None,
    budget: Annotated[
        str, typer.Option(help="Expert memory while recording: as of run; 1.0: every expert stays loaded.")
    ] = "1.0",
    threads: Threads = 1,
    as_json: AsJson = False,
) -> None:
    """Write a routing trace: what the model's routers say for each text.

    The first tokens of a text are prefilled, the others decoded one by one as they stand (teacher-forced). With
    --sample a text is a prompt, and what the model draws is decoded. Interrupted, it leaves a valid trace of what ran.
    """
    check_folder(out, "OUT", empty=True)
    config = run_config(model, policy="on-demand", budget=budget, threads=threads, link={"gbps": None})
    engine_settings(on_this_machine(config))
    check_model_dir(config.model_dir)
    found = read_prompts(prompts, config.model_dir, asked.limit)
    if asked.sample is None:
        ids, rest = forced(found, asked.prompt_tokens, asked.max_tokens)
        if not asked.allow_loops:
            refuse_loops(repeated_share(ids, rest), f"'{prompts}'", "give other text, or pass --allow-loops")
    else:
        ids, rest = [prompt[: asked.prompt_tokens] for prompt in found], None
    model_config = load_model_config(config.model_dir)
    for number, prompt in enumerate(ids, start=1):
        try:
            decoded = asked.max_tokens if rest is None else len(rest[number - 1])
            check_length(len(prompt), decoded, model_config, config.kv)
        except RequestError as error:
            raise RequestError(f"prompt {number}: {error.what}", f"{error.remedy}, or pass --prompt-tokens") from error
    from .record_trace import Texts, record  # torch takes seconds: imported after the options are checked

    console = Console(stderr=True)
    try:
        with progress_on(console) as progress:
            header = record(config, Texts(ids, rest), out, asked.sampling(), asked.distances, progress)
    except (KeyboardInterrupt, SystemExit):
        show(console, f"interrupted; '{out}' keeps what ran")
        raise
    _say(header, out, as_json)
    if not asked.allow_loops:
        remedy = "sample at --sample 0.8 or more, or pass --allow-loops"
        refuse_loops(header.repeated_8grams, f"'{out}', which is kept,", remedy)


def forced(
    texts: Sequence[Sequence[int]], prompt_tokens: int | None, max_tokens: int
) -> tuple[list[Sequence[int]], list[Sequence[int]]]:
    """Each text's tokens to prefill, half of them or `prompt_tokens`, and the next ones, which are decoded.

    Raises:
        RequestError: a text has no two tokens.
    """
    prompts, rest = [], []
    for number, text in enumerate(texts, start=1):
        if len(text) < 2:
            what = f"prompt {number} has {len(text)} tokens, and one at least is prefilled and one decoded"
            raise RequestError(what, "give longer text, or pass --sample 0.8")
        first = min(len(text) // 2 if prompt_tokens is None else prompt_tokens, len(text) - 1)
        prompts.append(text[:first])
        rest.append(text[first : first + max_tokens])
    return prompts, rest


def repeated_share(prompts: Sequence[Sequence[int]], rest: Sequence[Sequence[int]]) -> float | None:
    """Share of the 8-grams that occur earlier in their request; None: no request has eight tokens."""
    repeats = Repeats()
    for prompt, continuation in zip(prompts, rest, strict=True):
        repeats.begin()
        repeats.add([*prompt, *continuation])
    return repeats.share


def refuse_loops(repeated: float | None, where: str, remedy: str) -> None:
    """Raises TraceError if more 8-grams are repeated than in text."""
    if repeated is not None and repeated > MOST_REPEATED:
        what = f"{repeated:.0%} of the {NGRAM}-grams in {where} are repeated; caches look better on them than on text"
        raise TraceError(what, remedy)


def merge_command(
    out: Annotated[Path, typer.Argument(help="Trace folder to write.", metavar="OUT")],
    traces: Annotated[list[Path], typer.Argument(help="Traces of one model to merge.", metavar="TRACE...")],
    as_json: AsJson = False,
) -> None:
    """Put traces of one model behind each other, in a new trace."""
    check_folder(out, "OUT", empty=True)
    _say(merge_traces(traces, out), out, as_json)


def _say(header: TraceHeader, out: Path, as_json: bool) -> None:
    stored = sum(chunk.bytes for chunk in header.chunks)
    record = {
        "trace": str(out), "model": header.model, "layers": header.layers, "experts": header.experts,
        "top_k": header.top_k, "requests": header.requests, "rows": header.rows,
        "forwards": sum(chunk.forwards for chunk in header.chunks), "bytes": stored,
        "bytes_per_row": header.row_bytes, "complete": header.complete, "origin": header.origin,
        "repeated_8grams": header.repeated_8grams,
        "costs": None if header.costs is None else header.costs.model_dump(),
    }  # fmt: skip
    show(
        results(as_json),
        f"{out}: {record['rows']} rows in {record['forwards']} forwards, {size(stored)}, "
        f"{header.row_bytes} bytes a row of {header.layers} layers; {header.origin}, repeated {NGRAM}-grams: "
        f"{share(header.repeated_8grams)}",
    )
    if as_json:
        print_json(record)
