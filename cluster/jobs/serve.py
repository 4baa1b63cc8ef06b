"""`tiermoe serve`: OpenAI's and Anthropic's protocols before its own runtime or a running one, until Ctrl-C."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args

import typer
from pydantic import ValidationError
from rich.console import Console

from ...errors import ConfigError
from ...proto.tls import TlsFiles
from ..api.keys import read_keys
from ..api.origins import ANY, Access
from ..api.request_log import check_file
from ..api.settings import ApiSettings, LimitSettings, RequestLogFormat, ToolFormatName
from ..checkpoints.generation import GenerationConfigMode, read_defaults
from ..checkpoints.hub import locate
from ..checkpoints.weight_files import refuse_links_out
from ..config import RunConfig
from ..prompt import load_tokenizer
from ..report.steps import Steps
from ..report.tables import results
from ..yaml_file import explain, merged, read_yaml
from .ending import BoundedEnd
from .options import (
    RUNTIME,
    Attach,
    Config,
    DeploymentId,
    attached,
    checked_config,
    help_of,
    is_attached,
    option_of,
    with_options,
)
from .up import Check, serve_until_ended
from .watched import FileWatch, checks_of, ray_room_checks

if TYPE_CHECKING:
    from ..api.server_socket import ServerSocket
    from ..deploy import Deployment

_WATCH_S = 2.0


@dataclass(frozen=True)
class ServerOptions:
    """The server's keys as options of `tiermoe serve`, over those of a file."""

    api_key_file: Annotated[Path | None, option_of(ApiSettings, "api_key_file")] = None
    allow_origin: Annotated[list[str] | None, option_of(ApiSettings, "allow_origins")] = None
    allowed_host: Annotated[list[str] | None, option_of(ApiSettings, "allowed_hosts")] = None
    share_prefix_cache: Annotated[
        bool, typer.Option("--share-prefix-cache", help=help_of(ApiSettings, "share_prefix_cache"))
    ] = False
    model_name: Annotated[str | None, option_of(ApiSettings, "model_name")] = None
    chat_template: Annotated[Path | None, option_of(ApiSettings, "chat_template")] = None
    tool_format: Annotated[str | None, option_of(ApiSettings, "tool_format")] = None
    max_waiting: Annotated[int | None, option_of(LimitSettings, "waiting", min=0, show_default="256")] = None
    generation_config: Annotated[str | None, option_of(ApiSettings, "generation_config", show_default="auto")] = None
    request_log: Annotated[str | None, option_of(ApiSettings, "request_log", show_default="text")] = None
    request_log_file: Annotated[Path | None, option_of(ApiSettings, "request_log_file")] = None
    server_config: Annotated[
        Path | None, "YAML file of the server's keys (docs/configuration.md); options here override it."
    ] = None

    def settings(self) -> ApiSettings:
        """The server's keys: those of the file, the options that were given over them, and whole paths.

        Raises:
            ConfigError: the file is malformed, or has an unknown key, or a value out of range.
        """
        file = self.server_config
        below = {} if file is None else read_yaml(file)
        if "deployment" in below:
            raise ConfigError(f"{file}: key 'deployment' names a running runtime", "give --attach and --deployment")
        given = {
            "model_name": self.model_name, "chat_template": self.chat_template, "api_key_file": self.api_key_file,
            "allow_origins": self.allow_origin, "allowed_hosts": self.allowed_host,
            "share_prefix_cache": self.share_prefix_cache,
            "tool_format": _one_of("--tool-format", self.tool_format, ToolFormatName),
            "generation_config": _one_of("--generation-config", self.generation_config, GenerationConfigMode),
            "request_log": _one_of("--request-log", self.request_log, RequestLogFormat),
            "request_log_file": self.request_log_file,
            "limits": {} if self.max_waiting is None else {"waiting": self.max_waiting},
        }  # fmt: skip
        over = {name: str(value) if isinstance(value, Path) else value for name, value in given.items() if value}
        try:
            found = ApiSettings(**merged(below, over))
        except ValidationError as error:
            raise explain(error, ApiSettings, "the server" if file is None else str(file)) from error
        paths = ("chat_template", "api_key_file", "request_log_file", "tokenizer")
        whole = {name: _absolute(Path(value)) for name in paths if (value := getattr(found, name)) is not None}
        return found.model_copy(update=whole)


