"""`tiermoe replay`: policies on a recorded trace, on a virtual clock. Its numbers are labelled `simulated`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from numpy.typing import NDArray
from rich.console import Console

from ...actors.budget import Budget
from ...actors.combinations import Refusal, refuse_first
from ...actors.policies.eviction import Belady, EvictionPolicy
from ...actors.policies.prefetch import PrefetchPolicy
from ...actors.policies.registry import PolicyContext, kinds, make, options, options_class, policy_class
from ...actors.policy_settings import PolicySettings
from ...actors.slot_budget import divide
from ...errors import ConfigError, TierMoeError
from ..config import DEFAULT_LINK, load_policy
from ..host import now, versions
from ..report.output import print_json
from ..report.results import exit_code_of, refusals, refused_row
from ..report.tables import Facts, Grid, facts, grid, progress_on, results, seconds, share, show, size
from ..simulate.arrivals import Arrival, arrivals_of
from ..simulate.executor import (
    SimulatedEngine,
    context_of,
    eviction_of,
    policies_of,
    replays_routing,
    sizes_of,
)
from ..simulate.hit_rates import result, serve
from ..simulate.machine import Machine, load_machine
from ..simulate.predictors import Recall, load_predictors, recall, routing_profile, split, train_predictors
from ..simulate.trace import Request, Trace, TraceHeader
from .options import AsJson, Policy, with_options

RECALL_SOURCES = ("next-gate", "popularity", "activation-matrix", "stride")
RECALL_DISTANCE = 6
_OPTIMUM = "belady"  # an eviction that knows the trace: the bound of what loads on demand
_PREFETCH, _EVICTION = ", ".join(kinds("prefetch")), ", ".join(kinds("eviction"))
_SHOWN: Mapping[str, tuple[str, Callable[[Any], str]]] = {  # of a record: its name for people, and its form
    "hit_rate": ("hit rate", share),
    "prefill_hit_rate": ("hit rate in prefill", share),
    "decode_hit_rate": ("hit rate in decode", share),
    "hits": ("hits", str),
    "misses": ("misses", str),
    "prefetched_hits": ("hits by prefetch", str),
    "late_prefetches": ("late prefetches", str),
    "bytes_loaded_demand": ("loaded on demand", size),
    "bytes_loaded_prefetch": ("loaded by prefetch", size),
    "bytes_wasted": ("of it wasted", size),
    "blocked_io_s": ("compute waited for copies", seconds),
    "total_io_s": ("link busy", seconds),
    "ttft_s": ("time to first token (TTFT)", seconds),
    "tpot_s": ("time per output token (TPOT)", seconds),
    "queue_s": ("time in the queue", seconds),
    "latency_p50_s": ("time of a request, median", seconds),
    "latency_p99_s": ("time of a request, 99%", seconds),
    "virtual_s": ("virtual time in all", seconds),
}


@dataclass(frozen=True)
class ReplayOptions:
    """How policies are replayed: the options of `tiermoe replay` and `tiermoe.replay`."""

    prefetch: Annotated[str | None, typer.Option(help=f"Prefetch in place of the policy's: {_PREFETCH}.")] = None
    distance: Annotated[int | None, typer.Option(help="Prefetch distance in layers, in place of the policy's.")] = None
    synchronous: Annotated[
        bool, typer.Option("--synchronous", help="Let the forward pass wait for prefetches.")
    ] = False
    eviction: Annotated[
        str | None, typer.Option(help=f"Eviction in place of the policy's: {_EVICTION}, {_OPTIMUM}.")
    ] = None
    predictors: Annotated[
        Path | None, typer.Option(help="Predictors of prefetch stride; default: trained on --learn.")
    ] = None
    budget: Annotated[
        str, typer.Option(help="Expert memory: a share of the experts such as 25%, or a size such as 512MiB.")
    ] = "0.25"
    link_gbps: Annotated[
        float | None, typer.Option(help="Link in 1e9 bytes/s; default: the machine's, else 16.")
    ] = None
    link_latency_us: Annotated[
        float | None, typer.Option(help="Latency of a copy; default: the machine's, else 10.")
    ] = None
    machine: Annotated[
        str | None, typer.Option(help="Name in configs/machines, YAML file, or `this` machine; default: the trace's.")
    ] = None
    at_once: Annotated[int, typer.Option(help="Requests in each forward pass.")] = 1
    rate: Annotated[
        float | None, typer.Option(help="Arrivals a second, Poisson; default: a request arrives when there is room.")
    ] = None
    arrivals: Annotated[
        Path | None, typer.Option(help="CSV file of TIMESTAMP,ContextTokens,GeneratedTokens, in place of --rate.")
    ] = None
    learn: Annotated[
        float | None, typer.Option(help="Share of the requests that run first, uncounted; default: 0.")
    ] = None


@with_options()
def replay_command(
    trace: Annotated[Path, typer.Argument(help="Trace folder that `tiermoe record` wrote.", metavar="TRACE")],
    *,
    policy: Policy = "on-demand",
    policies: Annotated[str | None, typer.Option(help="Several policies, separated by commas, as a table.")] = None,
    chosen: ReplayOptions,
    as_recall: Annotated[
        bool, typer.Option("--recall", help="Print only the recall of each predictor, by distance.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Run the engine's cache and policies on recorded routing, without a model: hits, bytes, waits, TTFT and TPOT."""
    console = Console(stderr=True)
    names = [policy] if policies is None else [name.strip() for name in policies.split(",") if name.strip()]
    if policies is not None and (policy != "on-demand" or as_recall or not names):
        raise ConfigError(f"--policies is '{policies}', beside --policy or --recall", "give one of the three")
    for name in names:
        load_policy(name)  # one that is unknown or malformed, before the first runs
    rows: list[dict[str, Any]] = []
    if as_recall:
        _check_learn(chosen.learn)
        table: Facts | Grid
        record, table = recall_table(Trace(trace), 0.7 if chosen.learn is None else chosen.learn, console)
    elif policies is None:
        record = prepared(trace, names[0], chosen, console)()
        table = _figures(record)
    else:
        common = {"name": "replay", "trace": str(trace), "budget": chosen.budget}
        rows = replay_each({name: partial(prepared, trace, name, chosen, console) for name in names}, common, console)
        record, table = {"name": "replays", "rows": rows}, _policies_table(rows)
    show(results(as_json), table, *refusals(rows))
    if as_json:
        print_json(record)
    if code := exit_code_of(rows):
        raise typer.Exit(code)


