"""Micro-benchmarks that serve requests in this process: `ttft`, `turns` and `scale`.

All cases of a benchmark answer the same prompts, and must give the same tokens.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.progress import Progress

from tiermoe.actors.budget import Budget
from tiermoe.actors.combinations import check_combination
from tiermoe.actors.engine.stats import hit_rate
from tiermoe.actors.requests import GenerationRequest, SamplingParams
from tiermoe.cluster.config import RunConfig, engine_settings
from tiermoe.cluster.jobs.bench.cells import check_tokens
from tiermoe.cluster.jobs.bench.metrics import (
    Bar,
    Case,
    Measures,
    Report,
    Spread,
    interleaved,
    median_ratio,
    ratio,
    rows_of,
)
from tiermoe.cluster.jobs.bench.serving import heldout_prompts, serve
from tiermoe.cluster.jobs.evaluate.text import load_heldout
from tiermoe.cluster.jobs.local_worker import run_config, start_worker
from tiermoe.errors import BudgetError, CheckpointError, RuntimeFailure
from tiermoe.limits import usable_cores

from .cases import LATENCY_US, Scale, Ttft, Turns

BALANCE, SPEED = 1.1, 1.7  # bars of `scale`
RESIDENT, DECODED, TTFT_BAR = "all-resident", 8, 1.5  # of `ttft`; tokens generated after each prompt
STREAMS, STARTED, REST = 4, 32, 320  # of `turns`: streams that run, tokens of their prompts and of their answers
ANSWER, NEW = 32, 32  # tokens of a turn's answer, and of the next question
SHARE, NEXT = "second turn, shared", "second turn, run again"
WHOLE = "one chunk"

Prompt = tuple[int, ...]
Found = Mapping[str, Mapping[str, Spread]]  # by case, by measure


def ttft(options: Ttft, progress: Progress | None) -> Report:
    """Time to the first token of long prompts, one at a time; each round takes another held-out text.

    `floor_s` is what the link must carry: the seconds in which it moves the bytes that the prompt and the few tokens
    after it loaded, with its latency for each copy. `loaded_of_model` is these bytes over those of all experts.

    Bar: the first of `options.policy` over all-resident, the median of the rounds' ratios, <= 1.5.

    Raises:
        RuntimeFailure: the tokens differ.
    """
    configs = {name: options.run_of(name) for name in (*options.policy, RESIDENT)}
    prompts = long_prompts(configs[RESIDENT].model_dir, options.repeats + 1, options.prompt_tokens)
    known: dict[int, list[int]] = {}

    def case(name: str, worker: Any) -> Case:
        engine, turn = worker.engine, iter(range(len(prompts)))

        def run() -> Measures:
            number = next(turn)
            worker.reset_stats()
            measures, tokens = serve(worker.submit, [prompts[number]], DECODED)
            check_tokens(name, {number: tokens[0]}, known)
            total = worker.stats().total()
            model = engine.slot_bytes * engine.experts * len(engine.layers)
            copies = total.bytes_loaded / engine.slot_bytes
            floor_s = total.bytes_loaded / (options.link_gbps * 1e9) + copies * LATENCY_US * 1e-6
            return measures | {
                "floor_s": floor_s, "blocked_io_s": total.blocked_io_s, "loaded_of_model": total.bytes_loaded / model,
                "hits": float(total.hits), "bytes_wasted": float(total.bytes_wasted),
            }  # fmt: skip

        return Case(name, run)

    with ExitStack() as stack:
        workers = {name: stack.enter_context(closing(start_worker(config))) for name, config in configs.items()}
        report = Report("ttft", workers[RESIDENT].stats().executor, settings=options.settings(latency_us=LATENCY_US))
        found = interleaved([case(*item) for item in workers.items()], options.repeats, 1, progress)
    report.rows = rows_of(found)
    value = median_ratio(found[options.policy[0]]["ttft_s"], found[RESIDENT]["ttft_s"])
    what = f"TTFT of {options.prompt_tokens} tokens, {options.policy[0]} at {options.budget} over all-resident"
    report.bars = [Bar(what, value, "<=", TTFT_BAR)]
    return report


def long_prompts(model_dir: Path, count: int, tokens: int) -> list[Prompt]:
    """`count` prompts of `tokens` tokens: the held-out passages, document after document.

    Raises:
        CheckpointError: the model ships too little held-out text.
    """
    ids = [token for document in load_heldout(model_dir).documents for passage in document for token in passage.ids]
    if len(ids) < count * tokens:
        what = f"'{model_dir}' has {len(ids)} held-out tokens, not {count} times {tokens}"
        raise CheckpointError(what, "ask for fewer or shorter prompts, or use the default model")
    return [tuple(ids[first : first + tokens]) for first in range(0, count * tokens, tokens)]


def turns(options: Turns, progress: Progress | None) -> Report:
    """TTFT of a conversation's second turn, with and without the prefix cache; the longest gap of running streams.

    A turn's prompt is the text before it, its answer, and 32 new tokens. Each round has other held-out texts. For the
    gap, four streams decode while a long prompt comes in, in chunks of each size and in one; `gap_ms` is the longest
    time between two tokens of a stream from the prompt's arrival to its first token.

    Bars: TTFT of the second turn over the first's < 1/3; the longest gap with the first chunk over that with none
    <= 0.5 (medians of the rounds' ratios).

    Raises:
        RuntimeFailure: the tokens differ, or a request failed.
    """
    link = {"gbps": options.link_gbps, "latency_us": LATENCY_US}
    long_tokens = options.turn_tokens + ANSWER + NEW

    def started(stack: ExitStack, prefix_cache: bool, rows: int, chunk: int | None = None) -> Any:
        kv = {"prefix_cache": prefix_cache, "num_blocks": 512, "max_batch_tokens": rows, "prefill_chunk": chunk}
        config = run_config(
            options.model, options.config, policy=options.policy, budget=options.budget, link=link, kv=kv
        )
        return stack.enter_context(closing(start_worker(config)))

    folder = run_config(options.model, options.config).model_dir
    texts = long_prompts(folder, options.repeats + 1, max(options.prompt_tokens, long_tokens))
    with ExitStack() as stack:
        sharing, again = (started(stack, shared, 512) for shared in (True, False))
        report = Report("turns", sharing.stats().executor, settings=options.settings(latency_us=LATENCY_US))
        known: dict[int, list[int]] = {}
        cases = [_conversation(*item, options, texts, known) for item in ((NEXT, again), (SHARE, sharing))]
        found = interleaved(cases, options.repeats, 1, progress, "turns")
    chunks: dict[str, int | None] = {WHOLE: None} | {f"chunks of {chunk}": chunk for chunk in options.chunk}
    rows = options.prompt_tokens + STREAMS
    with ExitStack() as stack:
        cases = [
            _interruption(name, started(stack, False, rows, chunk), options, texts) for name, chunk in chunks.items()
        ]
        found |= interleaved(cases, options.repeats, 1, progress, "gaps")
    report.rows = rows_of(found)
    first = f"chunks of {options.chunk[0]}"
    second = median_ratio(found[SHARE]["ttft_s"], found[SHARE]["first_ttft_s"])
    gap = median_ratio(found[first]["gap_ms"], found[WHOLE]["gap_ms"])
    report.bars = [
        Bar("TTFT of the second turn over the first", second, "<", 1 / 3),
        Bar(f"longest gap, {first} over {WHOLE}", gap, "<=", 0.5),
    ]
    return report


def _conversation(
    name: str, worker: Any, options: Turns, texts: Sequence[tuple[int, ...]], known: dict[int, list[int]]
) -> Case:
    turn = iter(range(len(texts)))

    def run() -> Measures:
        number = next(turn)
        text = texts[number]
        first, (answer,) = serve(worker.submit, [text[: options.turn_tokens]], ANSWER)
        new = text[options.turn_tokens : options.turn_tokens + NEW]
        second, (end,) = serve(worker.submit, [(*text[: options.turn_tokens], *answer, *new)], ANSWER)
        check_tokens(name, {number: answer + end}, known)
        return {"first_ttft_s": first["ttft_s"], "ttft_s": second["ttft_s"], "tpot_s": second["tpot_s"]}

    return Case(name, run)


def _interruption(name: str, worker: Any, options: Turns, texts: Sequence[tuple[int, ...]]) -> Case:
    turn = iter(range(len(texts)))

    def run() -> Measures:
        number = next(turn)
        text = texts[number]
        sampling = SamplingParams(max_tokens=REST, ignore_eos=True)
        readers = [
            _Reader(worker.submit(GenerationRequest(f"{name}-{number}-{i}", text[i : i + STARTED], sampling)))
            for i in range(STREAMS)
        ]
        for reader in readers:
            reader.begun.wait()
        begin_s = time.perf_counter()
        measures, _ = serve(worker.submit, [text[: options.prompt_tokens]], 1)
        end_s = time.perf_counter()
        for reader in readers:
            reader.join()
        gaps = [reader.longest_s(begin_s, end_s) for reader in readers]
        return {"gap_ms": 1e3 * max(gaps), "ttft_s": measures["ttft_s"]}

    return Case(name, run)


class _Reader(threading.Thread):
    """When the tokens of one stream came. begun: its first one has."""

    def __init__(self, stream: Any) -> None:
        super().__init__(daemon=True)
        self._stream, self._came_s, self._finish = stream, list[float](), ""
        self.begun = threading.Event()
        self.start()

    def run(self) -> None:
        for event in self._stream:
            self._came_s.append(time.perf_counter())
            self._finish = event.finish or ""
            self.begun.set()

    def longest_s(self, begin_s: float, end_s: float) -> float:
        """The longest gap that touches an interval. Raises RuntimeFailure: the stream ended in it, or failed."""
        if self._finish != "length" or self._came_s[-1] < end_s:
            what = "a stream ended before the long prompt had its first token"
            raise RuntimeFailure(what, "give a shorter --prompt-tokens")
        pairs = zip(self._came_s, self._came_s[1:], strict=False)
        return max(later - earlier for earlier, later in pairs if later > begin_s and earlier < end_s)


@dataclass(frozen=True)
class Variant:
    """A case of `scale`: the GPUs, and the budget that equals one GPU's, of each ("per-GPU") or of all ("total")."""

    gpus: int
    equal: str

    @property
    def name(self) -> str:
        return f"{self.gpus} GPU" if self.gpus == 1 else f"{self.gpus} GPUs, equal {self.equal} budget"

    def config(self, options: Scale) -> RunConfig:
        """The run. Raises BudgetError: the budget is not a share."""
        share = _share(options) / (self.gpus if self.equal == "total" else 1)
        return run_config(
            options.model, options.config, policy=options.policy, budget=f"{share:.6f}",
            link={"gbps": options.link_gbps, "latency_us": LATENCY_US},
            cluster={"shards": self.gpus, "ownership": options.ownership},
        )  # fmt: skip


VARIANTS = (Variant(1, "total"), *(Variant(gpus, equal) for equal in ("total", "per-GPU") for gpus in (2, 4)))
_SHOWN = (
    "batch", "case", "tokens_per_s", "hit_rate", "needed_max_min", "bytes_max_min",
    "io_path_s", "io_path_gain", "link_path_s", "link_path_gain",
)  # fmt: skip


def scale(options: Scale, progress: Progress | None) -> Report:
    """Decode throughput, load per GPU and time lost to copies, at equal total and at equal per-GPU budget.

    Each GPU is a process with its own slots and its own link. Every round takes other held-out prompts (from the start
    again when they run out), the same for all cases, and continues with the caches of the previous round. Times are
    compared within a round; bytes of a GPU are summed over rounds, because a few prompts are unbalanced by chance.

    The time that copies take from a forward is given twice. In each layer the GPUs wait for their copies in parallel:
    `io_path_s` sums the longest wait of each layer, by wall-clock; `link_path_s` sums the longest time that a link was
    busy with the layer's copies, by the emulated links' own clock, as if cores were free and nothing overlapped. Copies
    of an earlier prefetch are in neither or in both; on demand, both cover the same copies.

    CPU stand-ins share the machine's cores: with fewer cores than GPUs, tokens per second say little of scaling. Bytes,
    hits and the links' own clock do.

    Bars, for every batch size: bytes loaded by the busiest GPU <= 1.1 of those by the idlest, for every number of GPUs;
    `io_path_s` of one GPU >= 1.7 of that of two at equal per-GPU budget (median of the rounds' ratios).

    Raises:
        RuntimeFailure: the tokens differ. ConfigError, BudgetError: the policy or the budget is not usable.
    """
    prompt_tokens, max_tokens = 48, 24
    batches = tuple(dict.fromkeys(options.batch))
    configs = {v: v.config(options) for v in VARIANTS}
    for config in configs.values():  # refused before anything is loaded
        check_combination(engine_settings(config))
    groups: dict[int, list[list[Prompt]]] = {}
    for batch in batches:  # of the warm-up first, then of each round
        count = (rounds(options, batch) + 1) * batch
        prompts = heldout_prompts(configs[VARIANTS[0]].model_dir, count, prompt_tokens, at_least=batch)
        groups[batch] = [prompts[i : i + batch] for i in range(0, len(prompts) - batch + 1, batch)]
    settings = options.settings(
        budget=_share(options), latency_us=LATENCY_US, rounds={str(b): rounds(options, b) for b in batches},
        prompt_tokens=prompt_tokens, max_tokens=max_tokens, threads=1, cores=usable_cores(),
    )  # fmt: skip

    def case(variant: Variant, worker: Any, prompts: Sequence[list[Prompt]], known: dict[int, list[int]]) -> Case:
        done = 0

        def run() -> Measures:
            nonlocal done
            group, done = done % len(prompts), done + 1
            worker.reset_stats()
            before = worker.shard_stats()
            times, tokens = serve(worker.submit, prompts[group], max_tokens)
            check_tokens(variant.name, dict(enumerate(tokens, group * len(prompts[group]))), known)
            rate = len(prompts[group]) / times["tpot_s"]
            return {"tokens_per_s": rate, "ttft_s": times["ttft_s"]} | _shard_measures(worker, before)

        return Case(variant.name, run)

    with ExitStack() as stack:
        workers = {v: stack.enter_context(closing(start_worker(config))) for v, config in configs.items()}
        report = Report("scale", workers[VARIANTS[0]].stats().executor, settings=settings, shown=_SHOWN)
        for batch, rounds_of_batch in groups.items():
            known: dict[int, list[int]] = {}
            cases = [case(*item, rounds_of_batch, known) for item in workers.items()]
            found = interleaved(cases, rounds(options, batch), 1, progress, f"batch {batch}")
            report.rows += [scale_row(batch, v, found) for v in VARIANTS]
            report.bars += scale_bars(batch, found)
    return report


def rounds(options: Scale, batch: int) -> int:
    """Counted rounds of `scale`, of `batch` prompts each."""
    return max(options.repeats, math.ceil(options.prompts / batch))


def _share(options: Scale) -> float:
    """The budget. Raises BudgetError: it is not a share."""
    share = Budget.parse(options.budget).share
    if share is None:
        raise BudgetError(f"budget '{options.budget}' is not a share", "give a share of all experts, such as 0.125")
    return share


def _shard_measures(worker: Any, before: Sequence[dict[str, Any]]) -> Measures:
    after = worker.shard_stats()
    if any(part["state"] != "serving" for part in (*before, *after)):
        raise RuntimeFailure("a shard was lost during the measurement", "run again, and report it if it stays")

    def of_each(name: str) -> list[float]:
        return [float(b[name] - a[name]) for a, b in zip(before, after, strict=True)]

    loaded, hits, misses = of_each("bytes_loaded"), of_each("hits"), of_each("misses")
    total = worker.stats().total()
    counted = {"hits": sum(hits), "misses": sum(misses), "ndp_experts": total.ndp_experts}
    return {
        "io_path_s": total.io_path_s,
        "link_path_s": total.link_path_s,
        "link_s_mean": sum(of_each("link_s")) / len(loaded),
        "blocked_io_s_all": sum(of_each("blocked_io_s")),
        "shard_wait_s": total.shard_wait_s,
        "recomputed": float(total.shard_recomputed),
        "hit_rate": hit_rate(counted) or 0.0,
        **{f"bytes_loaded_{i}": loaded[i] for i in range(len(loaded))},
        **{f"needed_{i}": hits[i] + misses[i] for i in range(len(loaded))},
    }


def scale_row(batch: int, variant: Variant, found: Found) -> dict[str, Any]:
    """Medians over rounds; sums over rounds of values per GPU; all rounds in `spread`.

    `..._max_min`: of the busiest GPU over the idlest. `..._gain`: one GPU's over this case's.
    """
    spreads = found[variant.name]
    loaded, needed = _per_gpu(spreads, "bytes_loaded"), _per_gpu(spreads, "needed")
    return {
        "batch": batch, "case": variant.name, "gpus": variant.gpus, "equal": variant.equal,
        **{name: spread.median for name, spread in spreads.items() if not name[-1].isdigit()},
        "io_path_gain": _gain(found, variant, "io_path_s"),
        "link_path_gain": _gain(found, variant, "link_path_s"),
        "loaded_mb": sum(loaded) / 1e6,
        "bytes_loaded": loaded,
        "needed": needed,
        "bytes_max_min": ratio(max(loaded), min(loaded)),
        "needed_max_min": ratio(max(needed), min(needed)),
        "spread": {name: asdict(spread) for name, spread in spreads.items()},
    }  # fmt: skip


def scale_bars(batch: int, found: Found) -> list[Bar]:
    bars = []
    for v in VARIANTS[1:]:
        loaded = _per_gpu(found[v.name], "bytes_loaded")
        name = f"batch {batch}: bytes loaded, busiest over idlest GPU, {v.name}"
        bars.append(Bar(name, ratio(max(loaded), min(loaded)), "<=", BALANCE))
    gain = _gain(found, Variant(2, "per-GPU"), "io_path_s")
    return [*bars, Bar(f"batch {batch}: time lost to copies, 1 GPU over 2 of the same budget each", gain, ">=", SPEED)]


def _per_gpu(spreads: Mapping[str, Spread], measure: str) -> list[float]:
    return [sum(spread.values) for name, spread in spreads.items() if name.startswith(f"{measure}_")]


def _gain(found: Found, variant: Variant, measure: str) -> float:
    """One GPU's over this case's, the median of the rounds' ratios, or NaN."""
    return median_ratio(found[VARIANTS[0].name][measure], found[variant.name][measure])
