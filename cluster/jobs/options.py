"""Command-line options made of the configuration's fields, and the checks of a runtime before it starts.

An option's name, type, default and help are those of a field of `RunConfig`: nothing is declared twice.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import types
import typing
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from rich.console import Console
from rich.markup import escape

from ...actors.combinations import check_combination
from ...actors.gpu_driver import gpu_count, has_gpu
from ...actors.settings import EngineSettings
from ...actors.slot_budget import divide
from ...errors import BudgetError, ConfigError, RequestError
from ..checkpoints.hub import located
from ..checkpoints.quantization import published_as
from ..config import RunConfig, check_model_dir, engine_settings, load_run_config, on_this_machine
from ..ray_auth import adopt_mode
from ..topology.inputs import facts_of_store
from ..topology.spec import compute_item_bytes, slot_sizes
from ..yaml_file import option_name
from .prepare.needs import check_artifacts, prepared_store

if TYPE_CHECKING:
    from ..attach import Attachment
    from ..deploy import Deployment

RUNTIME = (
    "model", "policy", "budget", "emulate", "device", "dtype", "threads", "store", "cache_dir", "kv.tokens",
    "kv.max_model_len", "kv.max_num_seqs", "kv.dtype", "drafts.kind", "cluster.host_memory", "cluster.shards",
    "cluster.ndp_workers",
    "cluster.channel_tls", "ndp.threads", "link.gbps", "link.latency_us", "ndp.hardware", "ndp.pace",
)  # fmt: skip


def option_of(model: type[BaseModel], key: str, **more: Any) -> Any:
    """A typer option whose help is the description of a field, and whose panel its; `more` as for `typer.Option`."""
    field = model.model_fields[key]
    return typer.Option(help=help_of(model, key), rich_help_panel=_panel(model, field), **more)


def help_of(model: type[BaseModel], key: str) -> str:
    """The description of a field as an option's help."""
    return _help(model.model_fields[key].description or "")


def _help(description: str) -> str:
    return escape(f"{description[:1].upper()}{description[1:]}.")


def _panel(model: type[BaseModel], field: FieldInfo) -> str:
    """The part of the help that a field's option is in."""
    own = field.json_schema_extra
    found = own.get("panel") if isinstance(own, dict) else None
    return str(found or getattr(model, "panel", "Options"))


OUTPUT, _RUNTIME = "Output", "Runtime"  # panels of the help
Config = Annotated[
    str | None,
    typer.Option(help="Configuration: a YAML file, or a name in configs/clusters.", rich_help_panel=_RUNTIME),
]
Attach = Annotated[
    str | None,
    typer.Option(help="Use the runtime at HOST:PORT, which `tiermoe up` started.", rich_help_panel=_RUNTIME),
]
DeploymentId = Annotated[
    str | None, typer.Option(help="Id of the runtime at --attach, if there are several.", rich_help_panel=_RUNTIME)
]
AsJson = Annotated[
    bool,
    typer.Option(
        "--json", help="Print one JSON object on stdout, everything else on stderr.", rich_help_panel=OUTPUT
    ),
]
Model = Annotated[str | None, option_of(RunConfig, "model")]
Policy = Annotated[  # of commands whose default is not a run's
    str,
    typer.Option(
        help="Policy preset: a name in configs/policies, or a YAML file.",
        rich_help_panel=_panel(RunConfig, RunConfig.model_fields["policy"]),
    ),
]
Budget = Annotated[str | None, option_of(RunConfig, "budget")]
Threads = Annotated[int, typer.Option(help="CPU threads of the worker.", rich_help_panel=RunConfig.panel)]


