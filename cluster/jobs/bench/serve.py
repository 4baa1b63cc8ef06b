"""`tiermoe bench serve`: loads on a server, and what came of them.

    a target (`targets.py`), loads (`load.py`) x repetitions, in turn  ->  rows, what each process did, page
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import math
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.progress import Progress

from ....errors import RequestError, RuntimeFailure
from ...prompt import load_tokenizer
from ...report.results import percentiles, refused_row
from ..local_worker import run_config
from ..options import checked_config
from .cases import Serve
from .load import (
    UNANSWERED,
    Answered,
    Conversation,
    Limits,
    Load,
    drive,
    errors_of,
    figures_of,
    made_conversations,
    read_conversations,
    read_schedule,
)
from .metrics import Report, advancing, interval95, rounded
from .process_log import ProcessLog
from .serving import heldout_texts
from .targets import Target, at_url, attached_to, placed

_STREAMS = (1, 4, 8, 16)  # where none are given
_OF_CLIENT, _OF_OPEN_LOOP = 2, 30  # requests, where no number is given
_LOOK_S = 1.0
_STOP_S = 10.0
_SHOWN = (
    "server", "load", "tokens_per_s", "requests_per_s", "ttft_p50_ms", "ttft_p99_ms", "tpot_p50_ms", "tpot_p99_ms",
    "e2e_p50_ms", "e2e_p99_ms", "goodput", "good_share", "requests", "failed",
)  # fmt: skip


@dataclass
class Cell:
    """A load on a target. repetitions: requests of each. ended: why the target stopped serving; None: it did not."""

    target: Target
    load: Load
    repetitions: list[list[Answered]] = field(default_factory=list)
    ended: str | None = None

    @property
    def requests(self) -> list[Answered]:
        """Of all repetitions."""
        return [one for repetition in self.repetitions for one in repetition]

    def values(self, limits: Limits) -> dict[str, list[float]]:
        """Each figure by repetition. One without an answer has none, nor, if another is whole, one that was cut short:
        what its clients had begun to read is in no rate.
        """
        whole = [one for one in self.repetitions if UNANSWERED not in errors_of(one)]
        found: dict[str, list[float]] = {}
        for repetition in whole or self.repetitions:
            for name, value in figures_of(repetition, limits).items():
                found.setdefault(name, []).extend([] if math.isnan(value) else [value])
        return found

    def row(self, limits: Limits) -> dict[str, Any]:
        """Means over the repetitions with their 95% intervals (`NAME_low`, `NAME_high`), or why there are none."""
        load, requests = self.load, self.requests
        row: dict[str, Any] = {"server": self.target.name, "load": load.name, "streams": load.clients}
        row |= {"rate": load.rate} | ({"arrivals": "a record"} if load.schedule_s else {})
        errors = errors_of(requests)
        counted = {"requests": len(requests) - sum(errors.values()), "failed": sum(errors.values()), "errors": errors}
        if not counted["requests"]:
            kinds = ", ".join(f"{kind} ({count})" for kind, count in errors.items()) or "none was sent"
            why = self.ended or kinds + next((f": {one.said}" for one in requests if one.said), "")
            return refused_row(RuntimeFailure(f"no request was answered: {why}", "see the server's log"), **row)
        for name, values in self.values(limits).items():
            if values:
                row[name] = statistics.fmean(values)
            if (interval := interval95(values)) is not None:
                row[f"{name}_low"], row[f"{name}_high"] = interval
        gaps = [1e3 * (b - a) for one in requests if one.error is None for a, b in itertools.pairwise(one.times_s)]
        return row | counted | {"between_ms": percentiles(gaps)} | ({"ended": self.ended} if self.ended else {})


def serve(options: Serve, progress: Progress | None) -> Report:
    """Rates, TTFT, TPOT and end-to-end times of streamed greedy requests, by load.

    A repetition has prompts of its own. Figures are means over the repetitions with 95% intervals; percentiles are over
    the requests of a repetition. A request, worker or node that is lost is part of the result; a load of which no
    request was answered is a refusal (exit code 1).

    Raises:
        TierMoeError: options or files are refused, or a server did not start.
    """
    given, schedule_s = files_of(options)
    with _target(options) as target:
        loads = loads_of(options, given, schedule_s, target.tokenizer)
        log = ProcessLog(target.deployment)
        cells = measured(target, loads, options.repeats, log, progress)
    return report_of(options, cells, log)


def report_of(options: Serve, cells: Sequence[Cell], log: ProcessLog) -> Report:
    """The report of measured cells; `as_dict` has every request, and what every process did each second."""
    target, limits = cells[0].target, Limits(options.slo_ttft_ms, options.slo_tpot_ms)
    fixed = {"model": Path(target.model).name, "prompts_repeat": _repeats(cells)}
    report = Report("serve", target.executor, settings=options.settings(**fixed), shown=_SHOWN)
    rows = [cell.row(limits) for cell in cells]
    report.rows = rounded([row for row in rows if "refused" not in row])
    report.refused = [row for row in rows if "refused" in row]
    loads = {cell.load.name: cell.load for cell in cells}.values()
    report.settings["streams"] = [load.clients for load in loads if load.clients]
    report.shown = tuple(name for name in _SHOWN if any(name in row for row in report.rows))
    report.figures = rounded({
        "plan": dict(target.plan), **log.as_dict(), "clients": _clients(cells, log.begun_s),
        "all_requests": [_request(cell, number, one, log.begun_s) for cell in cells
                         for number, repetition in enumerate(cell.repetitions) for one in repetition],
    })  # fmt: skip
    return report


def measured(
    target: Target, loads: Sequence[Load], repeats: int, log: ProcessLog, progress: Progress | None = None
) -> list[Cell]:
    """Every load, in turn; a target that has ended is asked no more.

    Args:
        log: looked at each second, as the target is.
    """
    cells, ended = [Cell(target, load) for load in loads], None
    advance = advancing(progress, "repetitions", repeats * len(cells))
    for repetition in range(repeats):
        for cell in cells:
            if ended is None:
                requests, ended = _driven(target, cell.load, repetition, log)
                cell.repetitions.append(requests)
                if ended is not None:
                    log.note(target.name, ended)
            cell.ended = ended
            advance()
    if ended is None:
        log.look()  # the seconds since the last one, and what was lost in them
    return cells


def _driven(target: Target, load: Load, repetition: int, log: ProcessLog) -> tuple[list[Answered], str | None]:
    """A repetition's requests, and why the target has ended, if it has."""
    driving, ended, next_s = _Driving(target, load, repetition), None, time.monotonic()
    driving.start()
    try:
        while driving.is_alive() and ended is None:
            ended = target.look()
            log.look()
            next_s = max(next_s + _LOOK_S, time.monotonic())
            driving.join(next_s - time.monotonic())
    finally:
        driving.stop()
    if driving.failure is not None:
        raise driving.failure
    return driving.requests, ended


