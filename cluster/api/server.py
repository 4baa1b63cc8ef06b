"""The HTTP server of `tiermoe serve`: its edge as a Ray actor beside this process, what becomes of it, its end.

    ServerSocket (`server_socket.py`: the address)  ->  Edge (`edge.py`)  ->  the leads of a runtime
"""

from __future__ import annotations

import contextlib
import time
from types import TracebackType
from typing import Any

import ray

from ...errors import RuntimeFailure, TierMoeError
from ..deployed_actors import EDGE, end, make_here
from ..ray_internals import actor_table
from ..ray_session import as_failure
from .edge import Edge
from .server_socket import DRAIN_S, ServerSocket
from .settings import ApiSettings

_START_S = 120.0
_END_S = 8.0  # of the edge, besides `DRAIN_S`
_REST_S = 5.0  # of an edge that refused to start again
_NONE_SERVES = "the server does not start; the standard error of `tiermoe serve` says why"  # no names of files
_CONCURRENCY = 4  # calls of the edge; requests do not come by calls
_SERVERS = 64  # before one runtime, on one Ray


class HttpServer:
    """A server on the Ray that this process has joined or started, ready inside the `with` block.

    Args:
        settings: which deployment, which limits; paths are of this machine.
        server_socket: where to listen. Once this is ready, it is this that answers there.
        plan: what the `plan` of the deployment's lead returned.
    """

    def __init__(self, settings: ApiSettings, server_socket: ServerSocket, plan: dict[str, Any]) -> None:
        self._settings, self._server_socket, self._plan = settings, server_socket, plan
        self._edge: Any = None
        self._health: Any = None  # the answer that is waited for, while it does not serve
        self._rest_s = 0.0  # until when, after a refusal
        self._problem: str | None = None  # why it does not serve

    def __enter__(self) -> HttpServer:
        """Start the edge, and hand the address over.

        Raises:
            TierMoeError: it refused (no tokenizer, an unreadable key, ...), or did not start.
        """
        try:
            self._edge = self._make()
            ray.get(self._edge.health.remote(), timeout=_START_S)
            self._server_socket.hand_over()
        except BaseException as error:
            self.close()
            if not isinstance(error, Exception) or (
                isinstance(error, TierMoeError) and not isinstance(error, ray.exceptions.RayError)
            ):
                raise
            raise as_failure(error, "the HTTP server did not start", _START_S) from error
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def look(self) -> str | None:
        """Make an edge that refused to restart anew; Ray itself restarts one that died. Call this every few seconds.

        While it refuses to start (because of a file, say), the server socket answers, and it is tried again: the cause
        may be removed.

        Returns:
            Why it does not serve; None: it does.
        """
        entry = actor_table().get(self._edge._actor_id.hex())
        refused = entry is None or entry["State"] == "DEAD"
        if self._problem is not None:
            self._follow()
        elif refused:
            self._problem = self._refusal(self._edge.health.remote())
            self._server_socket.answer_unavailable(_NONE_SERVES)
        if refused and time.monotonic() >= self._rest_s:
            self._rest_s = time.monotonic() + _REST_S
            self._edge = self._make()
            self._health = self._edge.health.remote()
        return self._problem

    def _follow(self) -> None:
        """Hand over again to an edge that has started, or record why it has not."""
        if self._health is not None and ray.wait([self._health], timeout=0)[0]:
            self._problem = self._refusal(self._health)
            if self._problem is None:
                self._server_socket.hand_over()

    def close(self) -> None:
        """End the edge, once the requests under way have ended, or 20 s have passed. Idempotent; never raises."""
        edge, self._edge = self._edge, None
        if edge is None:
            return
        with contextlib.suppress(OSError):  # then no client gets an answer
            self._server_socket.end()
        try:
            ray.wait([edge.end.remote()], timeout=DRAIN_S + _END_S)
        except Exception:  # Ray is gone, and the edge with it
            return
        finally:
            end(edge)

    def _make(self) -> Any:
        """An edge; its handle."""
        socket = self._server_socket
        arguments = (self._settings, self._plan, socket.name, socket.tls, socket.access)
        for number in range(_SERVERS):
            name = f"{self._settings.deployment}/{EDGE}/{number}"
            with contextlib.suppress(ValueError):  # the name is taken: several servers may be before one runtime
                # beside this process: its descriptors, the key, the template and the tokenizer are of this machine
                return make_here(name, Edge, *arguments, concurrency=_CONCURRENCY)
        raise RuntimeFailure(f"deployment {self._settings.deployment} has {_SERVERS} servers", "end one of them")

    @staticmethod
    def _refusal(health: Any) -> str | None:
        """Why an edge refuses, as the call of its health says; None: it does not."""
        try:
            ray.get(health, timeout=_START_S)
            return None
        except ray.exceptions.RayError as error:
            return f"the HTTP server does not serve, and is tried again: {as_failure(error, 'it ended', _START_S)}"
