"""The YAML model of an experiment: variants, workload, grid, metrics, tables, plots and bars.

`tiermoe bench NAME` reads a file of `configs/experiments`, or of `benchmarks/experiments` in a clone; `tiermoe bench
FILE.yaml` reads a user's own. Command-line options override single fields (`options` lists them).
"""

from __future__ import annotations

import types
import typing
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, ValidationError, field_validator, model_validator

from ....actors.base_settings import Settings
from ....actors.budget import Budget
from ....actors.policy_settings import PolicySettings
from ....errors import ConfigError
from ...config import chosen_policy, configs_dir
from ...yaml_file import explain, merged, read_yaml
from ..evaluate.quality import EvaluationOptions
from .clone import benchmarks_dir, load
from .random_model import LAYERS, MODELS, Form, NamedModel
from .synthetic_settings import Comparison, Count, Simulation


class Variant(Settings):
    """One row of a comparison: a preset, or a policy file, with changes nested as in the preset.

    A plain string is a preset under its own name. Models with fewer than `least_top_k` or more than `most_top_k`
    experts a token leave the variant out.
    """

    name: str
    preset: str
    changes: dict[str, Any] = Field(default_factory=dict)
    least_top_k: int = 0
    most_top_k: int = 1 << 30

    @model_validator(mode="before")
    @classmethod
    def _plain(cls, value: Any) -> Any:
        if isinstance(value, str):
            return {"name": value, "preset": value}
        return {"preset": value["name"], **value} if isinstance(value, dict) and "name" in value else value

    def policy(self, tau: int | None = None) -> PolicySettings:
        """The preset with its changes; an adaptive split runs its configurator every `tau` tokens.

        Raises:
            ConfigError: there is no such preset, or a change is refused.
        """
        preset = chosen_policy(self.preset)
        changes = self.changes
        if tau is not None and preset.split.kind == "adaptive":
            changes = merged(changes, {"split": {"tau": tau}})
        if not changes:
            return preset
        values = merged(preset.model_dump(mode="json"), {**changes, "name": self.name})
        try:
            return PolicySettings(**values)
        except ValidationError as error:
            raise explain(error, PolicySettings, f"{self.name} of preset {self.preset}") from error


class TraceSizes(Settings):
    """The routing trace for simulated sections and metrics."""

    learn: Count | None = Field(default=None, description="Prompts of the trace to learn from; default: 70% of all.")
    measure: Count | None = Field(default=None, description="Prompts of the trace to measure; default: 30% of all.")
    tokens: Count = Field(default=64, description="Tokens of the text that are decoded after each prompt of the trace.")
    distances: Count = Field(default=4, description="Most layers ahead that the trace holds predictions for.")


class Quality(Settings):
    """The held-out text that is scored; see `EvaluationOptions`."""

    documents: Count | None = Field(default=None, description="Held-out documents to score; default: all.")
    windows: Count = Field(default=1, description="Windows of each document.")
    items: Count = Field(default=1, description="Most multiple-choice items of each document.")
    prefix: Count = Field(default=128, description="Tokens that are prefilled in each window.")
    continuation: Count = Field(default=128, description="Tokens that are scored after them.")
    resamples: Count = Field(default=2000, description="Resamples of the bootstrap.")
    rows: Count | None = Field(default=None, description="Most scored tokens of a forward pass; default: all that fit.")

    @property
    def options(self) -> EvaluationOptions:
        return EvaluationOptions(**self.model_dump())


class Workload(Settings):
    """The prompts that every variant serves: held-out text, of several lengths with `contexts`, or a file."""

    prompt_tokens: Count | None = Field(default=32, description="Tokens of each prompt.")
    contexts: dict[str, Count] = Field(default_factory=dict, description="Tokens of each prompt, by context.")
    prompts_file: Path | None = Field(default=None, description="Text, one prompt a line, or JSON lines.")
    warm_file: Path | None = Field(
        default=None, description="Prompts served first, uncounted; default: one round of --prompts."
    )
    total_prompts: Count | None = Field(default=None, description="Held-out prompts, 70% of them to learn from.")
    prompts: Count = Field(default=1, description="Held-out prompts of a repetition, each served once.")
    warm: Count = Field(default=2, description="Prompts served first, uncounted.")
    max_tokens: Count = Field(default=32, description="Tokens to generate for each prompt.")
    repeats: Count = Field(default=5, description="Counted repetitions of each cell.")
    batch: Count = Field(default=1, description="Prompts in flight together.")
    fresh: bool = Field(default=True, description="Each repetition takes its own share of the prompts.")
    seed: int | None = Field(
        default=None, ge=0, description="Sample tokens at temperature 1 with this seed; default: greedy."
    )
    tau: Count | None = Field(default=None, description="Tokens between two cache configurations.")
    trace: TraceSizes = TraceSizes()
    quality: Quality = Quality()

    def tokens_of(self, context: str) -> int | None:
        """Tokens of a context's prompts; None: as many as the file's lines have."""
        return self.contexts.get(context, self.prompt_tokens)


