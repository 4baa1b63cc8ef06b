"""`bench predict`: the tokens per second that `plan` and `run` would print, against those that are measured.

For each preset in turn: the machine's costs (`jobs/measure_machine.py`), then its cells, so that inputs and
measurements see the same machine. The routing is recorded once a model, from other prompts than the measured ones.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from contextlib import closing
from dataclasses import astuple
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from rich.progress import Progress

from tiermoe.actors.requests import SamplingParams
from tiermoe.actors.settings import LinkSettings
from tiermoe.cluster.config import RunConfig, engine_settings, load_policy
from tiermoe.cluster.jobs.bench.metrics import Bar, Report
from tiermoe.cluster.jobs.bench.random_model import MoeShape, save_random_model
from tiermoe.cluster.jobs.bench.serving import (
    Prompt,
    ensure_artifacts,
    heldout_prompts,
    prepared_store,
    run_config,
    serve,
    start_worker,
)
from tiermoe.cluster.jobs.measure_machine import measure_machine
from tiermoe.cluster.jobs.prediction import predict_by_trace
from tiermoe.cluster.jobs.replay import require_replayable
from tiermoe.cluster.simulate.trace import Trace
from tiermoe.cluster.topology.estimate import OVERLAP, make_plan, measured_hardware
from tiermoe.cluster.topology.estimate import predict as predict_by_formula
from tiermoe.cluster.topology.inputs import facts_of_store, local_ray, this_machine
from tiermoe.cluster.topology.machine_costs import MachineCosts

from .cases import Predict

LATENCY_US = 10.0
PROMPT_TOKENS, RECORDED, DISTANCES = 32, 4, 4  # RECORDED: prompts whose routing predicts
WITHIN, MIN_SHARE = 0.25, 1.0
RANDOM = MoeShape(layers=4, experts=32, top_k=4, hidden=512, intermediate=256, vocabulary=4096)


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
                    row |= _measured(config, prompts[model][RECORDED:], options, report, progress, f"{model}, {name}")
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


def _config(base: RunConfig, preset: str, budget: str, gbps: float) -> RunConfig:
    link = LinkSettings() if budget == "1.0" else LinkSettings(gbps=gbps, latency_us=LATENCY_US)
    return base.model_copy(update={"policy": preset, "budget": budget, "link": link})


def _record(base: RunConfig, prompts: Sequence[Prompt], tokens: int, out: Path, progress: Progress | None) -> Trace:
    from tiermoe.cluster.jobs.record.job import record  # torch

    sampling = SamplingParams(max_tokens=tokens, ignore_eos=True)
    record(_config(base, "on-demand", "1.0", 0.0), prompts, out, sampling, DISTANCES, progress)
    return Trace(out)


def _predicted(config: RunConfig, costs: MachineCosts, trace: Trace) -> dict[str, Any]:
    """Tokens per second with and without the routing; the hit rate, and a token's waits for copies, of the former."""
    settings = engine_settings(config)
    facts = facts_of_store(prepared_store(config, settings), config.model_dir)
    plan = make_plan(config, settings, facts, this_machine(local_ray(config, settings)), "this machine", here=False)
    hardware = measured_hardware(plan.prediction.hardware, costs, config.link.gbps)
    formula = predict_by_formula(plan.topology, plan.spec, facts, hardware, costs, "measured in this run")
    replayed = predict_by_trace(formula, plan.spec, facts, config, costs, trace)
    return {
        "predicted": replayed.tokens_per_s, "without_routing": formula.tokens_per_s,
        "predicted_hit_rate": replayed.hit_share,
        "predicted_wait_ms": replayed.parts_s["load_s"] * facts.layers * 1e3,
    }  # fmt: skip


def _measured(
    config: RunConfig, prompts: Sequence[Prompt], options: Predict, report: Report, progress: Progress | None,
    label: str,
) -> dict[str, Any]:  # fmt: skip
    """Median tokens per second and the spread over the prompts, the hit rate, and a token's waits for copies."""
    task = None if progress is None else progress.add_task(label, total=len(prompts))
    speeds: list[float] = []
    with closing(start_worker(config)) as worker:
        report.executor = worker.stats().executor
        for number, prompt in enumerate(prompts):
            if number == 1:
                worker.reset_stats()
            measures, _ = serve(worker.submit, [prompt], options.max_tokens)
            if number:
                speeds.append(1 / measures["tpot_s"])
            if progress is not None and task is not None:
                progress.advance(task)
        stats = worker.stats()
    forwards = options.max_tokens * (len(prompts) - 1)  # a prompt's counts as one
    return {
        "measured": median(speeds), "least": min(speeds), "most": max(speeds), "hit_rate": stats.hit_rate,
        "wait_ms": stats.total().blocked_io_s / forwards * 1e3,
    }  # fmt: skip
