"""Run an experiment: its cells in turn or spread over a cluster's nodes, its simulated sections, its bars."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from rich.progress import Progress

from ....actors.budget import Budget
from ....actors.gpu_driver import has_gpu
from ....errors import ConfigError, rebuilt, size
from ...config import (
    DEFAULT_POLICY,
    RunConfig,
    check_model_dir,
    engine_settings,
    on_this_machine,
)
from ...host import cpu, versions
from ...report.results import measured_rows, percentiles
from ...simulate.machine import Machine, load_machine
from ..local_worker import run_config, start_worker
from ..prepare.measures import add_predictors_of_trace
from .cells import Cell, Cells, Journal, Measured, Policy, Score, Scoring, Start, measure_cell
from .experiment import Experiment, LinkAt, Section, Served, Simulated, plain
from .metrics import (
    Bar,
    Report,
    Row,
    Spread,
    advancing,
    cells_of,
    median_of,
    orders,
    paired,
    rounded,
)
from .random_model import NamedModel
from .serving import (
    Calibration,
    Recorded,
    Split,
    calibrate,
    own_store,
    prompts_of_file,
    record_split,
    shape_of,
    split_prompts,
)

_QUALITY = ("perplexity_ratio", "top1_agreement", "kl_nats", "same_tokens")


@dataclass
class Study:
    """A running experiment, as its sections and its `after` see it.

    base: the configuration. text: of the model whose text the prompts are; a random model has none.
    passages: prompts to choose from, by context. scratch: a temporary folder.
    calibration: None without ratios. ran: engine cells with their results. refused: a row for each variant of a cell
    that was refused, or failed, there.
    """

    experiment: Experiment
    base: RunConfig
    text: RunConfig
    passages: dict[str, Split]
    journal: Journal
    scratch: Path
    progress: Progress | None = None
    calibration: Calibration | None = None
    cells: list[Cell] = field(default_factory=list)
    ran: list[tuple[Cell, Measured]] = field(default_factory=list)
    rows: list[dict[str, Any]] = field(default_factory=list)
    refused: list[dict[str, Any]] = field(default_factory=list)
    bars: list[Bar] = field(default_factory=list)
    settings: dict[str, Any] = field(default_factory=dict)
    traces: dict[str, Recorded] = field(default_factory=dict)

    @property
    def contexts(self) -> list[str]:
        return list(self.passages)

    def traced(self, context: str) -> Split:
        """The texts of a context's trace: prompts, and the tokens after them that are decoded."""
        sizes = self.experiment.workload.trace
        return self._texts[context].take(sizes.learn, sizes.measure)

    @cached_property
    def _texts(self) -> dict[str, Split]:
        return _passages(self.experiment, self.text, self.experiment.workload.trace.tokens)

    def trace_path(self, context: str) -> Path:
        return self.scratch / f"trace-{context}"

    def recorded(self, context: str) -> Recorded:
        """The routing trace of a context's texts; the first call records it at `trace_path`."""
        if context not in self.traces:
            work, out = self.experiment.workload, self.trace_path(context)
            self.traces[context] = record_split(
                self.base, self.traced(context), work.tokens_of(context), work.trace.tokens, work.trace.distances, out,
                self.progress,
            )  # fmt: skip
        return self.traces[context]

    def stepped(self, what: str, total: int) -> Callable[[], None]:
        """Show a progress bar; call the result after each step."""
        return advancing(self.progress, what, total)


