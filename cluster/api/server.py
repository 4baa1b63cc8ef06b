"""The HTTP server of `tiermoe serve`: its edges as Ray actors beside this process, what becomes of them, their end.

    ServerSocket (`server_socket.py`: the address)  ->  Edge (`edge.py`, one or more)  ->  the leads of a runtime
"""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import time
from types import TracebackType
from typing import Any

import ray
from ray._private import state as gcs  # what `ray list actors` shows, without a dashboard

from ...errors import TierMoeError
from ..placement import end, make_here
from ..ray_session import as_failure, server_folder
from .edge import Edge
from .server_socket import DRAIN_S, ServerSocket
from .settings import ApiSettings

_START_S = 120.0
_END_S = 8.0  # of an edge, besides `DRAIN_S`
_REST_S = 5.0  # of an edge that refused to start again
_NONE_SERVES = "no process of the server starts; the standard error of `tiermoe serve` says why"  # no names of files
_CONCURRENCY = 4  # calls of an edge; requests do not come by calls


class HttpServer:
    """A server on the Ray that this process has joined or started, ready inside the `with` block.

    Args:
        settings: which deployment, which limits; paths are of this machine.
        server_socket: where to listen. Once this is ready, it is this that answers there.
        plan: what the `plan` of the deployment's lead returned.
    """

    def __init__(self, settings: ApiSettings, server_socket: ServerSocket, plan: dict[str, Any]) -> None:
        self._settings, self._server_socket, self._plan = settings, server_socket, plan
        self._edges: list[Any] = []
        self._shared: str | None = None  # folder of what several edges share
        self._rest_s = 0.0  # until when, after a refusal
        self._problem: str | None = None  # why no edge serves
        self._asked: list[Any] = []  # the health of each, while none serves

    def __enter__(self) -> HttpServer:
        """Start the edges, and hand the address over.

        Raises:
            TierMoeError: an edge refused (no tokenizer, an unreadable key, ...), or did not start.
        """
        try:
            for _ in range(self._settings.replicas):
                self._edges.append(self._make())
            ray.get([edge.health.remote() for edge in self._edges], timeout=_START_S)
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
        """Restart an edge that refused to restart; Ray itself restarts those that died. Call this every few
        seconds.

        While every edge refuses to start (because of a file, say), the server socket answers, and each is tried again:
        the cause may be removed.

        Returns:
            Why no edge serves; None: one does.
        """
        table = gcs.actors()
        refused = [i for i, edge in enumerate(self._edges) if _is_dead(table.get(edge._actor_id.hex()))]
        if self._problem is not None:
            self._follow()
        elif len(refused) == len(self._edges):
            self._problem = self._refusal(self._edges[refused[0]].health.remote())
            self._server_socket.answer_unavailable(_NONE_SERVES)
        if refused and time.monotonic() >= self._rest_s:
            self._rest_s = time.monotonic() + _REST_S
            for i in refused:
                self._edges[i] = self._make()
            self._asked = [edge.health.remote() for edge in self._edges] if self._problem is not None else []
        return self._problem

    def _follow(self) -> None:
        """Hand over again to an edge that has started, and record why others have not."""
        answered, _ = ray.wait(self._asked, num_returns=len(self._asked), timeout=0) if self._asked else ([], [])
        for problem in map(self._refusal, answered):
            self._problem = problem
            if problem is None:
                self._server_socket.hand_over()
                return

    def close(self) -> None:
        """End the edges, once the requests under way have ended, or 20 s have passed. Idempotent; never raises."""
        edges, self._edges = self._edges, []
        if not edges:
            return
        with contextlib.suppress(OSError):  # then no client gets an answer
            self._server_socket.end()
        try:
            ray.wait([edge.end.remote() for edge in edges], num_returns=len(edges), timeout=DRAIN_S + _END_S)
        except Exception:  # Ray is gone, and the edges with it
            return
        finally:
            for edge in edges:
                end(edge)
            if self._shared is not None:
                shutil.rmtree(self._shared, ignore_errors=True)

    def _make(self) -> Any:
        """One more edge; its handle."""
        if self._settings.replicas > 1 and self._shared is None:
            self._shared = str(server_folder() / str(os.getpid()))
        socket = self._server_socket
        arguments = (self._settings, self._plan, socket.name, socket.tls, self._shared, socket.access)
        for number in itertools.count():
            name = f"{self._settings.deployment}/edge/{number}"
            with contextlib.suppress(ValueError):  # the name is taken: several servers may be before one runtime
                # beside this process: its descriptors, the key, the template and the tokenizer are of this machine
                return make_here(name, Edge, *arguments, concurrency=_CONCURRENCY)
        raise AssertionError("numbers do not end")

    @staticmethod
    def _refusal(health: Any) -> str | None:
        """Why an edge refuses, as the call of its health says; None: it does not."""
        try:
            ray.get(health, timeout=_START_S)
            return None
        except ray.exceptions.RayError as error:
            return f"the HTTP server does not serve, and is tried again: {as_failure(error, 'it ended', _START_S)}"


def _is_dead(entry: dict[str, Any] | None) -> bool:
    return entry is None or entry["State"] == "DEAD"
