"""`bench validation`: the simulator against measured runs.

A cell is a preset at a budget on a link. All cells serve the same prompts, and the simulator replays the
routing of these very prompts with this machine's costs, measured at the begin. One worker is alive at a time.
`on-demand` begins and ends each group of cells that share a budget and a link; a group in which it drifts is discarded.
Before, each preset runs once on a stepped link, whose clock stands still while the worker computes: its hits depend on
decisions and counting alone, and no load of the machine changes them.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from contextlib import closing
from itertools import combinations, product
from pathlib import Path
from statistics import fmean
from typing import Any

from rich.console import Console
from rich.progress import Progress

from tiermoe.actors.budget import Budget
from tiermoe.actors.engine.stats import EngineStats
from tiermoe.actors.policies.cost import Link
from tiermoe.actors.settings import LinkSettings
from tiermoe.cluster.config import RunConfig, engine_settings, load_policy
from tiermoe.cluster.jobs.bench.metrics import Bar, Report, advancing
from tiermoe.cluster.jobs.bench.serving import (
    Prompt,
    Split,
    ensure_artifacts,
    heldout_prompts,
    record_served,
    serve,
)
from tiermoe.cluster.jobs.local_worker import run_config, start_worker
from tiermoe.cluster.jobs.measure_machine import measure_machine
from tiermoe.cluster.jobs.prepare.needs import prepared_store
from tiermoe.cluster.jobs.replay import Replay, require_replayable
from tiermoe.cluster.simulate.executor import context_of
from tiermoe.cluster.simulate.machine import Machine, machine_of
from tiermoe.cluster.simulate.trace import Trace, TraceHeader
from tiermoe.cluster.topology.estimate import make_plan
from tiermoe.cluster.topology.inputs import facts_of_store, local_ray, this_machine
from tiermoe.cluster.topology.machine_costs import MachineCosts

from .cases import LATENCY_US, Validation

PROMPT_TOKENS, DISTANCES = 32, 4
CONTROL = "on-demand"
TPOT_WITHIN, HITS_WITHIN, DRIFT, DIFFER, MIN_KEPT = 0.15, 0.01, 0.05, 0.05, 0.5
STEP_US = 150.0  # of the clock for each layer, on a stepped link


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
        recorded = Path(folder) / "trace"
        record_served(base, Split(tuple(prompts), ()), options.max_tokens, DISTANCES, recorded, progress)
        trace = Trace(recorded)
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


def _cell(
    config: RunConfig, costs: MachineCosts, trace: Trace, prompts: Sequence[Prompt], tokens: int, report: Report
) -> dict[str, Any]:
    """One cell: the first prompt warms both executors up and does not count."""
    machine, slots = _machine(config, costs, trace.header)
    simulated = _replayed(trace, config.policy, machine, slots)
    times_s, stats = _served(config, prompts, tokens)
    report.executor, measured_s = stats.executor, fmean(times_s)
    return _compared(config, stats, simulated) | {
        "measured_ms": measured_s * 1e3, "simulated_ms": simulated["tpot_s"] * 1e3,
        "ratio": simulated["tpot_s"] / measured_s,
    }  # fmt: skip


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


def _served(config: RunConfig, prompts: Sequence[Prompt], tokens: int) -> tuple[list[float], EngineStats]:
    """TPOT of each prompt but the first, and the counters of these."""
    times_s = list[float]()
    with closing(start_worker(config)) as worker:
        for number, prompt in enumerate(prompts):
            if number == 1:
                worker.reset_stats()
            measures, _ = serve(worker.submit, [prompt], tokens)
            if number:
                times_s.append(measures["tpot_s"])
        return times_s, worker.stats()


def _compared(config: RunConfig, stats: EngineStats, simulated: dict[str, Any]) -> dict[str, Any]:
    return {
        "policy": config.policy, "hit_rate": stats.hit_rate, "simulated_hit_rate": simulated["hit_rate"],
        "hits_off": simulated["hit_rate"] - stats.hit_rate,
    }  # fmt: skip


def _machine(config: RunConfig, costs: MachineCosts, header: TraceHeader) -> tuple[Machine, int]:
    """This machine under the run's preset and link, where attention reads the trace's contexts; slots of the budget."""
    settings = engine_settings(config)
    facts = facts_of_store(prepared_store(config, settings), config.model_dir)
    plan = make_plan(config, settings, facts, this_machine(local_ray(config, settings)), "this machine", here=False)
    spec, hardware = plan.spec, plan.times.hardware
    machine = machine_of(
        costs, costs.of_policy(config.policy), header, dense_bytes=spec.dense_bytes / facts.layers,
        kv_bytes=facts.kv_elements * spec.compute_item_bytes / facts.layers, slot_bytes=spec.slot_bytes,
        # a copy's bytes are those of this run's slots, not of the recording's
        copy_bytes=facts.expert_bytes if spec.gpu else spec.slot_bytes,
        link=Link(config.link.gbps or costs.copy_gbps, hardware.link_latency_us),
    )  # fmt: skip
    return machine, spec.budget_bytes // spec.slot_bytes


def _replayed(trace: Trace, policy: str, machine: Machine, slots: int) -> dict[str, Any]:
    budget, context = Budget(nbytes=slots * trace.header.slot_bytes), context_of(trace.header)
    return Replay(trace, load_policy(policy), context, machine, budget, first=1, console=Console(quiet=True))()


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
