"""Big bodies at once against a server, and what a bystander notices: `/health` and a stream of another client.

    python tests/edge_attack.py http://127.0.0.1:8000 [--key-file FILE] [--bodies 16] [--bytes 3900000]
    python tests/edge_attack.py http://127.0.0.1:8000 --bytes 50 --kind words    what the machine does without an attack

    python tests/edge_attack.py --held           seconds of CPU for which a body holds the event loop, in this process

Prints one JSON object for each kind of body. Kinds: `words` and `letters` are texts, `ids` a list of token ids, `bools`
a list of what no prompt may be. Nothing but loopback is attacked.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx

Figures = dict[str, Any]
KINDS = ("words", "letters", "ids", "bools")
_WAIT_S = 300.0
_STEP_S = 0.02


def body(kind: str, size: int) -> bytes:
    """A completion's body of about `size` bytes, valid JSON."""
    item = {"words": "the quick brown fox ", "letters": "a", "ids": "1,", "bools": "true,"}[kind]
    filler = (item * (size // len(item))).rstrip(",")
    prompt = f'"{filler}"' if kind in ("words", "letters") else f"[{filler}]"
    return f'{{"max_tokens": 1, "prompt": {prompt}}}'.encode()


def attack(url: str, headers: dict[str, str], kind: str, bodies: int, size: int) -> Figures:
    """Send the bodies at once when a line comes on standard input; how often each status came (0: no answer)."""
    content = body(kind, size)
    os.nice(10)  # a client on this machine shall not take the server's cores from it
    print("ready", flush=True)
    sys.stdin.readline()

    def send(_: int) -> int:
        try:
            sent = httpx.post(f"{url}/v1/completions", content=content, headers=headers, timeout=_WAIT_S)
            return sent.status_code
        except httpx.HTTPError:
            return 0

    with ThreadPoolExecutor(bodies) as pool:
        return {str(status): count for status, count in Counter(pool.map(send, range(bodies))).items()}


class Bystander:
    """A client that watches `/health` and reads streams, each in a thread, until `stop`."""

    def __init__(self, url: str, headers: dict[str, str]) -> None:
        self._url, self._headers = url, headers
        self._over, self._running = threading.Event(), threading.Event()
        self.health_s: list[float] = []
        self.gaps_s: list[float] = []
        self.failures: list[str] = []
        self._threads = [threading.Thread(target=self._guarded, args=(work,)) for work in (self._watch, self._read)]

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

    def _watch(self, http: httpx.Client) -> None:
        begin_s = time.perf_counter()
        http.get("/health").raise_for_status()
        self.health_s.append(time.perf_counter() - begin_s)
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


def measure(url: str, kind: str, bodies: int = 16, size: int = 3_900_000, key_file: Path | None = None) -> Figures:
    """Attack from a process of its own while a bystander measures in this one; milliseconds."""
    command = [sys.executable, __file__, url, "--kind", kind, "--bodies", str(bodies), "--bytes", str(size), "--attack"]
    command += [] if key_file is None else ["--key-file", str(key_file)]
    bystander = Bystander(url, _headers(key_file))
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as attacker:
        assert attacker.stdin is not None
        assert attacker.stdout is not None
        attacker.stdout.readline()  # it is ready: the start of its interpreter is no part of the attack
        bystander.start()
        before = len(bystander.health_s), len(bystander.gaps_s)
        begin_s = time.perf_counter()
        attacker.stdin.write("go\n")
        attacker.stdin.flush()
        said = attacker.stdout.readline()
        seconds = time.perf_counter() - begin_s
        bystander.stop()
    health, gaps = sorted(bystander.health_s[before[0] :]), sorted(bystander.gaps_s[before[1] :])
    return {
        "kind": kind, "bodies": bodies, "bytes": size, "seconds": round(seconds, 2), "statuses": json.loads(said),
        "health_p50_ms": _at(health, 0.5), "health_p99_ms": _at(health, 0.99), "health_max_ms": _at(health, 1.0),
        "health_samples": len(health),
        "stream_gap_p99_ms": _at(gaps, 0.99), "stream_gap_max_ms": _at(gaps, 1.0), "failures": bystander.failures,
    }  # fmt: skip


async def held(kind: str, size: int = 3_900_000) -> Figures:
    """For how long the event loop is held while the application refuses one body: a figure that no load changes."""
    from fake_api import FakeBackend

    from tiermoe.cluster.api.routes import make_app
    from tiermoe.cluster.api.service import Service
    from tiermoe.cluster.api.settings import LimitSettings
    from tiermoe.cluster.config import default_model_dir
    from tiermoe.cluster.prompt import load_tokenizer

    backend = FakeBackend()
    backend.plan["max_prompt_tokens"] = 2048
    app = make_app(Service(backend, load_tokenizer(default_model_dir()), None, "fake", LimitSettings()), None)
    content = body(kind, size)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as http:
        work = asyncio.ensure_future(http.post("/v1/completions", content=content, headers=_headers(None)))
        longest_s, last_s = 0.0, time.thread_time()
        while not work.done():
            await asyncio.sleep(0.001)
            longest_s, last_s = max(longest_s, time.thread_time() - last_s), time.thread_time()
    return {"kind": kind, "bytes": size, "status": work.result().status_code, "held_ms": round(1e3 * longest_s, 1)}


def _at(values: list[float], share: float) -> float | None:
    return round(1e3 * values[min(len(values) - 1, int(share * len(values)))], 1) if values else None


def _headers(key_file: Path | None) -> dict[str, str]:
    key = {} if key_file is None else {"Authorization": f"Bearer {key_file.read_text().split()[0]}"}
    return {"Content-Type": "application/json"} | key


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url", nargs="?", default="http://127.0.0.1:8000")
    parser.add_argument("--held", action="store_true", help="no server: how long the event loop is held")
    parser.add_argument("--key-file", type=Path)
    parser.add_argument("--kind", choices=KINDS, action="append")
    parser.add_argument("--bodies", type=int, default=16)
    parser.add_argument("--bytes", type=int, default=3_900_000)
    parser.add_argument("--attack", action="store_true", help="only send the bodies")
    given = parser.parse_args()
    if urlsplit(given.url).hostname not in ("127.0.0.1", "localhost", "::1"):
        parser.error("only a server on loopback may be attacked")
    for kind in given.kind or KINDS:
        if given.held:
            found: Any = asyncio.run(held(kind, given.bytes))
        elif given.attack:
            found = attack(given.url, _headers(given.key_file), kind, given.bodies, given.bytes)
        else:
            found = measure(given.url, kind, given.bodies, given.bytes, given.key_file)
        print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
