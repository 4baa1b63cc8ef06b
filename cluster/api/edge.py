"""The process of the server: uvicorn with the application of `make_app`, on a thread with its own event loop.

A plain class that `server.py` places as a Ray actor beside `tiermoe serve`. All that it needs to serve again after its
death are its constructor's arguments: it looks the leads up by their names, and gets the listening socket and standard
error from the server socket (`server_socket.py`), which keeps both.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
import traceback
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import uvicorn

from ...actors.sample import ProcessSample, take_sample
from ...actors.tokenizer import has_tokenizer
from ...errors import ConfigError, RuntimeFailure
from ...proto.tls import TlsFiles
from ..attach import leads_of
from ..checkpoints.generation import read_defaults
from ..prompt import load_tokenizer
from .backend import LeadBackend
from .keys import KeyRing
from .model import ServedModel
from .offload import keep_memory_small
from .origins import Access
from .request_log import RequestLog
from .routes import make_app
from .runs import Runs
from .server_socket import DRAIN_S, Descriptors, server_options
from .settings import ApiSettings
from .templates import load_chat_template

_LAST_S = 3  # for clients that were told that the server ends


class Edge:
    """The process of the server. It is ready once constructed, and listens once `ServerSocket` hands the socket over.

    Args:
        settings: of the server; `deployment` is named.
        plan: what the first lead's `plan` returned.
        server_socket: name of the `ServerSocket`.
        tls: for HTTPS; None: HTTP.
        access: which web pages may ask; None: only those of the server itself.

    Raises:
        TierMoeError: no such deployment, no tokenizer, an unreadable key or template.
    """

    def __init__(
        self,
        settings: ApiSettings,
        plan: dict[str, Any],
        server_socket: str,
        tls: TlsFiles | None,
        access: Access | None = None,
    ) -> None:
        self._settings, self._plan, self._tls, self._access = settings, plan, tls, access
        keep_memory_small()
        self._descriptors = Descriptors(server_socket)
        self._state = "starting"
        self._log: RequestLog | None = None
        self._backend: LeadBackend | None = None
        self._server: uvicorn.Server | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        ready: Future[None] = Future()
        self._thread = threading.Thread(target=self._run, args=(ready,), name="tiermoe-edge", daemon=True)
        self._thread.start()
        ready.result()

    def health(self) -> dict[str, Any]:
        """Its state, and the requests under way."""
        state = self._state if self._thread.is_alive() else "ended"
        return {"state": state, "requests": 0 if self._server is None else len(self._server.server_state.tasks)}

    def sample(self) -> ProcessSample:
        """Of its process; what it counts is in /metrics."""
        return take_sample()

    def end(self) -> None:
        """Take no more connections, answer the requests under way, in `DRAIN_S` at most, and end. Idempotent."""
        self._state = "ending"
        self._descriptors.close()
        if self._server is not None:
            self._server.should_exit = True
        self._thread.join(DRAIN_S)
        if self._thread.is_alive() and self._loop is not None and self._backend is not None:
            failure = RuntimeFailure("the server ends", "send the request again")
            self._loop.call_soon_threadsafe(self._backend.end, failure)
            self._thread.join(2 * _LAST_S)
        if self._log is not None:
            closing = threading.Thread(target=self._log.close, daemon=True)  # its output may have no reader
            closing.start()
            closing.join(_LAST_S)

    def _run(self, ready: Future[None]) -> None:
        try:
            factory = uvicorn.Config(make_app, **server_options(None)).get_loop_factory()
            with asyncio.Runner(loop_factory=factory) as runner:
                runner.run(self._serve(ready))
        except BaseException as error:
            if ready.done():
                with contextlib.suppress(OSError):  # Ray's log is on a full disk
                    traceback.print_exc()
                os._exit(1)  # Ray restarts this process
            ready.set_exception(error)

    async def _serve(self, ready: Future[None]) -> None:
        self._loop = asyncio.get_running_loop()
        app = await self._application()
        config = uvicorn.Config(app, timeout_graceful_shutdown=DRAIN_S + _LAST_S, **server_options(self._tls))
        config.load()  # a certificate that is refused is refused now
        self._server = uvicorn.Server(config)
        self._state = "waiting"
        ready.set_result(None)
        listener = await asyncio.to_thread(self._descriptors.listener)
        if listener is None:
            return
        threading.Thread(target=self._follow, name="tiermoe-serve-end", daemon=True).start()
        self._state = "serving"
        await self._server.serve([listener])

    async def _application(self) -> Any:
        settings, plan = self._settings, self._plan
        assert settings.deployment is not None
        folder = tokenizer_folder(plan, settings.tokenizer)
        template = load_chat_template(folder, Path(settings.chat_template) if settings.chat_template else None)
        leads = {name: lead.handle for name, lead in leads_of(settings.deployment).items()}
        self._backend = LeadBackend(leads, plan, settings.limits.request_s)
        await self._backend.first_look()
        name, limits = settings.model_name or Path(plan["model"]).name, settings.limits
        tokenizer = load_tokenizer(folder)
        defaults = read_defaults(folder, settings.generation_config)
        model = ServedModel(name, self._backend.plan, tokenizer, template, limits, settings.tool_format, defaults)
        runs = Runs(self._backend, tokenizer, limits, settings.share_prefix_cache)
        file = settings.api_key_file
        keys = None if file is None else KeyRing(Path(file), refused=lambda line: runs.metrics.key_file_refused())
        if settings.request_log != "off":
            written = settings.request_log_file
            log = self._descriptors.standard_error if written is None else Path(written)
            self._log = RequestLog(settings.request_log, log, runs.metrics.line_dropped)
        return make_app(model, runs, keys, sinks=() if self._log is None else (self._log,), access=self._access)

    def _follow(self) -> None:
        """End with the process of `tiermoe serve`, whatever ended it; a thread."""
        self._descriptors.wait_for_end()
        if self._state == "serving":  # else `end` was called
            self.end()
            os._exit(0)  # nobody waits for this process


def tokenizer_folder(plan: dict[str, Any], given: str | None) -> Path:
    """Where the tokenizer is: the given folder, else the runtime's expert store.

    Raises:
        ConfigError: not there.
    """
    folder = Path(given).expanduser() if given is not None else Path(plan["store_path"])
    if not has_tokenizer(folder):
        raise ConfigError(
            f"no tokenizer.json in '{folder}' on the server's node, and no other tokenizer",
            f"name the folder of {plan['model']}'s checkpoint",
        )
    return folder