class _Driving(threading.Thread):
    """`drive` on a thread, so that this one can look after the target."""

    def __init__(self, target: Target, load: Load, repetition: int) -> None:
        super().__init__(name="tiermoe-load", daemon=True)
        self._target, self._load, self._repetition = target, load, repetition
        self._began = threading.Event()
        self._cancel: Callable[[], None] = lambda: None
        self.requests: list[Answered] = []
        self.failure: BaseException | None = None

    def run(self) -> None:
        try:
            asyncio.run(self._drive())
        except asyncio.CancelledError:
            pass
        except BaseException as error:
            self.failure = error

    def stop(self) -> None:
        """End it, if it has not ended; what was under way is unanswered."""
        self._began.wait(_STOP_S)
        self._cancel()
        self.join(_STOP_S)

    async def _drive(self) -> None:
        one, loop = self._target, asyncio.get_running_loop()
        task = asyncio.create_task(
            drive(one.url, one.model, self._load, self._repetition, key=one.key, answered=self.requests)
        )

        def cancel() -> None:
            with contextlib.suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(task.cancel)

        self._cancel = cancel
        self._began.set()
        await task


# -- what is asked for -------------------------------------------------------------------------------------------------


def _target(options: Serve) -> Any:
    """The context manager of the one target that the options name."""
    if options.url is not None:
        return nullcontext(at_url(options.url, options.model_name, options.api_key_file))
    if options.attach is not None:
        return attached_to(options.attach, options.deployment, options.model)
    over = {"model": options.model, "policy": options.policy, "threads": options.threads, "store": options.store,
            "budget": options.budget,
            "link": None if options.link_gbps is None else {"gbps": options.link_gbps}}  # fmt: skip
    return placed(checked_config(options.config, {name: value for name, value in over.items() if value is not None}))