def replay_each(
    prepares: Mapping[str, Callable[[], Replay]], common: Mapping[str, Any], console: Console
) -> list[dict[str, Any]]:
    """The records of several policies, each as `replay_trace` gives it; of one that is refused, a row with the reason.

    What can be refused before is said on the console before the first runs.

    Args:
        prepares: by policy. common: what the row of a refused one has, beside its policy.

    Raises:
        TierMoeError: all are refused; that of the first.
    """
    runs, found = dict[str, Replay](), dict[str, dict[str, Any]]()
    errors: list[TierMoeError] = []

    def refuse(name: str, error: TierMoeError) -> None:
        errors.append(error)
        found[name] = refused_row(error, **common, policy=name)

    for name, prepare in prepares.items():
        try:
            runs[name] = prepare()
            runs[name].check()
        except TierMoeError as error:
            refuse(name, error)
    if len(found) == len(prepares):
        raise errors[0]
    show(console, *refusals(found.values()))
    for name, run in runs.items():
        if name not in found:
            try:
                found[name] = run()
            except TierMoeError as error:
                refuse(name, error)
    return [found[name] for name in prepares]


def replay_trace(
    trace: str | Path, policy: str = "on-demand", *, console: Console | None = None, **options: Any
) -> dict[str, Any]:
    """Replay a recorded trace under a policy, on a virtual clock; no model is loaded. What `tiermoe.replay` is.

    Args:
        trace: folder, as `tiermoe record` makes it.
        policy: name in configs/policies, or a YAML file.
        console: where progress goes; None: nowhere.
        options: of `ReplayOptions`.

    Returns:
        what `tiermoe replay --json` prints: hits, misses, bytes, seconds of the virtual clock.

    Raises:
        TierMoeError: the trace, the policy or an option is refused.
    """
    return prepared(trace, policy, ReplayOptions(**options), console)()


