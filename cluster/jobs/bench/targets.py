"""Servers to be measured: one at a URL, one put before a running deployment, one whose runtime is placed here.

Each is a context manager that gives a `Target`. What it has started ends with the block, also by a signal.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from ....errors import ConfigError, RuntimeFailure, TierMoeError, told
from ...api.keys import read_keys
from ...api.origins import Access
from ...api.settings import ApiSettings
from ...checkpoints.hub import locate
from ...config import RunConfig
from ...registry import Registry
from ...report.steps import LastStart, Steps
from ..ending import BoundedEnd
from ..options import attached, checked_settings, deployed
from .load import connecting

if TYPE_CHECKING:
    from ...deploy import Deployment

NOT_SAID = "not said"  # by which executor a server at a URL computes
_HOST = "127.0.0.1"  # the load comes from this process
_TERMINATED = 143
_ANSWER_S = 10.0
_COMMAND = "serve"  # whose start this is, in all that takes time


@dataclass(frozen=True)
class Target:
    """A server that answers.

    name: for people. url: without /v1. model: its name there. key: its bearer key. executor: of its figures.
    deployment: its runtime's id in the Ray of this process; None: nothing is known of it but its answers.
    plan: of its lead. tokenizer: folder of one, to count prompts by; None: not known.
    look: to be called about once a second: keeps what was placed alive, and says why it has ended (None: it serves).
    """

    name: str
    url: str
    model: str
    key: str | None = None
    executor: str = NOT_SAID
    deployment: str | None = None
    plan: Mapping[str, Any] = field(default_factory=dict)
    tokenizer: Path | None = None
    look: Callable[[], str | None] = lambda: None


def at_url(url: str, model_name: str | None = None, key_file: Path | None = None) -> Target:
    """A server of OpenAI's protocol that runs already; it needs no end.

    Args:
        url: with or without /v1. model_name: None: the first model that it lists. key_file: its first key is sent.

    Raises:
        RuntimeFailure: it does not list its models. ConfigError: the key file cannot be read, or this is no URL.
    """
    import httpx

    url, remedy = url.rstrip("/").removesuffix("/v1"), "give the URL of a server that speaks OpenAI's protocol"
    key = None if key_file is None else read_keys(key_file)[0].secret.decode()
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    try:
        answer = httpx.get(f"{url}/v1/models", headers=headers, timeout=_ANSWER_S, **connecting(url))
        answer.raise_for_status()
        listed = [str(model["id"]) for model in answer.json()["data"]]
    except (httpx.HTTPError, httpx.InvalidURL, OSError, ValueError, KeyError, TypeError) as error:
        what = f"no server lists its models at {url}/v1/models ({type(error).__name__}: {error})"
        no_url = isinstance(error, httpx.InvalidURL | httpx.UnsupportedProtocol)
        raise (ConfigError if no_url else RuntimeFailure)(what.splitlines()[0], remedy) from error
    if model_name is None and not listed:
        raise RuntimeFailure(f"the server at {url} lists no model", "give its name with --model-name")
    return Target(url, url, model_name or listed[0], key)


@contextmanager
def attached_to(address: str, wanted: str | None = None, tokenizer: str | None = None) -> Iterator[Target]:
    """A running deployment behind a server of its own, beside this process; the deployment stays.

    Args:
        address: HOST:PORT of its Ray. wanted: its id, if there are several. tokenizer: model whose tokenizer the server
            takes; None: that of the deployment's store.

    Raises:
        TierMoeError: there is none, or the server refuses. The loss of Ray itself ends this process with exit code 1.
    """
    with BoundedEnd(lambda: False, _TERMINATED) as ending, attached(address) as attachment, ExitStack() as stack:
        from ...launch import say
        from ...supervision import RayWatch

        deployment = attachment.choose(wanted)
        plan = attachment.ask(deployment, "plan")
        folder = Path(plan["store_path"]) if tokenizer is None else locate(tokenizer)
        watch = stack.enter_context(closing(RayWatch(deployment, True, say, ending.lost)))
        steps = Steps(Console(stderr=True))
        with steps:
            url, look_at_server = stack.enter_context(_server(deployment, plan, folder, steps))
        ending.serving()

        def look() -> str | None:
            attachment.check(deployment)
            watch.look()
            return look_at_server()

        yield _of_deployment(deployment, url, plan, folder, look)


@contextmanager
def placed(config: RunConfig) -> Iterator[Target]:
    """A runtime on the nodes of its Ray, or on a Ray of its own here, as `tiermoe serve` starts it; it ends with this.

    `tiermoe status` shows it, and `tiermoe down` ends it and this process.

    Raises:
        TierMoeError: it is refused, or does not start. The loss of Ray itself ends this process with exit code 1.
    """
    config, settings = checked_settings(config)
    notices, last, started = Console(stderr=True), LastStart(_COMMAND, config), list["Deployment"]()

    def force() -> bool:
        for one in started:
            Registry().withdraw(one.id)
        return any(one.abandon() for one in started)

    with BoundedEnd(force, _TERMINATED) as ending, ExitStack() as stack:

        def enter(it: Deployment) -> None:
            stack.enter_context(Registry().entered(it.id, it.address, config.ray.address is None))

        steps = Steps(notices, last.seconds)
        deployment = deployed(config, settings, notices, steps, enter, ending.lost)
        started.append(deployment)
        with steps:
            stack.enter_context(deployment)
            folder = config.model_dir.absolute()
            url, look_at_server = stack.enter_context(_server(deployment.id, deployment.plan, folder, steps))
        last.remember(steps.seconds)
        ending.serving()

        def look() -> str | None:
            return look_at_server() if deployment.watch() else "it was ended"

        yield _of_deployment(deployment.id, url, deployment.plan, folder, look)


def _of_deployment(
    deployment: str, url: str, plan: Mapping[str, Any], folder: Path, look: Callable[[], str | None]
) -> Target:
    def why_it_ended() -> str | None:
        try:
            return look()
        except TierMoeError as error:
            return told(error)

    return Target(
        f"deployment {deployment}", url, Path(plan["model"]).name, executor=str(plan["executor"]),
        deployment=deployment, plan=plan, tokenizer=folder, look=why_it_ended,
    )  # fmt: skip


@contextmanager
def _server(
    deployment: str, plan: Mapping[str, Any], folder: Path, steps: Steps
) -> Iterator[tuple[str, Callable[[], None]]]:
    """A server on loopback before a deployment, with the limits that users get: its URL, and what keeps it alive."""
    from ...api.server import HttpServer
    from ...api.server_socket import ServerSocket

    settings = ApiSettings(deployment=deployment, tokenizer=str(folder), request_log="off")
    with ServerSocket(_HOST, 0, access=Access((), (), _HOST, keyed=False)) as server_socket:
        server_socket.open(steps.progress)
        steps("starting the HTTP server")
        with HttpServer(settings, server_socket, dict(plan)) as http:

            def look() -> None:
                http.look()  # one that does not serve is in the answers

            yield server_socket.url, look
