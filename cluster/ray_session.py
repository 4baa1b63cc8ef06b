"""This process's connection to Ray: start a local one or join a running one, translate its errors, leave it.

`deployed_actors.py` places actors and `attach.py` finds those of others; no other code calls Ray's life cycle.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import signal
import sys
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TextIO, cast

import ray
import ray.exceptions as rex

from .. import errors
from ..errors import RuntimeFailure, TierMoeError
from ..proto.options import is_loopback
from ..proto.private import own_folder, reachable
from .host import thread_limits
from .ray_auth import check_joinable, ensure_private_token
from .ray_internals import JOB_CONFIG, OF_JOB, PlainNode, QuietNode, head_of, on_loopback, session_folder
from .scratch import Scratch

LOOPBACK = "127.0.0.1"  # of every port of a local Ray
NAMESPACE = "tiermoe"  # of the actors' names: other processes look them up here
# Ray's own switches, which it reads from the environment only.
_RAY_SWITCHES = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",  # else `uv run` would build a second environment for every actor
    "RAY_preallocate_plasma_memory": "1",  # else a message ends it where /dev/shm is full (SIGBUS)
    "RAY_task_events_report_interval_ms": "0",  # else the GCS keeps 100,000 events of tasks, and grows
}
_OPTIONS = {"log_to_driver": False, "logging_level": "ERROR", "namespace": NAMESPACE}
_RAY_THREADS = "ray_"
_MORE = "run `tiermoe doctor` to see memory and devices, and run again"


def refuse_second() -> None:
    """Raise RuntimeFailure if this process uses Ray already."""
    if ray.is_initialized():
        raise RuntimeFailure("this process uses Ray already", "leave the other deployment first")


def start_local(
    scratch: Scratch,
    cpus: int,
    resources: dict[str, float],
    store_bytes: int,
    threads: int,
    dashboard: bool = False,
    memory: int | None = None,
) -> None:
    """Start a Ray of this process's own, on loopback; it ends with the process.

    Args:
        scratch: where its files go.
        cpus: that it shall have.
        resources: custom ones, such as {"ndp": 1}.
        store_bytes: bytes of Ray's shared memory.
        threads: of the arithmetic in each actor.
        memory: bytes of the node's memory that it may give to actors; None: what is free.
        dashboard: whether Ray's dashboard, autoscaler and log monitor run, too.

    Raises:
        RuntimeFailure: other users could get to Ray's files.
        Exception: what Ray raises; `as_failure` makes it one line.
    """
    ensure_private_token()
    _check_private(scratch.path)
    # Actors inherit the thread limits as Ray's environment: a runtime_env would start a new process for each actor.
    # torch makes a directory for compiled code when it is imported: it is removed with the scratch directory
    inductor = {"TORCHINDUCTOR_CACHE_DIR": str(scratch.path / "inductor")}
    variables = _RAY_SWITCHES | thread_limits(threads) | inductor | dict.fromkeys(OF_JOB)
    with _surroundings(variables), head_of(PlainNode if dashboard else QuietNode), on_loopback():
        ray.init(
            address="local",  # also inside a Ray job, whose environment names the cluster that runs it
            _node_ip_address=LOOPBACK,  # Ray's servers bind their node's address; all, if it is not loopback
            num_cpus=cpus,
            resources=resources or None,
            include_dashboard=dashboard,
            object_store_memory=store_bytes,
            _memory=memory,
            _temp_dir=str(scratch.ray),
            **_OPTIONS,
        )
    _check_private(scratch.path)
    if reachable(session_folder()):
        raise RuntimeFailure(
            f"other users of this machine can get to Ray's files in '{session_folder()}'",
            f"report which Ray this is: it was configured to keep them in '{scratch.ray}'",
        )


def _check_private(folder: Path) -> None:
    """Raise RuntimeFailure if others can get below a folder: Ray makes most of what it has there writable to all."""
    try:
        own_folder(folder)
        if folder.stat().st_mode & 0o077:
            raise PermissionError(0, "others may enter it")
    except OSError as error:
        raise RuntimeFailure(
            f"'{folder}' does not hide Ray's files from other users: {error.strerror}",
            "set TMPDIR to a folder that only this user may write, such as one of mode 0700",
        ) from error


def join(address: str, variables: dict[str, str] | None = None) -> None:
    """Join the Ray at HOST:PORT, or with `auto` the one that runs on this machine or started this process.

    Args:
        variables: environment of the actors that this process starts there; of a job's own variables the job's hold.

    Raises:
        RuntimeFailure: no Ray answers, its authentication differs, or it refuses.
    """
    if address != "auto":
        check_joinable(address)
    of_job = _job_environment().get("env_vars") or {}  # Ray refuses a variable given twice
    own = {name: value for name, value in (variables or {}).items() if name not in of_job}
    options: dict[str, Any] = {"runtime_env": environment_of(own)} if own else {}
    # `auto` and a name are resolved as Ray does
    bound = on_loopback() if is_loopback(address.rpartition(":")[0]) else contextlib.nullcontext()
    with _surroundings(_RAY_SWITCHES), bound, contextlib.chdir("/"):  # see `PlainNode`
        try:
            ray.init(address=address, **options, **_OPTIONS)
        except Exception as error:
            remedy = "check that both sides have the same token (~/.ray/auth_token) and versions of Ray and Python"
            if address == "auto":  # none was found, or several on one machine
                remedy = "give HOST:PORT of the one that is meant (`ray start --head` prints it)"
            what = f"cannot join the Ray at '{address}' ({type(error).__name__}: {_line(error)})"
            raise RuntimeFailure(what, remedy) from error


def environment_of(variables: dict[str, str]) -> dict[str, Any]:
    """Ray's `runtime_env` of actors with these variables.

    Ray then starts Python by a line of a shell, without quotes: an environment whose path has a space would start none.
    """
    quoted = shlex.quote(sys.executable)
    as_it_is = quoted == sys.executable or "py_executable" in _job_environment()
    return {"env_vars": variables} | ({} if as_it_is else {"py_executable": quoted})


def _job_environment() -> dict[str, Any]:
    """The `runtime_env` that a Ray job which this process is gives its actors."""
    config = json.loads(os.environ.get(JOB_CONFIG, "{}"))
    return dict(config.get("runtime_env") or {})


def leave() -> None:
    """Leave Ray, and end it where it was started here. Idempotent; never raises."""
    with contextlib.suppress(Exception):
        if ray.is_initialized():
            ray.shutdown()


def ray_addresses() -> dict[str, str]:
    """HOST:PORT of the GCS, and of the raylet of this node, by name."""
    here = ray.get_runtime_context().get_node_id()
    raylets = {n["NodeID"]: f"{n['NodeManagerAddress']}:{n['NodeManagerPort']}" for n in ray.nodes() if n["Alive"]}
    return {"GCS": head_address()} | ({"raylet": raylets[here]} if here in raylets else {})


def node_lives() -> bool:
    """Whether the node that this process is on still belongs to its Ray."""
    here = ray.get_runtime_context().get_node_id()
    return any(node["NodeID"] == here and node["Alive"] for node in ray.nodes())


def head_address() -> str:
    """HOST:PORT by which others join the Ray of this process."""
    return str(ray.get_runtime_context().gcs_address)


@contextlib.contextmanager
def _surroundings(variables: Mapping[str, str | None]) -> Iterator[None]:
    """Set environment variables (None: unset), and make new files private, while Ray starts; then restore both and
    SIGTERM.
    """
    before = {name: os.environ.get(name) for name in variables}
    mask = os.umask(0o077)  # Ray's logs, tokens and sockets
    main = threading.current_thread() is threading.main_thread()
    handler = signal.getsignal(signal.SIGTERM) if main else None  # Ray's client replaces the program's handler
    _set(variables)
    try:
        yield
    finally:
        if handler is not None:  # None: another thread, or a handler that Python code did not set
            signal.signal(signal.SIGTERM, handler)
        os.umask(mask)
        _set(before)


def _set(variables: Mapping[str, str | None]) -> None:
    for name, value in variables.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


class _WithoutRay:
    """A text stream that drops what Ray's threads write."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        if threading.current_thread().name.startswith(_RAY_THREADS):
            return len(text)
        return self._stream.write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextlib.contextmanager
