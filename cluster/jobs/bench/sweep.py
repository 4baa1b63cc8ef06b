"""What a cluster serves, by configuration and load: the cells of one file, deployed one after the other as one job.

    file -> cells -> visits: a deployment, and all loads that are put on it -> journal -> a row for each cell

All deployments are visited once before any is visited again, A B C A B C, so that drift of the cluster affects all of
them. A journal beside the result has the finished visits: the same command resumes behind the last one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from hashlib import sha256
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field, ValidationError
from rich.progress import Progress

from ....actors.base_settings import Settings
from ....errors import ConfigError, TierMoeError, rebuilt
from ...config import RunConfig, load_run_config
from ...host import cpu, versions
from ...report.results import refused_row
from ...yaml_file import explain, merged, read_yaml
from ..ending import signalled
from .cases import Serve
from .cells import Journal
from .load import Limits
from .metrics import Report, Spread, advancing, paired, rounded
from .process_log import ProcessLog
from .serve import files_of, loads_of, measured
from .targets import placed

if TYPE_CHECKING:
    from ...attach import Sample

LOAD = "load."  # before the name of a load's value among a cell's
RATE, SHOWN = "tokens_per_s", ("tokens_per_s", "ratio", "ttft_p50_ms", "tpot_p50_ms", "tpot_p99_ms")

_SEVERAL = ("streams", "rate")  # options that `bench serve` takes several values of, each a load
_ARRIVALS = ("streams", "rate", "schedule")  # one of them says when requests come
_NOT_OF_LOADS = {"config", "attach", "deployment", "url", "model_name", "api_key_file", "model", "budget", "policy",
                 "threads", "link_gbps", "store", "repeats"}  # fmt: skip

_LOADED = ("bytes_loaded_demand", "bytes_loaded_prefetch", "bytes_loaded_migration")
_ALWAYS = ("failed", "requests")  # figures that a row has although they are 0
_MOVED = ("bytes_sent", "bytes_received")

Figures = dict[str, Any]  # of one load on one deployment: numbers by name with the unit, and details
Visit = Callable[[RunConfig, Sequence[Serve], int], Iterator[Figures]]


class Sweep(Settings):
    """A sweep's file.

    Attributes:
        config: keys of a run's configuration, or a file of them; with `ray.address` the cells run on that cluster.
        load: of every cell: options of `tiermoe bench serve` by their names, such as `requests` and `max_tokens`.
        cells: each a product: value, or list of values, by dotted key of the configuration (`cluster.shards`) or of the
            load (`load.streams`, `load.rate`). A value null leaves the key as it is in `config` or `load`.
        baseline: values of the cell that a cell is compared with, whose other values are the cell's own.
    """

    config: str | dict[str, Any] = Field(default_factory=dict)
    load: dict[str, Any] = Field(default_factory=dict)
    repeats: Annotated[int, Field(ge=1)] = 3
    cells: Annotated[tuple[dict[str, Any], ...], Field(min_length=1)]
    baseline: dict[str, Any] = Field(default_factory=dict)


@dataclass(frozen=True)
class SweepCell:
    """One configuration under one load. values: as the file gives them, by dotted key."""

    values: Mapping[str, Any]
    config: RunConfig
    load: Serve

    @property
    def name(self) -> str:
        return named(self.values)


def named(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{key} {value}" for key, value in values.items()) or "the only cell"


def read_sweep(file: Path) -> Sweep:
    """A sweep's file. Raises ConfigError: it cannot be read, or a key is unknown or malformed."""
    content = read_yaml(file)
    try:
        return Sweep(**content)
    except ValidationError as error:
        raise explain(error, Sweep, str(file)) from error


def cells_of(sweep: Sweep) -> list[SweepCell]:
    """The cells in the order of the file.

    Raises:
        ConfigError, RequestError: an unknown key or malformed value of configuration or load, a load's file that cannot
            be read, a cell that is there twice, or a baseline that is none.
    """
    found: list[SweepCell] = []
    for group in sweep.cells:
        if nothing := [key for key, value in group.items() if value == []]:
            raise ConfigError(f"cells: key '{nothing[0]}' has no value", "give at least one, or leave the key out")
        choices = [value if isinstance(value, list) else [value] for value in group.values()]
        for chosen in product(*choices):
            values = dict(zip(group, chosen, strict=True))
            config = {key: value for key, value in values.items() if not key.startswith(LOAD)}
            load = {key.removeprefix(LOAD): value for key, value in values.items() if key.startswith(LOAD)}
            found.append(SweepCell(values, _config(sweep, config), _load(sweep, load)))
    names = [cell.name for cell in found]
    if twice := [name for name in names if names.count(name) > 1]:
        raise ConfigError(f"the sweep has the cell '{twice[0]}' twice", "give each once")
    if sweep.baseline and not any(_has(cell, sweep.baseline) for cell in found):
        raise ConfigError(f"no cell is the baseline '{named(sweep.baseline)}'", "give the values as a cell has them")
    return found


