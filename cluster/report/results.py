"""Result files of `run`, `bench`, `bench serve`, `eval` and `replay`, read as measurements that can be compared.

    file -> kind -> pydantic model -> measurements

Numbers are taken as they are in the file: nothing is computed that the file does not say.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from pydantic import BaseModel, ConfigDict, ValidationError

from ...errors import ConfigError, reason

PERCENTS = (*range(0, 95, 5), 95, 96, 97, 98, 99, 100)  # of `percentiles`
_QUALITY = ("kl_nats", "perplexity_ratio", "top1_agreement")
_BLOCKED = {  # part of the waits, and its counter
    "copies": "blocked_io_s", "write-back": "writeback_blocked_s", "NDP workers": "ndp_wait_s", "GPUs": "shard_wait_s",
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


def read_results(paths: Sequence[Path]) -> list[Measurement]:
    """The measurements of all files, in order; quality that `eval` measured is added to speeds of the same origin.

    Raises:
        ConfigError: a file cannot be read, is no result that can be compared, or lacks a key.
    """
    return _joined([measured for path in paths for measured in measurements(read_json(path), path.name)])


def measurements(record: Mapping[str, Any], file: str) -> list[Measurement]:
    """The measurements of one record. Raises ConfigError: it cannot be compared, or lacks a key."""
    try:
        return list(_reader(record, file)(record, file))
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        what = f"'{file}' lacks '{where}'" if first["type"] == "missing" else f"'{file}': '{where}': {first['msg']}"
        raise ConfigError(what, "measure it again with this version of tiermoe") from error


def read_json(path: Path) -> Mapping[str, Any]:
    """A result file. Raises ConfigError: it cannot be read, or does not hold a JSON object."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"'{path}' cannot be read: {reason(error)}", "give a result's JSON file") from error
    except json.JSONDecodeError as error:
        raise ConfigError(f"'{path}' is not JSON: {error}", "give what a command wrote with --json or --out") from error
    if not isinstance(found, dict):
        raise ConfigError(f"'{path}' does not hold a JSON object", "give what a command wrote with --json or --out")
    return found


def _reader(
    record: Mapping[str, Any], file: str
) -> Callable[[Mapping[str, Any], str], Iterator[Measurement]]:
    name, rows = record.get("name"), record.get("rows")
    if isinstance(name, str) and name in _READERS:
        return _READERS[name]
    if "plan" in record and "finish" in record:  # of `run` before it had a name
        return _of_run
    if isinstance(rows, list) and rows and isinstance(rows[0], dict) and {"policy", "budget"} <= set(rows[0]):
        return _of_experiment
    said = f"a result of '{name}'" if name else "no result of tiermoe"
    raise ConfigError(
        f"'{file}' is {said}, which compares no policies",
        "give results of run, bench with an experiment such as compare, bench serve, eval or replay",
    )


# -- what the files hold -----------------------------------------------------------------------------------------------


class _Part(BaseModel):
    model_config = ConfigDict(extra="ignore", protected_namespaces=())


class _Machine(_Part):
    model: str
    cores: int = 0

    def __str__(self) -> str:
        return f"{self.model}, {self.cores} cores" if self.cores else self.model


class _File(_Part):
    hardware: _Machine | None = None
    executor: str
    versions: dict[str, str] = {}
    date: str | None = None


class _Served(_File):
    """Counters of an engine beside what is asked of a policy: of `run` and `replay`."""

    model: str
    policy: str
    ttft_s: float | None
    tpot_s: float | None
    hits: int
    misses: int
    expert_bytes_peak: float
    decode_hits: int | None = None
    decode_misses: int | None = None
    blocked_io_s: float
    writeback_blocked_s: float = 0.0
    ndp_wait_s: float = 0.0
    shard_wait_s: float = 0.0
    between_ms: list[float] = []
    residency: list[tuple[list[int], list[int]]] = []

    def measured(self, file: str, machine: str, setting: str, budget: str, lossless: bool | None) -> Measurement:
        rates = _rates({name: getattr(self, name) for name in ("hits", "misses", "decode_hits", "decode_misses")})
        return Measurement(
            file, Origin(self.executor, machine, Path(self.model).name, _text(self.versions)), self.date, self.policy,
            setting, budget, lossless, self.expert_bytes_peak, _once(self.tpot_s), _once(self.ttft_s), rates,
            _blocked({key: getattr(self, key) for key in _BLOCKED.values()}), None, self.between_ms or None,
            self.residency or None,
        )  # fmt: skip