def run_experiment(
    experiment: Experiment, model: str | None = None, file: str | None = None, out: Path | None = None,
    progress: Progress | None = None, cells: Cells | None = None, start: Start = start_worker,
    score: Score | None = None,
) -> tuple[Report, Journal]:  # fmt: skip
    """Run an experiment, or resume it.

    Args:
        model, file: checkpoint and configuration, except for the experiment's own keys. A name of `MODELS` is a random
            model: it is made, gets prompts of the default model's text, and its tokens are sampled.
        out: the result's file, which places the journal; None: no journal.
        cells: where engine cells run; None: in this process, in turn. start, score: see `measure_cell`.

    Returns:
        The report, and the journal, which the caller discards. A counter that no row of a section has was zero in all.

    Raises:
        ConfigError, BudgetError, CheckpointError, RequestError: refused before anything is measured.
        RuntimeFailure: see `measure_cell`.
    """
    experiment, load_average = experiment.of_model(model), os.getloadavg()[0]
    base = text = run_config(model if experiment.random is None else None, file)
    if experiment.random is not None:
        base = run_config(str(_made(experiment, experiment.random, progress)), file)
    if experiment.grid.latency_us is not None:
        link = base.link.model_copy(update={"latency_us": experiment.grid.latency_us})
        base = base.model_copy(update={"link": link})
    with tempfile.TemporaryDirectory(prefix=f"tiermoe-{experiment.name}-") as scratch:
        journal = Journal(None, {})
        passages = _passages(experiment, text) if experiment.needs_model else {}
        study = Study(experiment, base, text, passages, journal, Path(scratch), progress)
        _refuse(study)
        study.journal = journal = Journal(out, _fingerprint(study))
        study.settings = _settings(study) | {"load_average": load_average}
        links = _links(study)
        files = _predictor_files(study) if experiment.needs_model else {}
        for section in experiment.running:
            if isinstance(section, Simulated):
                simulate = partial(section.rows, study, links)
                # a policy that is refused may be mended until the run resumes
                found = journal.step(f"section {section.name}", simulate, lambda rows: rows == measured_rows(rows))
                study.rows += measured_rows(found)
                study.refused += [row for row in found if "refused" in row]
            elif isinstance(section, Served):
                study.cells += _cells(study, section, links, files)
        _run_cells(study, cells or partial(_in_turn, study, start, score))
        if study.refused and not study.rows:
            raise rebuilt(study.refused[0]["error"], study.refused[0]["refused"])
        _judge(study)
        figures: dict[str, Any] = {}
        if study.ran:
            figures["orders"] = orders(study.rows)
        if study.calibration is not None:
            figures["calibration"] = asdict(study.calibration)
        if experiment.after is not None and not study.refused:  # it compares all variants
            figures |= experiment.after(study)
    executors = {o.executor for _, found in study.ran for o in found.outcomes if not o.refused}
    executors |= {"simulated"} & {section.executor for section in experiment.sections}
    report = Report(
        experiment.name, ", ".join(sorted(executors, key=lambda name: name != "simulated")), rounded(study.rows),
        study.bars, rounded(study.settings), experiment.shown or _shown(study.rows), rounded(figures),
        refused=study.refused,
    )  # fmt: skip
    return report, journal


def _made(experiment: Experiment, random: NamedModel, progress: Progress | None) -> Path:
    """The folder of a random model, after a look at what its experts and the slots of all workers of a cell take."""
    for section in (section for section in experiment.running if isinstance(section, Served)):
        for budget in section.budgets or experiment.grid.budgets:
            given = Budget.parse(budget)
            held = given.bytes_of(1, random.expert_bytes) / random.expert_bytes
            random.require_memory(len(section.variants) if section.serve else 1, min(1.0, held))
    if progress is not None:
        what = f"{random.name}: {random.layers} layers of random weights in {random.form}"
        progress.console.print(f"{what}, {size(random.expert_bytes)} of experts", markup=False, soft_wrap=True)
    return random.made()


def _passages(experiment: Experiment, base: RunConfig, more: int = 0) -> dict[str, Split]:
    """By context, the prompts with `more` tokens of their text."""
    work = experiment.workload
    check_model_dir(base.model_dir)
    if work.prompts_file is not None:
        tokens = None if work.prompt_tokens is None else work.prompt_tokens + more
        generated = 0 if more else work.max_tokens
        warm = () if work.warm_file is None else prompts_of_file(work.warm_file, base, generated, tokens)
        return {"": Split(warm, prompts_of_file(work.prompts_file, base, generated, tokens))}
    return {
        context: split_prompts(base.model_dir, (work.tokens_of(context) or 32) + more)
        for context in work.contexts or ("",)
    }


def _served(study: Study, context: str) -> Split:
    """The prompts of a context that engine sections serve."""
    work, passages = study.experiment.workload, study.passages[context]
    if work.prompts_file is not None:
        return passages
    if work.total_prompts is not None:
        return passages.first(work.total_prompts)
    return passages.take(work.warm, work.repeats * work.prompts if work.fresh else work.prompts)


