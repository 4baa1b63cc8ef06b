"""Own servers on loopback, each a process of its own: `tiermoe serve` at a budget, and `transformers serve`."""

from __future__ import annotations

import re
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from ....errors import RuntimeFailure
from .cases import Serve
from .targets import Target

PEER, INSTALL = "transformers", "pip install 'transformers[serving]' accelerate"
LATENCY_US = 10.0  # of each copy on our emulated link
_START_S, _END_S = 300.0, 60.0
_READY = re.compile(r"http://\S+(?=/v1)")


@contextmanager
def tiermoe_serve(options: Serve, folder: Path, budget: str) -> Iterator[Target]:
    """Ours, on the emulated link. Raises RuntimeFailure: it did not start.

    Args:
        options: with policy, threads and link.
    """
    command = [
        str(Path(sys.executable).with_name("tiermoe")), "serve", "--model", str(folder), "--model-name", str(folder),
        "--policy", str(options.policy), "--budget", budget, "--threads", str(options.threads), "--device", "cpu",
        "--link-gbps", str(options.link_gbps), "--link-latency-us", str(LATENCY_US), "--port", "0",
    ]  # fmt: skip
    with _process(command) as (process, log):
        while (found := _READY.search(log.read_text(errors="replace"))) is None:
            _wait(process, log)
        yield Target(f"tiermoe {budget}", found[0], str(folder), executor="emulated")


def has_peer() -> bool:
    """Whether `transformers serve` has the packages that it needs."""
    from transformers.utils.import_utils import is_accelerate_available, is_serve_available

    return bool(is_serve_available() and is_accelerate_available())


@contextmanager
def transformers_serve(options: Serve, folder: Path) -> Iterator[Target]:
    """transformers', with its continuous batching and all experts resident in fp32. Raises RuntimeFailure."""
    import httpx

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [
        str(Path(sys.executable).with_name("transformers")), "serve", str(folder), "--continuous-batching",
        "--device", "cpu", "--dtype", "float32", "--attn-implementation", "sdpa", "--host", "127.0.0.1",
        "--port", str(port), "--cb-num-blocks", "256", "--cb-block-size", "32", "--cb-max-batch-tokens", "512",
    ]  # fmt: skip
    url, threads = f"http://127.0.0.1:{port}", str(options.threads)
    with _process(["env", f"OMP_NUM_THREADS={threads}", f"MKL_NUM_THREADS={threads}", *command]) as (process, log):
        while True:
            try:
                if httpx.get(f"{url}/health", timeout=5.0).status_code == 200:
                    break
            except httpx.TransportError:
                pass
            _wait(process, log)
        yield Target(PEER, url, str(folder), executor="emulated")


@contextmanager
def _process(command: Sequence[str]) -> Iterator[tuple[subprocess.Popen[bytes], Path]]:
    """A server and the file of its output; ended with the block."""
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        with log.open("wb") as out:
            process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT)
        try:
            process.started_s = time.monotonic()  # type: ignore[attr-defined]
            yield process, log
        finally:
            process.terminate()
            try:
                process.wait(_END_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _wait(process: subprocess.Popen[bytes], log: Path) -> None:
    """A moment of a server's start. Raises RuntimeFailure: it ended, or takes too long."""
    late = time.monotonic() - process.started_s > _START_S  # type: ignore[attr-defined]
    if late or process.poll() is not None:
        said = log.read_text(errors="replace")[-500:]
        raise RuntimeFailure(f"a server did not start: {said}", "run the command by hand")
    time.sleep(0.2)