def with_options(*keys: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command one option for each of some keys of `RunConfig`, in place of its parameter `options`, and for each
    field of a dataclass that is the type of a parameter.

    The command gets `options` nested by section, as `load_run_config` takes them; options not given are absent.
    """

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        generated = {option_name(*key.split("."))[2:].replace("-", "_"): key for key in keys}
        hints = typing.get_type_hints(command, include_extras=True)
        parameters: dict[str, tuple[Any, Any]] = {}
        parts: dict[str, type[Any]] = {}  # by parameter
        for name, parameter in inspect.signature(command).parameters.items():
            if name == "options":
                parameters |= {option: _option(key) for option, key in generated.items()}
            elif isinstance(kind := hints[name], type) and dataclasses.is_dataclass(kind):
                parts[name] = kind
                parameters |= _fields_as_options(kind)
            else:
                parameters[name] = (hints[name], parameter.default)

        def run(**given: Any) -> None:
            options: dict[str, Any] = {}
            for name, kind in parts.items():
                given[name] = kind(**{field.name: given.pop(field.name) for field in dataclasses.fields(kind)})
            for name, key in generated.items():
                section, _, field = key.rpartition(".")
                if (value := given.pop(name)) is not None:
                    (options.setdefault(section, {}) if section else options)[field] = value
            command(**({"options": options} if generated else {}), **given)

        return as_command(run, command.__name__, command.__doc__, parameters)

    return decorate


def as_command(
    run: Callable[..., None], name: str, summary: str | None, options: Mapping[str, tuple[Any, Any]]
) -> Callable[..., None]:
    """Give a function the name, the help and the options of a command.

    Args:
        options: by parameter of the function: annotation, as typer reads it, and default.
    """
    run.__name__, run.__doc__, run.__annotations__ = name, summary, {}
    run.__signature__ = inspect.Signature(  # type: ignore[attr-defined]  # where typer looks
        [
            inspect.Parameter(option, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)
            for option, (annotation, default) in options.items()
        ]
    )
    return run


def _fields_as_options(options: type[Any]) -> dict[str, tuple[Any, Any]]:
    """The fields of a dataclass as `as_command` takes options. What a field is annotated with is its option, or the
    option's help.
    """
    found: dict[str, tuple[Any, Any]] = {}
    hints = typing.get_type_hints(options, include_extras=True)
    for field in dataclasses.fields(options):
        kind, note = typing.get_args(hints[field.name])
        option = typer.Option(help=note) if isinstance(note, str) else note
        found[field.name] = (Annotated[kind, option], field.default)
    return found


def checked_config(file: str | None, options: Mapping[str, Any]) -> RunConfig:
    """The configuration of a file and options.

    Raises:
        ConfigError: malformed, or an emulated link for a real device.
    """
    config = load_run_config(file, options)
    if config.device == "cuda" and "link" in options:
        raise ConfigError(
            "--link-gbps and --link-latency-us emulate a link, but device is cuda",
            "leave them out, or use --device cpu",
        )
    return config


def is_attached(attach: str | None, deployment: str | None, options: Mapping[str, Any]) -> bool:
    """Whether a command uses a runtime that is already running.

    Args:
        options: those that belong to a runtime, which one that runs has had.

    Raises:
        RequestError: one of `options` with --attach, or --deployment without it.
    """
    if attach is not None:
        refuse_runtime_options(options)
    elif deployment is not None:
        raise RequestError("--deployment names a runtime that is already running", "pass --attach HOST:PORT with it")
    return attach is not None


def refuse_runtime_options(options: Mapping[str, Any]) -> None:
    """Refuse options of a runtime for one that runs already; `model` may name the tokenizer's folder.

    Raises:
        RequestError: one is given; the message names it.
    """
    for name, value in options.items():
        given = [(name, key) for key in value] if isinstance(value, Mapping) else [(name,)]
        if value is not None and name != "model":
            raise RequestError(
                f"{option_name(*given[0])} belongs to the runtime, which is already running",
                "leave it out, or run without --attach",
            )


def attached(address: str) -> Attachment:
    """This process as one more driver of the Ray at HOST:PORT, inside a `with` block.

    Ray reads its authentication mode when it is imported, so the import waits for the cluster's mode.
    """
    adopt_mode(address)
    from ..attach import Attachment

    return Attachment(address)


def deployed(
    config: RunConfig, settings: EngineSettings, notices: Console, step: Callable[[str], None],
    on_ray: Callable[[Deployment], None] | None = None, lost: Callable[[str], None] | None = None,
) -> Deployment:
    """The runtime of a checked configuration, with its store made if missing; it starts in a `with` block.

    Args:
        notices: where lines about the start, and about nodes that join, go.
        step: called with each step of the start.
        on_ray, lost: as for `Deployment`.

    Raises:
        TierMoeError: the checkpoint, the store or the budget was refused.
    """
    if config.ray.address is not None:
        adopt_mode(config.ray.address)
    from ..deploy import Deployment  # Ray: half a second that a refused command need not pay
    from ..launch import Launch

    check = partial(check_budget, local=config.ray.address is None)
    store = prepared_store(config, settings, progress=not notices.quiet, check=check)

    def notify(line: str) -> None:
        with contextlib.suppress(OSError, ValueError):  # as `launch.say`
            notices.print(line, markup=False, soft_wrap=True)

    launch = Launch(config, settings, str(store), notify=notify, step=step)
    return Deployment(launch, on_ray=on_ray, lost=lost)


def checked_settings(config: RunConfig, *, trace: bool = False) -> tuple[RunConfig, EngineSettings]:
    """The configuration with its model as a folder, and what the worker needs, after all checks that need no process.

    Raises:
        TierMoeError: the first thing that is wrong, with its remedy.
    """
    config = on_this_machine(config)
    settings = engine_settings(config, trace=trace)
    config = located(config)
    check_model_dir(config.model_dir)
    check_combination(settings, published_as(config.model_dir))
    check_artifacts(settings.policy, config)
    return config, settings


def check_budget(settings: EngineSettings, store: Path, local: bool = True) -> None:
    """Refuse a budget that the worker would refuse, before Ray starts.

    Where only the worker's device decides the dtype and is not known here, a budget is refused that is too small for
    the smaller one, with the least that is enough for the larger; the worker has the last word. What `auto` comes to is
    known with the nodes (`topology.decided`).

    Args:
        local: the worker runs on this machine.

    Raises:
        BudgetError: it is less than the policy needs.
    """
    if settings.budget.auto is not None:
        return
    if settings.device != "auto":
        gpus = [settings.device == "cuda"]
    elif local and gpu_count():
        gpus = [True]
    else:
        gpus = [True, False] if has_gpu() or not local else [False]
    facts, refusal = facts_of_store(store, store), None
    for item in sorted({compute_item_bytes(settings, gpu) for gpu in gpus}):
        try:
            divide(settings.policy, settings.budget, slot_sizes(settings, facts, item))
            return
        except BudgetError as error:
            refusal = error
    if refusal is not None:
        raise refusal


def _option(key: str) -> tuple[Any, Any]:
    """Type, as typer reads it, and default of a key's option: plain numbers and flags by their type, all else as text.

    The default None leaves the value to the file; the help names the value without a file.
    """
    value: Any = RunConfig()
    for part in key.split("."):
        model, value = type(value), getattr(value, part)
    field = model.model_fields[part]
    members = typing.get_args(field.annotation) if isinstance(field.annotation, types.UnionType) else ()
    kinds = [kind for kind in members or (field.annotation,) if kind is not types.NoneType]
    kind: Any = kinds[0] if kinds[0] in (int, float, bool) and len(kinds) == 1 else str
    shown = f"{value:g}" if isinstance(value, float) else str(value)
    default = "" if value in (None, False) else f"; default: {shown}"
    option = typer.Option(help=_help(f"{field.description}{default}"), rich_help_panel=_panel(model, field))
    return Annotated[kind | None, option], None
