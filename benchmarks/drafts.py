"""`bench drafts`: drafts against none, on text that repeats its prompt and on text that does not.

    ngram    code edits, and prose
    mtp      drafts of the model's own head, too, on held-out code and prose that go on

Code edits: the prompt is a held-out source file, the answer the same file after an edit that renames its most frequent
name, drops some lines and adds some. The default model cannot edit, so the answer's tokens are chosen for it, with and
without drafts alike; routing, experts and times are the model's on that text. Code and prose that go on are sampled
with a seed, prose at temperature 1, code at 0.6: a small model's greedy text repeats itself.
"""

from __future__ import annotations

import json
import re
import statistics
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.progress import Progress

from tiermoe.actors.policies.drafts import DraftStats
from tiermoe.actors.requests import Generation, GenerationRequest, SamplingParams
from tiermoe.cluster.jobs.bench.metrics import Bar, Report, advancing, ratio
from tiermoe.cluster.jobs.local_worker import run_config, start_worker
from tiermoe.cluster.prompt import load_tokenizer
from tiermoe.errors import CheckpointError, RuntimeFailure

from .cases import LATENCY_US, DraftKind, Drafts

BARS = {  # tokens a second with drafts over those without, at least
    DraftKind.NGRAM: {"code edits": 1.3, "prose": 0.98},
    DraftKind.MTP: {"code": 1.25, "prose": 0.98},
}
_DROPPED, _ADDED = 11, 7  # every so many lines
_SHOWN = ("text", "link_gbps", "off_tokens_per_s", "drafts_tokens_per_s", "ratio", "accepted_a_step", "drafted_a_step",
          "extra_experts", "saved_s")  # fmt: skip

Prompt = tuple[int, ...]


@dataclass(frozen=True)
class Text:
    """A prompt, and the answer's tokens; None: the model's own, sampled at a temperature with the seed."""

    prompt: Prompt
    answer: Prompt | None = None
    temperature: float = 0.0
    seed: int = 0


class Follow:
    """In place of a request's processor of scores: its next token is that of a given answer."""

    error: str | None = None

    def __init__(self, answer: Prompt) -> None:
        self._answer = answer

    def __call__(self, scores: torch.Tensor, generated: Sequence[int]) -> torch.Tensor:
        changed = scores.clone()
        changed[self._answer[len(generated)]] = scores.max() + 1.0
        return changed


def edited(code: str) -> str:
    """The code after an edit: its most frequent name has another name, some lines are gone and some are new."""
    names = Counter(re.findall(r"\b[a-z_]{5,}\b", code))
    if names:
        code = re.sub(rf"\b{names.most_common(1)[0][0]}\b", "renamed", code)
    lines = list[str]()
    for number, line in enumerate(code.split("\n"), start=1):
        if number % _DROPPED:
            lines.append(line)
        if number % _ADDED == 0:
            lines.append(f"{line[: len(line) - len(line.lstrip())]}# step {number} of the change")
    return "\n".join(lines)


def texts(model_dir: Path, options: Drafts) -> dict[str, list[Text]]:
    """By kind, as many texts as the rounds take, and those of a warm-up round.

    Raises:
        CheckpointError: the model ships too little held-out text.
    """
    tokenizer, count = load_tokenizer(model_dir), (options.repeats + 1) * options.prompts

    def passages(kind: str) -> list[str]:
        path = model_dir / "heldout" / f"{kind}.jsonl"
        lines = path.read_text(encoding="utf-8").split("\n") if path.exists() else []
        return [json.loads(line)["text"] for line in lines if line.strip()]

    found: dict[str, list[Text]] = {name: [] for name in BARS[options.kind]}
    for seed, code in enumerate(passages("python")):
        prompt, answer = tokenizer.encode(code).ids, tokenizer.encode(edited(code)).ids
        if len(prompt) < options.prompt_tokens or len(answer) < options.max_tokens:
            continue
        begin = tuple(prompt[: options.prompt_tokens])
        if options.kind == DraftKind.MTP:
            found["code"].append(Text(begin, temperature=0.6, seed=seed))
        else:
            found["code edits"].append(Text(begin, tuple(answer[: options.max_tokens])))
    for seed, prose in enumerate(passages("prose")):
        ids = tokenizer.encode(prose).ids
        if len(ids) >= options.prompt_tokens:
            found["prose"].append(Text(tuple(ids[: options.prompt_tokens]), temperature=1.0, seed=seed))
    for name, of_kind in found.items():
        if len(of_kind) < count:
            raise CheckpointError(
                f"'{model_dir}' has {len(of_kind)} held-out texts for {name}, not {count}",
                "ask for fewer or shorter prompts, or use the default model",
            )
    return {name: of_kind[:count] for name, of_kind in found.items()}