def _refuse(study: Study) -> None:
    """Refuse before anything is measured what cannot run."""
    experiment, base = study.experiment, study.base
    work, grid = experiment.workload, experiment.grid
    engine = [section for section in experiment.running if isinstance(section, Served)]
    throttled = any(link is not None for link in (*grid.links, *grid.ratios, grid.link))
    if engine:
        base = on_this_machine(base)
    on_gpu = base.device == "cuda" or (base.device == "auto" and has_gpu())
    if throttled and on_gpu and any(section.links != "none" for section in engine):
        remedy = "pass --links none, leave the section out with --parts, or pass --config FILE with device: cpu"
        raise ConfigError("links are emulated on the CPU stand-in only", remedy)
    for context in study.contexts if any(section.serve for section in engine) else ():
        count = len(_served(study, context).measure)
        if work.fresh and count < work.repeats:
            what = f"{count} prompts cannot be new in each of {work.repeats} repetitions"
            raise ConfigError(what, "give more prompts, fewer repetitions, or leave --fresh out")
        if count < 1:
            raise ConfigError("--prompts is 0", "give at least 1")
    for section in experiment.running:
        if isinstance(section, Simulated):
            section.refuse(study)
    for section in engine:
        for policy in _policies(section, work.tau, None):
            for budget in section.budgets or grid.budgets:
                config = base.model_copy(update={"policy": policy.source(study.scratch), "budget": budget})
                engine_settings(config)


def _policies(section: Section, tau: int | None, top_k: int | None) -> list[Policy]:
    """The section's variants; with `top_k` only those for models of so many experts a token."""
    found = []
    for variant in section.variants:
        if top_k is not None and not variant.least_top_k <= top_k <= variant.most_top_k:
            continue
        settings = variant.policy(tau)
        configured = tau and settings.split.kind == "adaptive"
        changed = configured or variant.name != variant.preset or variant.changes
        found.append(Policy(variant.name, settings, variant.preset, None if changed else variant.preset))
    return found


def _links(study: Study) -> list[LinkAt]:
    """Gigabytes (1e9) per second of each link, and its ratio of loading over computing; None: unknown."""
    grid, base = study.experiment.grid, study.base
    if grid.calibrate == "off":
        return [(gbps, None) for gbps in (grid.links or (base.link.gbps,))]
    context = study.contexts[0]
    if grid.calibrate == "resident":
        prompts, max_tokens = _served(study, context).measure, study.experiment.workload.max_tokens
        measure = partial(calibrate, base, prompts, max_tokens, study.progress)
        found = Calibration(**study.journal.step("calibration", lambda: asdict(measure())))
    else:

        def machine() -> dict[str, Any]:
            header = study.recorded(context).header
            return {"machine": load_machine(header, None, None, None).model_dump(), "shape": shape_of(header)}

        study.settings |= study.journal.step("machine", machine)
        found = Calibration.of_machine(
            study.settings["shape"], Machine(**study.settings["machine"]), base.link.latency_us
        )
    study.calibration = found
    digits = 2 if grid.calibrate == "resident" else 3
    by_ratio: dict[float | None, float] = {}  # of two ratios with the same link the first
    if grid.link is None and not grid.links:
        for wanted in grid.ratios:
            by_ratio.setdefault(found.link(wanted, digits), wanted)
    given = (grid.link,) if grid.link is not None else grid.links or tuple(by_ratio)
    low, high = study.experiment.regime
    study.settings["links"] = [
        {"gbps": gbps, "load_s": found.load_s(gbps), "compute_s": found.compute_s, "ratio": found.ratio(gbps),
         "in_regime": low <= found.ratio(gbps) <= high}
        for gbps in given if gbps is not None
    ]  # fmt: skip
    exact = by_ratio if grid.calibrate == "trace" else {}
    return [(gbps, None if gbps is None else exact.get(gbps, found.ratio(gbps))) for gbps in given]


def _predictor_files(study: Study) -> dict[str, bytes]:
    """By file name, the stride predictors that variants read, trained on the prompts to learn from."""
    presets = [v.policy() for section in study.experiment.running for v in section.variants]
    distances = {preset.prefetch.distance for preset in presets if preset.prefetch.kind == "stride"}
    if not distances or study.experiment.workload.prompts_file is not None:
        return {}

    def train() -> dict[str, str]:
        store, files, context = own_store(study.base, study.scratch), dict[str, str](), study.contexts[0]
        learned = len(study.recorded(context).learn)
        for distance in sorted(distances):
            path = add_predictors_of_trace(store, study.trace_path(context), distance, learned)
            files[path.name] = path.read_bytes().hex()
        return files

    return {name: bytes.fromhex(content) for name, content in study.journal.step("predictors", train).items()}


