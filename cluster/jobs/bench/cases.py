"""Benchmarks of one part of the system each.

A case is a class of options whose `measure` names a function `module.function(options, progress) -> Report` of the
package that has the class. The class's fields are the options of `tiermoe bench NAME`, its docstring is the help.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, get_args, get_origin

from annotated_types import Ge, Le
from pydantic import BaseModel, ConfigDict, Field

from ....actors.combinations import Refusal, refuse_first

if TYPE_CHECKING:
    from pydantic.fields import FieldInfo
    from rich.progress import Progress

    from .metrics import Report

Model = Annotated[str | None, Field(description="Checkpoint folder; default: the built-in tiny model.")]
Repeats = Annotated[int, Field(ge=1, description="Counted repetitions of each case.")]
Config = Annotated[
    str | None,
    Field(description="Configuration: a YAML file, or a name in configs/clusters."),
]


class Options(BaseModel):
    """Options of one case."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    measure: ClassVar[str]  # module beside that of the class, and its function
    own_keys: ClassVar[Sequence[str]] = ()  # keys of a configuration that the case sets itself
    parted: ClassVar[str] = ""  # field of several values, each of which another node may measure; empty: none

    def settings(self, **fixed: Any) -> dict[str, Any]:
        """The settings of the report: the options, overridden by the case's fixed values."""
        return self.model_dump(mode="json", exclude={"model"}) | fixed

    def result(self, name: str) -> str:
        """The name of the files in a folder given by `--out`. name: of the case."""
        return name

    def write_page(self, page: Path, report: Report) -> None:
        """Write a report's page beside its JSON; here: fill the tables of one that is there."""
        from .metrics import fill_report_page

        fill_report_page(page, report)


class Serve(Options):
    """What a server answers under load: rates, TTFT, TPOT, and what each process of the cluster did meanwhile.

    Of a deployment that is placed (--config; default: on this machine) or runs (--attach), or of any server (--url).
    """

    measure = "serve.serve"
    config: Config = None
    attach: str | None = Field(None, description="Measure the runtime at HOST:PORT, which `tiermoe up` started.")
    deployment: str | None = Field(None, description="Id of the runtime at --attach, if there are several.")
    url: str | None = Field(None, description="Measure the server of OpenAI's protocol at this URL.")
    model_name: str | None = Field(None, description="Model at --url; default: the first that it lists.")
    api_key_file: Path | None = Field(None, description="File with the key that --url asks for, mode 0600.")
    repeats: Repeats = 5
    streams: tuple[Annotated[int, Ge(1)], ...] = Field(
        (), description="Closed loop: clients at once; may be repeated; default: 1, 4, 8 and 16."
    )
    rate: tuple[Annotated[float, Ge(0.001)], ...] = Field(
        (), description="Open loop: arrivals a second, a Poisson process; may be repeated."
    )
    schedule: Path | None = Field(
        None, description="Open loop: recorded arrivals; a file of seconds, or JSON lines with at_s or timestamp (ms)."
    )
    requests: int | None = Field(
        None, ge=1, description="Of each client in a repetition; default: 2. Of an open loop, in all; default: 30, or "
        "the schedule's",
    )  # fmt: skip
    prompts: Path | None = Field(
        None, description="File of prompts: lines, or JSON lines with prompt, or messages of a chat; default: made."
    )
    prompt_tokens: int = Field(48, ge=1, description="Tokens of each made prompt.")
    repeated: float = Field(0.0, ge=0.0, le=0.95, description="Share of a made prompt that repeats its own n-grams.")
    max_tokens: int = Field(48, ge=2, description="Tokens of each answer, at most.")
    ignore_eos: bool = Field(False, description="Answers go on to --max-tokens; the server must know ignore_eos.")
    warmup: int | None = Field(None, ge=0, description="Requests before the first repetition; default: as one has.")
    seed: int = Field(0, ge=0, description="Of arrivals and made prompts.")
    slo_ttft_ms: float | None = Field(None, ge=0, description="Goodput: most milliseconds to the first token.")
    slo_tpot_ms: float | None = Field(None, ge=0, description="Goodput: most milliseconds of each further token.")
    model: Model = None
    budget: str | None = Field(None, description="Device memory for experts; over that of --config.")
    store: str | None = Field(None, description="Folder of the expert store; over that of --config.")
    policy: str | None = Field(None, description="Policy; over that of --config.")
    threads: int | None = Field(None, ge=1, description="Compute threads; over those of --config.")
    link_gbps: float | None = Field(
        None, ge=0.001, description="Emulated link, 1e9 bytes per second; over that of --config."
    )

    def write_page(self, page: Path, report: Report) -> None:
        """The page of what was measured, with a plot of what each process did each second."""
        from .serve_page import write_page

        write_page(page, report)

    def check(self) -> None:
        """Raise ConfigError for options that do not go together; the message names them."""

        def given(*names: str) -> list[str]:
            return [_option_name(name) for name in names if getattr(self, name) not in (None, ())]

        targets, arrivals = given("config", "attach", "url"), given("streams", "rate", "schedule")
        of_runtime, runs = given("policy", "budget", "threads", "link_gbps", "store"), given("attach", "url")
        lone = [] if self.url is not None else given("model_name", "api_key_file")
        lone += [] if self.attach is not None else given("deployment")
        changed = [name for name in ("prompt_tokens", "repeated") if getattr(self, name) != _default(name)]
        made = given(*changed, *(["model"] if self.url is not None else []))  # what is of made prompts alone
        refuse_first((
            Refusal(len(targets) > 1, f"{' and '.join(targets[:2])} both name what is measured", "give one of them"),
            Refusal(len(arrivals) > 1, f"{' and '.join(arrivals[:2])} both say when requests come", "give one of them"),
            Refusal(bool(lone), f"{''.join(lone[:1])} belongs to a server that runs already",
                    "give its --url or --attach"),
            Refusal(bool(runs and of_runtime), f"{''.join(of_runtime[:1])} belongs to a runtime that is started, and "
                    f"that of {''.join(runs)} runs already", "leave it out, or give --config"),
            Refusal(bool(made and self.prompts), f"{''.join(made[:1])} belongs to prompts that are made, and those of "
                    "--prompts are not", "leave one of them out"),
        ))  # fmt: skip