class _Plan(_Part):
    slots: int
    experts: int
    link: dict[str, float | None] = {}


class _Run(_Served):
    lossless: bool
    plan: _Plan


class _Replay(_Served):
    executor: str = "simulated"
    budget: str | float
    machine: dict[str, Any]
    at_once: int = 1
    eviction: str = ""
    rate: float | None = None
    arrivals: str | None = None


class _Eval(_File):
    model: str
    policy: str
    lossless: bool
    budget: str | float
    kl_nats: float
    perplexity_ratio: float
    top1_agreement: float


class _Experiment(_File):
    settings: dict[str, Any]
    rows: list[dict[str, Any]]


class _Row(_Part):
    policy: str
    budget: str
    link_gbps: float | None
    lossless: bool | None = None
    section: str = ""
    context: str = ""
    executor: str | None = None
    tpot_ms: float | None = None
    ttft_ms: float | None = None
    expert_bytes_peak: float | None = None
    quality: dict[str, Any] | None = None
    between_ms: list[float] = []
    residency: list[tuple[list[int], list[int]]] = []


class _ServerRow(_Part):
    server: str
    streams: int
    tpot_p50_ms: float | None = None
    ttft_p50_ms: float | None = None
    between_ms: list[float] = []


class _Servers(_File):
    settings: dict[str, Any]
    rows: list[_ServerRow]


# -- measurements of each kind -----------------------------------------------------------------------------------------


def _of_run(record: Mapping[str, Any], file: str) -> Iterator[Measurement]:
    found = _Run.model_validate(record)
    share = found.plan.slots / found.plan.experts if found.plan.experts else 0.0
    yield found.measured(file, str(found.hardware or "machine not said"), _link(found.plan.link.get("gbps")),
                         f"{share:g}", found.lossless)  # fmt: skip


def _of_replay(record: Mapping[str, Any], file: str) -> Iterator[Measurement]:
    found = _Replay.model_validate(record)
    machine, arrive = found.machine, f"arrivals of {found.arrivals}, " if found.arrivals else ""
    together = f"{found.at_once} requests at once, " if found.at_once > 1 else ""
    together += f"{found.rate:g} requests/s, " if found.rate else arrive
    # the machine is the simulated one: its name, and where the trace's costs were measured is not known
    if found.eviction == "belady":  # a bound, whichever policy it was given to
        found = found.model_copy(update={"policy": found.eviction})
    yield found.measured(file, f"machine '{machine.get('name')}'", together + _link(machine.get("link_gbps")),
                         str(found.budget), None)  # fmt: skip


def _of_replays(record: Mapping[str, Any], file: str) -> Iterator[Measurement]:
    for row in record.get("rows", ()):
        yield from _of_replay(row, file)


def _of_eval(record: Mapping[str, Any], file: str) -> Iterator[Measurement]:
    found = _Eval.model_validate(record)
    quality = {name: float(getattr(found, name)) for name in _QUALITY}
    origin = Origin(found.executor, str(found.hardware), Path(found.model).name, _text(found.versions))
    yield Measurement(
        file, origin, found.date, found.policy, "", str(found.budget), found.lossless, quality=quality
    )


