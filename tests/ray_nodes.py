"""Ray for tests: runtimes of the default model, a head node to join, nodes on `machines`, a remote driver."""

from __future__ import annotations

import itertools
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ray

from tiermoe.actors.requests import Generation, GenerationRequest, SamplingParams
from tiermoe.benchmarks.machines import BIN, Node, environment, free_port
from tiermoe.cluster.config import default_model_dir, engine_settings, load_run_config
from tiermoe.cluster.deploy import Deployment
from tiermoe.cluster.jobs.bench.serving import heldout_prompts
from tiermoe.cluster.jobs.prepare.needs import prepared_store
from tiermoe.cluster.launch import Launch, StandIns
from tiermoe.cluster.ray_session import NAMESPACE
from tiermoe.cluster.scratch import Scratch

_DRIVER = Path(__file__).parent / "multinode" / "driver.py"
_DEPLOY_DEADLINE_S = 150.0
_ANSWER_DEADLINE_S = 60.0


class RemoteError(Exception):
    """What the driver raised. `kind`: the name of its class."""

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(f"{kind}: {text}")
        self.kind, self.text = kind, text


class RemoteRuntime:
    """A driver on a node's machine, and the deployment that it was told to start.

    Every wait has a deadline and ends in TimeoutError. A driver that ends answers every question with ConnectionError.

    Attributes:
        started: plan, topology and startup_s of the deployment.
    """

    def __init__(self, node: Node) -> None:
        self._ids = itertools.count(1)
        self._answers: dict[int, queue.SimpleQueue[dict[str, Any]]] = {}
        self._lock = threading.Lock()
        self._ended = False
        self._process = subprocess.Popen(
            node.machine.command(sys.executable, str(_DRIVER)), env=environment(), text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True,
        )  # fmt: skip
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self.started: dict[str, Any] = {}

    def start(self, store: Path, **options: Any) -> dict[str, Any]:
        """Deploy; what the driver says of plan and topology.

        Raises:
            RemoteError: it was refused, or failed.
        """
        self.started = self._call("start", _DEPLOY_DEADLINE_S, options=options, store=str(store))
        return self.started

    def generate(
        self, prompt: Sequence[int], max_tokens: int, deadline_s: float = _ANSWER_DEADLINE_S, **sampling: Any
    ) -> Iterator[list[int]]:
        """The request's tokens as they come, piece by piece.

        Raises:
            RemoteError: the request failed.
        """
        end_s = time.monotonic() + deadline_s
        fields = {"prompt": list(prompt), "max_tokens": max_tokens, **sampling}
        answers = self._send("generate", name=f"r{next(self._ids)}", **fields)
        while (answer := _next(answers, end_s)) and "event" in answer:
            yield answer["event"]["token_ids"]
        _unpacked(answer)

    def tokens(self, prompt: Sequence[int], max_tokens: int, **sampling: Any) -> list[int]:
        """All of a request's tokens."""
        return [token for piece in self.generate(prompt, max_tokens, **sampling) for token in piece]

    def ask(self, method: str, *arguments: Any) -> Any:
        """What a method of the deployment returns."""
        return self._call("ask", method=method, arguments=arguments)

    def health_of(self, role: str) -> dict[str, Any]:
        """What another actor than the lead says of itself."""
        return self._call("health_of", role=role)

    def stats(self) -> dict[str, Any]:
        """The lead's counters."""
        return self._call("stats")

    def wait_until_healthy(self, deadline_s: float, wanted: Sequence[str] = ()) -> None:
        """Return once every peer of the lead is connected.

        Args:
            wanted: names of peers that must be among them.

        Raises:
            TimeoutError: it did not come to that.
        """
        end_s = time.monotonic() + deadline_s
        while True:
            health = self.ask("health")
            states = peers(health)
            if set(states) >= set(wanted) and all(state == "connected" for state in states.values()):
                return
            if time.monotonic() > end_s:
                raise TimeoutError(f"after {deadline_s:g} s: {health}")
            time.sleep(0.1)  # each look is a question to the lead

    def close(self) -> None:
        """End the deployment, and the driver with it. Idempotent."""
        if self._process.stdin is not None:
            self._process.stdin.close()
        try:
            self._process.wait(timeout=_ANSWER_DEADLINE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
        self._reader.join(timeout=_ANSWER_DEADLINE_S)

    def stop(self) -> None:
        """End the deployment; the driver waits for the next `start`."""
        self._call("close")

    def _send(self, do: str, **fields: Any) -> queue.SimpleQueue[dict[str, Any]]:
        answers: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        with self._lock:
            if self._ended:
                raise ConnectionError("the driver has ended")
            number = next(self._ids)
            self._answers[number] = answers
            self._process.stdin.write(json.dumps({"id": number, "do": do, **fields}) + "\n")
            self._process.stdin.flush()
        return answers

    def _call(self, do: str, deadline_s: float = _ANSWER_DEADLINE_S, **fields: Any) -> Any:
        return _unpacked(_next(self._send(do, **fields), time.monotonic() + deadline_s))

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            answer = json.loads(line)
            self._answers[answer["id"]].put(answer)
        with self._lock:
            self._ended = True
            for answers in self._answers.values():
                answers.put({"error": {"type": "ConnectionError", "text": "the driver has ended"}})


def peers(health: dict[str, Any]) -> dict[str, str]:
    """Of the lead: peer's name -> connected or lost."""
    return {name: state for name, state in health.items() if "/" in name}


def _next(answers: queue.SimpleQueue[dict[str, Any]], end_s: float) -> dict[str, Any]:
    try:
        return answers.get(timeout=max(0.0, end_s - time.monotonic()))
    except queue.Empty:
        raise TimeoutError("the driver did not answer in time") from None


def _unpacked(answer: dict[str, Any]) -> Any:
    if "error" in answer:
        if answer["error"]["type"] == "ConnectionError":
            raise ConnectionError(answer["error"]["text"])
        raise RemoteError(answer["error"]["type"], answer["error"]["text"])
    return answer["value"]


BACK_S = 60.0


def prompt() -> tuple[int, ...]:
    """32 tokens that the default model was not trained on."""
    return tuple(heldout_prompts(default_model_dir(), 1, 32)[0])


@contextmanager
def deployed(worker_class: type | None = None, **options: Any) -> Iterator[Deployment]:
    """A runtime with one thread a worker, whose leads are of this class."""
    config = load_run_config(None, {"threads": 1, "device": "cpu"} | options)
    settings = engine_settings(config)
    store = str(prepared_store(config, settings))
    with Deployment(Launch(config, settings, store, StandIns(worker_class))) as deployment:
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


def actor_health(runtime: Deployment, role: str) -> dict[str, Any]:
    """What an actor of a deployment's first group says of itself."""
    actor = ray.get_actor(f"{runtime.id}/{role}", namespace=NAMESPACE)
    found: dict[str, Any] = ray.get(actor.health.remote(), timeout=_ANSWER_DEADLINE_S)
    return found


def until(holds: Callable[[], bool], what: Callable[[], object]) -> None:
    """Return once something holds; each look is a round trip, and all of them are bounded."""
    end_s = time.monotonic() + BACK_S
    while not holds():
        assert time.monotonic() < end_s, what()


@contextmanager
def head(*options: str, cpus: int = 2) -> Iterator[str]:
    """A head node without authentication; its address."""
    scratch = Scratch()
    port = free_port()
    command = [
        str(BIN / "ray"), "start", "--head", f"--port={port}", f"--num-cpus={cpus}", f"--temp-dir={scratch.ray}",
        "--include-dashboard=false", "--disable-usage-stats", "--object-store-memory=100000000", *options,
    ]  # fmt: skip
    try:
        with (scratch.path / "start.log").open("w") as log:  # Ray's servers inherit it: not a pipe, which never ends
            subprocess.run(command, env=joining_environment(), stdout=log, stderr=log, timeout=90, check=True)
        yield f"127.0.0.1:{port}"
    finally:
        scratch.close()


def joining_environment(mode: str = "disabled") -> dict[str, str]:
    """Of a program that joins with this mode of authentication."""
    return os.environ | {"RAY_AUTH_MODE": mode}
