"""When requests arrive, and how long they are: a Poisson process, or a file in the columns of the Azure LLM trace."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from datetime import datetime
from pathlib import Path

import numpy as np

from ...errors import ConfigError, reason
from .trace import Iteration, Request

COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
_ROWS = [f.name for f in fields(Iteration) if f.name not in ("decode", "embedding")]


@dataclass(frozen=True)
class Arrival:
    """A request. at_s: seconds after the first one. prompt, generated: tokens at most; None: as recorded."""

    at_s: float
    prompt: int | None = None
    generated: int | None = None


def poisson(rate: float, seed: int = 0) -> Iterator[Arrival]:
    """Arrivals without end; the first one at 0. rate: requests a second.

    Raises:
        ConfigError: the rate is not positive.
    """
    if not 0 < rate < float("inf"):
        raise ConfigError(f"the rate of arrivals is {rate}", "give requests a second, above 0")
    return _poisson(rate, seed)


def _poisson(rate: float, seed: int) -> Iterator[Arrival]:
    draw, at_s = np.random.default_rng(seed), 0.0
    while True:
        yield Arrival(at_s)
        at_s += float(draw.exponential(1 / rate))


def azure(path: Path) -> list[Arrival]:
    """The arrivals of a file in the columns of the Azure LLM inference trace (Splitwise, ISCA 2024), in order of time.

    Raises:
        ConfigError: the file cannot be read, lacks a column, or a value is not a time or a count.
    """
    remedy = f"give a CSV file with the columns {','.join(COLUMNS)}"
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            table = csv.DictReader(file)
            if missing := [name for name in COLUMNS if name not in (table.fieldnames or ())]:
                raise ConfigError(f"'{path}' has no column {missing[0]}", remedy)
            rows = [tuple(row[name] or "" for name in COLUMNS) for row in table]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise ConfigError(f"'{path}' cannot be read: {reason(error)}", remedy) from error
    found = []
    for number, (time, prompt, generated) in enumerate(rows, start=2):
        try:
            whole, _, part = time.strip().removesuffix("+00:00").partition(".")
            # seven digits of a second, which `fromisoformat` refuses; both sides without a zone
            at_s = (datetime.fromisoformat(whole) - datetime(1970, 1, 1)).total_seconds() + float(f"0.{part or 0}")
            counts = int(prompt), int(generated)
        except ValueError as error:
            raise ConfigError(f"'{path}', line {number}: {error}", remedy) from error
        if min(counts) < 1:
            raise ConfigError(f"'{path}', line {number}: a request of {counts[0]} and {counts[1]} tokens", remedy)
        found.append(Arrival(at_s, *counts))
    if not found:
        raise ConfigError(f"'{path}' has no request", remedy)
    found.sort(key=lambda arrival: arrival.at_s)
    return [replace(arrival, at_s=arrival.at_s - found[0].at_s) for arrival in found]


def arriving(requests: Iterable[Request], arrivals: Iterable[Arrival]) -> Iterator[tuple[float, Request]]:
    """Recorded requests in recorded order at these times, as long as there are both.

    A request is cut to the arrival's tokens; a recording that is shorter stays as it is, since nothing says what its
    further tokens would route to.
    """
    for request, arrival in zip(requests, arrivals, strict=False):
        yield arrival.at_s, _cut(request, arrival)


def _cut(request: Request, arrival: Arrival) -> Request:
    prompt, decode = list[Iteration](), list[Iteration]()
    left = request.prompt_tokens if arrival.prompt is None else arrival.prompt
    for step in request.iterations:
        if step.decode:
            decode.append(step)
        elif left > 0:
            prompt.append(step if len(step.tokens) <= left else _first(step, left))
            left -= len(step.tokens)
    if arrival.generated is not None:
        decode = decode[: arrival.generated - 1]  # the prompt's forward gives the first token
    tokens = sum(len(step.tokens) for step in prompt)
    return replace(request, prompt_tokens=tokens, iterations=(*prompt, *decode))


def _first(step: Iteration, rows: int) -> Iteration:
    """The first rows of a forward."""
    changes = {name: getattr(step, name)[:rows] for name in _ROWS}
    return replace(step, **changes)


def all_at_once(requests: Iterable[Request]) -> Iterator[tuple[float, Request]]:
    """Requests that have all been there from the begin: a closed loop."""
    return ((0.0, request) for request in requests)


def arrivals_of(rate: float | None, file: Path | None) -> Iterable[Arrival] | None:
    """The arrivals of two options; None: neither is given.

    Raises:
        ConfigError: both are given, or one is refused.
    """
    if rate is not None and file is not None:
        raise ConfigError("--rate and --arrivals are both given", "give one of the two")
    if file is not None:
        return azure(file)
    return None if rate is None else poisson(rate)


def percentile(values: Sequence[float], share: float) -> float:
    """Of no values: 0."""
    return float(np.quantile(values, share)) if len(values) else 0.0
