"""Runtimes of the default model on Ray, requests during which a process is killed, and a head node to join."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tiermoe.actors.requests import Generation, GenerationRequest, SamplingParams
from tiermoe.cluster.config import default_model_dir, engine_settings, load_run_config
from tiermoe.cluster.deploy import Deployment
from tiermoe.cluster.jobs.bench.serving import heldout_prompts, prepared_store
from tiermoe.cluster.scratch import Scratch

BIN = Path(sys.executable).parent
BACK_S = 60.0


def prompt() -> tuple[int, ...]:
    """32 tokens that the default model was not trained on."""
    return tuple(heldout_prompts(default_model_dir(), 1, 32)[0])


@contextmanager
def deployed(**options: Any) -> Iterator[Deployment]:
    """A runtime with one thread a worker."""
    config = load_run_config(None, {"threads": 1, "device": "cpu"} | options)
    settings = engine_settings(config)
    with Deployment(config, settings, str(prepared_store(config, settings))) as deployment:
        yield deployment


def generate(runtime: Deployment, ids: tuple[int, ...], tokens: int, kill: int | None = None) -> list[int]:
    """The tokens of one request; `kill` is a process that is killed when eight of them are there."""
    generation = Generation("r")
    sampling = SamplingParams(max_tokens=tokens, ignore_eos=True)
    for event in runtime.generate(GenerationRequest("r", ids, sampling)):
        generation.add(event)
        if kill is not None and len(generation.token_ids) >= 8:
            os.kill(kill, signal.SIGKILL)
            kill = None
    assert generation.error is None, generation.error
    return generation.token_ids


def until(holds: Callable[[], bool], what: Callable[[], object]) -> None:
    """Return once something holds; each look is a round trip, and all of them are bounded."""
    end_s = time.monotonic() + BACK_S
    while not holds():
        assert time.monotonic() < end_s, what()


@contextmanager
def head(*options: str, cpus: int = 2) -> Iterator[str]:
    """A head node without authentication; its address."""
    scratch = Scratch()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    command = [
        str(BIN / "ray"), "start", "--head", f"--port={port}", f"--num-cpus={cpus}", f"--temp-dir={scratch.path}",
        "--include-dashboard=false", "--disable-usage-stats", "--object-store-memory=100000000", *options,
    ]  # fmt: skip
    try:
        with (scratch.path / "start.log").open("w") as log:  # Ray's servers inherit it: not a pipe, which never ends
            subprocess.run(command, env=environment(), stdout=log, stderr=log, timeout=90, check=True)
        yield f"127.0.0.1:{port}"
    finally:
        scratch.close()


def environment(mode: str = "disabled") -> dict[str, str]:
    """Of a program that joins with this mode of authentication."""
    return os.environ | {"RAY_AUTH_MODE": mode}
