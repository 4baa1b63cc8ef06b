"""Result files of `run`, `bench`, `bench serve`, `eval` and `replay`, read as measurements that can be compared.

    file -> rows that name a policy -> one pydantic model -> measurements

Numbers are taken as they are in the file: nothing is computed that the file does not say.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from pydantic import AliasChoices, BaseModel, ConfigDict, Field, ValidationError, model_validator

from ...actors.engine.stats import hit_rate
from ...errors import ConfigError, TierMoeError, exit_code, reason, rebuilt, told

PERCENTS = (*range(0, 95, 5), 95, 96, 97, 98, 99, 100)  # of `percentiles`
_OF_ALL = ("executor", "hardware", "versions", "date")  # keys of a file that hold for all of its rows
_QUALITY = ("kl_nats", "perplexity_ratio", "top1_agreement")
_BLOCKED = {  # part of the waits, and its counter
    "copies": "blocked_io_s", "write-back": "writeback_blocked_s", "NDP workers": "ndp_wait_s", "GPUs": "shard_wait_s",
}  # fmt: skip


_UNNAMED = {  # results that do not say which command wrote them, by keys that they have
    "plan": {"topology", "prediction", "notes"}, "doctor": {"cpu", "memory", "devices"}, "status": {"deployments"},
    "record": {"trace", "forwards", "rows"},
}  # fmt: skip


class Range(NamedTuple):
    """Median, least and greatest of the repetitions."""

    middle: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Range:
        return cls(median(values), min(values), max(values))

    def scaled(self, factor: float) -> Range:
        return Range(*(value * factor for value in self))


class Origin(NamedTuple):
    """Where figures come from: those of different origins are never in one line."""

    executor: str
    machine: str
    model: str
    versions: str


@dataclass(frozen=True)
class Measurement:
    """One policy at one budget; None for what the file lacks.

    setting: all else that a line has in common, such as context and link. memory_bytes: peak of expert memory.
    hit_rates: by phase (all, prefill, decode). blocked_s: seconds of waits by cause. quality: by measure,
    over lossless. latencies_ms: time between tokens at `PERCENTS`. residency: states and uses of each layer's experts.
    """

    file: str
    origin: Origin
    date: str | None
    policy: str
    setting: str
    budget: str
    lossless: bool | None = None
    memory_bytes: float | None = None
    tpot_ms: Range | None = None
    ttft_ms: Range | None = None
    hit_rates: Mapping[str, float] | None = None
    blocked_s: Mapping[str, float] | None = None
    quality: Mapping[str, float] | None = None
    latencies_ms: Sequence[float] | None = None
    residency: Sequence[tuple[Sequence[int], Sequence[int]]] | None = None


def percentiles(values: Sequence[float]) -> list[float]:
    """The values at `PERCENTS`, as result files hold them; empty for none."""
    import numpy as np

    return [float(f"{value:.4g}") for value in np.percentile(values, PERCENTS)] if values else []


def read_results(paths: Sequence[Path], refused: Callable[[ConfigError], None] | None = None) -> list[Measurement]:
    """The measurements of all files, in order; quality that `eval` measured is added to speeds of the same origin.

    Args:
        refused: called with the error of each file that is left out; None: the first one is raised.

    Raises:
        ConfigError: a file cannot be read, cannot be compared, or lacks a key; with `refused`: each of them.
    """
    found, errors = list[Measurement](), list[ConfigError]()
    for path in paths:
        try:
            found += measurements(read_json(path), path.name)
        except ConfigError as error:
            errors.append(error)
    if errors and (refused is None or not found):
        raise errors[0]
    for each in errors:
        assert refused is not None  # as just checked
        refused(each)
    return _joined(found)


def measurements(record: Mapping[str, Any], file: str) -> list[Measurement]:
    """The measurements of one record. Raises ConfigError: it cannot be compared, or lacks a key."""
    try:
        if found := [_Row.model_validate(row).measured(file) for row in _rows(record)]:
            return found
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        what = f"'{file}' lacks '{where}'" if first["type"] == "missing" else f"'{file}': '{where}': {first['msg']}"
        raise ConfigError(what, "measure it again with this version of tiermoe") from error
    name = record.get("name") or next((name for name, keys in _UNNAMED.items() if record.keys() >= keys), None)
    said = f"a result of '{name}'" if name else "no result of tiermoe"
    raise ConfigError(
        f"'{file}' is {said}, which compares no policies",
        "give results of run, bench with an experiment such as compare, bench serve, eval or replay",
    )


def refused_row(error: TierMoeError, **row: Any) -> dict[str, Any]:
    """The row of what was refused, or failed, beside the finished ones. row: what it was."""
    return row | {"refused": told(error), "error": type(error).__name__}


def measured_rows(rows: Iterable[Mapping[str, Any]]) -> list[Any]:
    """Those that were not refused."""
    return [row for row in rows if "refused" not in row]


def refusals(rows: Iterable[Mapping[str, Any]]) -> list[str]:
    """A line for each row that was refused."""
    keys = ("section", "context", "budget", "link_gbps", "load")

    def name(row: Mapping[str, Any]) -> str:
        if "cell" in row:  # of a sweep: it names all that differs
            return str(row["cell"])
        said = (f", {key} {row[key]}" for key in keys if row.get(key) not in (None, ""))
        return f"{row.get('policy') or row['server']}{''.join(said)}"

    return [f"refused: {name(row)}: {row['refused']}" for row in rows if "refused" in row]


def exit_code_of(rows: Iterable[Mapping[str, Any]]) -> int:
    """Of a command with these rows: 0 all are finished, else as of an error that ends the command."""
    return max((exit_code(rebuilt(row["error"], row["refused"])) for row in rows if "refused" in row), default=0)


def read_json(path: Path) -> Mapping[str, Any]:
    """A result file. Raises ConfigError: it cannot be read, or does not hold a JSON object."""
    try:
        found = json.loads(path.read_text(encoding="utf-8-sig"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"'{path}' cannot be read: {reason(error)}", "give a result's JSON file") from error
    except json.JSONDecodeError as error:
        raise ConfigError(f"'{path}' is not JSON: {error}", "give what a command wrote with --json or --out") from error
    if not isinstance(found, dict):
        raise ConfigError(f"'{path}' does not hold a JSON object", "give what a command wrote with --json or --out")
    return found


# -- what the files hold -----------------------------------------------------------------------------------------------


class _Part(BaseModel):
    model_config = ConfigDict(extra="ignore", protected_namespaces=())


class _Machine(_Part):
    model: str
    cores: int = 0

    def __str__(self) -> str:
        return f"{self.model}, {self.cores} cores" if self.cores else self.model


class _Plan(_Part):
    slots: int
    experts: int
    link: dict[str, float | None] = {}


class _Simulated(_Part):
    """The machine of a replay: where the costs of its trace were measured is not known."""

    name: str
    link_gbps: float | None = None


class _Row(_Part):
    """A policy at a budget: what `run`, `replay` and `eval` print of one, or a row with what its file says of all.

    server, streams: of `bench serve`, whose figures are percentiles over requests. plan: of `run`. machine: of
    `replay`. values: of measures that were repeated.
    """

    executor: str
    hardware: _Machine | None = None
    machine: _Simulated | None = None
    model: str = "model not said"
    versions: dict[str, str] = {}
    date: str | None = None

    policy: str = Field(validation_alias=AliasChoices("policy", "server"))
    lossless: bool | None = None
    budget: str | float = ""
    plan: _Plan | None = None
    section: str = ""
    context: str = ""
    link_gbps: float | None = None
    streams: int | None = None
    at_once: int = 1
    eviction: str = ""
    rate: float | None = None
    arrivals: str | None = None

    values: dict[str, list[float]] = {}
    tpot_s: float | None = None
    ttft_s: float | None = None
    tpot_ms: float | None = Field(None, validation_alias=AliasChoices("tpot_ms", "tpot_p50_ms"))
    ttft_ms: float | None = Field(None, validation_alias=AliasChoices("ttft_ms", "ttft_p50_ms"))
    hit_rate: float | None = None
    hits: float | None = None
    misses: float | None = None
    ndp_experts: float | None = None
    shard_experts: float | None = None
    decode_hits: float | None = None
    decode_misses: float | None = None
    decode_ndp_experts: float | None = None
    decode_shard_experts: float | None = None
    expert_bytes_peak: float | None = None
    blocked_io_s: float | None = None
    writeback_blocked_s: float | None = None
    ndp_wait_s: float | None = None
    shard_wait_s: float | None = None
    kl_nats: float | None = None
    perplexity_ratio: float | None = None
    top1_agreement: float | None = None
    between_ms: list[float] = []
    residency: list[tuple[list[int], list[int]]] = []

    @model_validator(mode="before")
    @classmethod
    def _repeated(cls, value: dict[str, Any]) -> dict[str, Any]:
        """A report in memory has its repeated measures as `spread`, a file as `values`."""
        spread = value.get("spread") or {}
        if not isinstance(spread, Mapping) or not all(isinstance(found, Mapping) for found in spread.values()):
            raise ValueError("'spread' is not as tiermoe writes it")
        return {"values": {name: found["values"] for name, found in spread.items()}} | value

    def once(self, name: str) -> float | None:
        """A figure of the row, else the median over the repetitions."""
        found: float | None = getattr(self, name)
        kept = self.values.get(name)
        return found if found is not None or not kept else median(kept)

    def milliseconds(self, name: str) -> Range | None:
        """Of `tpot` or `ttft`."""
        if kept := self.values.get(f"{name}_s"):
            return Range.of(kept).scaled(1e3)
        ms, seconds = getattr(self, f"{name}_ms"), getattr(self, f"{name}_s")
        once = ms or (1e3 * seconds if seconds else None)
        return Range.of([once]) if once else None

    @property
    def setting(self) -> str:
        arrive = f"arrivals of {self.arrivals}" if self.arrivals else ""
        link = ""
        if self.plan is not None:
            link = _link(self.plan.link.get("gbps"))
        elif self.machine is not None:
            link = _link(self.machine.link_gbps)
        elif "link_gbps" in self.model_fields_set:
            link = _link(self.link_gbps)
        parts = (
            self.section, self.context, f"over HTTP, {self.streams} clients" if self.streams is not None else "",
            f"{self.at_once} requests at once" if self.at_once > 1 else "",
            f"{self.rate:g} requests/s" if self.rate else arrive, link,
        )  # fmt: skip
        return ", ".join(part for part in parts if part)

    def measured(self, file: str) -> Measurement:
        where = "machine not said" if self.hardware is None else str(self.hardware)
        origin = Origin(
            self.executor, where if self.machine is None else f"machine '{self.machine.name}'", Path(self.model).name,
            ", ".join(f"{name} {version}" for name, version in self.versions.items()) or "versions not said",
        )  # fmt: skip
        budget = str(self.budget)
        if self.plan is not None:
            budget = f"{self.plan.slots / self.plan.experts if self.plan.experts else 0.0:g}"
        quality = {name: found for name in _QUALITY if (found := getattr(self, name)) is not None}
        return Measurement(
            file, origin, self.date,
            self.eviction if self.eviction == "belady" else self.policy,  # a bound, whichever policy it was given to
            self.setting, budget, self.lossless, self.once("expert_bytes_peak"), self.milliseconds("tpot"),
            self.milliseconds("ttft"), _rates(self.once), _blocked(self.once), quality or None, self.between_ms or None,
            self.residency or None,
        )  # fmt: skip


def _rows(record: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The rows of a file that compare policies, each with what the file says of all; a file may be one row itself."""
    common = {key: record[key] for key in _OF_ALL if key in record}
    settings, rows = record.get("settings"), record.get("rows")
    if isinstance(settings, Mapping) and settings.get("model") is not None:
        common["model"] = str(settings["model"])
    if not isinstance(rows, list) or not all(isinstance(row, Mapping) for row in rows):
        rows = [record]  # in the result of `eval`, `rows` is an option
    found = []
    for row in measured_rows(rows):
        if "server" in row or ("policy" in row and row.keys() & {"budget", "plan"}):
            found.append(common | {key: value for key, value in row.items() if value is not None or key not in common})
    return found