class Grid(Settings):
    """Budgets and links at which every variant runs.

    A ratio is the time to load a token's experts in a layer over the time to compute the layer. `calibrate` is the
    source of the computing time: `resident` decodes with everything resident, `trace` takes a recorded trace's costs.
    """

    budgets: tuple[str, ...] = Field(
        default=("0.25",), description="Device memory for experts: shares or sizes, separated by commas."
    )
    links: tuple[float | None, ...] = Field(
        default=(), description="Emulated links in 1e9 bytes per second, or none, separated by commas."
    )
    ratios: tuple[float, ...] = Field(default=(), description="Loading over computing on each emulated link.")
    link: float | None = Field(default=None, description="Emulated link in 1e9 bytes per second, in place of a ratio.")
    latency_us: float | None = Field(default=None, description="Of each copy; default: the configuration's.")
    calibrate: Literal["resident", "trace", "off"] = "off"

    @field_validator("links", mode="before")
    @classmethod
    def _none(cls, value: Any) -> Any:
        return [None if link == "none" else link for link in value] if isinstance(value, list | tuple) else value


class RandomModel(Settings):
    """The random model that `--model` names by its shape, such as qwen3-30b-a3b. Its tokens are sampled."""

    name: str | None = None
    form: Form | None = Field(default=None, description="Form of the experts of a random --model; default: q4_0.")
    layers: Count | None = Field(default=None, description=f"Layers of a random --model; default: {LAYERS}.")

    @property
    def model(self) -> NamedModel | None:
        return None if self.name is None else MODELS[self.name](self.form or Form.Q4_0, self.layers or LAYERS)


class Section(Settings):
    """Variants that are measured together, at each budget and link of the grid.

    executor: `engine` serves the prompts (`real` on a GPU, `emulated` on the CPU stand-in); `simulated` replays the
        recorded trace on a virtual clock, or synthetic ones where `simulation` states them, and nothing needs a model.
    budgets, ratios: override the grid's. links: all of the grid's, or the first.
    warm: serve the warm-up prompts first. serve: serve prompts at all.
    twins: each variant also with `evict_writeback` inverted.
    score: whose quality is scored. stepped: scoring runs on a link whose clock advances by layers.
    """

    name: str
    executor: Literal["engine", "simulated"] = "engine"
    simulation: Simulation | None = None
    variants: tuple[Variant, ...] = Field(default=(), description="Presets or YAML files, separated by commas.")
    budgets: tuple[str, ...] | None = None
    ratios: tuple[float, ...] | None = None
    links: Literal["all", "first", "none"] = "all"
    warm: bool = True
    twins: bool = False
    serve: bool = True
    score: Literal["lossy", "all", "none"] = "none"
    stepped: bool = False


class RatioBar(Settings):
    """In each cell, variant `of` over the best baseline, paired by repetition, must be at most `limit`.

    over: the baselines; the best has the lowest median. regime: only links in the experiment's `regime`.
    """

    section: str
    of: str
    over: tuple[str, ...]
    measure: str = "tpot_s"
    limit: float
    budgets: tuple[str, ...] = ()
    regime: bool = False


class Option(Settings):
    """A command-line option: paths of the fields that it sets. Type and default are those of the first.

    also: other names. least: the smallest value.
    """

    fields: tuple[str, ...]
    help: str | None = None
    also: tuple[str, ...] = ()
    least: float | None = None
    required: bool = False

    @model_validator(mode="before")
    @classmethod
    def _plain(cls, value: Any) -> Any:
        value = value if isinstance(value, dict) else {"fields": value}
        return value | {"fields": [value["fields"]] if isinstance(value.get("fields"), str) else value.get("fields")}


