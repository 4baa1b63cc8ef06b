"""Sections on synthetic routing, comparisons with published figures, and `tiermoe bench papers`."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from importlib import import_module
from itertools import product
from pathlib import Path
from statistics import fmean
from types import ModuleType
from typing import Any, ClassVar, Literal

from pydantic import ValidationError
from rich.progress import Progress

from tiermoe.actors.budget import Budget
from tiermoe.actors.policy_settings import PolicySettings
from tiermoe.cluster.jobs.bench.clone import CloneCall, called, in_a_ray_job
from tiermoe.cluster.jobs.bench.experiment import Experiment, LinkAt, Simulated, plain
from tiermoe.cluster.jobs.bench.metrics import Bar, Report, Row, advancing, median_of, paired, rounded
from tiermoe.cluster.jobs.bench.nodes import joined, over_nodes, over_processes
from tiermoe.cluster.jobs.bench.options import require_each_once
from tiermoe.cluster.jobs.bench.page import Table, select, table, write_folder
from tiermoe.cluster.jobs.bench.run import Study, run_experiment
from tiermoe.cluster.jobs.bench.serving import Recorded, read_split
from tiermoe.cluster.jobs.replay import engine_for, require_replayable
from tiermoe.cluster.report.results import refused_row
from tiermoe.cluster.simulate.arrivals import arrivals_of
from tiermoe.cluster.simulate.executor import SimulatedEngine, context_of
from tiermoe.cluster.simulate.hit_rates import result, serve
from tiermoe.cluster.simulate.machine import Machine, load_machine, without_ndp
from tiermoe.cluster.simulate.predictors import train_predictors
from tiermoe.cluster.simulate.shapes import shape_named
from tiermoe.cluster.simulate.synthetic import CALIBRATIONS, FAMILIES, write_synthetic
from tiermoe.cluster.yaml_file import explain
from tiermoe.errors import ConfigError, TierMoeError

WITHIN = 0.25  # of the published figure
_LEAST, _CLEAR, _NONE, _EITHER = 0.25, 1.02, 0.02, 0.05  # see `verdict`
_MEASURES = (
    "hit_rate", "prefill_hit_rate", "decode_hit_rate", "latency_p50_s", "latency_p99_s", "queue_s", "blocked_io_s",
    "bytes_loaded", "bytes_wasted", "generated_tokens", "virtual_s", "step_s", "substitutions", "dropped", "migrations",
    "ndp_experts", "ndp_modelled_s",
)  # fmt: skip


def engine_of_split(
    preset: PolicySettings, budget: Budget, machine: Machine, recorded: Recorded
) -> SimulatedEngine:
    """An engine of a preset, with predictors, popularity and profile of the requests to learn from.

    Raises as `engine_for`.
    """
    header, prefetch = recorded.header, preset.prefetch
    top = header.top_k if prefetch.top is None else min(prefetch.top, header.top_k)
    preset = preset.model_copy(update={"prefetch": prefetch.model_copy(update={"top": top})})  # a trace's own
    needed = "predictors" in prefetch.needs
    trained = train_predictors(header, recorded.learn, prefetch.distance) if needed else None
    return engine_for(preset, header, machine, budget, recorded.learn, context_of(header, predictors=trained))


# -- ActiveEvict's measures of a run's transfers, from the counters of any executor -----------------------------------


@dataclass(frozen=True)
class Transfers:
    """Transfers of a run, prefill included, for each generated token (ActiveEvict, Tables 2 and 3).

    blocking_ms: the compute waited for copies. total_ms: the link was busy, by its own clock. loaded_mb: loaded to the
    device. written_back_mb: copied back at evictions. redundant: share of the loaded bytes that left unused, or that
    pre-eviction had removed since the layer's last run. precision: share of the prefetched and demanded experts that
    were used. recall: share of the needed, absent experts that the preset's own fetches brought: by prefetch if it
    prefetches, else by demand. hit_rate: share that was present when the routing was known. dropped: (token, expert)
    pairs that did not run.
    """

    blocking_ms: float
    total_ms: float
    loaded_mb: float
    written_back_mb: float
    redundant: float
    precision: float
    recall: float
    hit_rate: float
    dropped: float


def transfers(counters: Mapping[str, Any], tokens: int) -> Transfers:
    """From `EngineStats.as_dict()` after so many generated tokens."""

    def share(part: float, whole: float, empty: float) -> float:
        return min(part / whole, 1.0) if whole else empty

    sources = counters["prefetch_sources"].values()
    used = sum(s["hits"] + s["late"] for s in sources)
    asked = sum(s["queued"] - s["cancelled"] for s in sources)
    demanded = counters["misses"] - counters["late_prefetches"]
    loaded = counters["bytes_loaded"]
    avoidable = counters["bytes_wasted"] + counters["bytes_premature"]
    return Transfers(
        1e3 * counters["blocked_io_s"] / tokens, 1e3 * counters["link_s"] / tokens, loaded / 1e6 / tokens,
        counters["bytes_written_back"] / 1e6 / tokens, share(avoidable, loaded, 0.0),
        share(used + demanded, asked + demanded, 1.0), share(used, used + demanded, 1.0) if asked else 1.0,
        counters["hit_rate"], counters["dropped"] / tokens,
    )  # fmt: skip


# -- sections ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Traces:
    """Synthetic requests of each family at each shape (`simulate.synthetic`).

    learn, measure: requests that are served first, uncounted, and those that count. prompt, decode: tokens of each.
    distances: layers ahead whose predictions a trace holds. layers: only so many of a shape's; None: all.
    recalls: share of a layer's experts that its router names 1, 2, .. layers before; None: the family's.
    """

    families: tuple[str, ...]
    shapes: tuple[str, ...]
    learn: int = 6
    measure: int = 3
    prompt: int = 32
    decode: int = 32
    distances: int = 4
    seed: int = 0
    recalls: tuple[float, ...] | None = None
    layers: int | None = None

    def recorded(self, study: Study, family: str, shape_name: str) -> Recorded:
        """The trace of a family at a shape; sections that state the same one share it."""
        key = f"{family} {shape_name} {replace(self, families=(), shapes=())}"
        if key not in study.traces:
            shape, out = shape_named(shape_name), study.scratch / f"synthetic-{len(study.traces)}"
            if self.layers is not None:
                layers = min(shape.layers, shape.dense_layers + self.layers)
                shape = shape.model_copy(update={"layers": layers})
            count = self.learn + self.measure
            write_synthetic(out, family, shape_name, shape, count, self.prompt, self.decode, self.distances,
                            self.seed, self.recalls)  # fmt: skip
            study.traces[key] = read_split(out, self.learn)
        return study.traces[key]


@dataclass(frozen=True)
class Synthetic(Simulated):
    """A section on synthetic routing and a machine of configs/machines. A budget is that of all GPUs together.

    assume: fields of `simulate.machine.Machine` in place of the table's, for every variant alike.
    batch: requests in each forward. rate: requests a second; None: a request arrives when there is room.
    sweep: values by `batch`, `rate`, `machine.FIELD`, or the path of a policy's setting; every combination runs. A
        row has each value under the last part of its name.
    """

    needs_model: ClassVar[bool] = False
    traces: Traces = field(kw_only=True)
    assume: Mapping[str, Any] = field(default_factory=dict)
    batch: int = 1
    rate: float | None = None
    sweep: Mapping[str, Sequence[Any]] = field(default_factory=dict)

    def rows(self, study: Study, links: Sequence[LinkAt]) -> list[dict[str, Any]]:
        """Rows of all variants at each trace, budget and swept value, as plain values; links are the machine's own.

        Raises:
            ConfigError: a swept name is unknown. What a variant is refused for is its row (`refused_row`).
        """
        rows, presets = list[dict[str, Any]](), [(variant, variant.policy()) for variant in self.variants]
        for _, preset in presets:
            require_replayable(preset)
        for name in _settings_of(self.sweep):
            if all(_place(preset.model_dump(mode="json"), name) is None for _, preset in presets):
                raise ConfigError(f"section {self.name} sweeps '{name}'", "name a setting that a variant has")
        budgets = self.budgets or study.experiment.grid.budgets
        points = [dict(zip(self.sweep, values, strict=True)) for values in product(*self.sweep.values())]
        kinds = list(product(self.traces.families, self.traces.shapes))
        stepped = study.stepped(f"replaying {self.name}", len(kinds) * len(budgets) * len(points) * len(presets))
        for family, shape in kinds:
            recorded = self.traces.recorded(study, family, shape)
            for budget, point, (variant, preset) in product(budgets, points, presets):
                swept = {name.rpartition(".")[2]: value for name, value in point.items()}
                row = {"section": self.name, "context": f"{shape}, {family}", "family": family, "shape": shape,
                       "budget": budget, "batch": self.batch, "rate": self.rate} | swept  # fmt: skip
                cell = json.dumps(row)  # all but the variant
                row |= {"cell": cell, "policy": variant.name, "preset": variant.preset}
                try:
                    figures = _replayed(self, point, changed(preset, point), budget, recorded, variant.preset)
                except TierMoeError as error:
                    rows.append(refused_row(error, **row))
                else:
                    rows.append(row | {
                        "lossless": preset.lossless, "writes_back": preset.evict_writeback, "executor": "simulated",
                        **figures,
                    })  # fmt: skip
                stepped()
        return rows


def changed(preset: PolicySettings, point: Mapping[str, Any]) -> PolicySettings:
    """The preset with the swept values that are its own; settings that this kind of policy lacks are left out."""
    values = preset.model_dump(mode="json")
    own = [name for name in _settings_of(point) if _place(values, name) is not None]
    for name in own:
        place = _place(values, name)
        assert place is not None  # as just found
        place[name.rpartition(".")[2]] = point[name]
    try:
        return PolicySettings(**values) if own else preset
    except ValidationError as error:
        raise explain(error, PolicySettings, f"sweep of {', '.join(own)}") from error


def _settings_of(point: Iterable[str]) -> list[str]:
    """The swept names that are settings of policies."""
    return [name for name in point if name not in ("batch", "rate") and not name.startswith("machine.")]


def _place(values: dict[str, Any], path: str) -> dict[str, Any] | None:
    """The part of a policy's values that has this setting; None: no part has."""
    *parts, last = path.split(".")
    place: Any = values
    for part in parts:
        place = place.get(part) if isinstance(place, dict) else None
    return place if isinstance(place, dict) and last in place else None


