"""Simulated sections, and the figures of one paper on recorded traces: ActiveEvict, MoEpic, fMoE.

A trace holds the model's own routing; clocks are virtual, so that every figure is deterministic.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import partial
from itertools import product
from statistics import median
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tiermoe.actors.policies.eviction import EvictionPolicy
from tiermoe.actors.policies.fmoe import ExpertMapPolicy, ExpertMapPrefetch
from tiermoe.actors.policies.fmoe.maps import ExpertMapStore, Sketch
from tiermoe.actors.policies.moepic import Lcp
from tiermoe.actors.policies.prefetch import most_probable
from tiermoe.actors.policy_settings import PolicySettings
from tiermoe.cluster.config import parse_budget
from tiermoe.cluster.jobs.bench.experiment import Section
from tiermoe.cluster.jobs.bench.metrics import Bar, Row, Spread, metric, values_of
from tiermoe.cluster.jobs.bench.run import Study
from tiermoe.cluster.jobs.bench.serving import Calibration, Recorded, Split, record_served, shape_of
from tiermoe.cluster.report.results import refused_row
from tiermoe.cluster.simulate.hit_rates import POLICIES, Ids, hit_rates, policies, result, serve
from tiermoe.cluster.simulate.machine import Machine, load_machine
from tiermoe.cluster.simulate.predictors import shown
from tiermoe.cluster.simulate.shapes import shape_named
from tiermoe.cluster.simulate.statistics import routing_of
from tiermoe.errors import TierMoeError

from .papers import engine_of_split, presets_of, synthetic, transfers

LinkAt = tuple[float | None, float | None]  # gigabytes (1e9) per second; ratio of loading over computing
_DISTANCE = 3  # layers ahead of the expert maps


# -- sections ----------------------------------------------------------------------------------------------------------


def recorded_rows(study: Study, section: Section, links: Sequence[LinkAt]) -> list[dict[str, Any]]:
    """Rows of all variants at each context, link and budget, as plain values.

    All contexts run on the machine that recorded the first context's trace; the section's own `ratios` are of it.

    Raises:
        ConfigError: no link is as fast as a ratio. What a variant is refused for is its row (`refused_row`).
    """
    experiment, rows, latency_us = study.experiment, list[dict[str, Any]](), study.base.link.latency_us
    presets = presets_of(section, experiment.workload.tau)
    machine = load_machine(study.recorded(study.contexts[0]).header, None, None, None)
    budgets, chosen = section.budgets or experiment.grid.budgets, links[:1] if section.links == "first" else links
    for context in study.contexts:
        recorded = study.recorded(context)
        if section.ratios is not None:
            computing = Calibration.of_machine(shape_of(recorded.header), machine, latency_us)
            chosen = [(computing.link(ratio, digits=3), ratio) for ratio in section.ratios]
        stepped = study.stepped(f"replaying {section.name}", len(chosen) * len(budgets) * len(presets))
        for (gbps, ratio), budget, (variant, preset) in product(chosen, budgets, presets):
            throttled = machine.model_copy(update={"link_gbps": gbps, "link_latency_us": latency_us})
            row = {"section": section.name, "context": context, "policy": variant.name, "preset": variant.preset,
                   "budget": budget, "link_gbps": gbps}  # fmt: skip
            try:
                (figures,) = replay(preset, budget, throttled, recorded, len(recorded.measure))
            except TierMoeError as error:
                rows.append(refused_row(error, **row))
            else:
                rows.append(row | {
                    "ratio": ratio, "lossless": preset.lossless, "executor": "simulated",
                    "writes_back": preset.evict_writeback, **figures,
                })  # fmt: skip
            stepped()
    return rows


def replay(
    preset: PolicySettings, budget: str, machine: Machine, recorded: Recorded, each: int
) -> list[dict[str, float]]:
    """Serve the requests to learn from, then the measured ones; figures of every `each` measured requests."""
    engine = engine_of_split(preset, parse_budget(budget), machine, recorded)
    serve(engine, recorded.learn)
    found = []
    for start in range(0, len(recorded.measure), each):
        engine.reset_stats()
        served = serve(engine, recorded.measure[start : start + each])
        counted = transfers(result(engine, served), served.generated)
        found.append({"tpot_ms": 1e3 * served.tpot_s, "ttft_ms": 1e3 * served.ttft_s, **asdict(counted)})
    return found


# -- ActiveEvict: transfers, blocking I/O (tables 2 and 3) -------------------------------------------------------------


def transfers_of_row(row: Row, tokens: int) -> dict[str, list[float]]:
    """`Transfers` of each repetition of an engine's row, whose repetitions generated so many tokens each.

    late_ms: delay of the copies against the link's stated rate, for each token.
    """
    each: list[dict[str, float]] = []
    for number in range(len(row["spread"]["tpot_s"]["values"])):
        counters: defaultdict[str, Any] = defaultdict(float)  # an absent counter was zero
        sources: defaultdict[str, defaultdict[str, float]] = defaultdict(lambda: defaultdict(float))
        for name, found in row["spread"].items():
            group, _, rest = name.partition(".")
            if group == "prefetch_sources":
                source, _, counter = rest.rpartition(".")
                sources[source][counter] = found["values"][number]
            else:
                counters[name] = found["values"][number]
        counters["prefetch_sources"] = sources
        late_s = counters["total_io_s"] - counters["link_s"]
        each.append(asdict(transfers(counters, tokens)) | {"late_ms": 1e3 * late_s / tokens})
    return {name: [found[name] for found in each] for name in each[0]}


def median_ratio(values: Sequence[float], over: Sequence[float]) -> float | None:
    """Median of the ratios by repetition; None where it is infinite.

    A zero in `over` counts as infinite: without its repetition the worst ratio would be hidden.
    """
    ratios = [a / b if b else math.inf for a, b in zip(values, over, strict=True) if a or b]
    middle = median(ratios) if ratios else math.inf
    return None if math.isinf(middle) else middle


@metric("activeevict-transfers")
def activeevict_transfers(study: Study, *, section: str) -> dict[str, Any]:
    """Add `Transfers` to a section's rows, and under `replayed` those of a replay of the same prompts."""
    work, latency_us = study.experiment.workload, study.base.link.latency_us
    cells = {(c.context, c.budget, c.gbps): c for c, _ in study.ran if c.section == section}
    recordings: dict[str, Recorded] = {}
    rows = [row for row in study.rows if row["section"] == section]
    stepped = study.stepped("replaying the same prompts", len(rows))
    for row in rows:
        cell = cells[row["context"], row["budget"], row["link_gbps"]]
        if cell.context not in recordings:
            prompts, out = Split(cell.warm, cell.prompts), study.scratch / f"served-{cell.context}"
            recordings[cell.context] = record_served(study.base, prompts, work.max_tokens, 2, out, study.progress)
        recorded, machine = recordings[cell.context], Machine(**study.settings["machine"])
        throttled = machine.model_copy(update={"link_gbps": cell.gbps, "link_latency_us": latency_us})
        policy = next(policy for policy in cell.policies if policy.name == row["policy"])
        again = replay(policy.settings, cell.budget, throttled, recorded, work.prompts)
        for name, values in transfers_of_row(row, work.prompts * work.max_tokens).items():
            row[name] = median(values)
            row["spread"][name] = asdict(Spread.of(values))
        row["same_tokens"] = 1.0 if row["lossless"] else row["same_tokens"]
        row["replayed"] = {name: [found[name] for found in again] for name in again[0]}
        row["blocked_over_replay"] = median_ratio(values_of(row, "blocking_ms"), row["replayed"]["blocking_ms"])
        if section not in study.settings:  # the first context's, as the machine of the replays
            header, now = recorded.header, load_machine(recorded.header, None, None, None)
            steps = [1e3 * Calibration.of_machine(shape_of(header), m, latency_us).tpot_s for m in (now, machine)]
            study.settings[section] = {"slot_bytes": header.slot_bytes, "step_ms": steps[0],
                                       "replayed_step_ms": steps[1]}  # fmt: skip
        stepped()
    return {}