def _default(field: str) -> Any:
    return Serve.model_fields[field].default


def _option_name(field: str) -> str:
    return f"--{field.replace('_', '-')}"


def measure(options: Options, progress: Progress | None = None) -> Report:
    module, _, function = options.measure.rpartition(".")
    package = type(options).__module__.rpartition(".")[0]
    report: Report = getattr(import_module(f".{module}", package), function)(options, progress)
    return report


def measure_over_nodes(name: str, options: Options, address: str | None, progress: Progress | None = None) -> Report:
    """The same, each value of the field `parted` on another node, in a process of its own; rows say which.

    Args:
        name: of a case in `benchmarks/`.
        address: HOST:PORT of a Ray cluster, or auto; None: in a Ray job its cluster, if there are several values, else
            this process.

    Raises:
        ConfigError: a node has no `benchmarks/`. As the case, and `nodes.over_nodes`.
    """
    from ...yaml_file import merged
    from .clone import CloneCall, called, in_a_ray_job
    from .metrics import advancing
    from .nodes import joined, over_nodes

    values = dict.fromkeys(getattr(options, options.parted)) if options.parted else {}
    if address is None and not (in_a_ray_job() and len(values) > 1):
        return measure(options, progress)
    parts = [options.model_dump() | {options.parted: (value,)} for value in values]
    found: dict[int, Report] = {}
    advance = advancing(progress, "on the cluster's nodes", len(parts))
    with joined(address or "auto"):
        for number, report, node in over_nodes(called, [CloneCall("cases", "measured", (name, p)) for p in parts]):
            report.rows = [{**row, "node": node} for row in report.rows]
            found[number] = report
            advance()
    whole = found.pop(0)
    for _, part in sorted(found.items()):
        whole.rows += part.rows
        whole.bars += part.bars
        whole.settings = merged(whole.settings, part.settings)
    whole.settings[options.parted] = list(values)
    return whole


def command(name: str, case: type[Options]) -> Callable[..., None]:
    """The function of `tiermoe bench NAME` for typer: the fields of the case, then --out, --json and --check."""
    from ..options import as_command  # typer: a GPU machine has none
    from .finish import Address, Check, Json, Out, file_or_folder, finish, say_overridden

    def run(out: Path | None, as_json: bool, check: bool, address: str | None = None, **given: Any) -> None:
        options = case(**given)
        if case.own_keys:
            say_overridden(given["config"], case.own_keys)
        file, folder = file_or_folder(out)
        result = options.result(name)
        if folder is not None:
            file = folder / f"{result}.json"

        def written(report: Report) -> None:
            if folder is not None:
                options.write_page(folder / f"{result}.md", report)

        finish(lambda progress: measure_over_nodes(name, options, address, progress), as_json, check, file, written)

    fields = {field: _option(info) for field, info in case.model_fields.items()}
    common: dict[str, Any] = {"out": (Out, None), "as_json": (Json, False), "check": (Check, False)}
    common |= {"address": (Address, None)} if case.parted else {}
    return as_command(run, name, case.__doc__, fields | common)


def _option(field: FieldInfo) -> tuple[Any, Any]:
    """Type of a field's option, with typer's limits and help, and the default."""
    import typer

    kind, limits, default = field.annotation, field.metadata, field.default
    if get_origin(kind) is tuple:  # an option that may be repeated
        kind, limits = get_args(kind)[0], []
        if get_origin(kind) is Annotated:
            kind, *limits = get_args(kind)
        kind, default = list[kind], list(default)  # type: ignore[valid-type]
    least: Any = next((limit.ge for limit in limits if isinstance(limit, Ge)), None)
    most: Any = next((limit.le for limit in limits if isinstance(limit, Le)), None)
    return Annotated[kind, typer.Option(min=least, max=most, help=field.description)], default
