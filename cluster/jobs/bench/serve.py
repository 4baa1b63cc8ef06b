"""`tiermoe serve` against `transformers serve`: the same texts over HTTP, from several clients at once."""

from __future__ import annotations

import asyncio
import itertools
import json
import re
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import Progress

from ....errors import RuntimeFailure
from ...prompt import load_tokenizer
from ...report.results import percentiles
from ...report.tables import show
from ..local_worker import run_config
from .cases import Serve
from .metrics import Bar, Case, Measures, Report, Spread, interleaved, median_ratio
from .serving import heldout_prompts

PEER, INSTALL = "transformers", "pip install 'transformers[serving]' accelerate"
LATENCY_US = 10.0  # of each copy on our emulated link
PROMPT_TOKENS = 48
START_S, END_S, REQUEST_S = 300.0, 60.0, 300.0
GAIN, SHARE = 3.0, 0.6  # bars
_READY = re.compile(r"http://\S+(?=/v1)")


@dataclass
class Answered:
    """One request. times_s: when its pieces of text came, from its start; tokens: as the server counts them."""

    times_s: list[float] = field(default_factory=list)
    tokens: int = 0

    @property
    def ttft_s(self) -> float:
        return self.times_s[0]

    @property
    def tpot_s(self) -> float | None:
        return (self.times_s[-1] - self.times_s[0]) / (self.tokens - 1) if self.tokens > 1 else None


def serve(options: Serve, progress: Progress | None) -> Report:
    """Tokens per second, TTFT and TPOT of streamed greedy completions over loopback, at several numbers of clients.

    The servers are processes with the same threads, idle while another is measured. transformers has all experts
    resident, its continuous batching and fp32, as ours. Each client sends its requests one after the other. A round has
    texts of its own, the same for all servers; p50 and p99 are over the requests of all counted rounds.

    Bars, where these numbers of clients are measured: tokens per second of 8 clients over one's >= 3 at the first
    budget; of the last budget over transformers' >= 0.6 at 8 clients (medians of the rounds' ratios). Where
    `transformers serve` lacks packages, it is not measured, and there is no bar on it.

    Raises:
        RuntimeFailure: a server did not start, or a request failed.
    """
    absent = [] if _has_peer() else [f"transformers serve, which lacks packages: {INSTALL}"]
    show(Console(stderr=True), *(f"not measured: {peer}" for peer in absent))  # it takes minutes
    folder = run_config(options.model).model_dir
    needed = (options.repeats + 1) * max(options.streams) * options.requests
    tokenizer = load_tokenizer(folder)
    found = heldout_prompts(folder, needed, PROMPT_TOKENS, at_least=max(options.streams))
    texts = [tokenizer.decode(list(prompt)) for prompt in found]
    answers: dict[tuple[str, int], list[Answered]] = {}
    results: dict[tuple[str, int], dict[str, Spread]] = {}
    with ExitStack() as stack:
        urls = {f"tiermoe {b}": stack.enter_context(_tiermoe(options, folder, b)) for b in options.budget}
        if not absent:
            urls[PEER] = stack.enter_context(_transformers(options, folder))
        for streams in options.streams:
            cases = [_case(name, url, str(folder), streams, options, texts, answers) for name, url in urls.items()]
            measured = interleaved(cases, options.repeats, 1, progress, f"{streams} clients")
            results |= {(name, streams): spreads for name, spreads in measured.items()}
    fixed = {"latency_us": LATENCY_US, "prompt_tokens": PROMPT_TOKENS, "model": folder.name}
    report = Report("serve", "emulated", settings=options.settings(**fixed), not_measured=absent)
    for (name, streams), spreads in results.items():
        counted = answers[name, streams][streams * options.requests :]  # without the round of the warm-up
        report.rows.append({"server": name, "streams": streams} | _row(spreads, counted))
    report.bars = list(_bars(options, results))
    return report


def _row(spreads: dict[str, Spread], answered: Sequence[Answered]) -> dict[str, Any]:
    rate, found = spreads["tokens_per_s"], {"ttft": [a.ttft_s for a in answered]}
    found["tpot"] = [a.tpot_s for a in answered if a.tpot_s is not None]
    row = {"tokens_per_s": rate.median, "minimum": rate.minimum, "maximum": rate.maximum}
    for name, values in found.items():
        for percent in (50, 99):
            row[f"{name}_p{percent}_ms"] = 1e3 * float(np.percentile(values, percent)) if values else float("nan")
    gaps = [1e3 * (b - a) for answer in answered for a, b in itertools.pairwise(answer.times_s)]
    return row | {"requests": len(answered), "between_ms": percentiles(gaps)}


def _bars(options: Serve, results: dict[tuple[str, int], dict[str, Spread]]) -> Iterator[Bar]:
    def rates(name: str, streams: int) -> Spread:
        return results[name, streams]["tokens_per_s"]

    first, last = f"tiermoe {options.budget[0]}", f"tiermoe {options.budget[-1]}"
    if {1, 8} <= set(options.streams):
        gain = median_ratio(rates(first, 8), rates(first, 1))
        yield Bar(f"{first}: tokens/s of 8 streams over one", gain, ">=", GAIN)
    if (PEER, 8) in results:
        yield Bar(f"{last} over {PEER}, 8 streams", median_ratio(rates(last, 8), rates(PEER, 8)), ">=", SHARE)