# -- parts -------------------------------------------------------------------------------------------------------------


def _link(gbps: float | None) -> str:
    return "no emulated link" if gbps is None else f"link {gbps:g} GB/s"


def _rates(once: Callable[[str], float | None]) -> dict[str, float] | None:
    """Hit rates by phase, as far as their counts are there."""

    names = ("hits", "misses", "ndp_experts", "shard_experts")
    of_all, of_decode = ({name: once(f"{phase}{name}") for name in names} for phase in ("", "decode_"))
    counted, phases = (counts["hits"] is not None and counts["misses"] is not None for counts in (of_all, of_decode))
    if of_decode["ndp_experts"] is None and of_all["ndp_experts"]:  # of an earlier version: not by phase
        phases = False
    found = {"all": hit_rate(_given(of_all)) if counted else once("hit_rate")}
    if counted and phases:
        found["decode"] = hit_rate(_given(of_decode))
        found["prefill"] = hit_rate({name: (of_all[name] or 0) - (of_decode[name] or 0) for name in names})
    return {name: value for name, value in found.items() if value is not None} or None


def _given(counts: Mapping[str, float | None]) -> dict[str, float]:
    return {name: count for name, count in counts.items() if count is not None}


def _blocked(once: Callable[[str], float | None]) -> dict[str, float] | None:
    """Seconds of waits by cause; those for a slot's write-back are no longer among the copies'."""
    if once("blocked_io_s") is None:
        return None
    found = {name: once(key) or 0.0 for name, key in _BLOCKED.items()}
    return found | {"copies": max(0.0, found["copies"] - found["write-back"])}


def _joined(found: Sequence[Measurement]) -> list[Measurement]:
    """Without measurements of quality alone whose policy, budget, model, executor and machine have speeds, too."""

    def key(one: Measurement) -> tuple[str, ...]:
        return (*one.origin[:3], one.policy, one.budget)

    scored = {key(one): one.quality for one in found if one.quality and one.tpot_ms is None}
    timed = {key(one) for one in found if one.tpot_ms is not None}
    joined = []
    for one in found:
        if one.tpot_ms is None and one.quality and key(one) in timed:
            continue
        joined.append(replace(one, quality=one.quality or scored.get(key(one))))
    return joined
