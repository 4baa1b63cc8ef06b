"""On which links moepic would be so much faster than its baselines: simulated, on a recorded trace."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from rich.progress import Progress

from .....actors.policies.cost import Link, load_s
from .....actors.policies.moepic.configure import Room, Times, configure
from .....actors.policies.moepic.split import CacheCut, LayerStatistics, Picks, buffer_for, observe
from .....actors.policy_settings import PolicySettings
from .....actors.settings import budget_bytes
from ....config import parse_budget
from ....simulate.executor import Machine, SimulatedEngine, context_of, engine_of, eviction_of, load_machine
from ....simulate.hit_rates import serve
from ....simulate.trace import Request, TraceHeader
from ..compare.sweep import Sweep
from ..recorded import Recorded
from .findings import BASELINES, OWN

RATIOS = (0.5, 1.0, 1.5, 2.0, 2.5, 3.0, 4.0, 6.0)  # loading over computing of the links that are tried
NEURONS = 128  # of an expert, in which a simulated cut is divided; only shares of it count
_REQUESTS = 8  # to learn from, and to measure, at most



def simulate(
    recorded: Recorded, sweep: Sweep, missed: Sequence[tuple[str, float, str]], progress: Progress | None
) -> dict[str, Any]:  # fmt: skip
    """TPOT of moepic and of those baselines that a trace can be replayed with, on links from fast to slow.

    Args:
        missed: cells whose budgets are simulated.

    Returns:
        rows: policy, budget, link_gbps, ratio (loading over computing of the simulated machine), tpot_ms. left_out:
        policies of which a trace has not what they predict from.
    """
    header, latency_us = recorded.header, sweep.base.link.latency_us
    budgets = list(dict.fromkeys(budget for budget, _, _ in missed))
    names = [name for name in (*BASELINES, OWN) if name in sweep.policies]
    usable = [name for name in names if replayable(sweep.preset(name), header)]
    links = simulated_links(header, latency_us)
    task = None
    if progress is not None:
        task = progress.add_task("simulated links", total=len(budgets) * len(links) * len(usable))
    learn, measure = recorded.learn[:_REQUESTS], recorded.measure[:_REQUESTS]
    rows = []
    for budget in budgets:
        for ratio, gbps in links:
            machine = load_machine(header, None, gbps, latency_us)
            for name in usable:
                engine = simulated_engine(sweep.preset(name), header, machine, parse_budget(budget), learn)
                rows.append({
                    "policy": name, "budget": budget, "link_gbps": gbps, "ratio": ratio,
                    "tpot_ms": 1e3 * replayed_tpot_s(engine, learn, measure),
                })  # fmt: skip
                if progress is not None and task is not None:
                    progress.advance(task)
    left_out = [name for name in names if name not in usable]
    return {"rows": rows, "left_out": left_out}


def replayable(preset: PolicySettings, header: TraceHeader) -> bool:
    """Whether a trace has what a preset goes by: its own predictions are those of the model's routers."""
    known = preset.prefetch.kind in ("none", "next-gate", "speculative", "random", "activation-matrix", "popularity")
    return known and not preset.uses_ndp and not preset.reroutes and header.distances >= 1


def simulated_links(header: TraceHeader, latency_us: float) -> list[tuple[float, float]]:
    """Loading over computing and gigabytes per second of each link that is tried, from fast to slow."""
    machine = load_machine(header, None, None, None)
    token_s = machine.forward_s + header.layers * (machine.dense(1) + machine.experts(header.top_k, header.top_k))
    found = []
    for ratio in RATIOS:
        transfer_s = ratio * token_s / header.layers / header.top_k - latency_us * 1e-6
        if transfer_s > 0:
            found.append((ratio, float(f"{header.slot_bytes / transfer_s / 1e9:.3g}")))
    return found


def simulated_engine(
    preset: PolicySettings, header: TraceHeader, machine: Machine, budget: float | int, learn: Sequence[Request]
) -> SimulatedEngine:
    """An engine of this preset; where it configures itself, with the cut that the learnt requests give."""
    top = header.top_k if preset.prefetch.top is None else min(preset.prefetch.top, header.top_k)
    cut = cut_of(preset, header, machine, budget, learn)
    predicted = preset.prefetch.model_copy(update={"top": top})  # a trace holds no more
    policy = preset.on_miss.make_prefetch(predicted, context_of(header))
    return engine_of(preset, header, machine, budget, eviction_of(preset, header), policy, cut, adapts=False)


def replayed_tpot_s(engine: SimulatedEngine, learn: Sequence[Request], measure: Sequence[Request]) -> float:
    """Mean over the measured requests, after the others."""
    serve(engine, learn)
    return serve(engine, measure).tpot_s


def cut_of(
    preset: PolicySettings, header: TraceHeader, machine: Machine, budget: float | int, learn: Sequence[Request]
) -> CacheCut | None:
    """The preset's cut: fixed, or the one that its configurator makes of these requests; None where it has none."""
    split = preset.split
    if split.kind == "off":
        return None
    keys = header.layers * header.experts
    pool = min(budget_bytes(budget, header.slot_bytes, keys) // header.slot_bytes, keys) * NEURONS
    buffer = buffer_for(split.theta, header.top_k) if split.buffer is None else split.buffer
    fixed = CacheCut.uniform(header.layers, header.experts, NEURONS, pool, split.theta, buffer)
    if split.kind == "fixed":
        return fixed
    times = Times(
        machine.dense(1), machine.experts(header.top_k, header.top_k), machine.forward_s,
        load_s(header.slot_bytes, machine.link or Link(1e6)),
    )  # fmt: skip
    found = configure(
        statistics_of(header, learn), times, Room(NEURONS, pool, header.top_k, split.buffer), fixed, zeta=split.zeta,
        min_gain=split.min_gain, allocation=split.allocation, guesses=header.top_k,
    )  # fmt: skip
    return fixed if found is None else found.cut


def statistics_of(header: TraceHeader, requests: Sequence[Request]) -> list[LayerStatistics]:
    """Of each layer, token by token; predictions are those of the layer before it, the first layer has none."""
    found = []
    for layer in range(header.layers):
        ids, scores = [], []
        for request in requests:
            for step in request.iterations:
                ids.append(step.ids[:, layer].astype(np.int64))
                ahead = step.lookahead(layer - 1, 1) if layer else None
                scores.append(ahead if ahead is not None else np.full((len(step.ids), header.experts), np.nan))
        picks = Picks.of_tokens(np.concatenate(ids), header.experts, np.concatenate(scores))
        found.append(observe(picks, "lcp")[0])
    return found
