"""Serve started and ended by this process: `tiermoe serve`."""

from __future__ import annotations

import contextlib
import errno
import logging
import re
import socket
from types import TracebackType
from typing import Any

import ray
from ray import serve
from ray.serve.schema import LoggingConfig

from ...errors import ConfigError, RuntimeFailure, TierMoeError
from ..failures import as_failure
from .app import application
from .settings import ApiSettings

APPLICATION = "tiermoe"
_DRAIN_S = 20.0


class PortReservation:
    """A port that is ours from here on: nobody else gets it before Serve's proxy binds it.

    Serve takes no port 0 (it would not say which one it got), so the port is chosen here. The socket that holds it
    never listens, and with SO_REUSEPORT the proxy, a process of the same user, binds the same port beside it.

    Args:
        host: address to bind.
        port: 0: one that is free.

    Raises:
        ConfigError: the address is not this machine's, or somebody has the port.
    """

    def __init__(self, host: str, port: int) -> None:
        try:
            found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
            family, _, _, _, address = found[0]
            with socket.socket(family, socket.SOCK_STREAM) as probe:  # alone: with SO_REUSEPORT two servers could share
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind(address)
            self._socket = socket.socket(family, socket.SOCK_STREAM)  # no SO_REUSEADDR: the next one's probe shall fail
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            self._socket.bind(address)
        except OSError as error:
            taken = error.errno == errno.EADDRINUSE
            remedy = "choose another --port, or 0 for a free one" if taken else "give an address of this machine"
            raise ConfigError(f"cannot listen on {host}:{port}: {error.strerror or error}", remedy) from error
        self.port = int(self._socket.getsockname()[1])

    def close(self) -> None:
        """Give it up."""
        self._socket.close()


class HttpServer:
    """A server on the Ray that this process has joined or started, ready inside the `with` block.

    Args:
        settings: which deployment, which limits; paths are of this machine.
        host, port: where to listen.

    Attributes:
        url: of the server.
    """

    def __init__(self, settings: ApiSettings, host: str, port: int) -> None:
        self._settings, self._host = settings, host
        self._port = PortReservation(host, port)
        self._started = False
        shown = f"[{host}]" if ":" in host else host
        self.url = f"http://{shown}:{self._port.port}"

    def __enter__(self) -> HttpServer:
        """Start Serve and the application.

        Raises:
            RuntimeFailure: Serve runs there already, or did not start.
            TierMoeError: the application was refused (no tokenizer, an unreadable key, ...).
        """
        try:
            self._start()
        except BaseException as error:
            self.close()
            if isinstance(error, TierMoeError) or not isinstance(error, Exception):
                raise
            raise as_failure(error, "the HTTP server did not start") from error
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def check(self) -> None:
        """Return while the server runs.

        Raises:
            RuntimeFailure: it does not.
        """
        state = serve.status().applications.get(APPLICATION)
        if state is None or state.status.value in ("DEPLOY_FAILED", "DELETING", "NOT_STARTED"):
            why = "it is gone" if state is None else state.message or state.status.value
            raise RuntimeFailure(f"the HTTP server ended: {' '.join(why.split())[:300]}", "start it again")

    def close(self) -> None:
        """End Serve, once the requests under way have ended, or 20 s have passed. Idempotent; never raises."""
        if self._started:
            self._started = False
            with contextlib.suppress(Exception):  # it drains; `shutdown` alone would take the proxy away first
                serve.delete(APPLICATION)
            with contextlib.suppress(Exception):
                serve.shutdown()
        self._port.close()

    def _start(self) -> None:
        if serve_runs():
            raise RuntimeFailure(
                "Ray Serve runs there already, and its address cannot be changed",
                "deploy the import path tiermoe.cluster.api.app:build to it, with `serve deploy`",
            )
        for name in ("ray.serve", "ray"):  # what it reports is in Ray's log files
            logging.getLogger(name).setLevel(logging.ERROR)
        self._started = True
        quiet = LoggingConfig(log_level="WARNING", enable_access_log=False)
        serve.start(
            proxy_location="EveryNode",  # on nodes with a replica: here
            http_options={"host": self._host, "port": self._port.port},
            logging_config=quiet,
        )
        # beside this process: key, template and tokenizer are files of this machine
        here = {f"node:{ray.util.get_node_ip_address()}": 0.001}
        app: Any = application(self._settings, drain_s=_DRAIN_S, resources=here)
        try:
            serve.run(app, name=APPLICATION, route_prefix="/", logging_config=quiet)
        except RuntimeError as error:
            raise RuntimeFailure(f"the HTTP server did not start: {_refusal()}", "mend that first") from error


def _refusal() -> str:
    """Why a replica did not start: Serve keeps it as the text of a traceback, whose last line says it."""
    state = serve.status().applications.get(APPLICATION)
    messages = [] if state is None else [found.message for found in state.deployments.values() if found.message]
    lines = [line for message in messages for line in message.strip().splitlines()]
    return re.sub(r"^[\w.]+: ", "", lines[-1].strip())[:300] if lines else "Serve does not say why"


def serve_runs() -> bool:
    """Whether somebody's Serve runs in this Ray."""
    named = ray.util.list_named_actors(all_namespaces=True)
    return any(entry["name"] == "SERVE_CONTROLLER_ACTOR" for entry in named)