def prepared(trace: str | Path, policy: str, chosen: ReplayOptions, console: Console | None) -> Replay:
    """The replay of one policy, with its options checked against each other. Raises as `replay_trace`."""
    at_once, link_gbps, link_latency_us = chosen.at_once, chosen.link_gbps, chosen.link_latency_us
    if at_once < 1:
        raise ConfigError(f"--at-once is {at_once}", "give a number of at least 1")
    _check_learn(chosen.learn)
    if chosen.machine is None:
        link_gbps = DEFAULT_LINK.gbps if link_gbps is None else link_gbps
        link_latency_us = DEFAULT_LINK.latency_us if link_latency_us is None else link_latency_us
    found, optimum = Trace(Path(trace)), chosen.eviction == _OPTIMUM
    settings = replay_policy(policy, None if optimum else chosen.eviction)
    kind = chosen.prefetch if chosen.prefetch is not None else settings.prefetch.kind
    ahead = chosen.distance if chosen.distance is not None else settings.prefetch.distance
    first = int(found.header.requests * (chosen.learn or 0.0) + 0.5)
    waits = chosen.synchronous or (chosen.prefetch is None and settings.prefetch.synchronous)
    settings = with_prefetch(settings, kind, distance=ahead, synchronous=waits)
    learns, file = "predictors" in settings.prefetch.needs, chosen.predictors
    queued = at_once > 1 or chosen.rate is not None or chosen.arrivals is not None
    refuse_first((
        Refusal(
            learns and file is None and not first,
            "stride prefetch needs predictors",
            "give --predictors FILE, or --learn 0.7",
        ),
        Refusal(
            not learns and file is not None,
            f"--predictors are for stride, but prefetch is {kind}",
            "leave them out",
        ),
        Refusal(
            optimum and (kind != "none" or settings.split.kind != "off" or queued),
            f"{_OPTIMUM} is the bound of loading on demand, one request after the other",
            "give --policy on-demand, without --at-once, --rate and --arrivals",
        ),
    ))  # fmt: skip
    context = _context(found, settings, None if file is None else Path(file), first)
    simulated = load_machine(found.header, chosen.machine, link_gbps, link_latency_us, settings.name)
    times = arrivals_of(chosen.rate, None if chosen.arrivals is None else Path(chosen.arrivals))
    record = {
        "name": "replay", "trace": str(trace), "complete": found.header.complete, "model": found.header.model,
        "policy": settings.name, "eviction": _OPTIMUM if optimum else settings.eviction.kind,
        "prefetch": kind, "distance": ahead,
        "synchronous": waits, "budget": chosen.budget, "at_once": at_once, "learned_requests": first,
        "rate": chosen.rate, "arrivals": None if chosen.arrivals is None else str(chosen.arrivals),
        "machine": simulated.model_dump(), "versions": versions(), "date": now(),
    }  # fmt: skip
    budget = Budget.parse(chosen.budget)
    return Replay(found, settings, context, simulated, budget, at_once, first, console, times, optimum, record)


@dataclass(frozen=True)
class Replay:
    """One policy on a trace, ready to run.

    Attributes:
        context: what policies are made from, without the eviction policy.
        first: requests that are run and not counted, to learn from.
        arrivals: of the others; None: a request arrives when there is room.
        optimum: evict by the trace's future, in place of the policy's eviction; of one request after the other.
        record: what it is, as its result begins.
    """

    trace: Trace
    settings: PolicySettings
    context: PolicyContext
    machine: Machine
    budget: Budget
    at_once: int = 1
    first: int = 0
    console: Console | None = None
    arrivals: Iterable[Arrival] | None = None
    optimum: bool = False
    record: Mapping[str, Any] = field(default_factory=dict)

    def check(self) -> None:
        """Raises TierMoeError: refused by the trace's shape, the machine or the budget; no request is replayed."""
        self._engine()

    def _engine(self, eviction: EvictionPolicy | None = None) -> SimulatedEngine:
        learn = islice(self.trace.requests(), self.first or None)
        return engine_for(self.settings, self.trace.header, self.machine, self.budget, learn, self.context, eviction)

    def __call__(self) -> dict[str, Any]:
        """The record with counters and times.

        Raises:
            TraceError: the trace is corrupt. BudgetError: it holds no expert, or not all experts, and all are
                preloaded. ConfigError: unknown prefetch, or one that needs what the trace does not hold.
        """
        engine = self._engine(_optimum(self.trace) if self.optimum else None)
        with progress_on(self.console if self.console is not None else Console(quiet=True)) as progress:
            task = progress.add_task("replaying requests", total=self.trace.header.requests)
            requests = self.trace.requests()
            if self.first:
                serve(engine, islice(requests, self.first), self.at_once, lambda: progress.advance(task))
                engine.reset_stats()
            served = serve(engine, requests, self.at_once, lambda: progress.advance(task), self.arrivals)
        residency = [(layer.states, layer.uses) for layer in engine.cache.layer_residency()]
        return {**self.record} | result(engine, served) | {"residency": residency}


def _check_learn(learn: float | None) -> None:
    if learn is not None and not 0 <= learn < 1:
        raise ConfigError(f"--learn is {learn}", "give a share from 0 to below 1")


