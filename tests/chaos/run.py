"""Kill and stop each process of `tiermoe serve` under twenty streams, and change what is around it; what clients saw.

    python tests/chaos/run.py --out docs/results            (make chaos)
    python tests/chaos/run.py --out docs/results --around   the second table only
    python tests/chaos/run.py --only lead raylet            some rows, without a page

For each process x (SIGKILL, SIGSTOP for 5 s): twenty streamed completions, half greedy, half sampled with seeds; the
signal comes when 200 of their 1,280 tokens have come. Then: how many failed, how many are what an undisturbed server
gives, the longest silence of a stream, when `serve` said something, whether it still serves, what is left. A second
table has what changes around the server (`surroundings.py`): files, certificates, a machine that sleeps.
"""

from __future__ import annotations

import argparse
import itertools
import json
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx
import psutil
from rig import Server, Stream, pause, run_streams, served
from surroundings import SURROUNDINGS, listed

from tiermoe.cluster.host import cpu, versions
from tiermoe.cluster.jobs.bench.metrics import fill_page, markdown

STREAMS, TOKENS, AFTER, STOP_S = 20, 64, 200, 5.0
LATER = 4  # streams that are sent again after a change around a server
NOTICED_S, READY_S, MINUTES = 10.0, 60.0, 20.0
EDGE_TRIES = 5  # of a client, where the process that it is connected to dies
_NEAR_DATA = ("--policy", "context-ndp-full", "--budget", "25%", "--shards", "2", "--ndp-workers", "2")
_TWO_LEADS = ("--policy", "next-gate", "--budget", "25%", "--replicas", "2")
_MAPS = ("--policy", "fmoe", "--budget", "25%")
# name -> (title, options, whether a client's retry is allowed, whether the server lives on)
PROCESSES: dict[str, tuple[str, tuple[str, ...], bool, bool]] = {
    "NDP worker": ("ray::NdpWorker", _NEAR_DATA, False, True),
    "shard": ("ray::ShardWorker", _NEAR_DATA, False, True),
    "store": ("ray::StoreWorker", _NEAR_DATA, False, True),
    "endpoint directory": ("ray::EndpointDirectory", _NEAR_DATA, False, True),
    "lead": ("ray::GpuWorker", _NEAR_DATA, False, True),
    "edge": ("ray::Edge", _NEAR_DATA, True, True),
    "helper that clears up": ("scratch.py", _NEAR_DATA, False, True),
    "one of two leads": ("ray::GpuWorker", _TWO_LEADS, False, True),
    "matcher": ("ray::Matcher", _MAPS, False, True),
    "dashboard agent": ("ray::DashboardAgent", _NEAR_DATA, False, False),
    "runtime environment agent": ("ray::RuntimeEnvAgent", _NEAR_DATA, False, False),
    "GCS": ("gcs_server", _NEAR_DATA, False, False),
    "raylet": ("raylet", _NEAR_DATA, False, False),
    "serve": ("serve", _NEAR_DATA, False, False),
}
_PAGE = "# Reliability\n\n<!-- table: rows -->\n<!-- end -->\n\n<!-- table: bars -->\n<!-- end -->\n"
_NO_FAILURE = (
    "NDP worker", "shard", "store", "matcher", "lead", "edge", "one of two leads",
)  # fmt: skip


def bodies() -> list[dict[str, Any]]:
    """The requests."""
    sampled = [{"temperature": 0.9, "seed": i} if i % 2 else {"temperature": 0} for i in range(STREAMS)]
    prompts = [f"def read_{i}(path):" for i in range(STREAMS)]
    return [
        {"prompt": prompt, "max_tokens": TOKENS, "ignore_eos": True} | how
        for prompt, how in zip(prompts, sampled, strict=True)
    ]


