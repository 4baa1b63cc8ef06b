"""One cell of an experiment, and the journal of the finished cells.

A cell is all variants of a section at one context, budget and link. One machine measures them in turn on the same
prompts, so that ratios within a repetition are paired. Cells are independent of each other. A journal beside the output
records the finished ones: the same command resumes.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

from rich.progress import Progress

from ....actors.engine.stats import needed_shares
from ....actors.policy_settings import PolicySettings
from ....actors.settings import LinkSettings
from ....errors import ConfigError, RuntimeFailure, TierMoeError
from ...config import RunConfig
from ...report.files import write_json
from ...report.results import refused_row
from ..evaluate.quality import EvaluationOptions
from ..local_worker import start_worker
from .metrics import Measures, ratio
from .serving import Prompt, ensure_artifacts, own_store, serve

_WARM_UP_TOKENS = 8  # of the first prompt, if the experiment names no warm-up
_FORMAT = 2  # of the journal
_SCORED = (
    "bytes_loaded_demand", "bytes_loaded_prefetch", "bytes_wasted", "hits", "misses", "late_prefetches", "ndp_experts",
    "bytes_demanded_decode",
)  # fmt: skip

Start = Callable[[RunConfig], Any]
Score = Callable[[Any, Progress | None], dict[str, Any]]


@dataclass(frozen=True)
class Policy:
    """A variant ready to run on any node. file: the value for `RunConfig.policy`; None: the settings have changes."""

    name: str
    settings: PolicySettings
    preset: str
    file: str | None

    def source(self, folder: Path) -> str:
        """A preset's name, or a YAML file that is written into this folder."""
        if self.file is not None:
            return self.file
        path = folder / f"{self.name.replace(' ', '-').replace('/', '-')}.yaml"
        path.write_text(json.dumps(self.settings.model_dump(mode="json")), encoding="utf-8")  # JSON is YAML
        return str(path)


@dataclass(frozen=True)
class Scoring:
    """How quality is scored.

    lossless: lossless variants are scored too. layer_us: each layer advances the link's clock by so many microseconds;
    None: the clock runs.
    """

    options: EvaluationOptions
    lossless: bool
    layer_us: float | None


@dataclass(frozen=True)
class Cell:
    """All that a node needs to measure the variants of a section at one context, budget and link.

    base: the configuration without policy, budget and link speed. gbps: gigabytes (1e9) per second; None: no emulated
    link. prompts: token ids; with `fresh` each repetition takes its own share. warm: prompts served first, uncounted.
    files: contents by name of files that are added to a copy of the store. seed: tokens are sampled; None: greedy.
    """

    section: str
    context: str
    budget: str
    gbps: float | None
    ratio: float | None
    base: RunConfig
    policies: tuple[Policy, ...]
    prompts: tuple[Prompt, ...]
    warm: tuple[Prompt, ...] = ()
    repeats: int = 5
    max_tokens: int = 32
    batch: int = 1
    fresh: bool = False
    serve: bool = True
    scoring: Scoring | None = None
    files: Mapping[str, bytes] = field(default_factory=dict)
    seed: int | None = None

    @property
    def key(self) -> list[Any]:
        return [self.section, self.context, self.budget, self.gbps]

    def config(self, policy: Policy, folder: Path) -> RunConfig:
        """The configuration of a variant; `folder` is for its policy's file."""
        latency_us = self.base.link.latency_us if self.gbps is not None else 0.0
        link = LinkSettings(gbps=self.gbps, latency_us=latency_us)
        return self.base.model_copy(update={"policy": policy.source(folder), "budget": self.budget, "link": link})

    def round(self, number: int) -> range:
        """Indices of a repetition's prompts; shares have equal size."""
        share = len(self.prompts) // self.repeats
        return range(number * share, (number + 1) * share) if self.fresh else range(len(self.prompts))

    @property
    def warm_up(self) -> tuple[Prompt, ...]:
        """The prompts before the first counted repetition."""
        return self.warm or ((self.prompts[0][:_WARM_UP_TOKENS],) if self.fresh else self.prompts)