def engine_for(
    settings: PolicySettings,
    header: TraceHeader,
    machine: Machine,
    budget: Budget,
    learn: Iterable[Request] = (),
    context: PolicyContext | None = None,
    eviction: EvictionPolicy | None = None,
) -> SimulatedEngine:
    """An engine of a preset at a trace's shape, with its experts loaded if the preset keeps all.

    Args:
        budget: of each GPU.
        learn: requests from which popularity and profile are counted, where the preset reads them.
        context: what policies are made from, without the eviction policy; None: that of the header.
        eviction: in place of the preset's.

    Raises:
        BudgetError: it holds no expert, or not all experts, and all are preloaded.
        ConfigError: the preset needs what the trace or the machine lacks.
    """
    divide(settings, budget, sizes_of(header, settings, machine.gpus))  # or it is refused
    eviction = eviction_of(settings, header) if eviction is None else eviction
    policy = checked_prefetch(settings, replace(context or context_of(header), eviction=eviction), header)
    requests = list(learn) if settings.needs_popularity or "profile" in settings.needs else []
    policies = policies_of(
        settings, header, machine, budget, eviction, policy,
        popularity=popularity(header, requests) if settings.needs_popularity else None,
        profile=routing_profile(header, requests) if "profile" in settings.needs else None,
    )  # fmt: skip
    engine = SimulatedEngine(header, machine, budget, policies)
    if settings.preload == "all":
        engine.preload()
    return engine


def popularity(header: TraceHeader, requests: Iterable[Request]) -> NDArray[np.int64]:
    """How often requests pick each expert [L, E]."""
    counts = np.zeros((header.layers, header.experts), np.int64)
    for step in (step for request in requests for step in request.iterations):
        for layer in range(header.layers):
            counts[layer] += np.bincount(step.ids[:, layer].ravel(), minlength=header.experts)
    return counts


def _optimum(trace: Trace) -> Belady:
    """Belady's order over all of the trace's layers, in the order in which they run."""
    experts, layers = trace.header.experts, range(trace.header.layers)
    steps = (part.ids for request in trace.requests() for part in request.iterations)
    return Belady([np.unique(ids[:, layer]).astype(np.int64) + layer * experts for ids in steps for layer in layers])


def recall_table(trace: Trace, learn: float, console: Console) -> tuple[dict[str, Any], Grid]:
    """Recall of every source at distances 1 to 6, learnt on the first share of the requests, measured on the rest.

    Holds the whole trace in memory.

    Raises:
        TraceError: the trace is corrupt. ConfigError: nothing is left to measure.
    """
    header = trace.header
    first, rest = split(list(trace.requests()), learn)
    if not rest:
        raise ConfigError(f"the trace has {len(first)} requests, and none is left to measure", "lower --learn")
    distances = range(1, min(RECALL_DISTANCE, header.layers - 1) + 1)
    with progress_on(console) as progress:
        task = progress.add_task("recall", total=len(RECALL_SOURCES) * len(distances))
        table = recall(
            header, recall_sources(header, first), distances, first, rest, lambda: progress.advance(task)
        )  # fmt: skip
    record = {
        "name": "recall", "executor": "simulated", "trace": str(trace.path), "model": header.model,
        "top_k": header.top_k, "learned_requests": len(first), "measured_requests": len(rest),
        "rows": [asdict(row) | {"per_layer": [_number(x) for x in row.per_layer]} for row in table],
    }  # fmt: skip
    return record, _recalls(table, distances)


def recall_sources(header: TraceHeader, learn: Sequence[Request]) -> dict[str, Callable[[int], PrefetchPolicy | None]]:
    """By name, what makes a predictor of a distance; None where the trace, or what is learnt from, is too little."""

    def made(kind: str, distance: int) -> PrefetchPolicy | None:
        if (kind == "next-gate" and distance > header.distances) or (kind == "stride" and not learn):
            return None
        predictors = train_predictors(header, learn, distance) if kind == "stride" else None
        chosen = options("prefetch", {"kind": kind, "distance": distance})
        found: PrefetchPolicy | None = make("prefetch", chosen, context_of(header, predictors=predictors))
        return found

    return {kind: partial(made, kind) for kind in RECALL_SOURCES}


def replay_policy(name: str, eviction: str | None) -> PolicySettings:
    """A preset that can be replayed, with another eviction if one is given.

    Raises:
        ConfigError: unknown, or it uses what the simulated executor lacks.
    """
    settings = load_policy(name)
    require_replayable(settings)
    if eviction is None:
        return settings
    if eviction not in kinds("eviction"):
        raise ConfigError(f"--eviction is '{eviction}'", f"give one of {_EVICTION}, {_OPTIMUM}")
    return settings.model_copy(update={"eviction": options("eviction", eviction)})