class Signalled:
    """What a signal did, as the server's output and its process show it."""

    def __init__(self, server: Server, victim: psutil.Process, number: signal.Signals) -> None:
        self._server, self._victim, self._number = server, victim, number
        self.at_s = 0.0
        self.noticed_s: float | None = None
        self.said: list[str] = []
        self._over = threading.Event()

    def __call__(self) -> None:
        before = len(self._server.said())
        self.at_s = time.monotonic()
        threading.Thread(target=self._listen, args=(before,), daemon=True).start()
        if self._number == signal.SIGKILL:
            self._victim.kill()
        else:
            pause(self._victim, STOP_S)

    def close(self) -> None:
        self._over.set()

    def _listen(self, before: int) -> None:
        while not self._over.wait(0.1):
            self.said = self._server.said()[before:].splitlines()
            if self.said and self.noticed_s is None:
                self.noticed_s = time.monotonic() - self.at_s


def cell(server: Server, name: str, number: signal.Signals, expected: list[str]) -> dict[str, Any]:
    """One row: a process, a signal."""
    title, _, retried, lives = PROCESSES[name]
    victim = server.members(title)[0]
    family = server.family()
    act = Signalled(server, victim, number)
    ends = not lives and number == signal.SIGKILL
    streams = run_streams(
        server.url, bodies(), act, after=AFTER, tries=EDGE_TRIES if retried else 1, timeout_s=30.0 if ends else 120.0
    )
    row: dict[str, Any] = {
        "process": name, "signal": number.name, "streams": STREAMS,
        "failed": sum(stream.error is not None for stream in streams),
        "retried": sum(stream.retries > 0 for stream in streams),
        "identical": sum(stream.text == text for stream, text in zip(streams, expected, strict=True)),
        "longest_silence_s": round(max(map(_silence, streams)), 2),
        "errors": sorted({stream.error for stream in streams if stream.error is not None})[:2],
    }  # fmt: skip
    if ends:
        try:
            row["exit_code"] = server.process.wait(60)
        except subprocess.TimeoutExpired:
            row["exit_code"] = None
        row["ended_s"] = round(time.monotonic() - act.at_s, 2)
        row["left"] = server.leftovers(family)
    else:
        row["ready_s"] = _ready_s(server, act.at_s)
    act.close()
    row |= {"noticed_s": act.noticed_s and round(act.noticed_s, 2), "said": act.said}
    return row


def surrounding(name: str) -> dict[str, Any]:
    """One row of the second table: what changes around a server of its own while streams run."""
    with (
        SURROUNDINGS[name]() as wanted,
        served(*_NEAR_DATA, *wanted.options, before=wanted.before, tmp=wanted.tmp) as server,
    ):
        expected = run_streams(server.url, bodies(), headers=wanted.headers)
        assert all(stream.error is None for stream in expected), expected
        before, done_s, heard_s, says = len(server.said()), 0.0, list[float](), wanted.says

        def listen() -> None:
            while time.monotonic() < done_s + NOTICED_S and not heard_s:
                if listed(server.said()[before:].splitlines(), says):
                    heard_s.append(time.monotonic() - done_s)
                time.sleep(0.1)

        listener = threading.Thread(target=listen)

        def disturb() -> None:
            nonlocal done_s, says
            wanted.act(server)
            says = () if wanted.in_vain() else says
            done_s = time.monotonic()
            listener.start()

        streams = run_streams(server.url, bodies(), disturb, after=AFTER, headers=wanted.headers)
        listener.join()
        ready_s = _ready_s(server, done_s, wanted.headers)
        later = run_streams(server.url, bodies()[:LATER], headers=wanted.headers)
        row = {
            "surrounding": name, "streams": STREAMS,
            "failed": sum(stream.error is not None for stream in streams),
            "identical": sum(a.text == b.text for a, b in zip(streams, expected, strict=True)),
            "longest_silence_s": round(max(map(_silence, streams)), 2),
            "errors": sorted({stream.error for stream in streams if stream.error is not None})[:2],
            "heard": bool(heard_s), "noticed_s": round(heard_s[0], 2) if says and heard_s else None,
            "said": server.said()[before:].splitlines(),
            "wrong": wanted.check(server), "ready_s": ready_s,
            "later": sum(a.text == b.text for a, b in zip(later, expected, strict=False)),
            "later_errors": sorted({stream.error for stream in later if stream.error is not None})[:2],
        }  # fmt: skip
        family = server.family()
        server.process.terminate()
        server.process.wait(60)
        return row | {"left": server.leftovers(family)}


