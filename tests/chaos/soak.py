"""An open-loop mix of requests against a `tiermoe serve` of its own for an hour, and what is not back when it is idle.

    python tests/chaos/soak.py --out docs/results [--minutes 60] [--rate 1.0]            (make soak MINUTES=60)

Requests come at random times, whatever the server has answered: whole and streamed completions, clients that leave,
malformed requests, prompts up to the token limit and over it, repeated prefixes, grammars and tool calls. After a
warm-up with the same mix the server is left idle, and each process's memory, descriptors and threads are kept; after
the load it is left idle again, and they are compared.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import re
import statistics
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil
from rig import Server, served, title_of

from tiermoe.cluster.host import cpu, versions
from tiermoe.cluster.jobs.bench.metrics import fill_page, markdown

MiB = 1 << 20
COUNTED = ("rss", "private", "descriptors", "threads")
_TEMPLATE = Path(__file__).with_name("tools.jinja")
OPTIONS = ("--policy", "context-ndp-full", "--budget", "25%", "--shards", "2", "--ndp-workers", "1", "--tool-format",
           "hermes", "--chat-template", str(_TEMPLATE))  # fmt: skip
GROWTH, GROWTH_MIB = 0.05, 32  # bounds of memory after the warm-up: of all processes, and of each
IDLE_S, REQUEST_S, SILENCE_S = 180.0, 300.0, 65.0  # the last: after it no connection is kept alive
_PAGE = "# Soak\n" + "".join(f"\n<!-- table: {name} -->\n<!-- end -->\n" for name in ("memory", "requests", "bars"))
_WORDS = "import os self path return value for in range def class None index name data list open"
_TOOL = {"type": "function", "function": {"name": "look_up", "parameters": {
    "type": "object", "properties": {"word": {"type": "string", "maxLength": 6}}, "required": ["word"],
    "additionalProperties": False}}}  # fmt: skip
_SCHEMA = {"type": "object", "properties": {"a": {"type": "boolean"}, "b": {"enum": ["x", "y"]}},
           "required": ["a", "b"], "additionalProperties": False}  # fmt: skip
_MALFORMED: tuple[tuple[str, bytes], ...] = (
    ("/v1/completions", b"{"),
    ("/v1/completions", b'{"prompt": "a", "max_tokens": -1}'),
    ("/v1/completions", b'{"prompt": [1, 2, 999999999]}'),
    ("/v1/completions", b'{"prompt": "a", "no_such_parameter": 1}'),
    ("/v1/chat/completions", b'{"messages": [{"role": "user"}]}'),
    ("/v1/chat/completions", b'{"messages": "\\ud800"}'),
    ("/v1/completions", b'{"prompt": "a", "guided_regex": "("}'),
    ("/v1/no_such_route", b"{}"),
)
Ask = Callable[[httpx.AsyncClient, random.Random], Awaitable[str]]  # what came, in a word; "ok": what had to come


class Kinds:
    """The requests of the mix: name -> (weight, what sends one). The words that they return are counted."""

    def __init__(self, limit_tokens: int) -> None:
        self._limit = limit_tokens
        self._prefixes = [_text(random.Random(i), 200) for i in range(4)]
        self.all: dict[str, tuple[int, Ask]] = {
            "whole": (20, self.whole), "streamed": (30, self.streamed), "client leaves": (15, self.leaves),
            "malformed": (10, self.malformed), "too long": (3, self.too_long), "long prompt": (4, self.long_prompt),
            "repeated prefix": (12, self.repeated_prefix), "grammar": (3, self.grammar),
            "tool call": (3, self.tool_call),
        }  # fmt: skip

    def pick(self, rng: random.Random) -> tuple[str, Ask]:
        names = list(self.all)
        (name,) = rng.choices(names, [self.all[name][0] for name in names])
        return name, self.all[name][1]

    async def whole(self, http: httpx.AsyncClient, rng: random.Random) -> str:
        return _said(await http.post("/v1/completions", json=_completion(rng) | {"n": rng.choice((1, 1, 1, 2))}))

    async def streamed(self, http: httpx.AsyncClient, rng: random.Random) -> str:
        ended = False
        async with http.stream("POST", "/v1/completions", json=_completion(rng) | {"stream": True}) as response:
            if response.status_code != 200:
                return _said(response)
            async for line in response.aiter_lines():
                if line.startswith('data: {"error"'):
                    return "error in the stream"
                ended = ended or line == "data: [DONE]"
        return "ok" if ended else "the stream ended early"

    async def leaves(self, http: httpx.AsyncClient, rng: random.Random) -> str:
        """After some events of a stream, or while it waits for a whole answer."""
        body, events = _completion(rng) | {"max_tokens": 200, "ignore_eos": True}, rng.randrange(6)
        if not events:
            try:
                return _said(await http.post("/v1/completions", json=body, timeout=httpx.Timeout(30.0, read=0.3)))
            except httpx.ReadTimeout:
                return "ok"
        async with http.stream("POST", "/v1/completions", json=body | {"stream": True}) as response:
            if response.status_code != 200:
                return _said(response)
            async for _ in response.aiter_lines():
                events -= 1
                if not events:
                    return "ok"
        return "the stream ended early"

    async def malformed(self, http: httpx.AsyncClient, rng: random.Random) -> str:
        path, body = rng.choice(_MALFORMED)
        return _said(await http.post(path, content=body, headers={"Content-Type": "application/json"}), 400, 404)

    async def too_long(self, http: httpx.AsyncClient, rng: random.Random) -> str:
        words = rng.choice((self._limit * 2, 400_000))  # the second is over a megabyte
        return _said(await http.post("/v1/completions", json=_completion(rng, words)), 400)

    async def long_prompt(self, http: httpx.AsyncClient, rng: random.Random) -> str:
        ids = [rng.randrange(1, 1000) for _ in range(self._limit - 40)]
        return _said(await http.post("/v1/completions", json=_completion(rng) | {"prompt": ids, "max_tokens": 8}))

    async def repeated_prefix(self, http: httpx.AsyncClient, rng: random.Random) -> str:
        prompt = f"{rng.choice(self._prefixes)}\n{_text(rng, 5)}"
        return _said(await http.post("/v1/completions", json=_completion(rng) | {"prompt": prompt}))

    async def grammar(self, http: httpx.AsyncClient, rng: random.Random) -> str:
        shape = {"type": "json_schema", "json_schema": {"name": "s", "schema": _SCHEMA}}
        response = await http.post(
            "/v1/completions", json={"prompt": _text(rng, 5), "max_tokens": 64, "response_format": shape}
        )
        if response.status_code == 200 and (choice := response.json()["choices"][0])["finish_reason"] == "stop":
            json.loads(choice["text"])
        return _said(response)

    async def tool_call(self, http: httpx.AsyncClient, rng: random.Random) -> str:
        asked = [{"role": "user", "content": _text(rng, 5)}]
        body = {"messages": asked, "tools": [_TOOL], "tool_choice": "required", "max_tokens": 64}
        return _said(await http.post("/v1/chat/completions", json=body))


def _text(rng: random.Random, words: int) -> str:
    return " ".join(rng.choices(_WORDS.split(), k=words))


def _completion(rng: random.Random, words: int = 0) -> dict[str, Any]:
    how = rng.choice(({"temperature": 0}, {"temperature": 0.9, "seed": rng.randrange(100)}, {"top_p": 0.8}))
    prompt = _text(rng, words or rng.randrange(1, 40))
    return {"prompt": prompt, "max_tokens": rng.choice((4, 8, 16, 32, 64)), "ignore_eos": True} | how


def _said(response: httpx.Response, *wanted: int) -> str:
    if response.status_code in (wanted or (200,)):
        return "ok"
    return "429" if response.status_code == 429 else f"{response.status_code} {response.text[:200]}"


@dataclass
class Load:
    """Requests at random times, `rate` a second in the mean, whatever the server has answered.

    Attributes:
        counts: of each kind, how often each word came.
        open: requests under way.
    """

    url: str
    kinds: Kinds
    rate: float
    seed: int
    counts: dict[str, Counter[str]] = field(default_factory=dict)
    open: set[asyncio.Task[None]] = field(default_factory=set)

    async def run(self, seconds: float) -> None:
        """Send for so long, then wait for the answers."""
        rng = random.Random(self.seed)
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=20)
        async with httpx.AsyncClient(base_url=self.url, timeout=REQUEST_S, limits=limits) as http:
            next_s = time.monotonic()
            end_s = next_s + seconds
            while next_s < end_s:
                await asyncio.sleep(max(0.0, next_s - time.monotonic()))
                name, ask = self.kinds.pick(rng)
                task = asyncio.create_task(self._one(name, ask, http, random.Random(rng.random())))
                self.open.add(task)
                task.add_done_callback(self.open.discard)
                next_s += rng.expovariate(self.rate)
            if self.open:
                await asyncio.wait(set(self.open), timeout=REQUEST_S)
            for task in set(self.open):
                task.cancel()

    async def _one(self, name: str, ask: Ask, http: httpx.AsyncClient, rng: random.Random) -> None:
        try:
            said = await ask(http, rng)
        except asyncio.CancelledError:
            said = "not answered"
        except Exception as error:
            said = type(error).__name__
        self.counts.setdefault(name, Counter())[said] += 1


GAUGES = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_ratio", "expert_slots_used", "expert_pins")


def gauges(url: str) -> dict[str, float]:
    """What requests hold, as /metrics says it."""
    page = httpx.get(f"{url}/metrics", timeout=30.0).text
    return {name: float(re.search(rf"^tiermoe_{name} (\S+)$", page, re.MULTILINE)[1]) for name in GAUGES}  # type: ignore[index]


def processes(server: Server) -> dict[str, dict[str, Any]]:
    """Memory (`rss`, and `private`: without what is mapped or shared), descriptors and threads, by title and pid."""
    found = {}
    for process in [psutil.Process(server.process.pid), *server.family()]:
        try:
            memory = process.memory_info()
            found[f"{title_of(process)} {process.pid}"] = {
                "rss": memory.rss, "private": memory.rss - memory.shared, "descriptors": process.num_fds(),
                "threads": process.num_threads(), "files": _files(process.pid),
            }  # fmt: skip
        except psutil.Error:  # it has just ended
            continue
    return found


def _files(pid: int) -> Counter[str]:
    """How many descriptors a process has of each kind: `socket`, or a path without numbers."""
    kinds: Counter[str] = Counter()
    for path in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):  # closed meanwhile
            kinds[re.sub(r"[0-9a-f]{6,}|\d+|:\[.*", "", str(path.readlink()))] += 1
    return kinds


async def idle(server: Server) -> dict[str, Any]:
    """Gauges and processes, once no request is left (or after three minutes) and no connection is kept alive."""
    end_s = time.monotonic() + IDLE_S
    while True:
        held = await asyncio.to_thread(gauges, server.url)
        if not any(held[name] for name in GAUGES if name != "expert_slots_used") or time.monotonic() > end_s:
            break
        await asyncio.sleep(2.0)
    await asyncio.sleep(SILENCE_S)
    return {"gauges": await asyncio.to_thread(gauges, server.url), "processes": processes(server)}


async def sampled(server: Server, load: Load, seconds: float) -> list[dict[str, Any]]:
    """Run a load; up to 120 samples of it."""
    samples, begin_s = [], time.monotonic()
    running = asyncio.create_task(load.run(seconds))
    while not (await asyncio.wait((running,), timeout=max(5.0, seconds / 120)))[0]:
        found = processes(server)
        total = {key: sum(one[key] for one in found.values()) for key in COUNTED}
        try:
            held = await asyncio.to_thread(gauges, server.url)
        except (httpx.HTTPError, TypeError):  # it answered with an error
            held = {}
        samples.append({"s": round(time.monotonic() - begin_s, 1), "open": len(load.open)} | total | held)
    await running
    return samples


def compared(before: dict[str, Any], after: dict[str, Any]) -> list[dict[str, Any]]:
    """Processes that were there in both idle moments."""
    first, second = before["processes"], after["processes"]
    return [
        {"process": name, "more": dict(second[name]["files"] - first[name]["files"])}
        | {f"{key}_{when}": side[name][key] for key in COUNTED for when, side in (("before", first), ("after", second))}
        for name in first if name in second
    ]  # fmt: skip


def bars(before: dict[str, Any], after: dict[str, Any], counts: dict[str, Counter[str]]) -> list[dict[str, Any]]:
    """What must hold, and whether it does."""
    rows = compared(before, after)
    grown = {row["process"]: (row["private_after"] - row["private_before"]) / MiB for row in rows}
    total = sum(row["private_after"] for row in rows) / sum(row["private_before"] for row in rows) - 1
    worst = max(grown, key=grown.__getitem__)
    more = {row["process"]: row["more"] for row in rows if row["descriptors_after"] > row["descriptors_before"]}
    others = sorted(set(before["processes"]) ^ set(after["processes"]))
    came = {f"{name}: {said}": n for name, words in counts.items() for said, n in words.items()}
    wrong = {what: n for what, n in came.items() if not what.endswith((": ok", ": 429"))}
    held = {name: value for name, value in after["gauges"].items() if name != "expert_slots_used"}
    return [
        {"bar": "every answer is what it had to be", "value": wrong or "all", "passed": not wrong},
        {"bar": "no request, KV block or pin is left", "value": held, "passed": not any(held.values())},
        {"bar": f"private memory of all processes <= {1 + GROWTH:g} x", "value": round(1 + total, 3),
         "passed": total <= GROWTH},
        {"bar": f"private memory of each process <= +{GROWTH_MIB} MiB", "value": f"{worst} {grown[worst]:+.1f}",
         "passed": grown[worst] <= GROWTH_MIB},
        {"bar": "descriptors of each process are not more", "value": more or "equal or fewer", "passed": not more},
        {"bar": "the processes are the same", "value": others or "same", "passed": not others},
    ]  # fmt: skip


def slope(samples: Sequence[dict[str, Any]], key: str) -> float | None:
    """Growth an hour over the second half of the samples, by least squares."""
    half = samples[len(samples) // 2 :]
    if len(half) < 3:
        return None
    return statistics.linear_regression([one["s"] / 3600 for one in half], [one[key] for one in half]).slope


async def soak(server: Server, minutes: float, rate: float, warm_minutes: float) -> dict[str, Any]:
    """Warm up, be idle, load, be idle."""
    models = httpx.get(f"{server.url}/v1/models", timeout=30.0).json()
    kinds = Kinds(int(models["data"][0]["max_model_len"]))
    await Load(server.url, kinds, rate, 1).run(60 * warm_minutes)
    before = await idle(server)
    load = Load(server.url, kinds, rate, 2)
    samples = await sampled(server, load, 60 * minutes)
    after = await idle(server)
    return {
        "requests": {name: dict(words) for name, words in sorted(load.counts.items())},
        "processes": compared(before, after), "idle_before": before["gauges"], "idle_after": after["gauges"],
        "private_mib_per_hour": (found := slope(samples, "private")) and round(found / MiB, 1),
        "bars": bars(before, after, load.counts), "samples": samples,
    }  # fmt: skip


def tables(record: dict[str, Any]) -> dict[str, list[str]]:
    """Memory, requests and bars, in Markdown."""
    memory = [
        (re.sub(r" \d+$", "", row["process"]),
         *(f"{row[f'{key}_before'] / MiB:.1f}, {row[f'{key}_after'] / MiB:.1f}" for key in ("rss", "private")),
         *(f"{row[f'{key}_before']}, {row[f'{key}_after']}" for key in ("descriptors", "threads")))
        for row in record["processes"]
    ]  # fmt: skip
    requests = [
        (name, str(sum(words.values())), ", ".join(f"{n} {said}" for said, n in words.items()))
        for name, words in record["requests"].items()
    ]
    held = [(bar["bar"], str(bar["value"]), "holds" if bar["passed"] else "missed") for bar in record["bars"]]
    return {
        "memory": markdown(("process", "RSS before, after, MiB", "private, MiB", "descriptors", "threads"), memory),
        "requests": markdown(("kind", "sent", "what came"), requests),
        "bars": markdown(("bar", "value", ""), held),
    }


def main() -> None:
    """Run, write, and exit with 1 where a bar is missed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder of soak.json and soak.md")
    parser.add_argument("--minutes", type=float, default=60.0, help="of the load")
    parser.add_argument("--warm-minutes", type=float, help="of the load before it; a fifth of it, 5 at most")
    parser.add_argument("--rate", type=float, default=1.0, help="requests a second, in the mean")
    given = parser.parse_args()
    warm = min(5.0, given.minutes / 5) if given.warm_minutes is None else given.warm_minutes
    with served(*OPTIONS) as server:
        found = asyncio.run(soak(server, given.minutes, given.rate, warm))
        family = server.family()
        server.process.terminate()
        server.process.wait(60)
        left = server.leftovers(family)
    found["bars"].append({"bar": "nothing is left after its end", "value": left or "nothing", "passed": not left})
    record = {
        "name": "soak", "hardware": cpu(), "versions": versions(), "executor": "emulated on cpu",
        "settings": {"minutes": given.minutes, "warm_minutes": warm, "rate": given.rate,
                     "options": [Path(option).name for option in OPTIONS]},
    } | found  # fmt: skip
    given.out.mkdir(parents=True, exist_ok=True)
    (given.out / "soak.json").write_text(json.dumps(record, indent=1) + "\n")
    fill_page(given.out / "soak.md", tables(record).__getitem__, _PAGE)
    for bar in record["bars"]:
        print("pass" if bar["passed"] else "MISS", bar["bar"], bar["value"])
    sys.exit(not all(bar["passed"] for bar in record["bars"]))


if __name__ == "__main__":
    main()