@dataclass(frozen=True)
class HttpsOptions:
    """The files of HTTPS as options."""

    ssl_certfile: Annotated[Path | None, "PEM certificate of the server, for HTTPS."] = None
    ssl_keyfile: Annotated[Path | None, "PEM key of the certificate, mode 0600."] = None
    ssl_ca_certs: Annotated[
        Path | None, "PEM certificates of a CA; clients must present a certificate that it signed."
    ] = None

    def files(self) -> TlsFiles | None:
        """Checked; None: HTTP. Raises ConfigError."""
        certificate, key, ca = self.ssl_certfile, self.ssl_keyfile, self.ssl_ca_certs
        if certificate is None and key is None and ca is None:
            return None
        if certificate is None or key is None:
            raise ConfigError("HTTPS needs a certificate and its key", "give --ssl-certfile and --ssl-keyfile")
        files = TlsFiles(_absolute(ca), _absolute(certificate), _absolute(key))
        files.read()
        files.refuse_expired()
        return files


@with_options(*RUNTIME, "cluster.replicas")
def serve_command(
    options: dict[str, Any],
    config: Config = None,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on; 0: a free one.", min=0, max=65535)] = 8000,
    *,
    http: ServerOptions,
    https: HttpsOptions,
    attach: Attach = None,
    deployment: DeploymentId = None,
) -> None:
    """Serve a model over HTTP until Ctrl-C."""
    server, tls = http.settings(), https.files()
    if is_attached(attach, deployment, options | {"config": config}):
        assert attach is not None
        _check_files(server)
        folder = str(locate(options["model"])) if "model" in options else None
        _serve_attached(
            attach, deployment, server.model_copy(update={"tokenizer": folder}),
            _server_socket(host, port, tls, server),
        )  # fmt: skip
    else:
        chosen = checked_config(config, options)
        _check_files(server)
        _serve_own(chosen, server, _server_socket(host, port, tls, server))


def _absolute(file: Path | None) -> str | None:
    return None if file is None else str(file.expanduser().absolute())


def _one_of(option: str, given: str | None, names: Any) -> str | None:
    if given is not None and given not in get_args(names):
        raise ConfigError(f"{option} is '{given}'", f"give one of {', '.join(get_args(names))}")
    return given


def _server_socket(host: str, port: int, tls: TlsFiles | None, server: ApiSettings) -> ServerSocket:
    from ..api.server_socket import ServerSocket

    access = Access(server.allow_origins, server.allowed_hosts, host, keyed=server.api_key_file is not None)
    return ServerSocket(host, port, tls, access)


def _serve_own(config: RunConfig, server: ApiSettings, server_socket: ServerSocket) -> None:
    """Start a runtime and its server; leave nothing behind."""
    if "request_s" in server.limits.model_fields_set:
        raise ConfigError("limits.request_s belongs to the runtime", "set request_deadline_s of its configuration")
    limits = server.limits.model_copy(update={"request_s": config.request_deadline_s})

    @contextmanager
    def served(deployment: Deployment, steps: Steps) -> Iterator[Check]:
        folder = server.tokenizer or str(deployment.config.model_dir.absolute())
        own = {"deployment": deployment.id, "tokenizer": folder, "limits": limits}
        where = f"deployment {deployment.id} is ready at {deployment.address}"
        with _http_server(server.model_copy(update=own), server_socket, deployment.plan, where, steps) as check:
            yield check

    def checks(located: RunConfig) -> None:
        folder = Path(server.tokenizer or located.model_dir)
        load_tokenizer(folder)
        read_defaults(folder, server.generation_config)

    with server_socket:
        serve_until_ended("serve", config, served, lambda steps: server_socket.open(steps.progress), checks)


