"""An experiment: variants, workload, budgets and links, and the tables and figures of its rows.

`compare.py` is the experiment of an installed package; a clone has those of `benchmarks/experiments`. An experiment is
a module with a function `experiment`: its parameters are the options of `tiermoe bench NAME`, its docstring is the
help, and it returns an `Experiment`, which `run.run_experiment` runs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import ValidationError

from ....actors.policy_settings import PolicySettings
from ....errors import ConfigError
from ...config import chosen_policy
from ...yaml_file import explain, merged
from ..evaluate.quality import EvaluationOptions
from .clone import load
from .options import parts, require_each_once
from .random_model import LAYERS, MODELS, Form, NamedModel

if TYPE_CHECKING:
    from .page import Figure, Table
    from .run import Study

LinkAt = tuple[float | None, float | None]  # gigabytes (1e9) per second; ratio of loading over computing


@dataclass(frozen=True)
class Variant:
    """One row of a comparison: a preset, or a policy file, with changes nested as in the preset.

    preset: empty: it has the variant's name. Models with fewer than `least_top_k` or more than `most_top_k` experts a
    token leave the variant out.
    """

    name: str
    preset: str = ""
    changes: Mapping[str, Any] = field(default_factory=dict)
    least_top_k: int = 0
    most_top_k: int = 1 << 30

    def __post_init__(self) -> None:
        object.__setattr__(self, "preset", self.preset or self.name)

    def policy(self, tau: int | None = None) -> PolicySettings:
        """The preset with its changes; an adaptive split runs its configurator every `tau` tokens.

        Raises:
            ConfigError: there is no such preset, or a change is refused.
        """
        preset = chosen_policy(self.preset)
        changes = dict(self.changes)
        if tau is not None and preset.split.kind == "adaptive":
            changes = merged(changes, {"split": {"tau": tau}})
        if not changes:
            return preset
        values = merged(preset.model_dump(mode="json"), {**changes, "name": self.name})
        try:
            return PolicySettings(**values)
        except ValidationError as error:
            raise explain(error, PolicySettings, f"{self.name} of preset {self.preset}") from error


def variants(*given: str | Variant) -> tuple[Variant, ...]:
    """Variants; text is a preset, or a policy file, under its own name."""
    return tuple(Variant(one) if isinstance(one, str) else one for one in given)


def chosen_policies(text: str) -> tuple[Variant, ...]:
    """The policies of `--policies`, each as it is. Raises ConfigError as `budgets`."""
    found = variants(*parts(text))
    require_each_once("policies", [variant.name for variant in found])
    for variant in found:
        variant.policy()
    return found


@dataclass(frozen=True)
class TraceSizes:
    """The routing trace for replays. learn, measure: prompts of each side; None: all, 70% of them to learn from.

    tokens: of the text, decoded after each prompt. distances: most layers ahead that it holds predictions for.
    """

    learn: int | None = None
    measure: int | None = None
    tokens: int = 64
    distances: int = 4


@dataclass(frozen=True)
class Workload:
    """The prompts that every variant serves: held-out text, of several lengths with `contexts`, or a file.

    prompt_tokens: of each prompt; None: as many as the file's lines have. contexts: tokens of each prompt, by context.
    prompts_file: text, one prompt a line, or JSON lines. warm_file: prompts served first; None: one round of them.
    total_prompts: held-out prompts, 70% of them to learn from. prompts: of a repetition, each served once. warm:
    prompts served first, uncounted. batch: prompts in flight together. fresh: each repetition takes its own share.
    seed: of sampling at temperature 1; None: greedy. tau: tokens between two cache configurations. quality: the
    held-out text that is scored.
    """

    prompt_tokens: int | None = 32
    contexts: Mapping[str, int] = field(default_factory=dict)
    prompts_file: Path | None = None
    warm_file: Path | None = None
    total_prompts: int | None = None
    prompts: int = 1
    warm: int = 2
    max_tokens: int = 32
    repeats: int = 5
    batch: int = 1
    fresh: bool = True
    seed: int | None = None
    tau: int | None = None
    trace: TraceSizes = TraceSizes()
    quality: EvaluationOptions = field(default_factory=EvaluationOptions)

    def tokens_of(self, context: str) -> int | None:
        """Tokens of a context's prompts; None: as many as the file's lines have."""
        return self.contexts.get(context, self.prompt_tokens)


@dataclass(frozen=True)
class Grid:
    """Budgets and links at which every variant runs.

    links: gigabytes (1e9) per second; None: no emulated link. A ratio is the time to load a token's experts in a layer
    over the time to compute the layer; `link` is in place of a ratio. `calibrate` is the source of the computing time:
    `resident` decodes with everything resident, `trace` takes a recorded trace's costs. latency_us: of each copy; None:
    the configuration's.
    """

    budgets: tuple[str, ...] = ("0.25",)
    links: tuple[float | None, ...] = ()
    ratios: tuple[float, ...] = ()
    link: float | None = None
    latency_us: float | None = None
    calibrate: Literal["resident", "trace", "off"] = "off"


@dataclass(frozen=True)
class Section:
    """Variants that are measured together, at each budget and link of the grid. budgets: in place of the grid's."""

    executor: ClassVar[str] = "engine"
    needs_model: ClassVar[bool] = True
    name: str
    variants: tuple[Variant, ...]
    budgets: tuple[str, ...] | None = None