class Metric(Settings):
    """A named metric function with its options."""

    metric: str
    options: dict[str, Any] = Field(default_factory=dict)

    @model_validator(mode="before")
    @classmethod
    def _plain(cls, value: Any) -> Any:
        return {"metric": value} if isinstance(value, str) else value


class Column(Settings):
    """A column: its title, and a cell's content as a format string over the row (`table.show`).

    of: `paired` in the format string is this row's measure over that of variant `of`, paired by repetition.
    """

    title: str
    show: str
    of: str | None = None
    measure: str = "tpot_s"


class Table(Settings):
    """A table of rows of the record: of `columns`, or a pivot.

    from: path of a list in the record, or in the experiment's `paper`. where: values that rows must have; a list: one
    of them. each: one table for each value of these keys, under `heading`. rows, across, cell: a pivot's format strings
    of the first columns (by title), of the other columns' titles, and of the content.
    """

    source: str = Field(default="rows", alias="from")
    where: dict[str, Any] = Field(default_factory=dict)
    each: tuple[str, ...] = ()
    heading: str = ""
    columns: tuple[Column, ...] = ()
    rows: dict[str, str] = Field(default_factory=dict)
    across: str = ""
    cell: str = ""


class Panel(Settings):
    """One plot of a figure: a list of the record as lines, bars or points.

    each: one panel for each value of these keys; the first gives columns, the second rows. x, y: keys of a row; a
    repeated measure also shows its range. mean: a line at the mean. level: series that are a line across, as they do
    not depend on x. executor: by which the numbers came, where neither rows nor record say it.
    """

    source: str = Field(default="rows", alias="from")
    where: dict[str, Any] = Field(default_factory=dict)
    kind: Literal["line", "bar", "point"] = "line"
    each: tuple[str, ...] = ()
    title: str = ""
    x: str
    y: str
    series: str = ""
    level: tuple[str, ...] = ()
    executor: Literal["real", "emulated", "simulated", ""] = ""
    x_label: str = ""
    y_label: str = ""
    x_scale: float = 1.0
    y_scale: float = 1.0
    from_zero: bool = False
    mean: bool = False


class Plot(Settings):
    """A PNG file of panels, one below the other or `beside` each other. highlight: emphasized series."""

    panels: tuple[Panel, ...]
    beside: bool = False
    size: tuple[float, float] = (4.2, 3.2)
    highlight: tuple[str, ...] = ()


class Experiment(Settings):
    """A whole experiment; its fields' classes describe the parts.

    own_keys: keys of the configuration that the experiment sets. regime: range of ratios that bars refer to.
    shown: keys of the printed table. printed: the one of `tables` that is printed in its place. paper: published
    figures, for tables. comparisons: of rows with published figures; they are the record's `comparisons`.
    """

    name: str
    title: str
    summary: str
    own_keys: tuple[str, ...] = ("policy", "quality", "budget", "link")
    workload: Workload = Workload()
    grid: Grid = Grid()
    random: RandomModel = RandomModel()
    sections: tuple[Section, ...] = Field(min_length=1)
    parts: tuple[str, ...] = Field(default=(), description="Sections to run, by name or executor; default: all.")
    regime: tuple[float, float] = (0.0, float("1e30"))
    metrics: tuple[Metric, ...] = ()
    bars: tuple[RatioBar, ...] = ()
    comparisons: tuple[Comparison, ...] = ()
    shown: tuple[str, ...] = ()
    printed: str | None = None
    tables: dict[str, Table] = Field(default_factory=dict)
    plots: dict[str, Plot] = Field(default_factory=dict)
    paper: dict[str, Any] = Field(default_factory=dict)
    options: dict[str, Option] = Field(default_factory=dict)

    @property
    def running(self) -> tuple[Section, ...]:
        """The sections that are asked for."""
        return tuple(s for s in self.sections if not self.parts or {s.name, s.executor} & set(self.parts))

    def of_model(self, model: str | None) -> Experiment:
        """The experiment of this `--model`: a name of `MODELS` is a random model, whose tokens are sampled.

        Raises:
            ConfigError: a form or layers are given, and the name is not a random model's.
        """
        load("study")
        if model in MODELS:
            seed = self.workload.seed or 0  # greedy tokens of random weights repeat themselves
            work = self.workload.model_copy(update={"seed": seed})
            return self.model_copy(update={"random": self.random.model_copy(update={"name": model}), "workload": work})
        for option in ("form", "layers"):
            if getattr(self.random, option) is not None:
                remedy = f"leave it out, or give --model {' or '.join(MODELS)}"
                raise ConfigError(f"--{option} is for random models", remedy)
        return self

    @property
    def stem(self) -> str:
        """Of the files of its result."""
        random = self.random.model
        return self.name if random is None else f"{self.name}-{random.name}-{random.form}"

    @property
    def needs_model(self) -> bool:
        """Whether any section serves or records a model."""
        return any(section.simulation is None for section in self.sections)

    def metric(self, name: str) -> dict[str, Any] | None:
        """The options of a metric; None: it is not measured."""
        return next((metric.options for metric in self.metrics if metric.metric == name), None)


