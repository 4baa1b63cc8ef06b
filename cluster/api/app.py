"""The server as a Ray Serve application, `tiermoe.cluster.api.app:build`, and its start by `tiermoe serve`.

    serve run tiermoe.cluster.api.app:build config=FILE        (or the import_path of a Serve YAML, or of a RayService)
    RuntimeProcess (one replica, where a runtime is to be started)  <-  ApiServer (FastAPI)  ->  the runtime's lead

A replica of the server that finds every lead dead for good is unhealthy: Serve starts it again, and it looks them up
again.
"""

from __future__ import annotations

import contextlib
import logging
import re
import socket
import ssl
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import ray
import yaml
from pydantic import ValidationError
from ray import serve
from ray._common.network_utils import build_address
from ray._common.tls_utils import add_port_to_grpc_server
from ray.serve._private import replica
from ray.serve.schema import LoggingConfig

from ...errors import ConfigError, RuntimeFailure, TierMoeError
from ...proto.options import is_loopback
from ..attach import CONTROL, lead_of, leads_of
from ..config import load_run_config
from ..placement import LEAD, family, split_name
from ..prompt import load_tokenizer
from ..ray_session import NAMESPACE, as_failure, head_address, server_folder
from ..registry import Registry
from ..yaml_file import explain
from .backend import LeadBackend
from .door import SILENCE_S, Door
from .keys import KeyRing
from .request_log import RequestLog
from .routes import make_app
from .service import Service
from .settings import ApiSettings
from .shared import share_counters
from .templates import load_chat_template
from .tracing import Tracer, make_exporter

SERVER, RUNTIME = "ApiServer", "Runtime"
APPLICATION = "tiermoe"
_MANY = 4096  # requests of one replica at a time: the server's own queue refuses long before, and says so
_LEAD_DEADLINE_S = 30.0
_DRAIN_S = 120.0
_COMMAND_DRAIN_S = 20.0  # of `tiermoe serve`
_FAILED_S = 3.0  # a controller that was started again forgets applications for less
_POLL_S = 0.2
_PROBE_S = 10.0
_END_DEADLINE_S = 60.0


class RuntimeProcess:
    """Serve deployment of one replica: the application's own runtime, `tiermoe up` in a process beside the replica.

    A runtime needs its own Ray driver, and a replica is not one. The process ends with the replica. When the process
    dies, Serve starts a new replica with a new runtime.

    Args:
        config: run configuration, as `tiermoe up --config`; None: the defaults. Whatever Ray it names, the runtime
            starts in the one that Serve runs in.
        overrides: keys of a run configuration, over `config`.

    Raises:
        TierMoeError: the configuration is refused, or the runtime did not start.
    """

    def __init__(self, config: str | None, overrides: Mapping[str, Any]) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._folder = tempfile.TemporaryDirectory(prefix="tiermoe-serve-")
        checked = load_run_config(config, overrides)
        # what was given, and nothing else: a default is not the same as a choice (`ray.num_cpus`)
        given = checked.model_dump(mode="json", exclude_unset=True)
        given["ray"] = given.get("ray", {}) | {"address": head_address()}
        file = Path(self._folder.name) / "run.yaml"
        file.write_text(yaml.safe_dump(given), encoding="utf-8")
        self._log = Path(self._folder.name) / "log"
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "tiermoe.cluster.cli", "up", "--config", str(file)],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log,
            )  # fmt: skip
        self._id = self._wait_until_ready()

    def runtime_id(self) -> str:
        """The runtime's id."""
        return self._id

    def check_health(self) -> None:
        """Serve asks this; raises RuntimeFailure when the runtime has ended."""
        if self._process is not None and self._process.poll() is not None:
            raise RuntimeFailure(f"the runtime ended: {self._last_line()}", "Serve starts another")

    def __del__(self) -> None:
        """Serve calls this when the replica shall end."""
        if self._process is not None and self._process.poll() is None:
            self._process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_END_DEADLINE_S)
            if self._process.poll() is None:
                self._process.kill()
        self._folder.cleanup()

    def _wait_until_ready(self) -> str:
        """`up` lists itself once it has a Ray, its lead answers once it serves; `up` has a deadline for both."""
        assert self._process is not None
        registry = Registry()
        while self._process.poll() is None:
            for entry in registry.entries():
                if entry.pid == self._process.pid:
                    with contextlib.suppress(TierMoeError):  # such as: there is no such actor yet
                        lead_of(entry.deployment).ask("plan")
                        return entry.deployment
            time.sleep(_POLL_S)
        raise RuntimeFailure(f"the runtime did not start: {self._last_line()}", "try it with `tiermoe up`")

    def _last_line(self) -> str:
        lines = self._log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        return lines[-1].removeprefix("error: ") if lines else "it said nothing"