def _replayed(
    on: Synthetic, point: Mapping[str, Any], preset: PolicySettings, budget: str, recorded: Recorded, timed_as: str
) -> dict[str, Any]:
    header = recorded.header
    costs = load_machine(header, on.machine, None, None, timed_as)  # a variant's own name is in no table
    assumed = dict(on.assume) | {n.removeprefix("machine."): v for n, v in point.items() if n.startswith("machine.")}
    if assumed:
        try:
            costs = Machine(**costs.model_dump() | assumed)
        except ValidationError as error:
            raise explain(error, Machine, "assume") from error
    if preset.uses_ndp and costs.ndp is None:
        raise without_ndp(preset.name, on.machine)
    each = Budget.parse(budget)
    if costs.gpus > 1:  # what the GPUs have together
        each = Budget(nbytes=each.bytes_of(header.slot_bytes, header.layers * header.experts) // costs.gpus)
    engine = engine_of_split(preset, each, costs, recorded)
    batch, rate = point.get("batch", on.batch), point.get("rate", on.rate)
    serve(engine, recorded.learn, batch)
    engine.reset_stats()
    served = serve(engine, recorded.measure, batch, arrivals=arrivals_of(rate, None))
    found = result(engine, served)
    return {
        "tpot_s": served.tpot_s, "ttft_s": served.ttft_s, "tpot_ms": 1e3 * served.tpot_s,
        "ttft_ms": 1e3 * served.ttft_s, "tokens_per_s": served.generated / served.wall_s,
        "prefill_tokens_per_s": (served.tokens - served.generated) / served.wall_s,
        "link_gbps": costs.link_gbps, "slots": engine.slots, "experts": header.layers * header.experts,
        **asdict(transfers(found, served.generated)), **{name: found.get(name) for name in _MEASURES},
    }  # fmt: skip


# -- comparisons -------------------------------------------------------------------------------------------------------


Published = float | Literal["higher", "lower"]


@dataclass(frozen=True)
class Comparison:
    """Our figure beside the published one: a measure, or with `over` the mean of its ratios to that of a baseline.

    source: where the paper says so. where: values of our rows; a tuple: one of them. of, over: variants; rows are
        paired that differ in the variant only.
    published: one figure, or the direction that the text states, for each value of a row's key `by`, where `of` and
        `over` name the variant.
    headline: a claim: that it holds is a bar, and it stands in the page's table of claims.
    why: of the verdict, as a person explains it; or one for each key of `published`.
    """

    title: str
    source: str
    section: str
    measure: str
    published: Mapping[str, Published]
    of: str | None = None
    over: str | None = None
    by: str = "over"
    where: Mapping[str, Any] = field(default_factory=dict)
    headline: bool = True
    why: str | Mapping[str, str] = ""


def judged(comparisons: Sequence[Comparison], study: Study) -> dict[str, Any]:
    """The record's `comparisons`; of synthetic sections also `traces` and `families`, and a bar for each claim."""
    found = lines_of(comparisons, study.rows)
    stated = [section for section in study.experiment.sections if isinstance(section, Synthetic)]
    if not stated:
        return {"comparisons": found} if found else {}
    study.bars += claim_bars(found)
    return {
        "comparisons": found,
        "traces": [
            {"section": one.name, "machine": one.machine, "assume": one.assume} | plain(one.traces) for one in stated
        ],
        "families": [
            {"family": name, "parameters": asdict(FAMILIES[name]), "source": CALIBRATIONS[name].source,
             "targets": {key: target.value for key, target in CALIBRATIONS[name].targets.items()}}
            for name in dict.fromkeys(family for one in stated for family in one.traces.families)
        ],
    }  # fmt: skip


def lines_of(comparisons: Sequence[Comparison], rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The lines of all comparisons, of rows of a run or of its file."""
    return [line for comparison in comparisons for line in compared(comparison, rows)]


def claim_bars(lines: Sequence[Mapping[str, Any]]) -> list[Bar]:
    """One bar for each claim, that it holds; for synthetic routing only, where each machine gives the same figures."""
    return [
        Bar(f"{line['title']}{', ' if line['of_key'] else ''}{line['of_key']}: holds",
            float(line["verdict"] == "holds"), ">=", 1.0)
        for line in lines if line["headline"] and line["verdict"] is not None
    ]  # fmt: skip


def verdict(published: float | str, ours: float, least: float, most: float) -> str:
    """`holds`, `tie` or `does not hold`, of a ratio with a published value or direction.

    tie: the mean is within 2% of no effect, or within 5% with cells on both sides. holds: no cell has the opposite
    sign, and at least a quarter of the published effect (in log) is there, or 2% where only a direction is published.
    """
    if abs(ours - 1) <= _NONE or (abs(ours - 1) <= _EITHER and least < 1 < most):
        return "tie"
    above = published == "higher" if isinstance(published, str) else published > 1
    logs = [math.log(ratio) if ratio else -math.inf for ratio in (ours, least, most)]
    effects = logs if above else [-log for log in logs]
    needed = math.log(_CLEAR) if isinstance(published, str) else _LEAST * abs(math.log(published))
    return "holds" if min(effects) >= 0 and effects[0] >= needed else "does not hold"


def compared(comparison: Comparison, rows: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """The lines of a comparison: published, ours, ratio of the two, verdict; None where no row fits."""
    for key, value in comparison.published.items():
        value = value if isinstance(value, str) else float(value)
        of, over, where = comparison.of, comparison.over, dict(comparison.where)
        if comparison.by == "of":
            of = key
        elif comparison.by == "over":
            over = key
        else:
            where[comparison.by] = key
        fitting = [row for row in rows if row["section"] == comparison.section and _fits(row, where)]
        mine = [row for row in fitting if of is None or row["policy"] == of]
        endless = False
        if over is None:
            values = [median_of(row, comparison.measure) for row in mine]
        else:
            base = {_cell(row): row for row in fitting if row["policy"] == over}
            pairs = [(row, base[_cell(row)]) for row in mine if _cell(row) in base]
            ratios = [paired(*pair, comparison.measure) for pair in pairs]
            values = [ratio for ratio in ratios if not math.isnan(ratio)]
            endless = any(  # something over nothing
                math.isnan(ratio) and median_of(row, comparison.measure) > 0
                for ratio, (row, _) in zip(ratios, pairs, strict=True)
            )
        ours, least, most = fmean(values) if values else None, min(values, default=None), max(values, default=None)
        ratio = None if ours is None or not value or isinstance(value, str) else ours / value
        above = value == "higher" if isinstance(value, str) else value > 1
        judged = over is not None and bool(values) and min(values) >= 0
        said = verdict(value, fmean(values), min(values), math.inf if endless else max(values)) if judged else None
        agree = sum(one > 1 if above else one < 1 for one in values)
        why = comparison.why if isinstance(comparison.why, str) else comparison.why.get(key, "")
        yield {
            **where, "title": comparison.title, "source": comparison.source, "section": comparison.section,
            "measure": comparison.measure, "of": of, "over": over, "of_key": key,
            "cells": len(values), "agree": agree if judged else None,
            "published": value, "ours": ours, "ratio": ratio, "headline": comparison.headline,
            "direction": None if over is None or ours is None else ours > 1 if above else ours < 1,
            "least": least, "most": most, "within": None if ratio is None else abs(ratio - 1) <= WITHIN,
            "verdict": said, "why": why,
        }  # fmt: skip


def _cell(row: Mapping[str, Any]) -> tuple[Any, ...]:
    """What rows of one cell have in common: all but the variant."""
    return tuple(row.get(key) for key in ("cell", "context", "budget", "link_gbps"))


def _fits(row: Mapping[str, Any], where: Mapping[str, Any]) -> bool:
    """A value fits as text too, since keys of `published` are text."""
    return all(
        str(row.get(key)) in [str(one) for one in (value if isinstance(value, list | tuple) else [value])]
        for key, value in where.items()
    )


def _agreeing(row: Row) -> str:
    return f"{row['agree']} of {row['cells']}" if "agree" in row else f"- of {row['cells']}"


def _ours(row: Row) -> str:
    return "- (- to -)" if "ours" not in row else f"{row['ours']:.3g} ({row['least']:.3g} to {row['most']:.3g})"


_COMPARED = (
    ("claim", "{title} {of_key}"), ("published", "{published}"), ("ours: mean (least to most)", _ours),
    ("cells that agree", _agreeing), ("verdict", "{verdict}"), ("why", "{why}"),
    ("where the paper says so", "{source}"),
)  # fmt: skip


def _claims(record: Mapping[str, Any]) -> list[str]:
    """The number of claims by verdict, and their table."""
    found = [line.get("verdict") for line in select(record, "comparisons", headline=True)]
    counts = ", ".join(f"{name} {found.count(name)}" for name in ("holds", "tie", "does not hold"))
    return [f"{len(found)} claims: {counts}", "", *table(_COMPARED, source="comparisons", headline=True)(record)]


CLAIMS: dict[str, Table] = {
    "claims": _claims, "comparisons": table(_COMPARED, source="comparisons", headline=False),
}  # fmt: skip
ROUTING: dict[str, Table] = {  # of experiments on synthetic routing
    "traces": table(
        [("section", "{section}"), ("machine", "{machine}"), ("assumed in its place", "{assume}"),
         ("families", "{families}"), ("shapes", "{shapes}"), ("requests learnt, measured", "{learn}, {measure}"),
         ("prompt, decode tokens", "{prompt}, {decode}"), ("seed", "{seed}")],
        source="traces",
    ),
    "families": table(
        [("family", "{family}"), ("calibrated on", "{source}"), ("published targets", "{targets}"),
         ("parameters", "{parameters}")],
        source="families",
    ),
}  # fmt: skip

# -- files -------------------------------------------------------------------------------------------------------------


def paper_names() -> list[str]:
    """The papers, sorted; the experiment of each is `paper-NAME`."""
    return sorted(name.removeprefix("paper-") for name in experiment_names() if name.startswith("paper-"))


def experiment_names() -> list[str]:
    """The modules of `experiments/`, by name of the command and of the result."""
    files = (Path(__file__).parent / "experiments").glob("[a-z]*.py")
    return sorted(file.stem.replace("_", "-") for file in files)


def module_of(name: str) -> ModuleType:
    """The module of an experiment: `experiment`, and its comparisons with published figures, if it has any."""
    return import_module(f"{__package__}.experiments.{name.replace('-', '_')}")


def quick_of(experiment: Experiment) -> Experiment:
    """The same sections and variants: the first family, shape, budget and swept values, on few layers and tokens."""
    sections = []
    for section in experiment.sections:
        assert isinstance(section, Synthetic)  # as those of all papers
        traces = replace(
            section.traces, families=section.traces.families[:1], shapes=section.traces.shapes[:1],
            learn=min(section.traces.learn, 2), measure=1, prompt=4, decode=4, layers=6,
            distances=min(section.traces.distances, 4),
        )  # fmt: skip
        sweep = {name: values[:1] for name, values in section.sweep.items()}
        budgets = (section.budgets or experiment.grid.budgets)[:1]
        sections.append(replace(section, traces=traces, sweep=sweep, budgets=budgets))
    return replace(experiment, sections=tuple(sections))


def judged_again(module: ModuleType, record: dict[str, Any]) -> dict[str, Any]:
    """A result with its comparisons and their bars by the present rule and words, from its own rows."""
    lines = lines_of(getattr(module, "COMPARISONS", ()), record["rows"])
    others = [bar for bar in record["bars"] if not bar["name"].endswith(": holds")]
    bars = [] if module.experiment().needs_model else [asdict(bar) | {"ok": bar.ok} for bar in claim_bars(lines)]
    return record | {"comparisons": rounded(lines), "bars": [*others, *bars]} if lines else record


def _experiment(name: str, quick: bool) -> Experiment:
    experiment: Experiment = module_of(f"paper-{name}").experiment()
    return quick_of(experiment) if quick else experiment


def run_paper(name: str, quick: bool, folder: Path | None) -> Report:
    """Run a paper's experiment, or resume it; writes its page and data into a folder, if there is one.

    Raises:
        ConfigError: it is unknown or refused, or the folder is not writable.
    """
    experiment = _experiment(name, quick)
    out = None if folder is None else folder / f"{experiment.name}.json"
    report, journal = run_experiment(experiment, out=out)
    if folder is not None:
        write_folder(experiment, report.as_dict(), folder)
    journal.discard()
    return report


def run_papers(
    names: Sequence[str], quick: bool, folder: Path | None, jobs: int, progress: Progress | None = None,
    address: str | None = None,
) -> Report:  # fmt: skip
    """Run papers in so many processes of each node; the comparisons and bars of all.

    Args:
        address: HOST:PORT of a Ray cluster whose nodes run them, or auto; None: in a Ray job its cluster, else this
            machine. A paper's journal is on the machine that runs it, so one that other nodes run begins again.

    Raises:
        ConfigError: see `run_paper`; no name is given, or one twice.
    """
    require_each_once("only", names)
    if unknown := [name for name in names if name not in paper_names()]:
        raise ConfigError(f"there is no paper '{unknown[0]}'", f"give some of {', '.join(paper_names())}")
    advance, reports = advancing(progress, "papers", len(names)), dict[int, Report]()
    if (address := address or ("auto" if in_a_ray_job() else None)) is None:
        for number, report in over_processes(partial(run_paper, quick=quick, folder=folder), names, jobs):
            reports[number] = report
            advance()
    else:
        calls = [CloneCall("papers", "run_paper", (name, quick, None)) for name in names]
        with joined(address):
            for number, report, _ in over_nodes(called, calls, each=jobs):
                if folder is not None:
                    write_folder(_experiment(names[number], quick), report.as_dict(), folder)
                reports[number] = report
                advance()
    found = [reports[number] for number in range(len(names))]
    rows = [{"paper": n} | line for n, one in zip(names, found, strict=True) for line in one.figures["comparisons"]]
    shown = ("paper", "title", "of_key", "published", "ours", "ratio", "verdict", "within")
    return Report("papers", "simulated", rows, [bar for one in found for bar in one.bars], {"quick": quick}, shown)