def _silence(stream: Stream) -> float:
    """The longest time between two events of a stream, in seconds."""
    times = stream.times_s
    return max((b - a for a, b in itertools.pairwise(times)), default=0.0)


def _ready_s(server: Server, since_s: float, headers: Mapping[str, str] | None = None) -> float | None:
    """Seconds from then until /ready says yes; None: it does not within a minute."""
    end_s = time.monotonic() + READY_S
    while time.monotonic() < end_s:
        try:
            if httpx.get(f"{server.url}/ready", timeout=5.0, headers=headers, verify=False).status_code == 200:
                return round(time.monotonic() - since_s, 2)
        except httpx.HTTPError:
            pass
        time.sleep(0.25)
    return None


def rows(names: list[str], show: Callable[[dict[str, Any]], None]) -> list[dict[str, Any]]:
    """All of them; processes with the same options share a server until one ends it."""
    wanted = [(name, number) for name in names for number in (signal.SIGSTOP, signal.SIGKILL)]
    found: list[dict[str, Any]] = []
    expected: dict[tuple[str, ...], list[str]] = {}
    while len(found) < len(wanted):
        options, first = PROCESSES[wanted[len(found)][0]][1], len(found)
        with served(*options) as server:
            if options not in expected:
                undisturbed = run_streams(server.url, bodies())
                assert all(stream.error is None for stream in undisturbed), undisturbed
                expected[options] = [stream.text for stream in undisturbed]
            for name, number in wanted[first:]:
                if server.process.poll() is not None or PROCESSES[name][1] != options:
                    break
                found.append(cell(server, name, number, expected[options]))
                show(found[-1])
            if server.process.poll() is None:
                family = server.family()
                server.process.terminate()
                server.process.wait(60)
                left = server.leftovers(family)
                for row in found[first:]:
                    row["left"] = left
    return found


def bars(found: list[dict[str, Any]], minutes: float) -> list[dict[str, Any]]:
    """What must hold, and whether it does: what is missed first."""
    made = [{"bar": f"all rows within {MINUTES:g} minutes", "passed": minutes <= MINUTES}]
    for row in found:
        what = f"{row['process']}, {row['signal']}"
        if row["process"] in _NO_FAILURE:
            fine = row["failed"] == 0 and row["identical"] == STREAMS
            made.append({"bar": f"{what}: 0 failed, all identical", "passed": fine})
        # a row without `left`: the next signal ended its server, whose row has it
        elif row["signal"] == "SIGKILL" and row["process"] == "serve":
            made.append({"bar": f"{what}: nothing left", "passed": not row.get("left")})
        elif row["signal"] == "SIGKILL":
            fine = row["noticed_s"] is not None and row["noticed_s"] <= NOTICED_S and not row.get("left")
            made.append({"bar": f"{what}: noticed within {NOTICED_S:g} s, nothing left", "passed": fine})
        else:
            made.append({"bar": f"{what}: serves after it", "passed": row["ready_s"] is not None})
    return sorted(made, key=lambda bar: bar["passed"])


