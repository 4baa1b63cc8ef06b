"""`bench gguf`: a model's GGUF files of several types, decoded here and by llama.cpp from the same bytes."""

from __future__ import annotations

import itertools
import math
import tempfile
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

import numpy as np
from gguf import GGMLQuantizationType
from rich.progress import Progress

from tiermoe.actors.requests import Generation, GenerationRequest, SamplingParams, TokenLogprob
from tiermoe.cluster.checkpoints.gguf_header import read_gguf_header
from tiermoe.cluster.jobs.bench.metrics import Bar, Report
from tiermoe.cluster.jobs.bench.serving import Prompt, Submit, heldout_prompts, run_config, start_worker
from tiermoe.errors import ConfigError, RuntimeFailure

from .cases import Gguf
from .llama import INSTALL, LlamaCpp, missing, quantize_gguf, write_gguf

PROMPT_TOKENS, MAX_TOKENS, TOP = 32, 24, 5
# Least share of tokens that are llama.cpp's, and the most that one of llama.cpp's may be less likely here: its CPU
# kernels round activations to float16 or to eight bits, which moves logits more than the order of additions does.
EXACT, SAME, NATS = ("F16",), 0.95, 0.25
_ids = itertools.count()


def gguf(options: Gguf, progress: Progress | None) -> Report:
    """The next token at each position of the same sequences: prompts, and the greedy tokens that we generate.

    llama.cpp quantizes the model, reads the file, and gives logits for our tokens, so that one other token does not
    change those after it. `same`: share of generated tokens that are llama.cpp's likeliest, too. `in_a_row`: mean of
    those before the first other one. `worst_nats`: where they differ, how much less likely llama.cpp's token is here
    than ours, at most. `logprob_diff`: mean absolute difference of the log-probability of our token. Here weights are
    exact values of the file's blocks, those of dense matrices rounded to bfloat16; llama.cpp rounds activations, to
    eight bits for quantized types.

    Bars: `same` = 1 for F16, >= 0.95 for other types; `worst_nats` <= 0.25.

    Raises:
        ConfigError: llama-cpp-python is not installed, or it does not know a type.
        UnsupportedModelError: no Qwen3-MoE model. RuntimeFailure: a request failed.
    """
    if absent := missing():
        raise ConfigError(f"llama.cpp is not measured without {absent[0]}", INSTALL)
    base = run_config(options.model)
    prompts = heldout_prompts(base.model_dir, options.prompts, PROMPT_TOKENS)
    settings = options.settings(prompt_tokens=PROMPT_TOKENS, max_tokens=MAX_TOKENS, threads=1)
    report = Report("gguf", "", settings=settings)
    task = None if progress is None else progress.add_task("against llama.cpp", total=len(options.kind))
    with tempfile.TemporaryDirectory(prefix="tiermoe-gguf-") as scratch:
        whole = write_gguf(base.model_dir, Path(scratch) / "whole.gguf")
        for kind in options.kind:
            folder = Path(scratch) / kind
            folder.mkdir()
            file = quantize_gguf(whole, kind, folder / "model.gguf")
            for name in ("config.json", "tokenizer.json"):
                (folder / name).write_bytes((base.model_dir / name).read_bytes())
            config = run_config(str(file), store=str(folder / "store"), budget=options.budget, policy="on-demand")
            with closing(start_worker(config)) as worker, closing(LlamaCpp(file)) as llama:
                report.executor = worker.stats().executor
                found = [_compared(worker.submit, llama, prompt) for prompt in prompts]
                report.rows.append({"type": kind, "experts": _types(file), **_summary(found)})
            if progress is not None and task is not None:
                progress.advance(task)
    for row in report.rows:
        least = 1.0 if row["type"] in EXACT else SAME
        report.bars += [
            Bar(f"share of tokens that are llama.cpp's, {row['type']}", row["same"], ">=", least),
            Bar(f"nats that llama.cpp's token is less likely, {row['type']}", row["worst_nats"], "<=", NATS),
        ]
    return report


@dataclass(frozen=True)
class _Token:
    """A generated token, and llama.cpp's likeliest at its place. logprob, of_theirs: ours; by_theirs: of our token."""

    ours: int
    theirs: int
    logprob: float
    of_theirs: float
    by_theirs: float


def _compared(submit: Submit, llama: LlamaCpp, prompt: Prompt) -> list[_Token]:
    """Our greedy tokens after a prompt, and what llama.cpp gives at each."""
    sampling = SamplingParams(max_tokens=MAX_TOKENS, ignore_eos=True, logprobs=TOP)
    ours, done = list[TokenLogprob](), Generation("")
    for event in submit(GenerationRequest(f"gguf-{next(_ids)}", prompt, sampling)):
        done.add(event)
        ours += event.logprobs
    if done.finish != "length":
        what = f"a request ended with {done.finish}: {done.error}"
        raise RuntimeFailure(what, "run again, and report it if it stays")
    logits = llama.logits([*prompt, *done.token_ids[:-1]])[len(prompt) - 1 :].astype(np.float64)  # [MAX_TOKENS, V]
    logits -= logits.max(axis=1, keepdims=True)
    logprobs = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    found = []
    for own, theirs in zip(ours, logprobs, strict=True):
        likeliest = int(theirs.argmax())
        of_theirs = dict(own.top).get(likeliest, -math.inf)
        found.append(_Token(own.token_id, likeliest, own.logprob, of_theirs, float(theirs[own.token_id])))
    return found


def _summary(found: Sequence[Sequence[_Token]]) -> dict[str, float]:
    tokens = [token for sequence in found for token in sequence]
    other = [token for token in tokens if token.ours != token.theirs]
    rows = [[token.ours == token.theirs for token in sequence] for sequence in found]
    return {
        "tokens": len(tokens), "same": 1 - len(other) / len(tokens),
        "in_a_row": fmean(row.index(False) if False in row else len(row) for row in rows),
        "worst_nats": max((token.logprob - token.of_theirs for token in other), default=0.0),
        "logprob_diff": fmean(abs(token.logprob - token.by_theirs) for token in tokens),
        "logprob_diff_most": max(abs(token.logprob - token.by_theirs) for token in tokens),
    }  # fmt: skip


def _types(file: Path) -> str:
    """GGML's names of the types of a file's experts."""
    kinds = {found.kind for name, found in read_gguf_header(file).tensors.items() if "_exps." in name}
    return ", ".join(sorted(GGMLQuantizationType(kind).name for kind in kinds))