@dataclass
class Outcome:
    """What one variant of a cell did.

    settled: name of the policy that ran, which `default` leaves to the start.
    values: by measure, one number for each repetition. layers: counters of each layer, summed over the repetitions.
    quality: see `score_worker`; None: not scored. between_s: seconds between tokens of all repetitions, of requests
    that are served one at a time. residency: states and uses of each layer's experts after the last repetition.
    refused: keys of `refused_row`, with the error that ended it; then it has no figures.
    """

    policy: str
    lossless: bool
    executor: str
    settled: str | None = None
    values: dict[str, list[float]] = field(default_factory=dict)
    layers: list[Measures] = field(default_factory=list)
    quality: dict[str, Any] | None = None
    between_s: list[float] = field(default_factory=list)
    residency: list[tuple[Sequence[int], Sequence[int]]] = field(default_factory=list)
    refused: dict[str, Any] = field(default_factory=dict)

    def started(self, worker: Any) -> None:
        """Take what the start decides."""
        self.executor, self.settled = worker.stats().executor, worker.settings.policy.name


@dataclass
class Measured:
    """A cell's outcomes, the tokens of its lossless variants by index of the prompt, and the node's address."""

    outcomes: list[Outcome]
    tokens: dict[int, list[int]]
    node: str | None = None


# Where cells run: yields the index of each cell with its result, in any order.
Cells = Callable[[Sequence[Cell]], Iterator[tuple[int, Measured]]]


def measure_cell(
    cell: Cell, known: Mapping[int, list[int]] | None = None, progress: Progress | None = None,
    advanced: Callable[[], None] = lambda: None, start: Start = start_worker, score: Score | None = None,
) -> Measured:  # fmt: skip
    """Measure a cell in this process. Only the cell's workers are alive; all are closed at the end.

    A variant that is refused, or fails, leaves the cell; the others go on.

    Args:
        known: tokens of lossless variants in other cells, by index of the prompt.
        advanced: called after each round of a variant.
        start: starts a worker. score: scores a worker's quality; None: `score_worker`.

    Raises:
        RuntimeFailure: lossless variants gave different tokens.
        ConfigError: links are to be emulated on hardware that has its own.
    """
    scorer = score or partial(score_worker, cell)
    with ExitStack() as stack:  # a worker that stays open keeps the process alive
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tiermoe-cell-")))
        ensure_artifacts(cell.base, [policy.settings for policy in cell.policies])
        if cell.files:
            store = own_store(cell.base, scratch)
            for name, content in cell.files.items():
                (store / name).write_bytes(content)
            cell = replace(cell, base=cell.base.model_copy(update={"store": str(store)}))
        configs = {policy.name: cell.config(policy, scratch) for policy in cell.policies}
        outcomes = {policy.name: Outcome(policy.name, policy.settings.lossless, "") for policy in cell.policies}
        if not cell.serve:
            for name, config in configs.items():
                with _leaving(outcomes[name]), closing(start(config)) as worker:
                    outcomes[name].started(worker)
                    outcomes[name].quality = scorer(worker, progress)
                advanced()
            return Measured(list(outcomes.values()), {})
        workers: dict[str, Any] = {}
        for name, config in configs.items():
            with _leaving(outcomes[name], workers):
                workers[name] = stack.enter_context(closing(start(config)))
                outcomes[name].started(workers[name])
            if outcomes[name].executor == "real" and cell.gbps is not None:
                raise ConfigError("links are emulated on the CPU stand-in only", "pass --links none on this hardware")
        for name, worker in list(workers.items()):
            with _leaving(outcomes[name], workers):
                _serve(worker, cell.warm_up, cell)
            advanced()
        tokens = dict(known or {})
        for number in range(cell.repeats if workers else 0):
            _repetition(cell, number, workers, outcomes, tokens, advanced)
        for name, worker in list(workers.items()):
            with _leaving(outcome := outcomes[name], workers):
                outcome.residency = [(layer.states, layer.uses) for layer in worker.residency()]
                if cell.scoring is not None and (cell.scoring.lossless or not outcome.lossless):
                    outcome.quality = scorer(worker, progress)
        return Measured(list(outcomes.values()), tokens)


@contextmanager
def _leaving(outcome: Outcome, workers: dict[str, Any] | None = None) -> Iterator[None]:
    """A variant's error inside the block is its outcome, and its worker is closed and leaves the others."""
    try:
        yield
    except TierMoeError as error:
        outcome.refused = refused_row(error)
        outcome.values, outcome.layers, outcome.between_s, outcome.residency = {}, [], [], []
        if workers is not None and (worker := workers.pop(outcome.policy, None)) is not None:
            worker.close()