def _cells(study: Study, section: Served, links: Sequence[LinkAt], files: Mapping[str, bytes]) -> Iterator[Cell]:
    work, grid, calibration = study.experiment.workload, study.experiment.grid, study.calibration
    policies = tuple(_policies(section, work.tau, calibration.top_k if calibration is not None else None))
    scoring = None
    if section.score != "none":
        layer_us = calibration.compute_s * 1e6 if section.stepped and calibration is not None else None
        scoring = Scoring(work.quality, section.score == "all", layer_us)
    chosen = {"all": links, "first": links[:1], "none": [(None, None)]}[section.links]
    for context in study.contexts if section.serve else study.contexts[:1]:
        split = _served(study, context) if section.serve else Split((), ())
        for budget in section.budgets or grid.budgets:
            for gbps, loading in chosen:
                yield Cell(
                    section.name, context, budget, gbps, loading, study.base, policies, split.measure,
                    split.learn if section.warm else (), work.repeats, work.max_tokens, work.batch, work.fresh,
                    section.serve, scoring, files, work.seed,
                )  # fmt: skip


def _in_turn(study: Study, start: Start, score: Score | None, cells: Sequence[Cell]) -> Iterator[tuple[int, Measured]]:
    """Measure the cells in this process; each knows the tokens of those before."""
    rounds = sum(len(cell.policies) * (cell.repeats + 1 if cell.serve else 1) for cell in cells)
    advanced = study.stepped("measuring", rounds)
    for i, cell in enumerate(cells):
        known = study.journal.tokens.get(cell.context, {})
        yield i, measure_cell(cell, known, study.progress, advanced, start, score)


def _run_cells(study: Study, run: Cells) -> None:
    """Run the cells that the journal lacks; rows are in the order of the cells."""
    found = {i: known for i, cell in enumerate(study.cells) if (known := study.journal.find(cell)) is not None}
    if left := [i for i in range(len(study.cells)) if i not in found]:
        for number, measured in run([study.cells[i] for i in left]):
            found[left[number]] = measured
            if not any(outcome.refused for outcome in measured.outcomes):  # a policy may be mended meanwhile
                study.journal.add(study.cells[left[number]], measured)
    study.ran = [(cell, found[i]) for i, cell in enumerate(study.cells)]
    outcomes = [(cell, outcome) for cell, measured in study.ran for outcome in measured.outcomes]
    study.refused += [
        {"section": cell.section, "context": cell.context, "policy": outcome.policy, "budget": cell.budget,
         "link_gbps": cell.gbps} | outcome.refused
        for cell, outcome in outcomes if outcome.refused
    ]  # fmt: skip
    for section in dict.fromkeys(cell.section for cell in study.cells):
        study.rows += _rows([(cell, m) for cell, m in study.ran if cell.section == section])


def _rows(ran: Sequence[tuple[Cell, Measured]]) -> list[dict[str, Any]]:
    """Medians with spread of every outcome of a section; `resolved_policy` is what `default` is there."""
    every = [(cell, found, outcome) for cell, found in ran for outcome in found.outcomes if not outcome.refused]
    counted = {key for *_, outcome in every for key, values in outcome.values.items() if any(values)} | {"same_tokens"}
    rows = []
    for cell, found, outcome in every:
        ran_as = next(policy for policy in cell.policies if policy.name == outcome.policy)
        quality = outcome.quality or {}
        row: dict[str, Any] = {
            "section": cell.section, "context": cell.context, "policy": outcome.policy, "preset": ran_as.preset,
            "resolved_policy": outcome.settled if ran_as.file == DEFAULT_POLICY else None,
            "budget": cell.budget, "link_gbps": cell.gbps, "ratio": cell.ratio, "lossless": outcome.lossless,
            "writes_back": ran_as.settings.evict_writeback, "executor": outcome.executor,
        }  # fmt: skip
        if found.node is not None:
            row["node"] = found.node
        if not cell.serve:
            rest = {k: v for k, v in quality.items() if k not in ("policy", "executor", "sums", "lossless")}
            rows.append(row | {"case": outcome.policy} | rest)
            continue
        spreads = {key: Spread.of(values) for key, values in sorted(outcome.values.items()) if key in counted}
        middle = {key: spread.median for key, spread in spreads.items()}
        row |= {
            "hit_rate": middle.get("hit_rate", 0.0), "ttft_ms": 1e3 * middle.get("ttft_s", 0.0),
            "tpot_ms": 1e3 * middle.get("tpot_s", 0.0), "blocked_io_s": middle.get("blocked_io_s", 0.0),
            "decode_blocked_io_s": middle.get("decode_blocked_io_s", 0.0),
            "expert_bytes_peak": middle.get("expert_bytes_peak"),
            "mb_loaded": middle.get("bytes_loaded", 0.0) / 1e6, "mb_wasted": middle.get("bytes_wasted", 0.0) / 1e6,
        }  # fmt: skip
        known = quality | {"same_tokens": middle.get("same_tokens")}
        row |= {key: known.get(key) for key in _QUALITY}
        spread = {key: asdict(found) for key, found in spreads.items()}
        row["between_ms"] = percentiles([1e3 * seconds for seconds in outcome.between_s])
        row["residency"] = outcome.residency
        rows.append(row | {"spread": spread, "layers": outcome.layers, "quality": outcome.quality})
    return rows


