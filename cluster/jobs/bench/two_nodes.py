"""A Ray of two nodes on this machine, for `tiermoe bench transfer`: two raylets, each with an object store of its own.

What one node puts travels to the other as it would between hosts, through the loopback interface. Nothing here asks or
changes a Ray that runs already; all processes and files lie below one scratch folder and go with it.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from ....errors import RuntimeFailure
from ...ray_auth import ensure_private_token
from ...scratch import Scratch

if "ray" not in sys.modules:  # which reads it once, when it is imported
    os.environ.setdefault("RAY_AUTH_MODE", "token")

import ray

from ...ray_session import join, leave, refuse_second

_START_S = 90.0
_MARK = "bench_other"


@contextlib.contextmanager
def two_nodes(object_store_bytes: int) -> Iterator[Callable[..., Any]]:
    """Start both and join the first.

    Args:
        object_store_bytes: of each node.

    Yields:
        other(plain class, name, *args): an actor of it on the other node, reachable by that name.

    Raises:
        RuntimeFailure: this process uses Ray already, or a node did not start.
    """
    refuse_second()
    ensure_private_token()
    scratch = Scratch()
    try:
        port = _free_port()
        _start(scratch, ["--head", f"--port={port}", "--node-ip-address=127.0.0.1"], object_store_bytes)
        mark = json.dumps({_MARK: 1})
        _start(
            scratch, [f"--address=127.0.0.1:{port}", "--node-ip-address=127.0.0.2", f"--resources={mark}"],
            object_store_bytes,
        )  # fmt: skip
        join(f"127.0.0.1:{port}")
        try:
            yield _on_the_other
        finally:
            leave()
    finally:
        scratch.close()


def _on_the_other(plain: type, name: str, *args: Any) -> Any:
    actor = ray.remote(name=name, num_cpus=0, resources={_MARK: 0.01}, max_concurrency=2)(plain).remote(*args)
    nodes = {node["NodeID"]: node for node in ray.nodes()}
    here = nodes[ray.get_runtime_context().get_node_id()]
    if _MARK in here["Resources"]:
        raise RuntimeFailure("Ray put this process on the node that it is to read from", "report this as a bug")
    return actor


def _start(scratch: Scratch, more: list[str], object_store_bytes: int) -> None:
    command = [
        str(Path(sys.executable).with_name("ray")), "start", *more, "--num-cpus=1", f"--temp-dir={scratch.path}",
        "--disable-usage-stats", f"--object-store-memory={object_store_bytes}",
    ]  # fmt: skip
    if "--head" in more:
        command.append("--include-dashboard=false")
    environment = os.environ | {"RAY_AUTH_MODE": os.environ.get("RAY_AUTH_MODE", "disabled")}  # this process's
    log = scratch.path / "start.log"
    with log.open("w") as said:  # a file: Ray's servers inherit it, and a pipe would never end
        done = subprocess.run(command, env=environment, stdout=said, stderr=said, timeout=_START_S, check=False)
    if done.returncode != 0:
        last = (log.read_text().strip().splitlines() or ["it said nothing"])[-1]
        raise RuntimeFailure(f"`ray start` failed: {last}", "see whether Ray starts here at all: `ray start --head`")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
