"""This process's connection to Ray: starting a local one or joining a running one, and leaving it.

With `deploy.py` (which places actors) and `attach.py` (which finds those of others) the only code that calls Ray's life
cycle. One process has one Ray at a time.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from typing import Any

import ray

from ..errors import RuntimeFailure
from .failures import as_join_failure
from .ray_auth import check_joinable, ensure_private_token
from .scratch import Scratch

NAMESPACE = "tiermoe"  # of the actors' names: whoever joins looks here
THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
# Ray's own switches, which it reads from the environment only.
_RAY_SWITCHES = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",  # else `uv run` would build a second environment for every actor
}
_OPTIONS = {"log_to_driver": False, "logging_level": "ERROR", "namespace": NAMESPACE}


def refuse_second() -> None:
    """Raise RuntimeFailure where this process uses Ray already."""
    if ray.is_initialized():
        raise RuntimeFailure("this process uses Ray already", "leave the other deployment first")


def start_local(scratch: Scratch, cpus: int, resources: dict[str, float], store_bytes: int, threads: int) -> None:
    """Start a Ray of this process's own; it ends with the process.

    Args:
        scratch: where its files go.
        cpus: that it shall have.
        resources: custom ones, such as {"ndp": 1}.
        store_bytes: bytes of Ray's shared memory.
        threads: of the arithmetic in each actor.

    Raises:
        Exception: what Ray raises; `failures.as_failure` makes it one line.
    """
    ensure_private_token()
    # The thread limits reach the actors as the environment that Ray's processes inherit. As a runtime_env they
    # would keep Ray from using the worker processes that it starts ahead (one second an actor).
    # torch makes a directory for compiled code as soon as it is imported: let it be swept with the rest
    inductor = {"TORCHINDUCTOR_CACHE_DIR": str(scratch.path / "inductor")}
    with _surroundings(_RAY_SWITCHES | thread_limits(threads) | inductor):
        ray.init(
            address="local",  # also inside a Ray job, whose environment names the cluster that runs it
            num_cpus=cpus,
            resources=resources or None,
            include_dashboard=False,
            object_store_memory=store_bytes,
            _temp_dir=str(scratch.path),
            **_OPTIONS,
        )


def join(address: str, variables: dict[str, str] | None = None) -> None:
    """Join the Ray at HOST:PORT.

    Args:
        variables: environment of the actors that this process starts there.

    Raises:
        RuntimeFailure: nobody answers, its authentication is another, or it refuses.
    """
    check_joinable(address)
    options: dict[str, Any] = {"runtime_env": {"env_vars": variables}} if variables else {}
    with _surroundings(_RAY_SWITCHES):
        try:
            ray.init(address=address, **options, **_OPTIONS)
        except Exception as error:
            raise as_join_failure(error, address) from error


def leave() -> None:
    """Leave Ray, and end it where it was started here. Idempotent; never raises."""
    with contextlib.suppress(Exception):
        if ray.is_initialized():
            ray.shutdown()


def head_address() -> str:
    """HOST:PORT by which others join the Ray of this process."""
    return str(ray.get_runtime_context().gcs_address)


def thread_limits(threads: int) -> dict[str, str]:
    """Environment that bounds the threads of arithmetic libraries."""
    return dict.fromkeys(THREAD_VARIABLES, str(threads))


@contextlib.contextmanager
def _surroundings(variables: dict[str, str]) -> Iterator[None]:
    with _environment(variables), _private_files(), _own_sigterm():
        yield


@contextlib.contextmanager
def _environment(extra: dict[str, str]) -> Iterator[None]:
    """Set variables while Ray's processes are born."""
    before = {name: os.environ.get(name) for name in extra}
    os.environ.update(extra)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@contextlib.contextmanager
def _own_sigterm() -> Iterator[None]:
    """Ray's client puts its own handler in place of the program's; put that back."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        if before is not None:  # None: set by other than Python code, and not ours to restore
            signal.signal(signal.SIGTERM, before)


@contextlib.contextmanager
def _private_files() -> Iterator[None]:
    """What Ray writes from here on (logs, tokens, sockets) is for this user only."""
    before = os.umask(0o077)
    try:
        yield
    finally:
        os.umask(before)