def files_of(options: Serve) -> tuple[tuple[Conversation, ...] | None, tuple[float, ...]]:
    """Conversations and arrivals of the user's files: None where prompts are made, and no arrival without a schedule.

    Raises:
        ConfigError, RequestError: options or a file are refused; this is said before anything starts.
    """
    options.check()
    given = None if options.prompts is None else read_conversations(options.prompts)
    schedule_s = () if options.schedule is None else read_schedule(options.schedule)
    loads_of(options, given or (Conversation("made once there is a tokenizer"),), schedule_s, None)
    return given, schedule_s


def loads_of(
    options: Serve, given: tuple[Conversation, ...] | None, schedule_s: tuple[float, ...], tokenizer: Path | None
) -> list[Load]:
    """The loads of the options, each with conversations of its own as long as there are enough.

    Args:
        given: of the user's file; None: made of the held-out text of the model, or of the default model's.
        tokenizer: folder of the one that counts the tokens of made prompts; None: that of --model.
    """
    ways: list[tuple[dict[str, Any], int]] = [
        *(({"rate": rate}, options.requests or _OF_OPEN_LOOP) for rate in options.rate),
        *([({"schedule_s": schedule_s}, options.requests or len(schedule_s))] if schedule_s else []),
    ]
    if not ways:
        each = options.requests or _OF_CLIENT
        ways = [({"clients": clients}, clients * each) for clients in options.streams or _STREAMS]
    count = sum(options.repeats * requests for _, requests in ways)
    most = max(requests for _, requests in ways) if options.warmup is None else options.warmup
    if given is None:
        folder = tokenizer or run_config(options.model).model_dir
        texts = heldout_texts(folder) or heldout_texts(run_config(None).model_dir)
        if not texts:
            raise RequestError(f"'{folder}' has no held-out text to make prompts of", "give --prompts FILE")
        made = options.prompt_tokens, options.repeated, options.seed
        given = made_conversations(texts, load_tokenizer(folder), count + most, *made)
    loads, first = [], 0
    for way, requests in ways:
        warmup = requests if options.warmup is None else options.warmup
        loads.append(Load(
            given, requests, options.max_tokens, warmup=warmup, first=first, seed=options.seed,
            ignore_eos=options.ignore_eos, **way,
        ))  # fmt: skip
        first += options.repeats * requests
    return loads


def _repeats(cells: Sequence[Cell]) -> bool:
    """Whether the server was asked the same twice, so that it may have had it in its cache."""
    asked = sum(len(cell.repetitions) * cell.load.requests for cell in cells)
    return asked > len(cells[0].load.pool)


# -- what came of it ---------------------------------------------------------------------------------------------------


def _request(cell: Cell, repetition: int, one: Answered, begun_s: float) -> dict[str, Any]:
    row = {"server": cell.target.name, "load": cell.load.name, "repetition": repetition,
           "t_s": one.arrived_s - begun_s, "sent_ms": 1e3 * one.sent_s, "e2e_ms": 1e3 * one.ended_s}  # fmt: skip
    if one.error is not None:
        return row | {"error": one.error} | ({"said": one.said} if one.said else {})
    return row | {
        "ttft_ms": 1e3 * one.ttft_s, "tpot_ms": None if one.tpot_s is None else 1e3 * one.tpot_s, "tokens": one.tokens,
        "counted": one.counted, "prompt_tokens": one.prompt_tokens, "cached_tokens": one.cached_tokens,
    }  # fmt: skip


def _clients(cells: Sequence[Cell], begun_s: float) -> list[dict[str, Any]]:
    """By server and second: tokens that came, requests under way, and requests that failed then."""
    found: dict[tuple[str, int], dict[str, float]] = {}

    def at(cell: Cell, moment_s: float) -> dict[str, float]:
        key = cell.target.name, int(moment_s - begun_s)
        return found.setdefault(key, {"tokens_per_s": 0.0, "running": 0.0, "failed": 0.0})

    for cell in cells:
        for one in cell.requests:
            end_s = one.arrived_s + one.ended_s
            for moment_s in one.times_s:
                at(cell, one.arrived_s + moment_s)["tokens_per_s"] += one.tokens / len(one.times_s)
            for second in range(int(one.arrived_s - begun_s), int(end_s - begun_s) + 1):
                inside_s = min(end_s, begun_s + second + 1) - max(one.arrived_s, begun_s + second)
                at(cell, begun_s + second)["running"] += inside_s
            if one.error is not None:
                at(cell, end_s)["failed"] += 1
    return [{"server": server, "t_s": second} | row for (server, second), row in sorted(found.items())]
