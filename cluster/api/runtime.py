"""A runtime that belongs to a Serve application: `tiermoe up` in a process of its own, beside this replica.

A runtime needs a driver of its own in Ray, which a replica is not; so the replica keeps one. It ends with the replica,
and Serve starts a new one, with a new runtime, when it has died.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ray
import yaml

from ...errors import RuntimeFailure, TierMoeError
from ..config import load_run_config
from ..lead import Lead
from ..names import LEAD
from ..ray_session import NAMESPACE, head_address
from ..registry import Registry

_POLL_S = 0.2
_END_DEADLINE_S = 60.0


class RuntimeProcess:
    """Serve deployment of one replica: starts a runtime in this Ray, and keeps it.

    Args:
        config: run configuration, as `tiermoe up --config`; None: the defaults. Whatever Ray it names, the runtime
            starts in the one that Serve runs in.
        overrides: keys of a run configuration, over `config`.

    Raises:
        TierMoeError: the configuration is refused, or the runtime did not start.
    """

    def __init__(self, config: str | None, overrides: Mapping[str, Any]) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._folder = tempfile.TemporaryDirectory(prefix="tiermoe-serve-")
        checked = load_run_config(config, overrides)
        # what was given, and nothing else: a default is not the same as a choice (`ray.num_cpus`)
        given = checked.model_dump(mode="json", exclude_unset=True)
        given["ray"] = given.get("ray", {}) | {"address": head_address()}
        file = Path(self._folder.name) / "run.yaml"
        file.write_text(yaml.safe_dump(given), encoding="utf-8")
        self._log = Path(self._folder.name) / "log"
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tiermoe.cluster.cli", "up", "--config", str(file)],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log,
            )  # fmt: skip
        self._id = self._wait_until_ready()

    def runtime_id(self) -> str:
        """The runtime's id."""
        return self._id

    def check_health(self) -> None:
        """Serve asks this; raises RuntimeFailure when the runtime has ended."""
        if self._process is not None and self._process.poll() is not None:
            raise RuntimeFailure(f"the runtime ended: {self._last_line()}", "Serve starts another")

    def __del__(self) -> None:
        """Serve calls this when the replica shall end."""
        if self._process is not None and self._process.poll() is None:
            self._process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_END_DEADLINE_S)
            if self._process.poll() is None:
                self._process.kill()
        self._folder.cleanup()

    def _wait_until_ready(self) -> str:
        """`up` lists itself once it has a Ray, its lead answers once it serves; `up` has a deadline for both."""
        assert self._process is not None
        registry = Registry()
        while self._process.poll() is None:
            for entry in registry.entries():
                if entry.pid == self._process.pid and _serves(entry.deployment):
                    return entry.deployment
            time.sleep(_POLL_S)
        raise RuntimeFailure(f"the runtime did not start: {self._last_line()}", "try it with `tiermoe up`")

    def _last_line(self) -> str:
        lines = self._log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        return lines[-1].removeprefix("error: ") if lines else "it said nothing"


def _serves(deployment: str) -> bool:
    """Whether a deployment's lead has started."""
    try:
        Lead(ray.get_actor(f"{deployment}/{LEAD}", namespace=NAMESPACE)).ask("plan")
    except (ValueError, TierMoeError):  # ValueError: there is no such actor yet
        return False
    return True