def _of_experiment(record: Mapping[str, Any], file: str) -> Iterator[Measurement]:
    found = _Experiment.model_validate(record)
    model = Path(str(found.settings.get("model", "model not said"))).name
    for raw in found.rows:
        if not {"policy", "budget"} <= set(raw):
            continue
        row, values = _Row.model_validate(raw), _values(raw)
        origin = Origin(row.executor or found.executor, str(found.hardware), model, _text(found.versions))
        setting = ", ".join(part for part in (row.section, row.context, _link(row.link_gbps)) if part)
        quality = {name: raw[name] for name in _QUALITY if raw.get(name) is not None}
        once = {key: median(kept) for key, kept in values.items()} | {
            key: raw[key] for key in ("hit_rate", *_BLOCKED.values()) if raw.get(key) is not None
        }  # fmt: skip
        yield Measurement(
            file, origin, found.date, row.policy, setting, row.budget, row.lossless,
            row.expert_bytes_peak or once.get("expert_bytes_peak"), _repeated(values, "tpot_s", row.tpot_ms),
            _repeated(values, "ttft_s", row.ttft_ms), _rates(once),
            _blocked(once) if "blocked_io_s" in once else None,
            {name: float(value) for name, value in quality.items()} or None, row.between_ms or None,
            row.residency or None,
        )  # fmt: skip


def _of_servers(record: Mapping[str, Any], file: str) -> Iterator[Measurement]:
    found = _Servers.model_validate(record)
    model = Path(str(found.settings.get("model") or "default model")).name
    origin = Origin(found.executor, str(found.hardware), model, _text(found.versions))
    for row in found.rows:
        yield Measurement(
            file, origin, found.date, row.server, f"over HTTP, {row.streams} clients", "", None,
            tpot_ms=None if row.tpot_p50_ms is None else Range.of([row.tpot_p50_ms]),
            ttft_ms=None if row.ttft_p50_ms is None else Range.of([row.ttft_p50_ms]),
            latencies_ms=row.between_ms or None,
        )  # fmt: skip


_READERS: dict[str, Callable[[Mapping[str, Any], str], Iterator[Measurement]]] = {
    "run": _of_run, "replay": _of_replay, "replays": _of_replays, "eval": _of_eval, "serve": _of_servers,
}  # fmt: skip


# -- parts -------------------------------------------------------------------------------------------------------------


def _text(versions: Mapping[str, str]) -> str:
    return ", ".join(f"{name} {version}" for name, version in versions.items()) or "versions not said"


def _link(gbps: float | None) -> str:
    return "no emulated link" if gbps is None else f"link {gbps:g} GB/s"


def _once(seconds: float | None) -> Range | None:
    return Range.of([1e3 * seconds]) if seconds else None


def _values(row: Mapping[str, Any]) -> dict[str, list[float]]:
    """A row's repeated measures, as a report has them (`spread`) or as a file does (`values`)."""
    found = row.get("values") or {name: spread["values"] for name, spread in (row.get("spread") or {}).items()}
    return {name: list(values) for name, values in found.items() if values}


def _repeated(values: Mapping[str, Sequence[float]], measure: str, middle_ms: float | None) -> Range | None:
    if measure in values:
        return Range.of(values[measure]).scaled(1e3)
    return None if not middle_ms else Range.of([middle_ms])


def _rates(once: Mapping[str, float | None]) -> dict[str, float] | None:
    """Hit rates by phase, as far as their counts are there."""

    def rate(hits: float | None, misses: float | None) -> float | None:
        return None if hits is None or misses is None or hits + misses <= 0 else hits / (hits + misses)

    hits, misses = once.get("hits"), once.get("misses")
    decode_hits, decode_misses = once.get("decode_hits"), once.get("decode_misses")
    found = {"all": once.get("hit_rate") if once.get("hit_rate") is not None else rate(hits, misses)}
    found["decode"] = rate(decode_hits, decode_misses)
    if None not in (hits, misses, decode_hits, decode_misses):
        found["prefill"] = rate(hits - decode_hits, misses - decode_misses)  # type: ignore[operator]
    return {name: value for name, value in found.items() if value is not None} or None


def _blocked(once: Mapping[str, float | None]) -> dict[str, float]:
    """Seconds of waits by cause; those for a slot's write-back are no longer among the copies'."""
    found = {name: once.get(key) or 0.0 for name, key in _BLOCKED.items()}
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