def _judge(study: Study) -> None:
    """Add the experiment's bars on ratios."""
    low, high = study.experiment.regime
    cells = {(c.section, c.context, c.budget, c.gbps): c for c in study.cells}
    for bar in study.experiment.bars:
        for key, of in cells_of(study.rows, bar.section).items():
            cell, names = cells[bar.section, *key], [name for name in bar.over if name in of]
            if bar.of not in of or not names or (bar.budgets and cell.budget not in bar.budgets):
                continue
            if bar.regime and not (cell.ratio is not None and low <= cell.ratio <= high):
                continue
            best = min(names, key=lambda name: median_of(of[name], bar.measure))
            link = "no emulated link" if cell.gbps is None else f"{cell.gbps:g} GB/s"
            what = bar.measure.removesuffix("_s")
            name = f"{what} of {bar.of} over {best}, budget {cell.budget}, {link}"
            study.bars.append(Bar(name, paired(of[bar.of], of[best], bar.measure), "<=", bar.limit))


def _settings(study: Study) -> dict[str, Any]:
    """For the report, as plain values."""
    experiment, base = study.experiment, study.base
    work = experiment.workload
    if not experiment.needs_model:
        return {"machine": ", ".join(dict.fromkeys(s.machine for s in experiment.sections if isinstance(s, Simulated)))}
    workload, random = plain(work), experiment.random
    del workload["quality"]["seed"]  # always the same
    made = None if random is None else f"{random.layers} layers of {random.name} in {random.form}, random weights"
    return {
        "model": made or base.model_dir.name, "threads": base.worker_threads, "latency_us": base.link.latency_us,
        "workload": workload, "grid": plain(experiment.grid),
        "policies": {section.name: [v.name for v in section.variants] for section in experiment.running},
    }  # fmt: skip


def _fingerprint(study: Study) -> dict[str, Any]:
    """All that changes a figure, by name: an experiment resumes only figures of the same fingerprint."""
    experiment, base = study.experiment, study.base
    work, matcher = experiment.workload, base.matcher.warm

    def digest(value: Any) -> str:
        return hashlib.sha256(json.dumps(value).encode()).hexdigest()

    return {
        **plain(replace(work, prompts_file=None, warm_file=None)), **plain(experiment.grid),
        "sections": [plain(replace(section, variants=())) for section in experiment.sections],
        "policies": {
            section.name: [[v.name, v.policy(work.tau).model_dump(mode="json")] for v in section.variants]
            for section in experiment.sections
        },
        "prompts": digest([[split.learn, split.measure] for split in study.passages.values()]),
        "maps": None if matcher is None else hashlib.sha256(Path(matcher).read_bytes()).hexdigest(),
        "config": base.model_dump(mode="json", exclude={"policy", "budget", "ray", "store"}),
        "checkpoint": digest((base.model_dir / "config.json").read_text(encoding="utf-8")),
        "hardware": cpu(),
        "versions": versions(),
    }  # fmt: skip


def _shown(rows: Iterable[Row]) -> tuple[str, ...]:
    """Columns of the printed table, if the experiment names none."""
    first = next(iter(rows), {})
    wanted = ("section", "policy", "budget", "link_gbps", "hit_rate", "ttft_ms", "tpot_ms", "blocked_io_s", "mb_loaded",
              "mb_wasted", *_QUALITY)  # fmt: skip
    return tuple(key for key in wanted if first.get(key) is not None or (key in first and key not in _QUALITY))