# Options of an experiment whose file lists none.
_COMMON = (
    "workload.repeats", "workload.prompts", "workload.warm", "workload.prompt_tokens", "workload.max_tokens",
    "grid.budgets", "grid.links", "grid.ratios",
)  # fmt: skip


@dataclass(frozen=True)
class FieldAt:
    """A field of an experiment: its value, type (None: a list, which options give as text) and description."""

    value: Any
    kind: type | None
    description: str


def experiment_files() -> dict[str, Path]:
    """The experiments of the package, and of `benchmarks/` where it is there, by name."""
    folders = [configs_dir() / "experiments"]
    if (own := benchmarks_dir()) is not None:
        folders.append(own / "experiments")
    return {path.stem: path for folder in folders for path in sorted(folder.glob("*.yaml"))}


def read_experiment(name_or_path: str) -> Experiment:
    """Read an experiment's file without the checks of `load_experiment`.

    Raises:
        ConfigError: no such file, or a value is refused.
    """
    path = Path(name_or_path).expanduser()
    if path.suffix not in (".yaml", ".yml"):
        known = experiment_files()
        if name_or_path not in known:
            remedy = f"choose one of {', '.join(sorted(known))}, or give a YAML file"
            raise ConfigError(f"no experiment '{name_or_path}'", remedy)
        path = known[name_or_path]
    return _built(read_yaml(path), str(path), {})


def load_experiment(name_or_path: str, given: Mapping[str, Any] | None = None) -> Experiment:
    """An experiment by its name or its file's path, with options on top, checked.

    Args:
        given: values of command-line options by name; None: not given. Text becomes a list where the field is one.

    Raises:
        ConfigError: no such file, or a value is refused; the message names the option that gave it.
        BudgetError: a budget is malformed.
    """
    experiment = read_experiment(name_or_path)
    if chosen := {name: value for name, value in (given or {}).items() if value is not None}:
        values, named = experiment.model_dump(mode="python", by_alias=True), dict[str, str]()
        for name, value in chosen.items():
            option = options_of(experiment)[name]
            for field in option.fields:
                is_list = field_at(experiment, field).kind is None
                _set(values, field.split("."), parts(value) if is_list else value)
                named[field] = name
            if option.least is not None and isinstance(value, int | float) and value < option.least:
                raise ConfigError(f"--{name} is {value:g}", option.help or f"give at least {option.least:g}")
        experiment = _built(values, name_or_path, named)
    _check(experiment)
    return experiment


def options_of(experiment: Experiment) -> dict[str, Option]:
    """The command-line options of an experiment by name; none of those below mean anything without a model."""
    if experiment.options or not experiment.needs_model:
        return experiment.options
    return {field.rpartition(".")[2].replace("_", "-"): Option(fields=(field,)) for field in _COMMON}


def field_at(experiment: Experiment, path: str) -> FieldAt:
    """The field at a path such as `workload.trace.tokens`, `workload.contexts.short` or `sections.0.variants`.

    Raises:
        ConfigError: there is no such field.
    """
    value: Any = experiment
    annotation: Any = None
    description = ""
    for part in path.split("."):
        try:
            if isinstance(value, BaseModel):
                field = type(value).model_fields[part]
                annotation, description, value = field.annotation, field.description or "", getattr(value, part)
            elif isinstance(value, Mapping):
                annotation, value = typing.get_args(annotation)[1], value[part]
            else:
                value = value[int(part)]
                annotation = type(value)
        except (KeyError, IndexError, ValueError) as error:
            raise ConfigError(f"options name no field '{path}'", "name a field of the experiment") from error
    union = typing.get_origin(annotation) in (types.UnionType, typing.Union)
    members = typing.get_args(annotation) if union else (annotation,)
    kinds = [_bare(member) for member in members if member is not type(None)]
    kind = kinds[0] if len(kinds) == 1 else str
    return FieldAt(value, None if kind is tuple else kind, description)


