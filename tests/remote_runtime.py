"""A deployment that a program on another machine holds (`multinode/driver.py`), as a test sees it."""

from __future__ import annotations

import itertools
import json
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from ray_nodes import Node, environment

_DRIVER = Path(__file__).parent / "multinode" / "driver.py"
_START_DEADLINE_S = 150.0
_ANSWER_DEADLINE_S = 60.0
_POLL_S = 0.1


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
        answers = self._send("start", options=options, store=str(store))
        self.started = self._value(answers, time.monotonic() + _START_DEADLINE_S)
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
        return self._value(self._send("ask", method=method, arguments=arguments), time.monotonic() + _ANSWER_DEADLINE_S)

    def stats(self) -> dict[str, Any]:
        """The lead's counters."""
        return self._value(self._send("stats"), time.monotonic() + _ANSWER_DEADLINE_S)

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
            time.sleep(_POLL_S)  # each look is a question to the lead

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
        self._value(self._send("close"), time.monotonic() + _ANSWER_DEADLINE_S)

    def _send(self, do: str, **fields: Any) -> queue.SimpleQueue[dict[str, Any]]:
        answers: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        with self._lock:
            if self._ended:
                raise ConnectionError("the driver has ended")
            number = next(self._ids)
            self._answers[number] = answers
            assert self._process.stdin is not None
            self._process.stdin.write(json.dumps({"id": number, "do": do, **fields}) + "\n")
            self._process.stdin.flush()
        return answers

    def _value(self, answers: queue.SimpleQueue[dict[str, Any]], end_s: float) -> Any:
        return _unpacked(_next(answers, end_s))

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
