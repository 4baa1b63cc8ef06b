"""All that is taken from `ray._private`, each with its reason; no other file reads it.

Ray has public calls for the life of actors, placement groups and nodes, and the rest of the package uses those.
A new version of Ray is checked here first (docs/deployment.md).
"""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ray._private.node as ray_node
import ray._private.ray_constants as ray_constants
import ray._private.worker
from ray._private import state
from ray._private.runtime_env.constants import RAY_JOB_CONFIG_JSON_ENV_VAR

JOB_CONFIG = RAY_JOB_CONFIG_JSON_ENV_VAR
# What a Ray job has in its environment: packages of the cluster's that runs it, which a Ray of its own cannot fetch.
OF_JOB = (JOB_CONFIG, ray_constants.RAY_RUNTIME_ENV_HOOK)


def actor_table() -> dict[str, dict[str, Any]]:
    """What `ray list actors` shows, by the actor's id, from the GCS itself."""
    return state.actors()


def free_resources() -> dict[str, dict[str, float]]:
    """What is free on each node, by its id. `ray.available_resources` has the sum over all nodes only."""
    return state.available_resources_per_node()


def session_folder() -> Path:
    """Where the Ray of this process keeps its sockets and logs on this machine; it goes with that Ray.

    The public `get_session_name` does not say below which folder.
    """
    return Path(ray._private.worker._global_node.get_session_dir_path())


def ray_processes() -> dict[str, subprocess.Popen[bytes]]:
    """GCS and raylet by name, where they were started here: the end of one is seen at once, and not by its silence."""
    node = ray._private.worker._global_node
    found = {} if node is None else node.all_processes
    kinds = {"GCS": ray_constants.PROCESS_TYPE_GCS_SERVER, "raylet": ray_constants.PROCESS_TYPE_RAYLET}
    return {name: found[kind][0].process for name, kind in kinds.items() if found.get(kind)}


class PlainNode(ray_node.Node):
    """A head node, whose driver is in the root folder once its processes run, in the user's.

    Ray puts the folder that its driver is in at the front of its workers' module path, where files of a clone would
    shadow modules (`profile`, `trace`, `triton`). `head_of` goes back.

    The agent that each node runs listens on a free port. Ray's default is one fixed port: while this Ray had it, no
    other Ray of the machine could run jobs (`ray job submit`).
    """

    def __init__(self, ray_params: Any, *args: Any, **options: Any) -> None:
        ray_params.dashboard_agent_listen_port = 0
        super().__init__(ray_params, *args, **options)
        os.chdir("/")


class QuietNode(PlainNode):
    """A head node without dashboard, autoscaler and log monitor: a Ray of one program uses none of them.

    Ray has no option for this. Waiting for the dashboard's process alone took seconds of each start.
    """

    def start_api_server(self, **options: Any) -> None:
        self._webui_url = ""

    def start_monitor(self) -> None: ...

    def start_log_monitor(self) -> None: ...


@contextlib.contextmanager
def head_of(kind: type[PlainNode]) -> Iterator[None]:
    """Inside the block, `ray.init` makes its head node of this class; then the process is where it was."""
    before, folder = ray_node.Node, os.getcwd()
    ray_node.Node = kind
    try:
        yield
    finally:
        ray_node.Node = before
        os.chdir(folder)


@contextlib.contextmanager
def on_loopback() -> Iterator[None]:
    """Inside the block, `ray.init` takes a loopback address as it is.

    Ray puts the machine's own address in its place, at which a Ray on loopback does not listen. The constant is Ray's
    switch for systems whose firewall asks at each port; it reads its environment variable at import only.
    """
    before = ray_constants.ENABLE_RAY_CLUSTER
    ray_constants.ENABLE_RAY_CLUSTER = False
    try:
        yield
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = before
