"""What a long prompt costs: a conversation's second turn, and the pause of streams that run meanwhile."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack, closing
from typing import Any

from rich.progress import Progress

from tiermoe.actors.requests import GenerationRequest, SamplingParams
from tiermoe.cluster.jobs.bench.metrics import Bar, Case, Measures, Report, interleaved, median_ratio, rows_of
from tiermoe.cluster.jobs.bench.serving import long_prompts, run_config, serve, start_worker
from tiermoe.errors import RuntimeFailure

from .cases import Turns
from .serving import LATENCY_US, SameTokens

STREAMS, STARTED, REST = 4, 32, 320  # running streams: how many, tokens of their prompts, tokens they generate
ANSWER, NEW = 32, 32  # tokens of a turn's answer, and of the next question
SHARE, NEXT = "second turn, shared", "second turn, run again"
WHOLE = "one chunk"


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
        same = SameTokens(NEXT)
        cases = [_conversation(*item, options, texts, same) for item in ((NEXT, again), (SHARE, sharing))]
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


def _conversation(name: str, worker: Any, options: Turns, texts: Sequence[tuple[int, ...]], same: SameTokens) -> Case:
    turn = iter(range(len(texts)))

    def run() -> Measures:
        number = next(turn)
        text = texts[number]
        first, (answer,) = serve(worker.submit, [text[: options.turn_tokens]], ANSWER)
        new = text[options.turn_tokens : options.turn_tokens + NEW]
        second, (end,) = serve(worker.submit, [(*text[: options.turn_tokens], *answer, *new)], ANSWER)
        same.check(name, number, [answer, end])
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
