"""Big bodies at once against a server, and what a bystander notices: `/health` and a stream of another client.

Kinds: `words` and `letters` are texts, `ids` a list of token ids, `bools` and `nested` lists of what no prompt may be,
`escapes` a string without an end; `rules`, `references` and `lines` are grammars.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import httpx

Figures = dict[str, Any]
KINDS = ("words", "letters", "ids", "bools", "nested", "escapes", "rules", "references", "lines")
_GRAMMAR_BYTES = 190_000  # of each grammar, at most
PROBED = ("/health", "/ready")
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
    command = [sys.executable, __file__, url, kind, str(bodies), str(size), str(seconds)]
    command += [] if key_file is None else [str(key_file)]
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


def _at(values: list[float], share: float) -> float | None:
    return round(1e3 * values[min(len(values) - 1, int(share * len(values)))], 1) if values else None


def _headers(key_file: Path | None) -> dict[str, str]:
    key = {} if key_file is None else {"Authorization": f"Bearer {key_file.read_text().split()[0]}"}
    return {"Content-Type": "application/json"} | key


def main() -> None:
    """The attacker's process: see `attack`."""
    url, kind, bodies, size, seconds, *key_file = sys.argv[1:]
    headers = _headers(Path(key_file[0]) if key_file else None)
    print(json.dumps(attack(url, headers, kind, int(bodies), int(size), float(seconds))), flush=True)


if __name__ == "__main__":
    main()
