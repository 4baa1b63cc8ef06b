"""`bench validation` and `predict`: the simulator against measured runs.

A validation cell is a preset at a budget on a link. All cells serve the same prompts, and the simulator replays the
routing of these very prompts with this machine's costs, measured at the begin. One worker is alive at a time.
`on-demand` begins and ends each group of cells that share a budget and a link; a group in which it drifts is discarded.
Before, each preset runs once on a stepped link, whose clock stands still while the worker computes: its hits depend on
decisions and counting alone, and no load of the machine changes them.

`predict` compares the tokens per second that `plan` and `run` would print. For each preset in turn: the machine's costs
(`jobs/measure_machine.py`), then its cells, so that inputs and measurements see the same machine. The routing is
recorded once a model, from other prompts than those that are measured.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import astuple
from itertools import combinations, product
from pathlib import Path
from statistics import fmean, median
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import Progress

from tiermoe.actors.engine.stats import EngineStats
from tiermoe.actors.settings import LinkSettings
from tiermoe.cluster.config import RunConfig, engine_settings, load_policy
from tiermoe.cluster.jobs.bench.metrics import Bar, Report, advancing
from tiermoe.cluster.jobs.bench.random_model import MoeShape, save_random_model
from tiermoe.cluster.jobs.bench.serving import (
    Prompt,
    Split,
    ensure_artifacts,
    heldout_prompts,
    record_served,
    run_config,
    serve,
    start_worker,
)
from tiermoe.cluster.jobs.measure_machine import measure_machine
from tiermoe.cluster.jobs.prediction import predict_by_trace, simulated_machine
from tiermoe.cluster.jobs.prepare.needs import prepared_store
from tiermoe.cluster.jobs.replay import replay, require_replayable
from tiermoe.cluster.simulate.executor import context_of
from tiermoe.cluster.simulate.machine import Machine
from tiermoe.cluster.simulate.trace import Trace
from tiermoe.cluster.topology.estimate import OVERLAP, Prediction, make_plan, measured_hardware
from tiermoe.cluster.topology.estimate import predict as predict_by_formula
from tiermoe.cluster.topology.inputs import facts_of_store, local_ray, this_machine
from tiermoe.cluster.topology.machine_costs import MachineCosts
from tiermoe.cluster.topology.spec import ClusterSpec, ModelFacts

from .cases import LATENCY_US, Predict, Validation

PROMPT_TOKENS, DISTANCES = 32, 4
CONTROL = "on-demand"
TPOT_WITHIN, HITS_WITHIN, DRIFT, DIFFER, MIN_KEPT = 0.15, 0.01, 0.05, 0.05, 0.5
STEP_US = 150.0  # of the clock for each layer, on a stepped link
WITHIN, MIN_SHARE = 0.25, 1.0  # of `predict`
RECORDED = 4  # prompts of `predict` whose routing predicts
RANDOM = MoeShape(layers=4, experts=32, top_k=4, hidden=512, intermediate=256, vocabulary=4096)


def validation(options: Validation, progress: Progress | None) -> Report:
    """TPOT and hit rate, simulated and measured.

    Bars, over the groups that are kept: TPOT within 15%, hit rate within one point, and the order of two presets the
    same where they differ by over 5%; at least half of the cells are kept.

    Raises:
        ConfigError: an unknown preset, or one that cannot be replayed. RuntimeFailure: a request failed.
    """
    presets, budgets, links = options.preset, options.budget, options.link_gbps
    for name in presets:
        require_replayable(load_policy(name))
    report = Report("validation", "", settings=options.settings(prompt_tokens=PROMPT_TOKENS, latency_us=LATENCY_US))
    base = run_config(options.model, None)
    prompts = heldout_prompts(base.model_dir, options.repeats + 1, PROMPT_TOKENS)
    ensure_artifacts(base, [load_policy(name) for name in presets])
    costs = measure_machine(progress, tuple(dict.fromkeys((CONTROL, *presets))))
    report.figures["costs"] = costs.model_dump(mode="json")
    with tempfile.TemporaryDirectory(prefix="tiermoe-validation-") as folder:
        trace = _record(base, prompts, options.max_tokens, Path(folder) / "trace", progress)
        total = len(budgets) * len(links) * (len(presets) + 2) + len(presets)
        advance = advancing(progress, "serving", total)
        stepped = report.figures["stepped"] = list[dict[str, Any]]()
        for name in presets:
            config = _config(base, name, budgets[0], links[-1])
            stepped.append(_stepped_cell(config, trace, prompts, options.max_tokens))
            advance()
        for budget, gbps in product(budgets, links):
            rows = []
            for name in (CONTROL, *presets, CONTROL):
                config = _config(base, name, budget, gbps)
                rows.append(_cell(config, costs, trace, prompts, options.max_tokens, report))
                advance()
            drift = abs(rows[-1]["measured_ms"] / rows[0]["measured_ms"] - 1)
            group = {"budget": budget, "link_gbps": gbps, "drift": drift, "kept": drift <= DRIFT}
            report.rows += [group | row for row in rows[1:-1]]
    report.bars += _bars(report.rows)
    worst = max(abs(row["hits_off"]) for row in stepped)
    report.bars.append(Bar("largest error of the hit rate on a stepped link", worst, "<=", HITS_WITHIN))
    return report


def _config(base: RunConfig, preset: str, budget: str, gbps: float) -> RunConfig:
    link = LinkSettings() if budget == "1.0" else LinkSettings(gbps=gbps, latency_us=LATENCY_US)
    return base.model_copy(update={"policy": preset, "budget": budget, "link": link})


def _record(base: RunConfig, prompts: Sequence[Prompt], tokens: int, out: Path, progress: Progress | None) -> Trace:
    record_served(base, Split(tuple(prompts), ()), tokens, DISTANCES, out, progress)
    return Trace(out)


def _cell(
    config: RunConfig, costs: MachineCosts, trace: Trace, prompts: Sequence[Prompt], tokens: int, report: Report
) -> dict[str, Any]:
    """One cell: the first prompt warms both executors up and does not count."""
    simulated = _simulated(config, costs, trace)
    times_s, stats = _served(config, prompts, tokens)
    report.executor, measured_s = stats.executor, fmean(times_s)
    times = {"measured_ms": measured_s * 1e3, "simulated_ms": simulated["tpot_s"] * 1e3}
    return _compared(config, stats, simulated) | times | {"ratio": simulated["tpot_s"] / measured_s}


def _stepped_cell(config: RunConfig, trace: Trace, prompts: Sequence[Prompt], tokens: int) -> dict[str, Any]:
    """Hit rates on a stepped link. A layer takes the simulator the same time, before its routing is known."""
    link = config.link
    config = config.model_copy(update={"link": link.model_copy(update={"layer_us": STEP_US})})
    _, stats = _served(config, prompts, tokens)
    machine = Machine(
        name="stepped", forward_s=0.0, dense_s=STEP_US * 1e-6, dense_row_s=0.0, expert_s=0.0, expert_row_s=0.0,
        link_gbps=link.gbps, link_latency_us=link.latency_us,
    )  # fmt: skip
    simulated = _replayed(trace, config.policy, machine, stats.slots)
    return {"budget": config.budget, "link_gbps": link.gbps} | _compared(config, stats, simulated)


def _served(
    config: RunConfig, prompts: Sequence[Prompt], tokens: int, advance: Callable[[], None] = lambda: None
) -> tuple[list[float], EngineStats]:
    """TPOT of each prompt but the first, and the counters of these."""
    times_s = list[float]()
    with closing(start_worker(config)) as worker:
        for number, prompt in enumerate(prompts):
            if number == 1:
                worker.reset_stats()
            measures, _ = serve(worker.submit, [prompt], tokens)
            if number:
                times_s.append(measures["tpot_s"])
            advance()
        return times_s, worker.stats()


def _compared(config: RunConfig, stats: EngineStats, simulated: dict[str, Any]) -> dict[str, Any]:
    return {
        "policy": config.policy, "hit_rate": stats.hit_rate, "simulated_hit_rate": simulated["hit_rate"],
        "hits_off": simulated["hit_rate"] - stats.hit_rate,
    }  # fmt: skip


def _simulated(config: RunConfig, costs: MachineCosts, trace: Trace) -> dict[str, Any]:
    spec, facts, assumed = _planned(config, costs)
    host, _ = costs.of_policy(config.policy)
    machine = simulated_machine(trace.header, spec, facts, costs, assumed, host, grows=True)
    return _replayed(trace, config.policy, machine, spec.budget_bytes // spec.slot_bytes)


def _planned(config: RunConfig, costs: MachineCosts) -> tuple[ClusterSpec, ModelFacts, Prediction]:
    """What `plan` says of this machine with measured costs, and an assumed routing."""
    settings = engine_settings(config)
    facts = facts_of_store(prepared_store(config, settings), config.model_dir)
    plan = make_plan(config, settings, facts, this_machine(local_ray(config, settings)), "this machine", here=False)
    hardware = measured_hardware(plan.prediction.hardware, costs, config.link.gbps)
    assumed = predict_by_formula(plan.topology, plan.spec, facts, hardware, costs, "measured in this run")
    return plan.spec, facts, assumed


def _replayed(trace: Trace, policy: str, machine: Machine, slots: int) -> dict[str, Any]:
    budget, context = slots * trace.header.slot_bytes, context_of(trace.header)
    return replay(trace, load_policy(policy), context, machine, budget, first=1, console=Console(quiet=True))


def _bars(rows: Sequence[dict[str, Any]]) -> list[Bar]:
    kept = [row for row in rows if row["kept"]]
    pairs = [
        (a, b) for a, b in combinations(kept, 2)
        if (a["budget"], a["link_gbps"]) == (b["budget"], b["link_gbps"])
        and max(a["measured_ms"], b["measured_ms"]) > (1 + DIFFER) * min(a["measured_ms"], b["measured_ms"])
    ]  # fmt: skip
    same = [(a["measured_ms"] < b["measured_ms"]) == (a["simulated_ms"] < b["simulated_ms"]) for a, b in pairs]
    nan = float("nan")
    return [
        Bar("largest error of TPOT", max((abs(r["ratio"] - 1) for r in kept), default=nan), "<=", TPOT_WITHIN),
        Bar("largest error of the hit rate", max((abs(r["hits_off"]) for r in kept), default=nan), "<=", HITS_WITHIN),
        Bar("pairs in the same order", fmean(same) if same else 1.0 if kept else nan, ">=", 1.0),
        Bar("share of cells kept", len(kept) / len(rows) if rows else nan, ">=", MIN_KEPT),
    ]


# -- predict -----------------------------------------------------------------------------------------------------------


def predict(options: Predict, progress: Progress | None) -> Report:
    """Decode speed of one request, predicted and measured.

    `predicted` replays the recorded routing with the measured costs, as `run` does for a model that ships one;
    `without_routing` assumes a routing, as for any other. `measured` is the median over prompts, after one that is not
    counted.

    Bar: `predicted` within 25% of `measured` in every cell.

    Raises:
        ConfigError: an unknown preset, or one that cannot be replayed. RuntimeFailure: a request failed.
    """
    policies = {name: load_policy(name) for name in options.preset}
    for settings in policies.values():
        require_replayable(settings)
    report = Report("predict", "")
    report.settings = options.settings(
        latency_us=LATENCY_US, prompt_tokens=PROMPT_TOKENS, threads=1, assumed_overlap=OVERLAP,
        random_model=list(astuple(RANDOM)),
    )  # fmt: skip
    with tempfile.TemporaryDirectory(prefix="tiermoe-predict-") as folder:
        bases, prompts = _models(options, Path(folder))
        traces = {
            name: _record(base, prompts[name][:RECORDED], options.max_tokens, Path(folder) / f"trace-{name}", progress)
            for name, base in bases.items()
        }
        for base in bases.values():
            ensure_artifacts(base, list(policies.values()))
        for name, settings in policies.items():
            costs = measure_machine(progress, (name,))
            report.figures.setdefault("costs", {})[name] = costs.model_dump(mode="json")
            for model, base in bases.items():
                for budget in ("1.0",) if settings.preload == "all" else options.budget:
                    config = _config(base, name, budget, options.link_gbps)
                    row: dict[str, Any] = {"model": model, "policy": name, "budget": budget}
                    row |= _predicted(config, costs, traces[model])
                    label, served = f"{model}, {name}", prompts[model][RECORDED:]
                    row |= _measured_speed(config, served, options, report, progress, label)
                    ratio = row["predicted"] / row["measured"]
                    report.rows.append(row | {"ratio": ratio, "within": abs(ratio - 1) <= WITHIN})
    share = sum(row["within"] for row in report.rows) / len(report.rows)
    report.bars.append(Bar(f"share of cells predicted within {WITHIN:.0%}", share, ">=", MIN_SHARE))
    return report


def _models(options: Predict, folder: Path) -> tuple[dict[str, RunConfig], dict[str, Sequence[Prompt]]]:
    """The configurations of both models by name, and their prompts: those to record, then those to measure."""
    own = run_config(options.model, None)
    random = run_config(str(save_random_model(RANDOM, folder / "random")), None, store=str(folder / "store"))
    count, draw = RECORDED + 1 + options.repeats, np.random.default_rng(0)
    drawn = [tuple(draw.integers(0, RANDOM.vocabulary, PROMPT_TOKENS).tolist()) for _ in range(count)]
    name = own.model_dir.name
    return {name: own, "random": random}, {
        name: heldout_prompts(own.model_dir, count, PROMPT_TOKENS), "random": drawn,
    }  # fmt: skip


def _predicted(config: RunConfig, costs: MachineCosts, trace: Trace) -> dict[str, Any]:
    """Tokens per second with and without the routing; the hit rate, and a token's waits for copies, of the former."""
    spec, facts, formula = _planned(config, costs)
    replayed = predict_by_trace(formula, spec, facts, config, costs, trace)
    return {
        "predicted": replayed.tokens_per_s, "without_routing": formula.tokens_per_s,
        "predicted_hit_rate": replayed.hit_share,
        "predicted_wait_ms": replayed.parts_s["load_s"] * facts.layers * 1e3,
    }  # fmt: skip


def _measured_speed(
    config: RunConfig, prompts: Sequence[Prompt], options: Predict, report: Report, progress: Progress | None,
    label: str,
) -> dict[str, Any]:  # fmt: skip
    """Median tokens per second and the spread over the prompts, the hit rate, and a token's waits for copies."""
    times_s, stats = _served(config, prompts, options.max_tokens, advancing(progress, label, len(prompts)))
    report.executor, speeds = stats.executor, [1 / tpot_s for tpot_s in times_s]
    forwards = options.max_tokens * (len(prompts) - 1)  # a prompt's counts as one
    return {
        "measured": median(speeds), "least": min(speeds), "most": max(speeds), "hit_rate": stats.hit_rate,
        "wait_ms": stats.total().blocked_io_s / forwards * 1e3,
    }  # fmt: skip