def bars_around(found: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The bars of the second table: what is missed first."""
    made = []
    for row in found:
        fine = row["failed"] == 0 and row["identical"] == STREAMS and row["wrong"] is None
        made.append({"bar": f"{row['surrounding']}: nothing lost, nothing wrong", "passed": fine})
        fine = row["heard"] and row["ready_s"] is not None and row["later"] == LATER and not row["left"]
        made.append({"bar": f"{row['surrounding']}: said within {NOTICED_S:g} s, serves after it", "passed": fine})
    return sorted(made, key=lambda bar: bar["passed"])


def table(found: list[dict[str, Any]]) -> list[str]:
    """The rows, in Markdown."""
    head = ("process", "signal", "failed", "sent again", "identical", "longest silence, s", "said after, s", "after it")
    body = []
    for row in found:
        if "exit_code" in row:
            after = f"exit {row['exit_code']} after {row['ended_s']} s, {len(row['left'])} left"
        else:
            after = "not ready" if row["ready_s"] is None else "serves"
            if "left" in row:  # else the next signal ended the server
                after += f"; at its end {len(row['left'])} left"
        said = "-" if row["noticed_s"] is None else str(row["noticed_s"])
        counts = [f"{row[key]}/{row['streams']}" for key in ("failed", "retried", "identical")]
        body.append((row["process"], row["signal"], *counts, str(row["longest_silence_s"]), said, after))
    return markdown(head, body)


def table_around(around: list[dict[str, Any]]) -> list[str]:
    """The rows of the second table, in Markdown."""
    head = ("around it", "failed", "identical", "longest silence, s", "said after, s", "after it")
    body = []
    for row in around:
        said = "not said" if not row["heard"] else "-" if row["noticed_s"] is None else str(row["noticed_s"])
        after = row["wrong"] or ("not ready" if row["ready_s"] is None else f"{row['later']}/{LATER} identical")
        counts = [f"{row[key]}/{row['streams']}" for key in ("failed", "identical")]
        silence = str(row["longest_silence_s"])
        body.append((row["surrounding"], *counts, silence, said, f"{after}; at its end {len(row['left'])} left"))
    return markdown(head, body)


def write(out: Path, record: dict[str, Any], made: Callable[[list[dict[str, Any]]], list[str]]) -> None:
    """NAME.json, and the tables of NAME.md, whose words stay."""
    out.mkdir(parents=True, exist_ok=True)
    (out / f"{record['name']}.json").write_text(json.dumps(record, indent=1) + "\n")
    held = [(bar["bar"], "holds" if bar["passed"] else "**missed**") for bar in record["bars"]]
    tables = {"rows": made(record["rows"]), "bars": markdown(("bar", ""), held)}
    fill_page(out / f"{record['name']}.md", tables.__getitem__, _PAGE)


def main() -> None:
    """Run, write, and exit with 1 where a bar is missed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="folder of the pages reliability and surroundings; all rows")
    parser.add_argument("--around", action="store_true", help="with --out: the page surroundings only")
    parser.add_argument("--only", nargs="*", choices=[*PROCESSES, *SURROUNDINGS], help="these rows; writes nothing")
    given = parser.parse_args()
    if (given.out is None) == (given.only is None):
        parser.error("give --out for all rows, or --only for some of them: a page has the rows of one run")
    wanted = given.only or [*([] if given.around else PROCESSES), *SURROUNDINGS]
    common = {
        "hardware": cpu(), "versions": versions(), "executor": "emulated on cpu",
        "settings": {"streams": STREAMS, "tokens": TOKENS, "after_tokens": AFTER, "stop_s": STOP_S,
                     "edge_tries": EDGE_TRIES},
    }  # fmt: skip
    held: list[dict[str, Any]] = []
    begin_s = time.monotonic()
    if processes := [name for name in wanted if name in PROCESSES]:
        found = rows(processes, lambda row: print(json.dumps(row), flush=True))
        minutes = (time.monotonic() - begin_s) / 60
        held += bars(found, minutes)
        ended = [row["longest_silence_s"] for row in found if (row["process"], row["signal"]) == ("lead", "SIGKILL")]
        record = {"name": "reliability", **common, "minutes": round(minutes, 1), "rows": found, "bars": held,
                  "lead_recovers_s": statistics.median(ended) if ended else None}  # fmt: skip
        if given.out is not None:
            write(given.out, record, table)
    if names := [name for name in wanted if name in SURROUNDINGS]:
        around = []
        for name in names:
            around.append(surrounding(name))
            print(json.dumps(around[-1]), flush=True)
        record = {"name": "surroundings", **common, "rows": around, "bars": bars_around(around)}
        held += record["bars"]
        if given.out is not None:
            write(given.out, record, table_around)
    for bar in held:
        print("pass" if bar["passed"] else "MISS", bar["bar"])
    sys.exit(not all(bar["passed"] for bar in held))


if __name__ == "__main__":
    main()