@metric("activeevict-bars")
def activeevict_bars(
    study: Study, *, sections: Mapping[str, str], own: str, lossy: str, baselines: Sequence[str], limit: float
) -> dict[str, Any]:
    """Bars on the blocking I/O of `own` over the best prefetching baseline, and on the precision of all fetches.

    The ratio is the least over budgets and links of a context, once with write-back in the baselines (as published)
    and once without. Ratios of engine rows are medians over paired repetitions.

    Args:
        sections: suffix of the context in a bar's name, by section.
    """
    for section, label in sections.items():
        for context in dict.fromkeys(row["context"] for row in study.rows if row["section"] == section):
            mine = [row for row in study.rows if (row["section"], row["context"]) == (section, context)]
            for swaps, of in ((True, "as the baselines are, which write back"), (False, "where nobody writes back")):
                ratios = []
                for row in (row for row in mine if row["preset"] == own and not row["writes_back"]):
                    over = [
                        median_ratio(values_of(row, "blocking_ms"), values_of(other, "blocking_ms"))
                        for other in mine
                        if other["preset"] in baselines and other["writes_back"] == swaps
                        and (other["budget"], other["link_gbps"]) == (row["budget"], row["link_gbps"])
                    ]  # fmt: skip
                    if over and None not in over:
                        ratios.append(max(ratio for ratio in over if ratio is not None))
                least = min(ratios, default=math.nan)
                study.bars.append(Bar(f"{context}{label}: blocking I/O, {of}", least, "<=", limit))
            fetches = [(row, name) for row in mine if row["preset"] in (own, lossy) for name in ("precision", "recall")]
            least = min((min(values_of(row, name)) for row, name in fetches), default=math.nan)
            study.bars.append(Bar(f"{context}{label}: fetch precision and recall", least, ">=", 1.0))
    return {}