def _case(
    name: str, url: str, model: str, streams: int, options: Serve, texts: Sequence[str],
    answers: dict[tuple[str, int], list[Answered]],
) -> Case:  # fmt: skip
    begin = 0

    def run() -> Measures:
        nonlocal begin
        count = streams * options.requests
        chosen = [texts[(begin + i) % len(texts)] for i in range(count)]
        begin += count
        started_s = time.perf_counter()
        found = asyncio.run(_clients(url, model, chosen, streams, options.max_tokens))
        wall_s = time.perf_counter() - started_s
        answers.setdefault((name, streams), []).extend(found)
        return {"tokens_per_s": sum(answered.tokens for answered in found) / wall_s}

    return Case(name, run)


async def _clients(url: str, model: str, texts: Sequence[str], streams: int, max_tokens: int) -> list[Answered]:
    import httpx

    async with httpx.AsyncClient(base_url=url, timeout=REQUEST_S) as http:

        async def client(own: Sequence[str]) -> list[Answered]:
            return [await _complete(http, model, text, max_tokens) for text in own]

        parts = await asyncio.gather(*(client(texts[i::streams]) for i in range(streams)))
    return [answered for part in parts for answered in part]


async def _complete(http: Any, model: str, text: str, max_tokens: int) -> Answered:
    """One streamed completion. Raises RuntimeFailure: it failed, or came without its token count."""
    body = {"model": model, "prompt": text, "max_tokens": max_tokens, "temperature": 0.0, "stream": True,
            "stream_options": {"include_usage": True}}  # fmt: skip
    begin_s, answered = time.perf_counter(), Answered()
    async with http.stream("POST", "/v1/completions", json=body) as response:
        if response.status_code != 200:
            said = (await response.aread()).decode(errors="replace")[:300]
            raise RuntimeFailure(f"{http.base_url} answers {response.status_code}: {said}", "report this as a bug")
        async for line in response.aiter_lines():
            if not line.startswith("data: {"):
                continue
            chunk = json.loads(line.removeprefix("data: "))
            if any(choice.get("text") for choice in chunk.get("choices", ())):
                answered.times_s.append(time.perf_counter() - begin_s)
            answered.tokens = (chunk.get("usage") or {}).get("completion_tokens", answered.tokens)
    if not answered.tokens:
        raise RuntimeFailure(f"{http.base_url} counted no token of a completion", "report this as a bug")
    if not answered.times_s:  # tokens without text
        answered.times_s.append(time.perf_counter() - begin_s)
    return answered


@contextmanager
def _tiermoe(options: Serve, folder: Path, budget: str) -> Iterator[str]:
    """Our server's address."""
    command = [
        str(Path(sys.executable).with_name("tiermoe")), "serve", "--model", str(folder), "--model-name", str(folder),
        "--policy", options.policy, "--budget", budget, "--threads", str(options.threads), "--device", "cpu",
        "--link-gbps", str(options.link_gbps), "--link-latency-us", str(LATENCY_US), "--port", "0",
    ]  # fmt: skip
    with _process(command) as (process, log):
        while (found := _READY.search(log.read_text(errors="replace"))) is None:
            _wait(process, log)
        yield found[0]


def _has_peer() -> bool:
    """Whether `transformers serve` has the packages that it needs."""
    from transformers.utils.import_utils import is_accelerate_available, is_serve_available

    return bool(is_serve_available() and is_accelerate_available())


@contextmanager
def _transformers(options: Serve, folder: Path) -> Iterator[str]:
    """The address of transformers' server."""
    import httpx

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [
        str(Path(sys.executable).with_name("transformers")), "serve", str(folder), "--continuous-batching",
        "--device", "cpu", "--dtype", "float32", "--attn-implementation", "sdpa", "--host", "127.0.0.1",
        "--port", str(port), "--cb-num-blocks", "256", "--cb-block-size", "32", "--cb-max-batch-tokens", "512",
    ]  # fmt: skip
    url, threads = f"http://127.0.0.1:{port}", str(options.threads)
    with _process(["env", f"OMP_NUM_THREADS={threads}", f"MKL_NUM_THREADS={threads}", *command]) as (process, log):
        while True:
            try:
                if httpx.get(f"{url}/health", timeout=5.0).status_code == 200:
                    break
            except httpx.TransportError:
                pass
            _wait(process, log)
        yield url


@contextmanager
def _process(command: Sequence[str]) -> Iterator[tuple[subprocess.Popen[bytes], Path]]:
    """A server and the file of its output; ended with the block."""
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        with log.open("wb") as out:
            process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT)
        try:
            process.started_s = time.monotonic()  # type: ignore[attr-defined]
            yield process, log
        finally:
            process.terminate()
            try:
                process.wait(END_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _wait(process: subprocess.Popen[bytes], log: Path) -> None:
    """A moment of a server's start. Raises RuntimeFailure: it ended, or takes too long."""
    late = time.monotonic() - process.started_s > START_S  # type: ignore[attr-defined]
    if late or process.poll() is not None:
        said = log.read_text(errors="replace")[-500:]
        raise RuntimeFailure(f"a server did not start: {said}", "run the command by hand")
    time.sleep(0.2)
