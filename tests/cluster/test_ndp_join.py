"""A policy with an NDP worker in a Ray that runs already: it goes where the resource `ndp` is, or is refused."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tiermoe.cluster.scratch import Scratch

_BIN = Path(sys.executable).parent
_ENV = os.environ | {"RAY_AUTH_MODE": "disabled"}


@contextmanager
def _head(*options: str) -> Iterator[str]:
    """A head node without authentication; its address."""
    scratch = Scratch()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    command = [
        str(_BIN / "ray"), "start", "--head", f"--port={port}", "--num-cpus=4", f"--temp-dir={scratch.path}",
        "--include-dashboard=false", "--disable-usage-stats", "--object-store-memory=100000000", *options,
    ]  # fmt: skip
    try:
        with (scratch.path / "start.log").open("w") as log:
            subprocess.run(command, env=_ENV, stdout=log, stderr=log, timeout=90, check=True)
        yield f"127.0.0.1:{port}"
    finally:
        scratch.close()


def _run(address: str, folder: Path) -> subprocess.CompletedProcess[str]:
    config = folder / "run.yaml"
    config.write_text(f"policy: context-ndp-full\nbudget: 50%\nthreads: 1\nray:\n  address: {address}\n")
    command = [str(_BIN / "tiermoe"), "run", "import os", "--config", str(config), "--max-tokens", "12", "--json"]
    return subprocess.run(command, env=_ENV, capture_output=True, text=True, timeout=150, check=False)


def test_the_worker_goes_where_the_resource_is(tmp_path: Path) -> None:
    with _head("--resources", '{"ndp": 1}') as address:
        done = _run(address, tmp_path)
        assert done.returncode == 0, done.stderr
        record = json.loads(done.stdout)
        assert record["ndp_tokens"] > 0
        assert record["ndp_losses"] == 0
        assert record["plan"]["ndp"]["transport"] in ("shm", "grpc")


def test_a_cluster_without_the_resource_is_refused(tmp_path: Path) -> None:
    with _head() as address:
        done = _run(address, tmp_path)
        assert done.returncode == 2
        assert "policy 'context-ndp-full' needs 1 of the resource ndp, the nodes have none" in done.stderr
        assert "Traceback" not in done.stderr