def parts(text: Any) -> Any:
    """Text split at its commas; other values as they are."""
    return tuple(part.strip() for part in text.split(",") if part.strip()) if isinstance(text, str) else text


def require_each_once(option: str, values: Sequence[Hashable]) -> None:
    """Raise ConfigError for an empty option, or a value that it has twice."""
    if not values:
        raise ConfigError(f"--{option} names nothing", "give at least one, separated by commas")
    if len(set(values)) < len(values):
        raise ConfigError(f"--{option} names one twice: {', '.join(map(str, values))}", "name each once")


def _built(values: Mapping[str, Any], source: str, named: Mapping[str, str]) -> Experiment:
    """named: options by the field that they set, for error messages."""
    try:
        return Experiment(**values)
    except ValidationError as error:
        finding = error.errors(include_url=False)[0]
        path = ".".join(str(part) for part in finding["loc"])
        message = str(finding["msg"])
        for field, option in named.items():
            if path == field or path.startswith(f"{field}."):
                raise ConfigError(f"--{option} is {finding['input']}", message[:1].lower() + message[1:]) from error
        raise explain(error, Experiment, source) from error


def _check(experiment: Experiment) -> None:
    """Checks of several fields together."""
    names = {field: name for name, option in options_of(experiment).items() for field in option.fields}
    grid, work = experiment.grid, experiment.workload
    for i, section in enumerate(experiment.sections):
        label = names.get(f"sections.{i}.variants", "policies")
        require_each_once(label, [variant.name for variant in section.variants])
        for variant in section.variants:
            variant.policy(work.tau)
    require_each_once(_named(names, "grid.budgets"), grid.budgets)
    for budget in (*grid.budgets, *(b for section in experiment.sections for b in section.budgets or ())):
        Budget.parse(budget)
    if experiment.needs_model and not grid.links and grid.link is None:
        require_each_once(_named(names, "grid.ratios", "grid.links"), grid.ratios)
    if len(set(grid.links)) < len(grid.links):
        require_each_once(_named(names, "grid.links"), grid.links)
    for name, numbers in (("links", (*grid.links, grid.link)), ("ratios", grid.ratios)):
        if any(number is not None and not 0 < number < float("inf") for number in numbers):
            option = _named(names, f"grid.{name}")
            raise ConfigError(f"--{option} must be above 0", "give numbers, or none for a link")
    if experiment.printed is not None and experiment.printed not in experiment.tables:
        raise ConfigError(f"there is no table '{experiment.printed}' to print", "name one of `tables`")
    known = dict.fromkeys(name for section in experiment.sections for name in (section.name, section.executor))
    if unknown := set(experiment.parts) - set(known):
        raise ConfigError(f"--parts has '{', '.join(sorted(unknown))}'", f"give some of {', '.join(known)}")
    if work.tau is not None and not work.contexts and work.prompt_tokens is not None:
        before = (work.warm - 1) * (work.prompt_tokens + work.max_tokens - 1)
        if before < work.tau:
            raise ConfigError(
                f"the warm-up has {before} tokens before its last prompt, the configurator runs after {work.tau}",
                "raise --warm, or lower --tau",
            )


def _named(names: Mapping[str, str], *fields: str) -> str:
    """The option of the first of these fields that has one; else the first field's name."""
    for field in fields:
        for path, option in names.items():
            if path == field or path.startswith(f"{field}."):
                return option
    return fields[0].rpartition(".")[2].replace("_", "-")


def _set(values: Any, path: Sequence[str], value: Any) -> None:
    first, rest = path[0], path[1:]
    key: Any = int(first) if isinstance(values, list) else first
    if not rest:
        values[key] = value
        return
    if isinstance(values[key], tuple):
        values[key] = list(values[key])
    _set(values[key], rest, value)


def _bare(annotation: Any) -> Any:
    """int of Annotated[int, ...], tuple of tuple[str, ...]."""
    origin = typing.get_origin(annotation)
    if origin is Annotated:
        return _bare(typing.get_args(annotation)[0])
    return annotation if origin is None else origin