class ApiServer:
    """One replica of the server.

    Args:
        settings: see `ApiSettings`.
        runtime: handle of the application's `RuntimeProcess`; None: a running deployment is served.

    Raises:
        TierMoeError: no such deployment, no tokenizer, an unreadable key or template.
    """

    async def __init__(self, settings: ApiSettings, runtime: Any = None) -> None:  # type: ignore[misc]  # Serve awaits
        _keep_port_local()
        wanted = settings.deployment if runtime is None else await runtime.runtime_id.remote()
        leads = {name: lead.handle for name, lead in leads_of(find_runtime(wanted)).items()}
        try:
            plan = await next(iter(leads.values())).plan.options(concurrency_group=CONTROL).remote()
        except ray.exceptions.RayError as error:
            raise as_failure(error, "the runtime did not answer 'plan'", _LEAD_DEADLINE_S) from error
        folder = tokenizer_folder(plan, settings.tokenizer)
        template = load_chat_template(folder, Path(settings.chat_template) if settings.chat_template else None)
        self._backend = LeadBackend(leads, plan, settings.limits.request_s)
        await self._backend.first_look()
        name = settings.model_name or Path(plan["model"]).name
        self._service = Service(
            self._backend, load_tokenizer(folder), template, name, settings.limits, settings.tool_format,
            _shared_folder() if settings.replicas > 1 else None,
        )  # fmt: skip
        file = settings.api_key_file
        self._keys = None if file is None else KeyRing(Path(file).expanduser(), refused=self._key_file_refused)
        self._sinks: list[RequestLog | Tracer] = []
        if settings.request_log != "off":
            written = settings.request_log_file
            log = None if written is None else Path(written).expanduser()
            self._sinks.append(RequestLog(settings.request_log, log, self._service.metrics.line_dropped))
        if settings.otlp_endpoint is not None:
            self._sinks.append(Tracer(make_exporter(settings.otlp_endpoint)))

    def __del__(self) -> None:
        """Serve calls this when the replica shall end."""
        for sink in getattr(self, "_sinks", ()):
            sink.close()

    def _key_file_refused(self, line: str) -> None:
        logging.getLogger("ray.serve").error("%s", line)  # `tiermoe serve` says it, too
        self._service.metrics.key_file_refused()

    def __serve_build_asgi_app__(self) -> Any:
        """Serve calls this once the constructor is through."""
        return make_app(self._service, self._keys, sinks=self._sinks, answer_id=False)

    async def check_health(self) -> None:
        """Serve asks this; raises RuntimeFailure when every lead is dead for good, not when one comes back."""
        failures = [lead.failure for lead in self._backend.leads if lead.failure is not None]
        if len(failures) == len(self._backend.leads):
            raise failures[0]


def _shared_folder() -> Path:
    """What the replicas of this application on this machine share; see `server_folder`."""
    folder = server_folder() / serve.get_replica_context().app_name
    share_counters(folder)
    return folder


def _keep_port_local() -> None:
    """In a replica on a loopback node, before Serve opens the replica's own port: bind that port to loopback, too.

    The proxy calls it there. Serve binds it to all interfaces, and has no option for it.
    """
    node = ray.util.get_node_ip_address()
    if is_loopback(node):
        replica.add_port_to_grpc_server = lambda server, _: add_port_to_grpc_server(server, build_address(node, 0))


def build(args: dict[str, Any]) -> serve.Application:
    """The application; Serve calls this with the `args` of its YAML.

    Args:
        args: keys of `ApiSettings`.

    Raises:
        ConfigError: an unknown key or a value out of range.
    """
    try:
        settings = ApiSettings(**args)
    except ValidationError as error:
        raise explain(error, ApiSettings, "the application's args") from error
    return application(settings)


def application(settings: ApiSettings, *, drain_s: float = _DRAIN_S, resources: dict[str, float] | None = None) -> Any:
    """The application of checked settings.

    Args:
        drain_s: seconds that requests under way may take when it ends.
        resources: Ray resources of each replica of the server, by which it is placed.
    """
    common: dict[str, Any] = {"graceful_shutdown_timeout_s": drain_s}
    server = serve.deployment(
        name=SERVER,
        num_replicas=settings.replicas,
        max_ongoing_requests=_MANY,
        graceful_shutdown_wait_loop_s=0.5,
        health_check_period_s=5.0,
        health_check_timeout_s=30.0,
        ray_actor_options={"num_cpus": 0, "resources": resources or {}},
        **common,
    )(serve.ingress()(ApiServer))
    if not settings.starts_runtime:
        return server.bind(settings)
    one = {"num_replicas": 1, "ray_actor_options": {"num_cpus": 0}}
    runtime = serve.deployment(name=RUNTIME, **one, **common)(RuntimeProcess)
    return server.bind(settings, runtime.bind(settings.config, settings.runtime))