def require_replayable(settings: PolicySettings) -> None:
    """Raise ConfigError if a preset uses what the simulated executor lacks."""
    if settings.reroutes and not replays_routing(settings):
        raise ConfigError(
            f"policy '{settings.name}' changes the routing, and a trace holds what the model picked",
            "replay one with exact routing",
        )


def with_prefetch(settings: PolicySettings, kind: str, **changes: Any) -> PolicySettings:
    """The preset with another prefetch, whose options are the preset's and the changes as far as the kind has them.

    Raises:
        ConfigError: there is no such prefetch.
    """
    try:
        chosen = options_class("prefetch", kind)
    except ValueError as error:
        raise ConfigError(str(error), "choose another --prefetch") from error
    values = settings.prefetch.model_dump() | changes | {"kind": kind}
    kept = {name: value for name, value in values.items() if name in chosen.model_fields}
    return settings.model_copy(update={"prefetch": chosen.model_construct(**kept)})


def checked_prefetch(settings: PolicySettings, context: PolicyContext, header: TraceHeader) -> PrefetchPolicy | None:
    """The preset's prefetch policy, if the trace has what it needs.

    Raises:
        ConfigError: it lacks it, or there is no such policy.
    """
    prefetch = settings.prefetch
    top = prefetch.experts(context)
    if "gates" in prefetch.needs:
        raise ConfigError(
            "gates of pre-gated prefetch score hidden states, which a trace does not have",
            "replay next-gate in its place",
        )
    asks_routers = getattr(policy_class("prefetch", prefetch.kind), "needs_lookahead", False)
    if asks_routers and (prefetch.distance > header.distances or top > header.top_k):
        raise ConfigError(
            f"the trace holds the top {header.top_k} of {header.distances} layers ahead, not the top {top} of "
            f"{prefetch.distance}",
            "record it with a greater --distances, or lower the policy's distance or top",
        )
    try:
        return settings.make_prefetch(context)
    except ValueError as error:
        raise ConfigError(str(error), "choose another --prefetch or --distance") from error


def _context(trace: Trace, settings: PolicySettings, file: Path | None, first: int) -> PolicyContext:
    header, predictors = trace.header, None
    distance = settings.prefetch.distance
    if distance < 0:
        raise ConfigError(f"--distance is {distance}", "give a number of layers")
    if file is not None:
        predictors = load_predictors(file, header, distance)
    elif "predictors" in settings.prefetch.needs:
        predictors = train_predictors(header, islice(trace.requests(), first), distance)
    return context_of(header, predictors=predictors)


def _figures(record: dict[str, Any]) -> Facts:
    title = f"{record['policy']}, prefetch {record['prefetch']}, budget {record['budget']}: simulated"
    return facts(title, [(name, form(record[key])) for key, (name, form) in _SHOWN.items() if record[key] is not None])


def _policies_table(rows: list[dict[str, Any]]) -> Grid:
    """One line for each policy of a replay."""
    title = f"{rows[0]['trace']}, budget {rows[0]['budget']}: simulated"
    columns = (
        "policy", "hit rate", "in prefill", "in decode", "loaded", "of it prefetched", "wasted", "waited for copies",
        "TTFT", "TPOT",
    )  # fmt: skip
    cells = [
        (row["policy"], "refused") if "refused" in row else (
            row["policy"], share(row["hit_rate"]), share(row["prefill_hit_rate"]), share(row["decode_hit_rate"]),
            size(row["bytes_loaded_demand"] + row["bytes_loaded_prefetch"]), size(row["bytes_loaded_prefetch"]),
            size(row["bytes_wasted"]), seconds(row["blocked_io_s"]), seconds(row["ttft_s"]), seconds(row["tpot_s"]),
        )
        for row in rows
    ]  # fmt: skip
    return grid(title, columns, cells)


def _recalls(rows: list[Recall], distances: range) -> Grid:
    cells = []
    for source in dict.fromkeys(row.source for row in rows):
        by = {row.distance: row.overall for row in rows if row.source == source}
        cells.append((source, *(f"{by[d]:.3f}" if d in by else "-" for d in distances)))
    return grid("recall of the true top-k, by distance in layers", ("source", *map(str, distances)), cells)


def _number(value: float) -> float | None:
    return None if value != value else value  # JSON has no NaN
