"""A program that deploys on the Ray of its machine and does as it is told: one JSON object per line, there and back.

    {"id": 1, "do": "start", "options": {...}, "store": PATH}  -> {"id": 1, "value": {...}}
    {"id": 2, "do": "generate", "prompt": [...], ...}          -> {"id": 2, "event": ...} ..., {"id": 2, "value": null}
    {"id": 3, "do": "stats"}                                   -> {"id": 3, "error": {"type": ..., "text": ...}}

Every command has a thread, so that one answers while another waits. At the end of its standard input it ends the
deployment and itself. `ray_nodes` is the other side.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import traceback
from collections.abc import Callable
from dataclasses import asdict
from typing import Any, TextIO

import ray

from tiermoe.actors.requests import GenerationRequest, SamplingParams
from tiermoe.cluster.config import engine_settings, load_run_config
from tiermoe.cluster.deploy import Deployment
from tiermoe.cluster.launch import Launch
from tiermoe.cluster.ray_session import NAMESPACE
from tiermoe.errors import TierMoeError


class Driver:
    """The deployment and what can be asked of it."""

    def __init__(self, out: TextIO) -> None:
        self._out, self._lock = out, threading.Lock()
        self._deployment: Deployment | None = None

    def run(self, command: dict[str, Any]) -> None:
        number = command.pop("id")

        def tell(**fields: Any) -> None:
            with self._lock:
                print(json.dumps({"id": number, **fields}), file=self._out, flush=True)

        try:
            method: Callable[..., Any] = getattr(self, command.pop("do"))
            tell(value=method(tell, **command))
        except BaseException as error:
            typed = isinstance(error, TierMoeError)
            tell(error={"type": type(error).__name__, "text": str(error) if typed else traceback.format_exc()})

    def start(self, tell: Callable[..., None], options: dict[str, Any], store: str) -> dict[str, Any]:
        config = load_run_config(None, options)
        deployment = Deployment(Launch(config, engine_settings(config), store))
        deployment.__enter__()
        self._deployment = deployment
        return {"plan": deployment.plan, "topology": deployment.topology.as_dict(), "startup_s": deployment.startup_s}

    def generate(self, tell: Callable[..., None], name: str, prompt: list[int], **sampling: Any) -> None:
        request = GenerationRequest(name, tuple(prompt), SamplingParams(**sampling))
        for event in self._running.generate(request):
            tell(event=asdict(event))

    def stats(self, tell: Callable[..., None]) -> dict[str, Any]:
        return self._running.stats().as_dict()

    def ask(self, tell: Callable[..., None], method: str, arguments: list[Any]) -> Any:
        return getattr(self._running, method)(*arguments)

    def health_of(self, tell: Callable[..., None], role: str) -> dict[str, Any]:
        actor = ray.get_actor(f"{self._running.id}/{role}", namespace=NAMESPACE)
        return ray.get(actor.health.remote(), timeout=60.0)

    def close(self, tell: Callable[..., None]) -> None:
        deployment, self._deployment = self._deployment, None
        if deployment is not None:
            deployment.close()

    @property
    def _running(self) -> Deployment:
        assert self._deployment is not None, "not started"
        return self._deployment


def main() -> None:
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever prints must not get between the lines
    driver = Driver(out)
    for line in sys.stdin:
        threading.Thread(target=driver.run, args=(json.loads(line),), daemon=True).start()
    driver.close(lambda **fields: None)


if __name__ == "__main__":
    main()
