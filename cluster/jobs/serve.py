"""`tiermoe serve`: an OpenAI-compatible server before a runtime of its own, or one that runs, until Ctrl-C."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from ...errors import ConfigError
from ..ray_auth import adopt_mode
from ..report.runtime import placed_tables, plan_table
from .options import (
    Budget,
    Config,
    Device,
    Dtype,
    LinkGbps,
    LinkLatency,
    Model,
    NdpHardware,
    NdpPace,
    NdpThreads,
    NdpWorkers,
    Policy,
    Shards,
    Store,
    Threads,
    checked_config,
    checked_settings,
    prepared_for,
    refuse_runtime_options,
    runtime_options,
)
from .up import Check, keep_runtime

if TYPE_CHECKING:
    from ..deploy import Deployment

_WATCH_S = 2.0


def serve_command(
    model: Model = None,
    config: Config = None,
    policy: Policy = None,
    budget: Budget = None,
    device: Device = None,
    dtype: Dtype = None,
    threads: Threads = None,
    link_gbps: LinkGbps = None,
    link_latency_us: LinkLatency = None,
    ndp_threads: NdpThreads = None,
    ndp_hardware: NdpHardware = None,
    ndp_pace: NdpPace = None,
    shards: Shards = None,
    ndp_workers: NdpWorkers = None,
    store: Store = None,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port; 0: a free one.", min=0, max=65535)] = 8000,
    api_key_file: Annotated[
        Path | None, typer.Option(help="File with the key that clients must send; none: no key.")
    ] = None,
    model_name: Annotated[str | None, typer.Option(help="What clients call the model. (its folder's name)")] = None,
    chat_template: Annotated[Path | None, typer.Option(help="Jinja file, instead of the model's own.")] = None,
    max_waiting: Annotated[int, typer.Option(help="Requests that may wait; more get 429.", min=0)] = 256,
    attach: Annotated[str | None, typer.Option(help="HOST:PORT of a runtime that runs: serve that.")] = None,
    deployment: Annotated[str | None, typer.Option(help="Id of the runtime there, if it has several.")] = None,
) -> None:
    """Serve a model over HTTP until Ctrl-C."""
    _check_installed()
    options = runtime_options(
        model=model, policy=policy, budget=budget, device=device, dtype=dtype, threads=threads, store=store,
        link_gbps=link_gbps, link_latency_us=link_latency_us, ndp_threads=ndp_threads, ndp_hardware=ndp_hardware,
        ndp_pace=ndp_pace, shards=shards, ndp_workers=ndp_workers,
    )  # fmt: skip
    server: dict[str, Any] = {
        "model_name": model_name,
        "chat_template": None if chat_template is None else str(chat_template.expanduser().absolute()),
        "api_key_file": None if api_key_file is None else str(api_key_file.expanduser().absolute()),
        "limits": {"waiting": max_waiting},
    }
    if attach is not None:
        refuse_runtime_options(options | {"config": config})
        _serve_guest(attach, deployment, server | {"tokenizer": model}, host, port)
    elif deployment is not None:
        raise ConfigError("--deployment names a runtime that runs already", "pass --attach HOST:PORT with it")
    else:
        _serve_own(config, options, server, host, port)


def _serve_own(config: str | None, options: dict[str, Any], server: dict[str, Any], host: str, port: int) -> None:
    """Start a runtime and its server; leave nothing behind."""
    chosen = checked_config(config, options)
    settings = checked_settings(chosen)
    _check_files(server)
    notices = Console(stderr=True)
    folder = prepared_for(chosen, settings, progress=notices.is_terminal)
    limits = server["limits"] | {"request_s": chosen.request_deadline_s}

    @contextmanager
    def served(deployment: Deployment) -> Iterator[Check]:
        Console().print(plan_table(deployment.plan), *placed_tables(deployment.planned.as_dict()))
        tokenizer = str(chosen.model_dir.absolute())
        found = server | {"deployment": deployment.id, "tokenizer": tokenizer, "limits": limits}
        with ExitStack() as stack:
            with notices.status("starting the server ..."):
                http = stack.enter_context(_http_server(found, host, port))
            _announce(http, found, host, f"deployment {deployment.id} is ready at {deployment.address}")
            yield http.check

    ended = keep_runtime(chosen, settings, folder, notices, served)
    Console().print(f"deployment {ended} was ended by `tiermoe down`")


def _serve_guest(address: str, wanted: str | None, server: dict[str, Any], host: str, port: int) -> None:
    """Serve a runtime that stays when this ends."""
    _check_files(server)
    adopt_mode(address)
    from ..attach import Attachment  # Ray, which reads the mode when it is imported

    with Attachment(address) as attachment:
        deployment = attachment.choose(wanted)
        found = server | {"deployment": deployment}
        with _http_server(found, host, port) as http:
            _announce(http, found, host, f"deployment {deployment} runs at {address}")
            while True:
                attachment.ask(deployment, "plan")
                http.check()
                time.sleep(_WATCH_S)


def _http_server(settings: dict[str, Any], host: str, port: int) -> Any:
    from ..api.app import HttpServer
    from ..api.settings import ApiSettings

    return HttpServer(ApiSettings(**settings), host, port)


def _check_files(server: dict[str, Any]) -> None:
    """Refuse a key or a template that the server would refuse, before anything is started."""
    from ..api.settings import read_key
    from ..api.text import load_chat_template

    read_key(server["api_key_file"])
    if server["chat_template"] is not None:
        load_chat_template(Path("."), Path(server["chat_template"]))


def _check_installed() -> None:
    try:
        import fastapi  # noqa: F401
        import prometheus_client  # noqa: F401
        import uvicorn  # noqa: F401  (comes with ray[serve])
    except ImportError as error:
        raise ConfigError(
            f"the server needs packages that are not installed ({error.name})", "pip install 'tiermoe[serve]'"
        ) from error


def _announce(http: Any, server: dict[str, Any], host: str, where: str) -> None:
    out = Console()
    out.print(where, soft_wrap=True)
    out.print(f"serving at {http.url}/v1", soft_wrap=True)
    out.print("end it:    Ctrl-C")
    if server["api_key_file"] is None and host not in ("127.0.0.1", "localhost", "::1"):
        warning = f"no key is asked for: whoever reaches {host} may use the model; see --api-key-file"
        Console(stderr=True).print(warning, soft_wrap=True)
    out.file.flush()