def _serve_attached(address: str, wanted: str | None, server: ApiSettings, server_socket: ServerSocket) -> None:
    """Serve a runtime that stays when this ends. The end of its Ray, or a hang of it, ends this with exit code 1."""
    with server_socket, BoundedEnd(lambda: False) as ending, attached(address) as attachment:
        from ..launch import say
        from ..ray_internals import session_folder
        from ..supervision import RayWatch

        deployment = attachment.choose(wanted)
        where = f"deployment {deployment} runs at {address}"
        plan = attachment.ask(deployment, "plan")
        folder = server.tokenizer or str(plan["store_path"])
        server = server.model_copy(update={"deployment": deployment, "tokenizer": folder})
        watching = closing(RayWatch(deployment, True, say, ending.lost))
        steps = Steps(Console(stderr=True))
        server_socket.open(steps.progress)
        with watching as ray_watch, _http_server(server, server_socket, plan, where, steps) as check:
            rooms = FileWatch(ray_room_checks(session_folder(), local=False), say)
            ending.serving()
            while True:
                attachment.check(deployment)
                ray_watch.look()
                check()
                rooms.look()
                time.sleep(_WATCH_S)


@contextmanager
def _http_server(
    server: ApiSettings, server_socket: ServerSocket, plan: dict[str, Any], where: str, steps: Steps
) -> Iterator[Check]:
    """The server, announced once it is ready, with the line `where` about its runtime, which has this plan."""
    from ..api.server import HttpServer
    from ..api.templates import end_helper
    from ..launch import say

    checks = checks_of(server, server_socket.tls)
    with ExitStack() as stack:
        with steps:
            steps("starting the HTTP server")
            http = stack.enter_context(HttpServer(server, server_socket, plan))
        _say_what_chats_lack(server)
        defaults = read_defaults(Path(server.tokenizer or plan["store_path"]), server.generation_config)
        if defaults.warning is not None:
            Console(stderr=True).print(defaults.warning, soft_wrap=True, markup=False)
        end_helper()  # the server's process has its own
        out = results()
        out.print(where, soft_wrap=True)
        out.print(f"serving at {server_socket.url}/v1", soft_wrap=True)
        if (said := defaults.said(server=True)) is not None:
            out.print(said, soft_wrap=True, markup=False)
        out.print("end it:    Ctrl-C")
        if server.api_key_file is None and server_socket.host not in ("127.0.0.1", "localhost", "::1"):
            warning = f"no key is asked for: whoever reaches {server_socket.host} may use the model; see --api-key-file"
            Console(stderr=True).print(warning, soft_wrap=True)
        if server.api_key_file is None and ANY in server.allow_origins:
            warning = "no key is asked for: every web page that a user of this machine opens may use the model"
            Console(stderr=True).print(f"{warning}; see --allow-origin", soft_wrap=True)
        out.file.flush()
        yield FileWatch(checks | {"the HTTP server": http.look}, say).look


def _say_what_chats_lack(server: ApiSettings) -> None:
    """A model's own template that cannot be rendered costs its chats, not the server; calls that are not known cost
    their parsing."""
    from ..api.templates import load_chat_template
    from ..api.tools import calling

    if server.tokenizer is None:
        return
    template = load_chat_template(Path(server.tokenizer), Path(server.chat_template) if server.chat_template else None)
    if template is not None and template.problem is not None:
        words = f"chats are refused: {template.problem}; completions are served, see --chat-template"
        Console(stderr=True).print(words, soft_wrap=True, markup=False)
    elif (unknown := calling(template, server.tool_format).unknown) is not None:
        Console(stderr=True).print(unknown, soft_wrap=True, markup=False)


def _check_files(server: ApiSettings) -> None:
    """Refuse a key or a template that the server would refuse, before anything is started."""
    from ..api.templates import load_chat_template

    if server.api_key_file is not None:
        read_keys(Path(server.api_key_file))
    if server.tokenizer is not None and Path(server.tokenizer).is_dir():
        refuse_links_out(Path(server.tokenizer))
    if server.request_log_file is not None:
        check_file(Path(server.request_log_file))
    if server.chat_template is not None:
        load_chat_template(Path("."), Path(server.chat_template))