def find_runtime(deployment: str | None) -> str:
    """The id of the runtime to serve.

    Args:
        deployment: the id, where it is known; None: that of the only one.

    Raises:
        RuntimeFailure: none runs. ConfigError: there are several.
    """
    if deployment is None:
        named = ray.util.list_named_actors(all_namespaces=True)
        parts = [split_name(entry["name"]) for entry in named if entry["namespace"] == NAMESPACE]
        ids = sorted({family(part[0]) for part in parts if part is not None and part[1] == LEAD})
        if not ids:
            raise RuntimeFailure("no deployment runs in this Ray", "start one with `tiermoe up`, or give config")
        if len(ids) > 1:
            raise ConfigError(f"{len(ids)} deployments run in this Ray", f"set deployment to one of {', '.join(ids)}")
        deployment = ids[0]
    return deployment


def tokenizer_folder(plan: dict[str, Any], given: str | None) -> Path:
    """Where tokenizer.json is: the given folder, else the runtime's expert store.

    Raises:
        ConfigError: not there.
    """
    folder = Path(given).expanduser() if given is not None else Path(plan["store_path"])
    if not (folder / "tokenizer.json").is_file():
        raise ConfigError(
            f"no tokenizer.json in '{folder}' on the server's node", f"name the folder of {plan['model']}'s checkpoint"
        )
    return folder


class HttpServer:
    """A server on the Ray that this process has joined or started, ready inside the `with` block.

    Args:
        settings: which deployment, which limits; paths are of this machine.
        door: where to listen. Once this is ready, it is this that answers there.
    """

    def __init__(self, settings: ApiSettings, door: Door) -> None:
        self._settings, self._door = settings, door
        self._started = False
        self._asking: threading.Thread | None = None
        self._failed: str | None = None  # as Serve said last
        self._failed_s: float | None = None  # since when

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
        if self._asking is None or not self._asking.is_alive():  # it waits while the controller hangs
            self._asking = threading.Thread(target=self._ask, name="tiermoe-serve-status", daemon=True)
            self._asking.start()
        if self._failed is None:
            self._failed_s = None
        elif self._failed_s is None:
            self._failed_s = time.monotonic()
        elif time.monotonic() - self._failed_s > _FAILED_S:
            raise RuntimeFailure(f"the HTTP server ended: {self._failed}", "start it again")

    def _ask(self) -> None:
        try:
            state = serve.status().applications.get(APPLICATION)
        except Exception:  # the controller has died: Ray starts another, and `RayWatch` says so
            return
        failed = state is None or state.status.value in ("DEPLOY_FAILED", "DELETING", "NOT_STARTED")
        why = "it is gone" if state is None else state.message or state.status.value
        self._failed = " ".join(why.split())[:300] if failed else None

    def close(self) -> None:
        """End Serve, once the requests under way have ended, or 20 s have passed. Idempotent; never raises."""
        if self._started:
            self._started = False
            with contextlib.suppress(OSError):  # then nobody answers once the proxy is gone
                self._door.end()
            with contextlib.suppress(Exception):  # it drains; `shutdown` alone would take the proxy away first
                serve.delete(APPLICATION)
            with contextlib.suppress(Exception):
                serve.shutdown()

    def _start(self) -> None:
        named = ray.util.list_named_actors(all_namespaces=True)
        if any(entry["name"] == "SERVE_CONTROLLER_ACTOR" for entry in named):
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
            http_options={
                "host": self._door.address, "port": self._door.port, "keep_alive_timeout_s": SILENCE_S, **self._door.ssl
            },
            logging_config=quiet,
        )
        self._door.beside()
        # beside this process: key, template and tokenizer are files of this machine
        here = {f"node:{ray.util.get_node_ip_address()}": 0.001}
        app: Any = application(self._settings, drain_s=_COMMAND_DRAIN_S, resources=here)
        try:
            serve.run(app, name=APPLICATION, route_prefix="/", logging_config=quiet)
        except RuntimeError as error:
            raise RuntimeFailure(f"the HTTP server did not start: {_refusal()}", "mend that first") from error
        self._door.hand_over()
        if self._door.ssl.get("ssl_ca_certs") is not None and not self._demands_certificates():
            raise RuntimeFailure(
                "Serve's proxy there asks clients for no certificate",
                "start that Ray with RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH=tiermoe.cluster.api.connections:install",
            )

    def _demands_certificates(self) -> bool:
        """Whether a client without a certificate gets no answer; a proxy without `connections.install` gives one."""
        context = ssl.create_default_context()
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE  # which server this is, is known
        with socket.create_connection((self._door.address, self._door.port), _PROBE_S) as plain:
            try:
                with context.wrap_socket(plain) as connection:
                    connection.sendall(b"GET /-/healthz HTTP/1.0\r\n\r\n")
                    return not connection.recv(1)
            except (ssl.SSLError, ConnectionError):
                return True


def _refusal() -> str:
    """Why a replica did not start: Serve has it as the text of a traceback, whose last line says it."""
    state = serve.status().applications.get(APPLICATION)
    messages = [] if state is None else [found.message for found in state.deployments.values() if found.message]
    lines = [line for message in messages for line in message.strip().splitlines()]
    return re.sub(r"^[\w.]+: ", "", lines[-1].strip())[:300] if lines else "Serve does not say why"