def drafts(options: Drafts, progress: Progress | None) -> Report:
    """Decoded tokens a second with drafts over those without, medians of interleaved rounds.

    Raises:
        RuntimeFailure: the tokens differ.
    """
    base = run_config(options.model, options.config, policy=options.policy, budget=options.budget)
    chosen = texts(base.model_dir, options)
    report = Report("drafts", "emulated", settings=options.settings(latency_us=LATENCY_US), shown=tuple(_SHOWN))
    advance = advancing(progress, "serving", len(options.link_gbps) * 2 * len(chosen["prose"]))
    for link in options.link_gbps:
        with ExitStack() as stack:
            workers = {}
            for kind in ("off", options.kind.value):
                config = run_config(
                    options.model, options.config, policy=options.policy, budget=options.budget,
                    link={"gbps": link, "latency_us": LATENCY_US}, drafts={"kind": kind, "tokens": options.tokens},
                )  # fmt: skip
                workers["off" if kind == "off" else "drafts"] = stack.enter_context(closing(start_worker(config)))
            report.executor = workers["off"].stats().executor
            for name, of_kind in chosen.items():
                found = list[dict[str, float]]()
                for number, text in enumerate(of_kind):
                    if number == options.prompts:  # the first round was to warm up
                        for worker in workers.values():
                            worker.reset_stats()
                    found.append(_seconds_a_token(workers, text, options.max_tokens, flipped=number % 2 == 1))
                    advance()
                report.rows.append(_row(name, link, found, options.prompts, workers["drafts"].stats().drafts))
                value, bar = report.rows[-1]["ratio"], BARS[options.kind][name]
                report.bars.append(Bar(f"tokens/s with drafts, {name}, {link:g} GB/s", value, ">=", bar))
    return report


def _seconds_a_token(workers: dict[str, Any], text: Text, max_tokens: int, flipped: bool) -> dict[str, float]:
    """Of each worker, after the first token. They take turns, in this order or the other.

    Raises:
        RuntimeFailure: their tokens differ.
    """
    sampling = SamplingParams(
        max_tokens=max_tokens, ignore_eos=True, temperature=text.temperature, seed=text.seed
    )
    seconds, tokens = dict[str, float](), set[tuple[int, ...]]()
    for kind in list(workers)[:: -1 if flipped else 1]:
        stream = workers[kind].submit(GenerationRequest("bench-drafts", text.prompt, sampling))
        if text.answer is not None:
            stream.processor = Follow(text.answer)  # its prompt is still to run
        generation = Generation("")
        for event in stream:
            generation.add(event)
        if generation.failure is not None:
            raise generation.failure
        seconds[kind] = generation.tpot_s or 0.0
        tokens.add(tuple(generation.token_ids))
    if len(tokens) > 1:
        raise RuntimeFailure("the tokens with drafts differ from those without", "report it")
    return seconds


def _row(name: str, link: float, found: Sequence[dict[str, float]], prompts: int, stats: DraftStats) -> dict[str, Any]:
    """Medians over the rounds; the ratio is the median of the rounds' own. The first round is left out."""
    rounds = [found[first : first + prompts] for first in range(prompts, len(found), prompts)]
    rates = {kind: [len(one) / sum(seconds[kind] for seconds in one) for one in rounds] for kind in ("off", "drafts")}
    ratios = [ratio(one, other) for one, other in zip(rates["drafts"], rates["off"], strict=True)]
    return {
        "text": name, "link_gbps": link,
        **{f"{kind}_tokens_per_s": statistics.median(values) for kind, values in rates.items()},
        "ratio": statistics.median(ratios), "ratios": ratios,
        "drafted": stats.drafted, "accepted": stats.accepted, "steps_with_drafts": stats.steps,
        "accepted_a_step": ratio(stats.accepted, stats.steps),
        "drafted_a_step": ratio(stats.drafted, stats.steps), "extra_experts": stats.extra_experts,
        "saved_s": stats.saved_s, "values": rates,
    }  # fmt: skip
