"""The server as a Ray Serve application: `tiermoe.cluster.api.app:build`.

    serve run tiermoe.cluster.api.app:build config=FILE        (or the import_path of a Serve YAML, or of a RayService)
    RuntimeProcess (one replica, where a runtime is to be started)  <-  ApiServer (FastAPI)  ->  the runtime's lead

A replica of the server that finds its lead dead is unhealthy: Serve starts it again, and it looks for the lead anew.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ray
from pydantic import ValidationError
from ray import serve

from ...errors import ConfigError, RuntimeFailure
from ..failures import as_failure
from ..lead import CONTROL
from ..names import LEAD, split_name
from ..prompt import load_tokenizer
from ..ray_session import NAMESPACE
from ..yaml_file import explain
from .backend import LeadBackend
from .chat_template import load_chat_template
from .key import read_key
from .routes import make_app
from .service import Service, model_name_of
from .settings import ApiSettings

_LEAD_DEADLINE_S = 30.0
_MANY = 4096  # requests of one replica at a time: the server's own queue refuses long before, and says so
_DRAIN_S = 120.0
SERVER, RUNTIME = "ApiServer", "Runtime"


class ApiServer:
    """One replica of the server.

    Args:
        settings: see `ApiSettings`.
        runtime: handle of the application's `RuntimeProcess`; None: a running deployment is served.

    Raises:
        TierMoeError: no such deployment, no tokenizer, an unreadable key or template.
    """

    async def __init__(self, settings: ApiSettings, runtime: Any = None) -> None:  # type: ignore[misc]  # Serve awaits
        wanted = settings.deployment if runtime is None else await runtime.runtime_id.remote()
        self._lead = find_lead(wanted)
        try:
            plan = await self._lead.plan.options(concurrency_group=CONTROL).remote()
        except ray.exceptions.RayError as error:
            raise as_failure(error, "the runtime did not answer 'plan'", _LEAD_DEADLINE_S) from error
        folder = tokenizer_folder(plan, settings.tokenizer)
        template = load_chat_template(folder, Path(settings.chat_template) if settings.chat_template else None)
        self._service = Service(
            LeadBackend(self._lead, plan, settings.limits.request_s),
            load_tokenizer(folder),
            template,
            model_name_of(plan, settings.model_name),
            settings.limits,
        )
        self._key = read_key(settings.api_key_file)

    def __serve_build_asgi_app__(self) -> Any:
        """Serve calls this once the constructor is through."""
        return make_app(self._service, self._key, answer_id=False)

    async def check_health(self) -> None:
        """Serve asks this; raises RuntimeFailure when the lead is dead, not when it is busy."""
        try:
            await self._lead.health.options(concurrency_group=CONTROL).remote()
        except ray.exceptions.RayError as error:
            raise as_failure(error, "the runtime failed") from error


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
    placed: dict[str, Any] = {"num_cpus": 0, "resources": resources or {}}
    server = serve.deployment(
        name=SERVER,
        num_replicas=1,
        max_ongoing_requests=_MANY,
        graceful_shutdown_timeout_s=drain_s,
        graceful_shutdown_wait_loop_s=0.5,
        health_check_period_s=5.0,
        health_check_timeout_s=30.0,
        ray_actor_options=placed,
    )(serve.ingress()(ApiServer))
    if not settings.starts_runtime:
        return server.bind(settings)
    from .runtime import RuntimeProcess

    runtime = serve.deployment(
        name=RUNTIME,
        num_replicas=1,
        graceful_shutdown_timeout_s=drain_s,
        ray_actor_options={"num_cpus": 0},
    )(RuntimeProcess)
    return server.bind(settings, runtime.bind(settings.config, settings.runtime))


def find_lead(deployment: str | None) -> Any:
    """The lead's handle.

    Args:
        deployment: its id; None: the only one.

    Raises:
        RuntimeFailure: there is none of this id, or none at all. ConfigError: there are several.
    """
    if deployment is None:
        named = ray.util.list_named_actors(all_namespaces=True)
        parts = [split_name(entry["name"]) for entry in named if entry["namespace"] == NAMESPACE]
        ids = sorted({part[0] for part in parts if part is not None and part[1] == LEAD})
        if not ids:
            raise RuntimeFailure("no deployment runs in this Ray", "start one with `tiermoe up`, or give config")
        if len(ids) > 1:
            raise ConfigError(f"{len(ids)} deployments run in this Ray", f"set deployment to one of {', '.join(ids)}")
        deployment = ids[0]
    try:
        return ray.get_actor(f"{deployment}/{LEAD}", namespace=NAMESPACE)
    except ValueError as error:
        raise RuntimeFailure(f"deployment '{deployment}' has no lead", "look at `tiermoe status`") from error


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
