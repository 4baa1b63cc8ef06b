"""An NDP worker in a process of its own, without Ray: for benchmarks, evaluation and tests.

The parent writes the settings to the child's standard input and reads the address from its standard output. The child
ends when its standard input does, so it never outlives its parent, however that dies.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import subprocess
import sys
from pathlib import Path
from types import TracebackType
from typing import IO

from ..actors.links import NDP, NdpLink, Noticeboard
from ..actors.settings import NdpSettings
from ..errors import RuntimeFailure

_START_S = 60.0
_END_S = 5.0


class NdpProcess:
    """One NDP worker process at a time, found through `link`.

    Args:
        settings: of the worker.
        store: folder of the expert store.

    Attributes:
        link: give it to `GpuWorker`; it leads to the present process, also after `restart`.
    """

    def __init__(self, settings: NdpSettings, store: Path) -> None:
        self._settings, self._store = settings, store
        self._board = Noticeboard()
        self.link = NdpLink(self._board)
        self._process: subprocess.Popen[str] | None = None

    def __enter__(self) -> NdpProcess:
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
            raise RuntimeFailure("the NDP worker is not running", "start it first")
        return self._process.pid

    def restart(self) -> None:
        """Start the worker, after ending the one that may be there.

        Raises:
            RuntimeFailure: it did not come up; the message carries its last words.
        """
        self.close()
        threads = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}  # its kernels bring threads of their own
        process = subprocess.Popen(
            [sys.executable, "-m", __name__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | threads,
            start_new_session=True,  # Ctrl-C is for the parent, which ends it in order
        )
        self._process = process
        stdin, stdout, stderr = _pipes(process)
        request = {"settings": self._settings.model_dump(), "store": str(self._store)}
        try:
            stdin.write(json.dumps(request) + "\n")
            stdin.flush()
            ready, _, _ = select.select([stdout], [], [], _START_S)
            address = stdout.readline().strip() if ready else ""
        except OSError:
            address = ""
        if not address:
            process.kill()
            last = stderr.read().strip().splitlines()
            self.close()
            raise RuntimeFailure(
                f"the NDP worker did not start: {last[-1] if last else 'it said nothing'}", "see its settings and store"
            )
        self._board.register(NDP, address)

    def close(self) -> None:
        """End the process. Safe to call twice."""
        process, self._process = self._process, None
        if process is None:
            return
        stdin, stdout, stderr = _pipes(process)
        with contextlib.suppress(OSError):  # it is dead already
            stdin.close()
        try:
            process.wait(_END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        stdout.close()
        stderr.close()


def _pipes(process: subprocess.Popen[str]) -> tuple[IO[str], IO[str], IO[str]]:
    stdin, stdout, stderr = process.stdin, process.stdout, process.stderr
    if stdin is None or stdout is None or stderr is None:
        raise AssertionError("the process was started without pipes")
    return stdin, stdout, stderr


def main() -> None:
    """The child: serve until standard input ends."""
    from ..actors.ndp_worker import NdpWorker
    from ..errors import TierMoeError

    request = json.loads(sys.stdin.readline())
    try:
        worker = NdpWorker(NdpSettings(**request["settings"]), request["store"], Noticeboard())
    except TierMoeError as error:
        sys.exit(str(error))
    print(worker.address, flush=True)
    sys.stdin.read()
    worker.close()


if __name__ == "__main__":
    main()
