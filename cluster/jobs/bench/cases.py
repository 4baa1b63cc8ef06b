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


class Serve(Options):
    """`tiermoe serve` against `transformers serve` over HTTP: throughput, TTFT and TPOT by the number of clients."""

    measure = "serve.serve"
    model: Model = None
    repeats: Repeats = 5
    streams: tuple[Annotated[int, Ge(1)], ...] = Field((1, 4, 8, 16), description="Clients at once; may be repeated.")
    budget: tuple[str, ...] = Field(
        ("0.25", "0.5"),
        description="Device memory for experts; the bars judge the first and the last; may be repeated.",
    )
    policy: str = Field("next-gate", description="Of `tiermoe serve`.")
    requests: int = Field(2, ge=1, description="Of each client in a round, one after the other.")
    max_tokens: int = Field(48, ge=2, description="Tokens of each answer, at most.")
    threads: int = Field(1, ge=1, description="Compute threads of each server.")
    link_gbps: float = Field(16.0, ge=0.001, description="Emulated link of `tiermoe serve` in 1e9 bytes per second.")


def measure(options: Options, progress: Progress | None = None) -> Report:
    module, _, function = options.measure.partition(".")
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
    from .metrics import fill_report_page

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
                fill_report_page(folder / f"{result}.md", report)

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
