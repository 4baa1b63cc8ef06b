"""Jobs of a worker of `proto/bounded.py`, for tests: `python -m bounded_jobs`."""

from __future__ import annotations

import os
import signal
import time

from tiermoe.proto.bounded import CarryOut, serve


def _fail(why: str) -> None:
    raise RuntimeError(why)


def _jobs(given: bytes) -> CarryOut:
    def die(unless: str = "") -> str:
        if not os.path.exists(unless):
            if unless:
                open(unless, "w").close()
            os.kill(os.getpid(), signal.SIGSEGV)
        return "alive"

    return {
        "echo": lambda text: text, "given": given.decode, "fail": _fail, "fill": lambda size: len(bytearray(size)),
        "sleep": lambda seconds: time.sleep(seconds), "pid": os.getpid, "die": die,
    }  # fmt: skip


if __name__ == "__main__":
    serve(lambda given: lambda: _jobs(given))