def _repetition(
    cell: Cell, number: int, workers: dict[str, Any], outcomes: Mapping[str, Outcome],
    known: dict[int, list[int]], advanced: Callable[[], None],
) -> None:  # fmt: skip
    """Serve the prompts once on every variant, A B C, so that drift of the machine affects all of them."""
    indices = cell.round(number)
    given: dict[str, dict[int, list[int]]] = {}
    for name, worker in list(workers.items()):
        with _leaving(outcome := outcomes[name], workers):
            worker.reset_stats()
            measures, tokens = _serve(worker, [cell.prompts[i] for i in indices], cell, outcome.between_s)
            stats = worker.stats()
            for measure, value in {**counters(stats), **measures}.items():
                outcome.values.setdefault(measure, [0.0] * number).append(value)  # a new counter was zero before
            for values in outcome.values.values():
                values += [0.0] * (number + 1 - len(values))
            layers = [{k: float(v) for k, v in layer.items() if v} for layer in stats.as_dict()["layers"]]
            outcome.layers = added(outcome.layers, layers)
            given[name] = dict(zip(indices, tokens, strict=True))
        advanced()
    for name, by_prompt in given.items():
        if outcomes[name].lossless:
            check_tokens(name, by_prompt, known)
    for name, by_prompt in given.items():
        if not outcomes[name].lossless and all(i in known for i in indices):
            same = sum(by_prompt[i] == known[i] for i in indices) / len(indices)
            outcomes[name].values.setdefault("same_tokens", [0.0] * (number + 1))[number] = same


def _serve(
    worker: Any, prompts: Sequence[Prompt], cell: Cell, between_s: list[float] | None = None
) -> tuple[Measures, list[list[int]]]:
    """Serve batch after batch; means over the requests, and each request's tokens. between_s: see `serve`."""
    sums, tokens = {"ttft_s": 0.0, "tpot_s": 0.0}, list[list[int]]()
    for start in range(0, len(prompts), cell.batch):
        batch = prompts[start : start + cell.batch]
        measures, found = serve(worker.submit, batch, cell.max_tokens, cell.seed, between_s)
        for name in sums:
            sums[name] += measures[name] * len(batch)
        tokens += found
    return {name: value / len(prompts) for name, value in sums.items()}, tokens


def check_tokens(policy: str, given: Mapping[int, list[int]], known: dict[int, list[int]]) -> None:
    """Add a lossless policy's tokens to the known ones. Raises RuntimeFailure where they differ."""
    for index, tokens in given.items():
        if known.setdefault(index, list(tokens)) != tokens:
            what = f"{policy} is lossless and gives other tokens than those before it for prompt {index + 1}"
            raise RuntimeFailure(what, "report this as a bug")