# -- MoEpic: hit rates by cache size (Table 1) -------------------------------------------------------------------------


@metric("moepic-table1")
def moepic_table1(
    study: Study, *, shares: Sequence[float], rhos: Sequence[float] = (), omegas: Sequence[int] = ()
) -> dict[str, Any]:
    """Hit rates by policy and size of each layer's cache, and those of LCP by rho and omega at the middle size.

    The requests to learn from are played first, uncounted. shares: of a layer's experts that its cache holds.
    """

    def measure() -> dict[str, Any]:
        recorded = study.recorded(study.contexts[0])
        header = recorded.header
        sizes = sorted({max(1, round(share * header.experts)) for share in shares})
        half, pairs = sizes[len(sizes) // 2], list(product(rhos, omegas))
        stepped = study.stepped("hit rates on the trace", len(POLICIES) * len(sizes) + len(pairs))
        ids = routing_of(header, [*recorded.learn, *recorded.measure]).ids.astype(np.int64)
        counted = np.arange(ids.shape[1]) >= routing_of(header, recorded.learn).ids.shape[1]
        table = hit_rates(ids, sizes, policies(), counted, stepped)
        named = {f"{rho:g} {omega}": partial(_lcp, rho, omega) for rho, omega in pairs}
        grid = {row.policy: row.overall for row in hit_rates(ids, [half], named, counted, stepped)}
        return {
            "experts": header.experts, "tokens": int(counted.sum()), "lcp_size": half,
            "rates": [{"policy": row.policy, "size": row.size, "hit_rate": row.overall} for row in table],
            "lcp": [{"rho": rho, "omega": omega, "hit_rate": grid[f"{rho:g} {omega}"]} for rho, omega in pairs],
        }  # fmt: skip

    return {"hits": study.journal.step("moepic-table1", measure)}


def _lcp(rho: float, omega: int, ids: Ids) -> EvictionPolicy:
    return Lcp(1, int(ids.max(initial=0)) + 1, rho, omega)


# -- fMoE: what expert maps find (Figures 8, 14a) ----------------------------------------------------------------------


@metric("paper-map-search")
def paper_map_search(study: Study, *, section: str, capacities: Sequence[int], sizes: Sequence[int]) -> dict[str, Any]:
    """Similarity of the matched maps by capacity, its correlation with the hit rate, and the bytes of a full store.

    Args:
        section: whose traces are searched, three layers ahead. sizes: capacities whose bytes are given.
    """
    on = next(s.simulation for s in study.experiment.sections if s.name == section)
    assert on is not None  # the metric's section is on synthetic routing
    rows = [
        {"context": f"{shape}, {family}", "capacity": capacity} | row
        for family, shape, capacity in product(on.traces.families, on.traces.shapes, capacities)
        for row in map_correlations(synthetic(study, on.traces, family, shape), capacity)
    ]
    memory = []
    for name, size in product(("mixtral-8x7b", "qwen1.5-moe-a2.7b", "phi-3.5-moe"), sizes):
        shape = shape_named(name)
        store = ExpertMapStore(shape.moe_layers, shape.experts, Sketch(shape.hidden).width, _DISTANCE, size)
        memory.append({"shape": name, "capacity": size, "bytes": store.nbytes})
    return {"map_search": rows, "map_memory": memory}


def map_correlations(recorded: Recorded, capacity: int, distance: int = _DISTANCE) -> list[dict[str, Any]]:
    """Pearson's r of a match's similarity and the share of the true top-k among the map's K most probable experts.

    The store has the requests to learn from, and none of the measured ones.

    Args:
        capacity: maps of the store. distance: layers from the last one seen to the first one foretold, less one.

    Returns:
        For each search (semantic, trajectory): r, None where one of the two is constant; mean_score, mean_hit, pairs.
    """
    header = recorded.header
    sketch = Sketch(header.hidden)
    store = ExpertMapStore(header.layers, header.experts, sketch.width, distance, capacity)
    policy = ExpertMapPolicy(ExpertMapPrefetch(store, header.hidden, header.top_k), header.hidden)
    for request in recorded.learn:  # as in serving
        for _ in shown(policy, request, header):
            pass
    semantic, trajectory = ("semantic", "-"), ("trajectory", "all")  # the search, and the layers that it has seen
    pairs: dict[tuple[str, str], list[tuple[float, float]]] = {semantic: [], trajectory: []}
    for step in (step for request in recorded.measure for step in request.iterations if step.decode):
        search = store.search(sketch(step.embedding[None]))
        match = search.match(semantic=True)
        assert match is not None  # the store has learnt
        shares = [_share(store, match[0], step.ids[0], layer) for layer in range(min(distance, header.layers))]
        pairs[semantic].append((float(match[1][0]), float(np.mean(shares))))
        for layer in range(header.layers - 1 - distance):
            search.observe(layer, step.probabilities[:, layer].astype(np.float32).mean(axis=0, keepdims=True))
            match = search.match(semantic=False)
            assert match is not None
            share = _share(store, match[0], step.ids[0], layer + 1 + distance)
            pairs[trajectory].append((float(match[1][0]), share))
    rows = []
    for (kind, seen), found in pairs.items():
        scores, hits = np.array(found).T
        r = float(np.corrcoef(scores, hits)[0, 1]) if scores.std() > 0 and hits.std() > 0 else None
        rows.append({"search": kind, "seen": seen, "learns": False, "r": r, "mean_score": float(scores.mean()),
                     "mean_hit": float(hits.mean()), "pairs": len(found)})  # fmt: skip
    return rows


def _share(store: ExpertMapStore, entries: Sequence[int], ids: NDArray[Any], layer: int) -> float:
    """Share of the layer's experts ids[layer] [K] that are among the K most probable of the matched map."""
    row = store.maps_of(entries, layer)[0]
    return len(set(most_probable(row, ids.shape[1])) & set(ids[layer].tolist())) / ids.shape[1]
