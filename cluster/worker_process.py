"""A worker in a process of its own, without Ray: for benchmarks, evaluation and tests.

The parent writes the role to the child's standard input and reads the address from its standard output. The child ends
when its standard input does, so it never outlives its parent, however that dies.
"""

from __future__ import annotations

import base64
import contextlib
import importlib
import os
import pickle
import select
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from ..actors.policies.fmoe import MapOptions
from ..actors.settings import EngineSettings, MatcherSettings, NdpSettings
from ..actors.store.artifacts import MapShape
from ..errors import RuntimeFailure, TierMoeError
from ..proto.peers import MATCHER, LocalDirectory, PeerLink, ndp_name, shard_name
from .host import thread_limits
from .report.output import set_aside, stdout

_START_S = 120.0
_END_S = 5.0


@dataclass(frozen=True)
class Role:
    """What a child is to be.

    Attributes:
        name: under which it registers.
        label: what messages call it.
        worker: MODULE:CLASS, which only the child imports; MODULE is below `tiermoe`.
        arguments: of the class, by name, besides the directory.
        store: name of the argument that is the store's folder; None: it reads no store.
        threads: of its numerical libraries.
    """

    name: str
    label: str
    worker: str
    arguments: dict[str, Any] = field(default_factory=dict)
    store: str | None = "store"
    threads: int = 1

    @staticmethod
    def ndp(settings: NdpSettings, index: int = 0) -> Role:
        """NDP worker `index`, 0..N-1; its kernels bring threads of their own."""
        arguments = {"settings": settings, "index": index}
        return Role(ndp_name(index), f"NDP worker {index}", "actors.ndp_worker:NdpWorker", arguments)

    @staticmethod
    def shard(settings: EngineSettings, index: int) -> Role:
        """Shard `index`, 1..G-1."""
        arguments = {"settings": settings, "index": index, "gpu": index}
        worker = "actors.shard_worker:ShardWorker"
        return Role(shard_name(index), f"shard {index}", worker, arguments, threads=settings.threads)

    @staticmethod
    def matcher(settings: MatcherSettings, maps: MapOptions, shape: MapShape, top_k: int) -> Role:
        """The matcher of expert maps."""
        arguments: dict[str, Any] = {"settings": settings, "maps": maps, "shape": shape, "top_k": top_k}
        return Role(MATCHER, "matcher", "actors.matcher:Matcher", arguments, None)


class WorkerProcess:
    """One process of a role at a time, found through `link`.

    Args:
        role: what it runs.
        store: folder of the expert store; None for a role that reads none.

    Attributes:
        link: give it to `GpuWorker`; it leads to the present process, also after `restart`.
    """

    def __init__(self, role: Role, store: Path | None = None) -> None:
        self._role, self._store = role, store
        self._directory = LocalDirectory()
        self.link = PeerLink(self._directory, name=role.name)
        self._process: subprocess.Popen[str] | None = None
        self._errors: IO[str] | None = None  # its standard error: a file, which never fills up like a pipe

    def __enter__(self) -> WorkerProcess:
        self.restart()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def pid(self) -> int:
        """Of the present process.

        Raises:
            RuntimeFailure: it is not running.
        """
        if self._process is None:
            raise RuntimeFailure(f"the {self._role.label} is not running", "start it first")
        return self._process.pid

    def restart(self) -> None:
        """Start the worker, after ending the one that may be there, and wait until it serves.

        Raises:
            RuntimeFailure: it did not come up; the message carries its last words.
        """
        self.begin()
        self.wait_until_ready()

    def begin(self) -> None:
        """The first half of `restart`: several workers may begin before the first is ready."""
        self.close()
        role = self._role
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed by `close`
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", __name__],  # -P: no module of the folder that the user is in
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            env=os.environ | thread_limits(role.threads),
            start_new_session=True,  # Ctrl-C is for the parent, which ends it in order
        )
        store = {} if role.store is None else {role.store: str(self._store)}
        request = base64.b64encode(pickle.dumps((role.worker, role.arguments | store)))
        stdin, _ = _pipes(self._process)
        with contextlib.suppress(OSError):  # it is dead already; `wait_until_ready` says why
            stdin.write(request.decode() + "\n")
            stdin.flush()

    def wait_until_ready(self) -> None:
        """The second half of `restart`.

        Raises:
            RuntimeFailure: it did not come up; the message carries its last words.
        """
        process, errors = self._process, self._errors
        if process is None or errors is None:
            raise AssertionError("begin it first")
        _, stdout = _pipes(process)
        ready, _, _ = select.select([stdout], [], [], _START_S)
        address = stdout.readline().strip() if ready else ""
        if not address:
            process.kill()
            process.wait()
            errors.seek(0)
            last = errors.read().strip().splitlines()
            self.close()
            raise RuntimeFailure(
                f"the {self._role.label} did not start: {last[-1] if last else 'it wrote no message'}",
                "see its settings and store",
            )
        self._directory.register(self._role.name, address)

    def ask_to_end(self) -> None:
        """The first half of `close`: several workers may end side by side, which takes each about a second."""
        if self._process is not None:
            stdin, _ = _pipes(self._process)
            with contextlib.suppress(OSError):  # it is dead already
                stdin.close()

    def close(self, deadline_s: float = _END_S) -> None:
        """End the process. Safe to call twice."""
        self.ask_to_end()
        process, self._process = self._process, None
        errors, self._errors = self._errors, None
        if process is not None:
            _, stdout = _pipes(process)
            try:
                process.wait(deadline_s)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            stdout.close()
        if errors is not None:
            errors.close()


def _pipes(process: subprocess.Popen[str]) -> tuple[IO[str], IO[str]]:
    stdin, stdout = process.stdin, process.stdout
    if stdin is None or stdout is None:
        raise AssertionError("the process was started without pipes")
    return stdin, stdout


def main() -> None:
    """The child: serve until standard input ends. Standard output has the address alone: the parent reads one line."""
    with set_aside():
        _serve()


def _serve() -> None:
    worker, arguments = pickle.loads(base64.b64decode(sys.stdin.readline()))  # from the parent, over its own pipe
    module, _, name = worker.partition(":")
    try:
        served = getattr(importlib.import_module(f"..{module}", __package__), name)(
            **arguments, directory=LocalDirectory()
        )
    except TierMoeError as error:
        sys.exit(str(error))
    print(served.address, file=stdout(), flush=True)
    sys.stdin.read()
    served.close()


if __name__ == "__main__":
    main()