def _config(sweep: Sweep, values: Mapping[str, Any]) -> RunConfig:
    nested: dict[str, Any] = {}
    for key, value in values.items():
        *sections, last = key.split(".")
        part: dict[str, Any] = {last: value}
        for section in reversed(sections):
            part = {section: part}
        nested = merged(nested, part)
    if isinstance(sweep.config, str):
        return load_run_config(sweep.config, nested)
    return load_run_config(None, merged(sweep.config, nested))


def _load(sweep: Sweep, values: Mapping[str, Any]) -> Serve:
    """Raises ConfigError, RequestError: an unknown option, malformed value or file, or an option of the runtime."""
    given = sweep.load | {key: value for key, value in values.items() if value is not None}
    known = Serve.model_fields.keys() - _NOT_OF_LOADS
    if unknown := sorted(given.keys() - known):
        raise ConfigError(f"a load has no '{unknown[0]}'", f"give some of {', '.join(sorted(known))}")
    given = {key: (value,) if key in _SEVERAL else value for key, value in given.items()}
    try:
        load = Serve(**given, repeats=sweep.repeats)
    except ValidationError as error:
        raise explain(error, Serve, "load") from error
    if not any(getattr(load, way) for way in _ARRIVALS):
        remedy = f"give one of {', '.join(_ARRIVALS)} in load, or for a cell as {LOAD}streams"
        raise ConfigError("a load does not say when requests come", remedy)
    files_of(load)
    return load


def _has(cell: SweepCell, values: Mapping[str, Any]) -> bool:
    return all(cell.values.get(key) == value for key, value in values.items())


def fingerprint(sweep: Sweep, cells: Sequence[SweepCell]) -> dict[str, Any]:
    """All that changes a figure, by name: also what the files hold that the sweep names."""
    names: set[str] = set()
    for cell in cells:
        given = cell.load.prompts, cell.load.schedule, cell.config.policy, cell.config.ndp.hardware
        names |= {str(name) for name in given if isinstance(name, str | Path)}
    return {
        **sweep.model_dump(mode="json"), "hardware": cpu(), "versions": versions(),
        "configuration": [cell.config.model_dump(mode="json") for cell in cells],
        "files": {name: sha256(Path(name).read_bytes()).hexdigest() for name in names if Path(name).is_file()},
    }  # fmt: skip


def baseline_of(cell: SweepCell, cells: Sequence[SweepCell], baseline: Mapping[str, Any]) -> SweepCell | None:
    """The cell with the baseline's values that agrees with a cell in every other value that both have.

    Of several the one that agrees in most values; None: there is none, or no baseline.
    """

    def agrees(other: SweepCell) -> bool:
        shared = (cell.values.keys() & other.values.keys()) - baseline.keys()
        return _has(other, baseline) and all(cell.values[key] == other.values[key] for key in shared)

    def common(other: SweepCell) -> int:
        return len(cell.values.items() & other.values.items())

    return max(filter(agrees, cells), key=common, default=None) if baseline else None


def run_sweep(
    sweep: Sweep, cells: Sequence[SweepCell], visit: Visit, journal: Journal, progress: Progress | None = None
) -> Report:
    """Visit every deployment `repeats` times.

    A deployment that is refused, or fails, is left out from then on, and its cells' rows have the reason; the same
    command tries it again. Ratios are of the baseline, paired by repetition.

    Args:
        visit: deploys a configuration, yields the figures of each load in a repetition, and ends what it deployed.
    """
    deployments: dict[str, list[int]] = {}  # indices of the cells, by what tells deployments apart
    for index, cell in enumerate(cells):
        deployments.setdefault(cell.config.model_dump_json(), []).append(index)
    advance = advancing(progress, "visiting deployments", sweep.repeats * len(deployments))
    found: dict[int, list[Figures]] = {index: [] for index in range(len(cells))}
    refused: dict[int, dict[str, Any]] = {}
    for number in range(sweep.repeats):
        for own in deployments.values():
            visits = partial(_visit, visit, [cells[index] for index in own], number)
            try:
                if own[0] not in refused:
                    figures = journal.step(f"{number + 1}: {cells[own[0]].name}", visits)
                    for index, of_load in zip(own, figures, strict=True):
                        found[index].append(of_load)
            except TierMoeError as error:
                if signalled() is not None:  # what Ray's client made of the signal
                    raise
                refused |= {i: refused_row(error, cell=cells[i].name, **cells[i].values) for i in own}
            advance()
    rows = {index: _row(cell, found[index]) for index, cell in enumerate(cells) if index not in refused}
    for index, row in rows.items():
        base = baseline_of(cells[index], cells, sweep.baseline)
        other = None if base is None else rows.get(cells.index(base))
        if other is not None:
            row["ratio"] = paired(row, other, RATE)
    varied = dict.fromkeys(key for cell in cells for key in cell.values)
    report = Report("sweep", "", list(rows.values()), refused=list(refused.values()))
    report.executor = ", ".join(dict.fromkeys(row["executor"] for row in report.rows if "executor" in row))
    report.settings = sweep.model_dump(mode="json")
    report.shown = (*varied, *(key for key in SHOWN if any(key in row for row in report.rows)))
    return report