@dataclass(frozen=True)
class Served(Section):
    """The engine serves the prompts: `real` on a GPU, `emulated` on the CPU stand-in.

    links: all of the grid's, or the first. warm: serve the warm-up prompts first. serve: serve prompts at all. score:
    whose quality is scored. stepped: scoring runs on a link whose clock advances by layers.
    """

    links: Literal["all", "first", "none"] = "all"
    warm: bool = True
    serve: bool = True
    score: Literal["lossy", "all", "none"] = "none"
    stepped: bool = False


@dataclass(frozen=True)
class Simulated(Section):
    """Variants on a virtual clock; `benchmarks/` has the two kinds: on a recorded trace, and on synthetic routing.

    machine: of configs/machines; empty: the one that recorded the trace.
    """

    executor: ClassVar[str] = "simulated"
    machine: str = ""

    def refuse(self, study: Study) -> None:
        """Raise what can be known to be wrong before anything is measured."""

    def rows(self, study: Study, links: Sequence[LinkAt]) -> list[dict[str, Any]]:
        """The section's rows, as plain values; a variant that is refused is a `refused_row`."""
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class RatioBar:
    """In each cell, variant `of` over the best baseline, paired by repetition, must be at most `limit`.

    over: the baselines; the best has the lowest median. regime: only links in the experiment's `regime`.
    """

    section: str
    of: str
    over: tuple[str, ...]
    limit: float
    measure: str = "tpot_s"
    budgets: tuple[str, ...] = ()
    regime: bool = False


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """A whole experiment.

    command: words after `tiermoe bench` that run it; empty: its name. own_keys: keys of the configuration that it sets.
    form, layers: of the random model that `--model` may name. parts: sections to run, by name or executor; none: all.
    regime: range of ratios that bars refer to. after: makes figures by key of the record of all rows; it may add bars
    and settings to the study, and measures to its rows. shown: keys of the printed table. printed: the one of `tables`
    that is printed in its place.
    """

    name: str
    title: str
    sections: tuple[Section, ...]
    command: str = ""
    own_keys: tuple[str, ...] = ("policy", "quality", "budget", "link")
    workload: Workload = Workload()
    grid: Grid = Grid()
    form: Form | None = None
    layers: int | None = None
    random: NamedModel | None = None
    parts: tuple[str, ...] = ()
    regime: tuple[float, float] = (0.0, math.inf)
    after: Callable[[Study], dict[str, Any]] | None = None
    bars: tuple[RatioBar, ...] = ()
    shown: tuple[str, ...] = ()
    printed: str | None = None
    tables: Mapping[str, Table] = field(default_factory=dict)
    figures: Mapping[str, Figure] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Raises ConfigError: there is no such part, or the warm-up is too short for the configurator."""
        object.__setattr__(self, "command", self.command or self.name)
        known = dict.fromkeys(name for section in self.sections for name in (section.name, section.executor))
        if unknown := set(self.parts) - set(known):
            raise ConfigError(f"--parts has '{', '.join(sorted(unknown))}'", f"give some of {', '.join(known)}")
        work = self.workload
        if work.tau is not None and not work.contexts and work.prompt_tokens is not None:
            before = (work.warm - 1) * (work.prompt_tokens + work.max_tokens - 1)
            if before < work.tau:
                raise ConfigError(
                    f"the warm-up has {before} tokens before its last prompt, the configurator runs after {work.tau}",
                    "raise --warm, or lower --tau",
                )

    @property
    def running(self) -> tuple[Section, ...]:
        """The sections that are asked for."""
        return tuple(s for s in self.sections if not self.parts or {s.name, s.executor} & set(self.parts))

    @property
    def needs_model(self) -> bool:
        """Whether any section serves or records a model."""
        return any(section.needs_model for section in self.sections)

    @property
    def stem(self) -> str:
        """Of the files of its result."""
        return self.name if self.random is None else f"{self.name}-{self.random.name}-{self.random.form}"

    def of_model(self, model: str | None) -> Experiment:
        """The experiment of this `--model`: a name of `MODELS` is a random model, whose tokens are sampled.

        Raises:
            ConfigError: a form or layers are given, and the name is not a random model's.
        """
        load("random_model")
        if model in MODELS:
            random = MODELS[model](self.form or Form.Q4_0, self.layers or LAYERS)
            work = replace(self.workload, seed=self.workload.seed or 0)  # greedy tokens repeat themselves
            command = f"{self.name} --model {random.name} --form {random.form} --layers {random.layers}"
            return replace(self, random=random, workload=work, command=command)
        for option in ("form", "layers"):
            if getattr(self, option) is not None:
                remedy = f"leave it out, or give --model {' or '.join(MODELS)}"
                raise ConfigError(f"--{option} is for random models", remedy)
        return self


def plain(value: Any) -> Any:
    """A dataclass's fields as plain values of JSON."""
    if isinstance(value, Mapping):
        return {key: plain(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [plain(part) for part in value]
    if hasattr(value, "__dataclass_fields__"):
        return plain(asdict(value))
    return str(value) if isinstance(value, Path) else value
