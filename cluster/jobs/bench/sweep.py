"""What a cluster serves, by configuration and load: the cells of one file, deployed one after the other as one job.

    file -> cells -> visits: a deployment, and all loads that are put on it -> journal -> a row for each cell

All deployments are visited once before any is visited again, A B C A B C, so that drift of the cluster affects all of
them. A journal beside the result has the finished visits: the same command resumes behind the last one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, ValidationError
from rich.progress import Progress

from ....actors.base_settings import Settings
from ....errors import ConfigError, TierMoeError
from ...config import RunConfig, load_run_config
from ...report.results import refused_row
from ...yaml_file import explain, merged, read_yaml
from .cells import Journal
from .load import Load, read_load
from .metrics import Report, Spread, advancing, paired

LOAD = "load."  # before the name of a load's value among a cell's
RATE, SHOWN = "tokens_per_s", ("tokens_per_s", "ratio", "ttft_p50_ms", "tpot_p50_ms", "tpot_p99_ms")

Figures = dict[str, Any]  # of one load on one deployment: numbers by name with the unit, and details
Visit = Callable[[RunConfig, Sequence[Load]], Iterator[Figures]]


class Sweep(Settings):
    """A sweep's file.

    Attributes:
        config: keys of a run's configuration, or a file of them; with `ray.address` the cells run on that cluster.
        load: of every cell, as `tiermoe bench serve` takes it.
        cells: each a product: value, or list of values, by dotted key of the configuration (`cluster.shards`) or of the
            load (`load.clients`). A value null leaves the key as it is in `config` or `load`.
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
    load: Load

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
        ConfigError: an unknown key or malformed value of configuration or load, or a cell that is there twice.
    """
    found: list[SweepCell] = []
    for group in sweep.cells:
        choices = [value if isinstance(value, list) else [value] for value in group.values()]
        for chosen in product(*choices):
            values = dict(zip(group, chosen, strict=True))
            config = {key: value for key, value in values.items() if not key.startswith(LOAD)}
            load = {key.removeprefix(LOAD): value for key, value in values.items() if key.startswith(LOAD)}
            found.append(SweepCell(values, _config(sweep, config), _load(sweep, load)))
    names = [cell.name for cell in found]
    if twice := [name for name in names if names.count(name) > 1]:
        raise ConfigError(f"the sweep has the cell '{twice[0]}' twice", "give each once")
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


def _load(sweep: Sweep, values: Mapping[str, Any]) -> Load:
    return read_load(sweep.load | {key: value for key, value in values.items() if value is not None})


def baseline_of(cell: SweepCell, cells: Sequence[SweepCell], baseline: Mapping[str, Any]) -> SweepCell | None:
    """The cell with the baseline's values that agrees with a cell in every other value that both have.

    Of several the one that agrees in most values; None: there is none, or no baseline.
    """

    def agrees(other: SweepCell) -> bool:
        stated = all(other.values.get(key) == value for key, value in baseline.items())
        shared = (cell.values.keys() & other.values.keys()) - baseline.keys()
        return stated and all(cell.values[key] == other.values[key] for key in shared)

    def common(other: SweepCell) -> int:
        return len(cell.values.items() & other.values.items())

    return max(filter(agrees, cells), key=common, default=None) if baseline else None


def run_sweep(
    sweep: Sweep, cells: Sequence[SweepCell], visit: Visit, journal: Journal, progress: Progress | None = None
) -> Report:
    """Visit every deployment `repeats` times.

    A deployment that is refused, or fails, is left out from then on, and its cells' rows have the reason; a run that
    resumes tries it again. Ratios are of the baseline, paired by repetition.

    Args:
        visit: deploys a configuration, yields the figures of each load, and ends what it deployed.
    """
    deployments: dict[str, list[int]] = {}  # indices of the cells, by what tells deployments apart
    for index, cell in enumerate(cells):
        deployments.setdefault(cell.config.model_dump_json(), []).append(index)
    advance = advancing(progress, "visiting deployments", sweep.repeats * len(deployments))
    found: dict[int, list[Figures]] = {index: [] for index in range(len(cells))}
    refused: dict[int, dict[str, Any]] = {}
    for number in range(sweep.repeats):
        for own in deployments.values():
            if own[0] not in refused:
                measured = partial(_visited, visit, [cells[index] for index in own])
                try:
                    figures = journal.step(f"{number + 1}: {cells[own[0]].name}", measured)
                except TierMoeError as error:
                    refused |= {index: refused_row(error, **cells[index].values) for index in own}
                else:
                    for index, of_load in zip(own, figures, strict=True):
                        found[index].append(of_load)
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


def _visited(visit: Visit, cells: Sequence[SweepCell]) -> list[Figures]:
    return list(visit(cells[0].config, [cell.load for cell in cells]))


def _row(cell: SweepCell, figures: Sequence[Figures]) -> dict[str, Any]:
    """Medians and spreads over the repetitions of what is a number in each; details by repetition in `visits`."""
    numbers = [key for key, value in figures[0].items() if _is_number(value)]
    numbers = [key for key in numbers if all(_is_number(one.get(key)) for one in figures)]
    spread = {key: Spread.of([float(one[key]) for one in figures]) for key in numbers}
    details = [{key: value for key, value in one.items() if key not in numbers} for one in figures]
    shared = {key: value for key, value in details[0].items() if isinstance(value, str)}
    return {
        **cell.values, **shared, **{key: one.median for key, one in spread.items()},
        "spread": {key: vars(one) for key, one in spread.items()}, "visits": details,
    }  # fmt: skip


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
