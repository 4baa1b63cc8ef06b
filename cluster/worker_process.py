"""A worker in a process of its own, without Ray: for benchmarks, evaluation and tests.

The parent writes the role and its settings to the child's standard input and reads the address from its standard
output. The child ends when its standard input does, so it never outlives its parent, however that dies.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Literal

from ..actors.settings import EngineSettings, MatcherSettings, NdpSettings
from ..actors.store.artifacts import MapShape
from ..errors import RuntimeFailure
from ..proto.peers import MATCHER, LocalDirectory, PeerLink, StoreLink, ndp_name, shard_name, store_name

_START_S = 120.0
_END_S = 5.0


@dataclass(frozen=True)
class Role:
    """What a child is to be.

    kind: which class it runs. index: number among those of its kind. threads: of its numerical libraries.
    settings: as plain values, for `NdpSettings` or `EngineSettings`; of a store, its layers and whether a client of
    this host may share memory with it; of a matcher its arguments.
    """

    kind: Literal["ndp", "shard", "store", "matcher"]
    index: int
    threads: int
    settings: dict[str, Any]

    @staticmethod
    def ndp(settings: NdpSettings, index: int = 0) -> Role:
        """NDP worker `index`, 0..N-1; its kernels bring threads of their own."""
        return Role("ndp", index, 1, settings.model_dump())

    @staticmethod
    def shard(settings: EngineSettings, index: int) -> Role:
        """Shard `index`, 1..G-1."""
        return Role("shard", index, settings.threads, settings.model_dump())

    @staticmethod
    def store(index: int, layers: Sequence[int], shared_memory: bool = True) -> Role:
        """A store of these layers; without shared memory it is read as if it were on another host."""
        return Role("store", index, 1, {"layers": list(layers), "shared_memory": shared_memory})

    @staticmethod
    def matcher(
        settings: MatcherSettings, shape: MapShape, top_k: int, snapshot: Path | None = None, warm: Path | None = None
    ) -> Role:
        """The matcher of expert maps."""
        files = {name: None if path is None else str(path) for name, path in (("snapshot", snapshot), ("warm", warm))}
        arguments = {"settings": settings.model_dump(), "shape": asdict(shape), "top_k": top_k} | files
        return Role("matcher", 0, 1, arguments)

    @property
    def name(self) -> str:
        """Under which it registers."""
        if self.kind == "matcher":
            return MATCHER
        return {"ndp": ndp_name, "store": store_name, "shard": shard_name}[self.kind](self.index)

    @property
    def label(self) -> str:
        """What messages call it."""
        names = {"ndp": f"NDP worker {self.index}", "matcher": "matcher"}
        return names.get(self.kind, f"{self.kind} {self.index}")


class WorkerProcess:
    """One process of a role at a time, found through `link`.

    Args:
        role: what it runs.
        store: folder of the expert store; a matcher reads none.

    Attributes:
        link: give it to `GpuWorker`; it leads to the present process, also after `restart`.
    """

    def __init__(self, role: Role, store: Path | None = None) -> None:
        self._role, self._store = role, store
        self._board = LocalDirectory()
        self.link = PeerLink(self._board, name=role.name)
        self._process: subprocess.Popen[str] | None = None
        self._said: IO[str] | None = None  # its standard error: a file, which never fills up like a pipe

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
            RuntimeFailure: there is none.
        """
        if self._process is None:
            raise RuntimeFailure(f"the {self._role.label} is not running", "start it first")
        return self._process.pid

    @property
    def store_link(self) -> StoreLink:
        """Of a store: give it to those who read it."""
        return StoreLink(self._role.name, tuple(self._role.settings["layers"]), self.link)

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
        threads = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), str(self._role.threads))
        self._said = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed by `close`
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._said,
            text=True,
            env=os.environ | threads,
            start_new_session=True,  # Ctrl-C is for the parent, which ends it in order
        )
        role = self._role
        request = {"kind": role.kind, "index": role.index, "settings": role.settings, "store": str(self._store)}
        stdin, _ = _pipes(self._process)
        with contextlib.suppress(OSError):  # it is dead already; `wait_until_ready` says why
            stdin.write(json.dumps(request) + "\n")
            stdin.flush()

    def wait_until_ready(self) -> None:
        """The second half of `restart`.

        Raises:
            RuntimeFailure: it did not come up; the message carries its last words.
        """
        process, said = self._process, self._said
        if process is None or said is None:
            raise AssertionError("begin it first")
        _, stdout = _pipes(process)
        ready, _, _ = select.select([stdout], [], [], _START_S)
        address = stdout.readline().strip() if ready else ""
        if not address:
            process.kill()
            process.wait()
            said.seek(0)
            last = said.read().strip().splitlines()
            self.close()
            raise RuntimeFailure(
                f"the {self._role.label} did not start: {last[-1] if last else 'it said nothing'}",
                "see its settings and store",
            )
        self._board.register(self._role.name, address)

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
        said, self._said = self._said, None
        if process is not None:
            _, stdout = _pipes(process)
            try:
                process.wait(deadline_s)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            stdout.close()
        if said is not None:
            said.close()


def _pipes(process: subprocess.Popen[str]) -> tuple[IO[str], IO[str]]:
    stdin, stdout = process.stdin, process.stdout
    if stdin is None or stdout is None:
        raise AssertionError("the process was started without pipes")
    return stdin, stdout


def _worker(request: dict[str, Any]) -> Any:
    """The worker that a request asks for; it serves."""
    if request["kind"] == "ndp":
        from ..actors.ndp_worker import NdpWorker

        near_data = NdpSettings(**request["settings"])
        return NdpWorker(near_data, request["store"], LocalDirectory(), index=request["index"])
    if request["kind"] == "store":
        from ..actors.store.server import StoreWorker
        from ..proto.options import ServerOptions

        given = request["settings"]
        options = ServerOptions(shared_memory=given["shared_memory"])
        return StoreWorker(
            request["store"], request["index"], given["layers"], "stamp", LocalDirectory(), options=options
        )
    if request["kind"] == "matcher":
        from ..actors.matcher import Matcher

        asked = request["settings"]
        settings, shape = MatcherSettings(**asked["settings"]), MapShape(**asked["shape"])
        return Matcher(
            settings, shape, asked["top_k"], LocalDirectory(), snapshot=asked["snapshot"], warm=asked["warm"]
        )
    from ..actors.shard_worker import ShardWorker

    index = request["index"]
    return ShardWorker(EngineSettings(**request["settings"]), index, request["store"], LocalDirectory(), gpu=index)


def main() -> None:
    """The child: serve until standard input ends."""
    from ..errors import TierMoeError

    request = json.loads(sys.stdin.readline())
    try:
        worker = _worker(request)
    except TierMoeError as error:
        sys.exit(str(error))
    print(worker.address, flush=True)
    sys.stdin.read()
    worker.close()


if __name__ == "__main__":
    main()
