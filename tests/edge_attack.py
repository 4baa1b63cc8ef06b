"""Big bodies at once against a server, and what a bystander notices: `/health` and a stream of another client.

    python tests/edge_attack.py --check                 a server of its own; exits with 1 where a bar is missed
    python tests/edge_attack.py --bytes 50 --kind words                what the machine does without an attack
    python tests/edge_attack.py http://127.0.0.1:8000 [--key-file FILE] [--bodies 16] [--bytes 3900000]
    python tests/edge_attack.py --serve="--replicas 2"    options of the server of its own
    python tests/edge_attack.py --framing        memory and time that bytes take which are no body, in this process

Prints one JSON object for each kind of body. Kinds: `words` and `letters` are texts, `ids` a list of token ids, `bools`
and `nested` lists of what no prompt may be, `escapes` a string without an end; `rules`, `references` and `lines` are
grammars. Nothing but loopback is attacked. Bars: p99 of `/health` and of `/ready` under 250 ms,
the longest gap of the stream under 1 s.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shlex
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
from started import ON_CPU, started

Figures = dict[str, Any]
KINDS = ("words", "letters", "ids", "bools", "nested", "escapes", "rules", "references", "lines")
_GRAMMAR_BYTES = 190_000  # of each grammar, at most
PROBED = ("/health", "/ready")
P99_MS, GAP_MS = 250.0, 1000.0
_WAIT_S = 300.0
_STEP_S = 0.02


def body(kind: str, size: int) -> bytes:
    """A completion's body of about `size` bytes; JSON but for `escapes`, which does not end."""
    if kind in ("rules", "references", "lines"):
        return json.dumps({"max_tokens": 8, "prompt": "a"} | grammar(kind, min(size, _GRAMMAR_BYTES))).encode()
    if kind == "escapes":
        return b'{"prompt": "' + b'\\"' * (size // 2)
    item = {"words": "the quick brown fox ", "letters": "a", "ids": "1,", "bools": "true,",
            "nested": "[" * 99 + "]" * 99 + ","}[kind]  # fmt: skip
    filler = (item * (size // len(item))).rstrip(",")
    prompt = f'"{filler}"' if kind in ("words", "letters") else f"[{filler}]"
    return f'{{"max_tokens": 1, "prompt": {prompt}}}'.encode()


def grammar(kind: str, size: int) -> Figures:
    """Of `rules` and `references` each names the next one; `lines` are empty."""
    if kind == "lines":
        return {"grammar": 'root ::= "a"' + "\n" * size}
    number = size // (40 if kind == "references" else 16)
    if kind == "rules":
        rules = "".join(f"r{i}: r{i + 1}\n" for i in range(number))
        return {"guided_grammar": f'start: r0\n{rules}r{number}: "a"\n'}
    links = {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(number)} | {f"d{number}": {"type": "integer"}}
    return {"guided_json": json.dumps({"$ref": "#/$defs/d0", "$defs": links})}


def attack(url: str, headers: dict[str, str], kind: str, bodies: int, size: int, seconds: float) -> Figures:
    """So many at once, each sent again for so long, once a line comes on standard input.

    Returns:
        How often each status came; 0: no answer.
    """
    content = body(kind, size)
    os.nice(10)  # a client on this machine shall not take the server's cores from it
    print("ready", flush=True)
    sys.stdin.readline()

    end_s = time.monotonic() + seconds

    def send(_: int) -> Counter[str]:
        came = Counter[str]()
        with httpx.Client(base_url=url, headers=headers, timeout=_WAIT_S) as http:
            while not came or time.monotonic() < end_s:
                try:
                    came[str(http.post("/v1/completions", content=content).status_code)] += 1
                except httpx.HTTPError:
                    came["0"] += 1
        return came

    with ThreadPoolExecutor(bodies) as pool:
        return dict(sum(pool.map(send, range(bodies)), Counter[str]()))


class Bystander:
    """A client that asks `/health` and `/ready` and reads streams, each in a thread, until `stop`."""

    def __init__(self, url: str, headers: dict[str, str]) -> None:
        self._url, self._headers = url, headers
        self._over, self._running = threading.Event(), threading.Event()
        self.answered_s: dict[str, list[float]] = {path: [] for path in PROBED}
        self.gaps_s: list[float] = []
        self.failures: list[str] = []
        works = (*(partial(self._watch, path) for path in PROBED), self._read)
        self._threads = [threading.Thread(target=self._guarded, args=(work,)) for work in works]

    def start(self) -> None:
        """Return once a stream runs."""
        for thread in self._threads:
            thread.start()
        if not self._running.wait(_WAIT_S):
            raise TimeoutError("the stream did not begin")

    def stop(self) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join(_WAIT_S)

    def _guarded(self, work: Any) -> None:
        try:
            with httpx.Client(base_url=self._url, headers=self._headers, timeout=_WAIT_S) as http:
                while not self._over.is_set():
                    work(http)
        except Exception as error:
            self.failures.append(f"{type(error).__name__}: {error}")
            self._running.set()

    def _watch(self, path: str, http: httpx.Client) -> None:
        begin_s = time.perf_counter()
        http.get(path).raise_for_status()
        self.answered_s[path].append(time.perf_counter() - begin_s)
        time.sleep(_STEP_S)

    def _read(self, http: httpx.Client) -> None:
        asked = {"prompt": "import os", "max_tokens": 500, "ignore_eos": True, "stream": True, "temperature": 0}
        with http.stream("POST", "/v1/completions", json=asked) as response:
            response.raise_for_status()
            last_s: float | None = None
            for line in response.iter_lines():
                if not line.startswith("data: {"):
                    continue
                if "error" in (event := json.loads(line[6:])):
                    raise RuntimeError(event["error"]["message"])
                now_s = time.perf_counter()
                if last_s is not None:
                    self.gaps_s.append(now_s - last_s)
                last_s = now_s
                self._running.set()
                if self._over.is_set():
                    return


def measure(
    url: str, kind: str, bodies: int = 16, size: int = 3_900_000, seconds: float = 10.0, key_file: Path | None = None
) -> Figures:
    """Attack from a process of its own while a bystander measures in this one; milliseconds."""
    command = [sys.executable, __file__, url, "--kind", kind, "--bodies", str(bodies), "--bytes", str(size)]
    command += ["--seconds", str(seconds), "--attack"]
    command += [] if key_file is None else ["--key-file", str(key_file)]
    bystander = Bystander(url, _headers(key_file))
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as attacker:
        assert attacker.stdin is not None
        attacker.stdout.readline()  # it is ready: the start of its interpreter is no part of the attack
        bystander.start()
        before = {path: len(times) for path, times in bystander.answered_s.items()}, len(bystander.gaps_s)
        begin_s = time.perf_counter()
        attacker.stdin.write("go\n")
        attacker.stdin.flush()
        said = attacker.stdout.readline()
        took_s = time.perf_counter() - begin_s
        bystander.stop()
    found: Figures = {
        "kind": kind, "bodies": bodies, "bytes": size, "seconds": round(took_s, 2), "statuses": json.loads(said)
    }  # fmt: skip
    for path, times in bystander.answered_s.items():
        name, during = path.strip("/"), sorted(times[before[0][path] :])
        found |= {f"{name}_{label}_ms": _at(during, at) for label, at in (("p50", 0.5), ("p99", 0.99), ("max", 1.0))}
        found[f"{name}_samples"] = len(during)
    gaps = sorted(bystander.gaps_s[before[1] :])
    return found | {
        "stream_gap_p99_ms": _at(gaps, 0.99), "stream_gap_max_ms": _at(gaps, 1.0), "failures": bystander.failures,
    }  # fmt: skip


FRAMINGS = {
    "trailers": [b"0\r\n", *[(b"X-A: " + b"b" * 50 + b"\r\n") * 1000] * 900],  # 50 MiB
    "one trailer": [b"0\r\nX-A: ", *[b"b" * 2**14] * 3200],
    "extensions": [(b"1;" + b"e" * 1000 + b"\r\nx\r\n") * 50] * 1000,
    "pipelined": [b"0\r\n\r\n", *[b"GET / HTTP/1.1\r\nHost: a\r\n\r\n" * 2500] * 20],
}


async def framed(kind: str, connections: int = 10) -> Figures:
    """What bytes that are no body take of the connections of the edge, while an application waits without an answer.

    Returns:
        Megabytes that the process grows by at most, and milliseconds for which its event loop was held at most.
    """
    import psutil
    import uvicorn

    from tiermoe.cluster.api.connections import BoundedConnection

    own, over = psutil.Process(), asyncio.Event()

    async def answer(scope: Any, receive: Any, send: Any) -> None:
        await over.wait()
        await send({"type": "http.response.start", "status": 401, "headers": [(b"content-length", b"0")]})
        await send({"type": "http.response.body"})

    async def pour(port: int) -> None:
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n")
        with suppress(ConnectionError, TimeoutError):  # it is refused, or not read
            for piece in FRAMINGS[kind]:
                writer.write(piece)
                await asyncio.wait_for(writer.drain(), 1)
        writer.transport.abort()

    config = uvicorn.Config(answer, http=BoundedConnection, lifespan="off", log_config=None, log_level="error")
    server = uvicorn.Server(config)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        serving = asyncio.create_task(server._serve([listener]))
        port, before = listener.getsockname()[1], own.memory_info().rss
        pours = [asyncio.create_task(pour(port)) for _ in range(connections)]
        grown, longest_s, last_s = 0, 0.0, time.thread_time()
        while not all(task.done() for task in pours):
            await asyncio.sleep(0.001)
            longest_s, last_s = max(longest_s, time.thread_time() - last_s), time.thread_time()
            grown = max(grown, own.memory_info().rss - before)
        over.set()
        server.should_exit = True
        await serving
    await asyncio.gather(*pours, return_exceptions=True)
    took = {"MiB": round(grown / 2**20, 1), "held_ms": round(1e3 * longest_s, 1)}
    return {"kind": kind, "connections": connections} | took


def _at(values: list[float], share: float) -> float | None:
    return round(1e3 * values[min(len(values) - 1, int(share * len(values)))], 1) if values else None


def _headers(key_file: Path | None) -> dict[str, str]:
    key = {} if key_file is None else {"Authorization": f"Bearer {key_file.read_text().split()[0]}"}
    return {"Content-Type": "application/json"} | key


def missed(found: Figures) -> list[str]:
    """The bars that figures of `measure` miss."""
    bars = {"health_p99_ms": P99_MS, "ready_p99_ms": P99_MS, "stream_gap_max_ms": GAP_MS}
    over = [
        f"{name} is {found[name]}, bar {bar:g}"
        for name, bar in bars.items()
        if found[name] is None or found[name] >= bar
    ]
    return over + found["failures"] + ([f"statuses {found['statuses']}"] if "0" in found["statuses"] else [])


@contextmanager
def attacked(url: str | None, options: list[str]) -> Iterator[str]:
    """The server at `url`, else one of its own with these options."""
    if url is not None:
        yield url
        return
    own = ("--port", "0", "--request-log", "off", *ON_CPU, *options)
    with (
        tempfile.TemporaryDirectory(prefix="attack-", dir="/tmp") as name,
        started(Path(name), "serve", *own) as server,
    ):
        yield server.url


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url", nargs="?", help="of a server on loopback; none: one is started and ended")
    parser.add_argument("--framing", action="store_true", help="no server: what bytes take that are no body")
    parser.add_argument("--check", action="store_true", help="exit with 1 where a bar is missed")
    parser.add_argument("--serve", default="", help="options of the server that is started")
    parser.add_argument("--key-file", type=Path)
    parser.add_argument("--kind", choices=KINDS, action="append")
    parser.add_argument("--bodies", type=int, default=16)
    parser.add_argument("--bytes", type=int, default=3_900_000)
    parser.add_argument("--seconds", type=float, default=10.0, help="for which each of them is sent again")
    parser.add_argument("--attack", action="store_true", help="only send the bodies")
    given = parser.parse_args()
    kinds, headers = given.kind or KINDS, _headers(given.key_file)
    if given.url is not None and urlsplit(given.url).hostname not in ("127.0.0.1", "localhost", "::1"):
        parser.error("only a server on loopback may be attacked")
    if given.framing:
        for kind in FRAMINGS:
            print(json.dumps(asyncio.run(framed(kind))), flush=True)
        return
    if given.attack:
        print(json.dumps(attack(given.url, headers, kinds[0], given.bodies, given.bytes, given.seconds)), flush=True)
        return
    over = list[str]()
    with attacked(given.url, shlex.split(given.serve)) as url:
        try:
            httpx.get(f"{url}/health", timeout=_WAIT_S).raise_for_status()
        except httpx.HTTPError as error:
            sys.exit(f"error: no server answers at {url} ({error}); start one, or give no address")
        for kind in kinds:
            found = measure(url, kind, given.bodies, given.bytes, given.seconds, given.key_file)
            print(json.dumps(found), flush=True)
            over += [f"{kind}: {what}" for what in missed(found)] if given.check else found["failures"]
    if over:
        sys.exit("\n".join(f"MISS {what}" for what in over))


if __name__ == "__main__":
    main()
