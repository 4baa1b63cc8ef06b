"""A real `tiermoe serve`, streams of it, and signals to one of its processes while they run."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil

sys.path.insert(0, str(Path(__file__).parents[1]))
from started import ON_CPU, WAIT_S, Started, started

SHM = Path("/dev/shm")
_RETRY_S = 0.5


@dataclass
class Server(Started):
    """A server that is ready, its temporary folder, and what was in shared memory before it."""

    shared: set[str]
    tmp: Path

    def members(self, title: str) -> list[psutil.Process]:
        """Those of its processes with such a title (`title_of`); "serve" is itself."""
        if title == "serve":
            return [psutil.Process(self.process.pid)]
        return [process for process in self.family() if title_of(process) == title]

    def leftovers(self, family: Sequence[psutil.Process], within_s: float = 10.0) -> list[str]:
        """Processes of its family, shared memory and temporary folders that are there after its end."""
        end_s = time.monotonic() + within_s
        _, alive = psutil.wait_procs(family, timeout=within_s)
        # another program's, which has just ended, may be there for a moment
        while (shared := _unused(_shared() - self.shared)) and time.monotonic() < end_s:
            time.sleep(0.5)
        names = [f"process {process.pid}" for process in alive] + [f"/dev/shm/{name}" for name in sorted(shared)]
        return names + sorted(str(path) for path in self.tmp.glob("tiermoe*"))


@contextmanager
def served(
    *options: str, wait: bool = True, before: Callable[[], None] | None = None, tmp: Path | None = None
) -> Iterator[Server]:  # fmt: skip
    """A server of the default model on a free port, in a session of its own; whatever is left of it is ended.

    Args:
        before: run in its process before the program.
        tmp: its temporary folder; None: one in the folder of what it writes.
    """
    with tempfile.TemporaryDirectory(prefix="chaos-", dir="/tmp") as name:
        folder, shared = Path(name), _shared()
        tmp = tmp or folder / "tmp"
        tmp.mkdir(exist_ok=True)
        # without a request log: what it says is about its processes
        log = () if "--request-log-file" in options else ("--request-log", "off")
        with started(
            folder, "serve", "--port", "0", *log, *ON_CPU, *options, wait=wait, start_new_session=True,
            variables={"TMPDIR": str(tmp)}, preexec_fn=before,
        ) as it:  # fmt: skip
            yield Server(**vars(it), shared=shared, tmp=tmp)


@dataclass
class Stream:
    """What came of one streamed completion.

    Attributes:
        error: why it failed; None: it did not.
        retries: times that its client sent it again from the start.
        times_s: when its events came, monotonic clock.
    """

    text: str = ""
    error: str | None = None
    retries: int = 0
    times_s: list[float] = field(default_factory=list)


async def _stream(http: httpx.AsyncClient, body: dict[str, Any], stream: Stream) -> None:
    """One attempt. Raises HTTPError or RuntimeError: it failed."""
    stream.text = ""
    async with http.stream("POST", "/v1/completions", json=body | {"stream": True}) as response:
        if response.status_code != 200:
            raise RuntimeError(f"{response.status_code} {(await response.aread())[:200]!r}")
        ended = False
        async for line in response.aiter_lines():
            if line == "data: [DONE]":
                ended = True
            elif line.startswith("data: "):
                chunk = json.loads(line.removeprefix("data: "))
                if "error" in chunk:
                    raise RuntimeError(chunk["error"]["message"])
                stream.text += "".join(choice["text"] for choice in chunk["choices"])
                stream.times_s.append(time.monotonic())
        if not ended:
            raise RuntimeError("the stream ended without [DONE]")


async def _with_retries(http: httpx.AsyncClient, body: dict[str, Any], stream: Stream, tries: int) -> None:
    for attempt in range(tries):
        stream.retries = attempt
        try:
            await _stream(http, body, stream)
            stream.error = None
            return
        except (httpx.HTTPError, RuntimeError, ValueError) as error:
            stream.error = f"{type(error).__name__}: {error}"
            if attempt + 1 < tries:
                await asyncio.sleep(_RETRY_S * 2**attempt)


def run_streams(
    url: str, bodies: Sequence[dict[str, Any]], disturb: Callable[[], None] | None = None, *, after: int = 0,
    tries: int = 1, timeout_s: float = WAIT_S, headers: Mapping[str, str] | None = None,
) -> list[Stream]:
    """Stream all at once.

    Args:
        disturb: called once, in a thread, when `after` events have come.
        tries: times that each is sent before it counts as failed.
        timeout_s: of all of them.
        headers: of each.
    """
    streams = [Stream() for _ in bodies]

    async def run() -> None:
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
        async with httpx.AsyncClient(
            base_url=url, timeout=timeout_s, limits=limits, headers=headers, verify=False
        ) as http:
            tasks = [
                asyncio.create_task(_with_retries(http, body, stream, tries))
                for body, stream in zip(bodies, streams, strict=True)
            ]
            if disturb is not None:
                while sum(len(stream.times_s) for stream in streams) < after and not all(t.done() for t in tasks):
                    await asyncio.sleep(0.02)
                await asyncio.to_thread(disturb)
            done, late = await asyncio.wait(tasks, timeout=timeout_s)
            for task in late:
                task.cancel()
            for task, stream in zip(tasks, streams, strict=True):
                stream.error = f"not answered within {timeout_s:g} s" if task in late else stream.error
            for task in done:
                task.result()

    asyncio.run(run())
    return streams


def pause(process: psutil.Process, seconds: float) -> None:
    """Stop a process for so long."""
    process.send_signal(signal.SIGSTOP)
    try:
        time.sleep(seconds)
    finally:
        process.send_signal(signal.SIGCONT)


def title_of(process: psutil.Process) -> str:
    """`ray::CLASS` of an actor (Ray adds `.METHOD` while a method runs), a script's file; else the program's name."""
    try:
        first, *more = process.cmdline() or [""]
        scripts = [Path(argument).name for argument in more if argument.endswith(".py")]
        return first.partition(".")[0] if first.startswith("ray::") else (scripts or [process.name()])[0]
    except psutil.Error:
        return ""


def _unused(names: set[str]) -> set[str]:
    """Those of shared memory that no living process maps: what is mapped is another program's, on a busy machine."""
    used = set[str]()
    for maps in Path("/proc").glob("[0-9]*/maps") if names else ():
        with contextlib.suppress(OSError):  # it has ended, or is another user's
            used |= {Path(line.split()[-1]).name for line in maps.read_text().splitlines() if " /dev/shm/" in line}
    return names - used


def _shared() -> set[str]:
    return set(os.listdir(SHM)) if SHM.is_dir() else set()