def without_ray_notices() -> Iterator[None]:
    """Inside the block, Ray's threads cannot write to standard output.

    A thread of Ray's client prints notices of dead workers to `sys.stdout`, whatever its log options say. They would
    break `--json`. Ray's log files have them too.
    """
    before = sys.stdout
    quiet = cast(TextIO, _WithoutRay(before))
    sys.stdout = quiet
    try:
        yield
    finally:
        if sys.stdout is quiet:  # another redirection stays
            sys.stdout = before


def as_failure(
    error: Exception, doing: str, deadline_s: float | None = None, setting: str | None = None
) -> TierMoeError:
    """An exception of Ray, as the user sees it.

    Args:
        error: what Ray raised.
        doing: what failed, in words that start the message.
        deadline_s: the deadline that applied, in seconds.
        setting: the configuration key that holds it; None if it is fixed.

    Returns:
        The actor's own TierMoeError where it raised one; otherwise a RuntimeFailure.
    """
    cause = error.cause if isinstance(error, rex.RayTaskError) else error
    if isinstance(cause, TierMoeError):
        return cause
    if isinstance(cause, rex.GetTimeoutError):
        within = f" within {deadline_s:g} s" if deadline_s is not None else ""
        remedy = "look for what keeps the machine busy, and run again"
        return RuntimeFailure(f"{doing}{within}", f"raise {setting}, or {remedy}" if setting else remedy)
    if isinstance(cause, rex.OutOfMemoryError) or "OutOfMemory" in type(cause).__name__:
        return RuntimeFailure(f"{doing}: out of memory", "lower --budget or --kv-tokens")
    if isinstance(cause, rex.RayActorError):
        if cause.actor_init_failed:
            # Ray has the constructor's error only as the text of a traceback
            found = re.findall(rf"^{re.escape(errors.__name__)}\.(\w+): (.*)$", str(cause), re.MULTILINE)
            return errors.rebuilt(*found[-1]) if found else RuntimeFailure(f"{doing}: {_line(cause, -1)}", _MORE)
        return RuntimeFailure(f"{doing}: its process ended ({_death(cause)})", _MORE)
    return RuntimeFailure(f"{doing}: {type(cause).__name__}: {_line(cause)}", _MORE)


def _death(error: rex.RayActorError) -> str:
    """The reason in Ray's report of a dead actor."""
    text = " ".join(str(error).split())
    for pattern in (r"Worker exit detail: (.*?)(?: Some common causes| There are some|$)", r"because (.*)$"):
        match = re.search(pattern, text)
        if match:
            return match[1][:200].rstrip(". ")
    return text[:200]


def _line(error: BaseException, index: int = 0) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or ["no message"]
    return lines[index][:300]