def counters(stats: Any) -> Measures:
    """Numbers of an `EngineStats` without its layers; names of nested ones are joined with dots."""

    def flat(prefix: str, values: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
        for name, value in values.items():
            if isinstance(value, Mapping):
                yield from flat(f"{prefix}{name}.", value)
            elif isinstance(value, bool | int | float):
                yield f"{prefix}{name}", float(value)

    return dict(flat("", {key: value for key, value in stats.as_dict().items() if key != "layers"}))


def added(sums: list[Measures], more: list[Measures]) -> list[Measures]:
    """The sum, layer by layer."""
    if not sums:
        return more
    return [{n: a.get(n, 0.0) + b.get(n, 0.0) for n in {**a, **b}} for a, b in zip(sums, more, strict=True)]


@lru_cache(maxsize=1)
def _evaluation(model_dir: Path, options: EvaluationOptions) -> Any:
    """The evaluation, whose lossless reference is computed once."""
    from ..evaluate.scoring import Evaluation  # torch: seconds that refused options need not pay

    return Evaluation(model_dir, options)


def score_worker(cell: Cell, worker: Any, progress: Progress | None) -> dict[str, Any]:
    """Figures of `Quality.as_dict`, their sums by document, and counters of the scoring.

    With `Scoring.layer_us` another worker of the same settings is scored. Its link's clock advances by the same time
    for each layer, so that the figures are independent of the machine's load.

    `picks`: (token, expert) pairs that the routers chose; `replaced` and `left_out`: shares of these.
    """
    from ...local import LocalWorker

    assert cell.scoring is not None  # the caller's condition
    evaluation = _evaluation(cell.base.model_dir, cell.scoring.options)
    evaluation.reference(progress)
    with ExitStack() as stack:
        if cell.scoring.layer_us is not None:
            link = worker.settings.link.model_copy(update={"layer_us": cell.scoring.layer_us})
            stepped = LocalWorker(worker.settings.model_copy(update={"link": link}), worker.store, 0)
            worker = stack.enter_context(closing(stepped))
            worker.start()
        quality = evaluation.measure(worker, progress)
        stats = worker.stats()
        total = stats.total()
        windows = sum(len(window.ids) - 1 for window in evaluation.windows)
        choices = (len(item.context) + sum(len(t) - 1 for t in item.candidates) for item in evaluation.items)
        picks = (windows + sum(choices)) * len(stats.layers) * worker.engine.top_k
        return quality.as_dict() | {
            "sums": {name: values.tolist() for name, values in quality.sums.items()},
            "picks": picks, "substitutions": stats.substitutions, "dropped": stats.dropped,
            "replaced": ratio(stats.substitutions, picks), "left_out": ratio(stats.dropped, picks),
            "scored_hit_rate": stats.hit_rate or 0.0,
            "ndp_share": (needed_shares(asdict(total)) or {}).get("near_data", 0.0),
            **{name: getattr(total, name) for name in _SCORED},
        }  # fmt: skip


# -- journal -----------------------------------------------------------------------------------------------------------


def journal_file(out: Path) -> Path:
    """The journal of a result's file."""
    return out.with_name(f"{out.stem}.partial.json")


class Journal:
    """What an experiment has measured so far, in a file that exists while the result is unfinished.

    Args:
        out: the result's file; None: nothing is written.
        fingerprint: all that changes a figure, by name, as plain values. A file with another one is refused.

    Attributes:
        tokens: of lossless variants, by context and by index of the prompt. steps: results of `step` by name.

    Raises:
        ConfigError: the file cannot be read, or is of an experiment with other settings.
    """

    def __init__(self, out: Path | None, fingerprint: Mapping[str, Any]) -> None:
        self.path = None if out is None else journal_file(out)
        self._fingerprint = json.loads(json.dumps(fingerprint))  # as a file gives it back
        self._cells: list[tuple[list[Any], Measured]] = []
        self.steps: dict[str, Any] = {}
        self.tokens: dict[str, dict[int, list[int]]] = {}
        if self.path is not None and self.path.exists():
            self._read(self.path)

    def _read(self, path: Path) -> None:
        remedy = f"delete '{path}' to begin again"
        try:
            record = json.loads(path.read_text(encoding="utf-8"))
            if record["format"] != _FORMAT:
                raise ValueError(f"format {record['format']}")
            then = record["fingerprint"]
            self.steps = dict(record["steps"])
            for entry in record["cells"]:
                tokens = {int(index): list(ids) for index, ids in entry["tokens"].items()}
                outcomes = [Outcome(**outcome) for outcome in entry["outcomes"]]
                self._add(entry["key"], Measured(outcomes, tokens, entry["node"]))
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConfigError(f"'{path}' holds no part of an experiment: {error}", remedy) from error
        if changed := [name for name, value in self._fingerprint.items() if then.get(name) != value]:
            raise ConfigError(
                f"'{path}' is of an experiment with other {', '.join(changed)}",
                f"run it with those settings to resume it, or {remedy}",
            )

    def find(self, cell: Cell) -> Measured | None:
        """The result of a finished cell."""
        return next((found for key, found in self._cells if key == cell.key), None)

    def add(self, cell: Cell, found: Measured) -> None:
        """Record a cell's result.

        Raises:
            RuntimeFailure: lossless variants gave other tokens than in earlier cells.
            ConfigError: the file cannot be written.
        """
        self._add(cell.key, found)
        self._write()

    def step(self, name: str, measure: Callable[[], Any], final: Callable[[Any], bool] = lambda found: True) -> Any:
        """The recorded result of a step, as plain values; at its first call the step is measured.

        Args:
            final: whether a result is recorded; another one is measured again by a run that resumes.
        """
        if name in self.steps:
            return self.steps[name]
        found = measure()
        if final(found):
            self.steps[name] = found
            self._write()
        return found

    def discard(self) -> None:
        """Delete the file, once the result is written."""
        if self.path is not None:
            self.path.unlink(missing_ok=True)

    def _add(self, key: list[Any], found: Measured) -> None:
        check_tokens(f"section {key[0]}", found.tokens, self.tokens.setdefault(key[1], {}))
        self._cells.append((key, found))

    def _write(self) -> None:
        if self.path is not None:
            cells = [{"key": key, **asdict(found)} for key, found in self._cells]
            record = {"format": _FORMAT, "fingerprint": self._fingerprint, "steps": self.steps, "cells": cells}
            write_json(self.path, record)