def _visit(visit: Visit, cells: Sequence[SweepCell], repetition: int) -> list[Figures]:
    return list(visit(cells[0].config, [cell.load for cell in cells], repetition))


def _row(cell: SweepCell, figures: Sequence[Figures]) -> dict[str, Any]:
    """Medians and spreads over the repetitions of what is a number in each; details by repetition in `visits`.

    A counter that is 0 in all is left out.
    """
    numbers = [key for key, value in figures[0].items() if _is_number(value)]
    numbers = [key for key in numbers if all(_is_number(one.get(key)) for one in figures)]
    values = {key: [float(one[key]) for one in figures] for key in numbers}
    spread = {key: Spread.of(found) for key, found in values.items() if any(found) or key in _ALWAYS}
    details = [{key: value for key, value in one.items() if key not in numbers} for one in figures]
    shared = {key: value for key, value in details[0].items() if isinstance(value, str)}
    return {
        **cell.values, **shared, **{key: one.median for key, one in spread.items()},
        "spread": rounded({key: vars(one) for key, one in spread.items()}), "visits": details,
    }  # fmt: skip


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


# -- one visit ---------------------------------------------------------------------------------------------------------


def visited(config: RunConfig, loads: Sequence[Serve], repetition: int) -> Iterator[Figures]:
    """Deploy a configuration, put each load on it, and end it: the figures of each load.

    Raises:
        TierMoeError: it is refused, does not start, or answers no request of a load.
    """
    from ...attach import samples  # Ray

    with placed(config) as target:
        assert target.deployment is not None  # it was placed
        for options in loads:
            (load,) = loads_of(options, *files_of(options), target.tokenizer)
            if load.warmup:  # before its own counters are read
                warm = replace(
                    load, first=options.repeats * load.requests, requests=load.warmup, warmup=0,
                    clients=load.clients or load.warmup, rate=None, schedule_s=(),
                )  # fmt: skip
                measured(target, [warm], 1, ProcessLog(None))
            own = replace(load, first=repetition * load.requests, warmup=0)
            log, before = ProcessLog(target.deployment), samples(target.deployment)
            (cell,) = measured(target, [own], 1, log)
            row = cell.row(Limits(options.slo_ttft_ms, options.slo_tpot_ms))
            if "refused" in row:
                raise rebuilt(row["error"], row["refused"])
            figures = {key: value for key, value in row.items() if _is_number(value) or key in ("errors", "ended")}
            figures |= counted(before, samples(target.deployment))
            yield figures | {"executor": target.executor, "lost": log.as_dict()["lost"]}


def counted(before: Sequence[Sample], after: Sequence[Sample]) -> Figures:
    """What a deployment's processes counted in between; one that was started again has what it counted since.

    `lead.NAME`: the lead's counters. `cpu_s.KIND`: of all processes of a kind. bytes_loaded: by the links of all GPUs.
    bytes_between: there and back between GPUs and their peers on other nodes.
    """
    earlier = {sample.worker: sample for sample in before}
    nodes = {sample.worker: sample.node for sample in after}
    found: dict[str, float] = {"bytes_loaded": 0.0, "bytes_between": 0.0}
    for sample in after:
        since = earlier.get(sample.worker)
        if since is None or since.pid != sample.pid:
            since = replace(sample, cpu_s=0.0, counters={}, peers={})
        rise = {name: value - since.counters.get(name, 0.0) for name, value in sample.counters.items()}
        kind = f"cpu_s.{sample.kind}"
        found[kind] = found.get(kind, 0.0) + sample.cpu_s - since.cpu_s
        found["bytes_loaded"] += sum(rise.get(name, 0.0) for name in _LOADED)
        if sample.kind == "lead":
            found |= {f"lead.{name}": value for name, value in rise.items()}
        if sample.kind in ("lead", "shard"):
            for peer, moved in sample.peers.items():
                if nodes.get(peer) != sample.node:
                    known = since.peers.get(peer, {})
                    found["bytes_between"] += sum(moved[name] - known.get(name, 0.0) for name in _MOVED)
    return found
