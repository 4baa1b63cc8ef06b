"""fMoE (section 6) on its six-GPU testbed, simulated.

The text states means over models and data sets; most figures are plots only, so those comparisons are of direction. The
traces are the synthetic families, not the paper's data sets. The paper does not state its cache: a quarter here.

Baselines against the paper's: `moe-infinity-sync` waits for its prefetches, as section 4.3 says of MoE-Infinity.
`deepspeed-inference` loads every expert of a layer when the layer runs, so no access is a hit; the paper adds a cache
to it, whose hit rate is not zero: `on-demand` (LRU, no prefetch) is that reading. ProMoE's predictors are trained on
the same requests that fMoE learns from. All of them run on one engine: the paper's run on MoE-Infinity's code, whose
iteration takes about 600 ms (section 6.7: 30 ms are 5% of it); sections `host` and `maps` sweep that. The families'
next-layer router names 0.86 of a layer's experts, which no map does: section `recall` lowers it.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import product
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tiermoe.actors.policies.fmoe import ExpertMapPolicy, ExpertMapPrefetch
from tiermoe.actors.policies.fmoe.maps import ExpertMapStore, Sketch
from tiermoe.actors.policies.prefetch import most_probable
from tiermoe.cluster.jobs.bench.experiment import Experiment, Variant, variants
from tiermoe.cluster.jobs.bench.metrics import Row
from tiermoe.cluster.jobs.bench.page import pivot
from tiermoe.cluster.jobs.bench.run import Study
from tiermoe.cluster.jobs.bench.serving import Recorded
from tiermoe.cluster.simulate.predictors import shown
from tiermoe.cluster.simulate.shapes import shape_named

from ..papers import CLAIMS, ROUTING, Comparison, Synthetic, Traces, judged

on = partial(Synthetic, machine="3090x6-nvlink")
FIG12_TRACES = Traces(("flat", "sticky"), ("qwen1.5-moe-a2.7b", "mixtral-8x7b"), learn=7, measure=2, prompt=32,
                      decode=20, layers=10)  # fmt: skip
FIG14B_VARIANTS = variants("mixtral-offloading", "promoe", "moe-infinity-sync", "fmoe")
_SECTIONS = (
    on("fig9",
       variants("on-demand", "deepspeed-inference", "mixtral-offloading", "promoe", "moe-infinity-sync", "fmoe"),
       traces=Traces(("flat", "sticky"), ("qwen1.5-moe-a2.7b", "mixtral-8x7b", "phi-3.5-moe"), learn=7, measure=3,
                     prompt=32, decode=24, layers=12)),
    on("fig10", variants("deepspeed-inference", "mixtral-offloading", "moe-infinity-sync", "fmoe"),
       traces=Traces(("flat",), ("qwen1.5-moe-a2.7b", "mixtral-8x7b"), learn=0, measure=10, prompt=64, decode=16,
                     layers=12), batch=4, rate=2.0),
    on("fig11", variants("deepspeed-inference", "mixtral-offloading", "promoe", "moe-infinity-sync", "fmoe"),
       budgets=("6GB",),
       traces=Traces(("flat",), ("qwen1.5-moe-a2.7b", "mixtral-8x7b", "phi-3.5-moe"), learn=3, measure=1, prompt=32,
                     decode=16)),
    on("fig12",
       variants(Variant("speculate", "fmoe", {"eviction": {"kind": "lfu"}, "prefetch": {"kind": "next-gate"}}),
                Variant("hit-count", "moe-infinity"), "fmoe-t", "fmoe-ts", "fmoe",
                Variant("fmoe-lru", "fmoe", {"eviction": {"kind": "lru"}}),
                Variant("fmoe-lfu", "fmoe", {"eviction": {"kind": "lfu"}})), traces=FIG12_TRACES),
    on("distance",
       variants(Variant("fine-1", "fmoe", {"prefetch": {"distance": 1}}), Variant("fine-3", "fmoe"),
                Variant("fine-6", "fmoe", {"prefetch": {"distance": 6}}),
                Variant("coarse-1", "moe-infinity", {"prefetch": {"distance": 1}}), Variant("coarse-3", "moe-infinity"),
                Variant("coarse-6", "moe-infinity", {"prefetch": {"distance": 6}})),
       traces=Traces(("flat",), ("qwen1.5-moe-a2.7b", "mixtral-8x7b"), learn=7, measure=2, prompt=32, decode=20,
                     layers=10), sweep={"machine.matcher_s": (0, 0.004)}),
    on("fig14b", FIG14B_VARIANTS,
       traces=Traces(("flat",), ("mixtral-8x7b",), learn=4, measure=4, prompt=32, decode=20, layers=10),
       sweep={"batch": (1, 2, 4)}),
    on("host", variants("on-demand", "mixtral-offloading", "promoe", "moe-infinity-sync", "fmoe"), traces=FIG12_TRACES,
       sweep={"machine.dense_s": (0.0005, 0.02)}),
    on("maps", FIG14B_VARIANTS,
       traces=Traces(("sticky",), ("qwen1.5-moe-a2.7b",), learn=48, measure=2, prompt=32, decode=20, layers=8),
       sweep={"machine.dense_s": (0.0005, 0.02)}),
    on("recall", variants("mixtral-offloading", "fmoe"),
       traces=Traces(("flat",), ("qwen1.5-moe-a2.7b", "mixtral-8x7b"), learn=7, measure=2, prompt=32, decode=20,
                     layers=10, recalls=(0.45, 0.4, 0.35, 0.3)), sweep={"machine.dense_s": (0.0005, 0.02)}),
)  # fmt: skip
COMPARISONS = (
    Comparison("Figure 9, TTFT of fMoE over", "6.2: by 44%, 35%, 33%, 30%", "fig9", "ttft_s",
               {"deepspeed-inference": 0.56, "mixtral-offloading": 0.65, "promoe": 0.67, "moe-infinity-sync": 0.7},
               of="fmoe",
               why={"deepspeed-inference": "the cell that does not is Mixtral's", "mixtral-offloading": "see below"}),
    Comparison("Figure 9, TPOT of fMoE over", "6.2: by 70%, 61%, 55%, 48%", "fig9", "tpot_s",
               {"deepspeed-inference": 0.3, "mixtral-offloading": 0.39, "promoe": 0.45, "moe-infinity-sync": 0.52},
               of="fmoe",
               why={"deepspeed-inference": "whole layers: 4 to 35 times the bytes of `on-demand`",
                    "mixtral-offloading": "see below", "moe-infinity-sync": "a third of the effect"}),
    Comparison("Figure 9, hit rate of fMoE over", "6.2: by 147%, 11%, 34%, 63%", "fig9", "hit_rate",
               {"on-demand": 2.47, "mixtral-offloading": 1.11, "promoe": 1.34, "moe-infinity-sync": 1.63},
               of="fmoe",
               why={"on-demand": "LRU keeps more where routing repeats (*sticky*)", "mixtral-offloading": "see below"}),
    Comparison("Figure 10, median latency of fMoE over", "6.3", "fig10", "latency_p50_s",
               {"deepspeed-inference": "lower", "mixtral-offloading": "lower", "moe-infinity-sync": "lower"},
               of="fmoe",
               why={"deepspeed-inference": "the cell that does not is Mixtral's", "mixtral-offloading": "see below"}),
    Comparison("Figure 11 at 6 GB, TPOT of fMoE over", "6.4: by 32%, 24%, 18%, 18%", "fig11", "tpot_s",
               {"deepspeed-inference": 0.68, "mixtral-offloading": 0.76, "promoe": 0.82, "moe-infinity-sync": 0.82},
               of="fmoe", why={"mixtral-offloading": "see below"}),
    Comparison("Figure 12a, hit rate of fMoE over", "6.5: the hit rate increases gradually", "fig12", "hit_rate",
               {"speculate": "higher", "hit-count": "higher", "fmoe-t": "higher", "fmoe-ts": "higher"},
               of="fmoe", why={"speculate": "the next layer's router names more"}),
    Comparison("Figure 12b, hit rate of fMoE over its prefetch with",
               "6.5: LRU performs poorly, LFU higher than LRU, fMoE surpasses both", "fig12", "hit_rate",
               {"fmoe-lru": "higher", "fmoe-lfu": "higher"}, of="fmoe"),
    Comparison("Figure 4, hit rate of maps, 1 layer ahead, over", "2.5", "distance", "hit_rate", {"coarse-1": "higher"},
               of="fine-1"),
    Comparison("Figure 4, hit rate of maps, 3 layers ahead, over", "2.5", "distance", "hit_rate",
               {"coarse-3": "higher"}, of="fine-3"),
    Comparison("Figure 4, hit rate of maps, 6 layers ahead, over", "2.5", "distance", "hit_rate",
               {"coarse-6": "higher"}, of="fine-6"),
    Comparison("Figure 13, TPOT at 3 layers, no lag, over",
               "6.6: small distances do not hide the delay, large ones hit less", "distance", "tpot_s",
               {"fine-1": "lower", "fine-6": "lower"}, of="fine-3", where={"matcher_s": 0},
               why={"fine-1": "maps get worse with each layer faster than the link gains"}),
    Comparison("Figure 13, TPOT at 3 layers, lag of 4 ms, over", "6.6", "distance", "tpot_s",
               {"fine-1": "lower", "fine-6": "lower"}, of="fine-3", where={"matcher_s": 0.004},
               why={"fine-1": "maps get worse with each layer faster than the link gains"}),
    Comparison("Figure 14b, TPOT of fMoE at batch 1 to 4 over", "6.6: the lowest in most cases", "fig14b", "tpot_s",
               {"mixtral-offloading": "lower", "promoe": "lower", "moe-infinity-sync": "lower"}, of="fmoe",
               why={"mixtral-offloading": "see below"}),
    Comparison("Figure 9 with section 6.1's DeepSpeed, on-demand loading with a cache: TPOT of fMoE over", "6.1, 6.2",
               "fig9", "tpot_s", {"on-demand": 0.3}, of="fmoe", headline=False),
    Comparison("bytes of fMoE over", "", "fig9", "bytes_loaded", {"on-demand": "higher"}, of="fmoe", headline=False,
               why="not a claim of the paper: what a hit rate costs"),
    Comparison("assumed: 20 ms of a layer outside experts; TPOT of fMoE over", "6.7, as Figure 9", "host", "tpot_s",
               {"mixtral-offloading": 0.39, "promoe": 0.45, "moe-infinity-sync": 0.52}, of="fmoe",
               where={"dense_s": 0.02}, headline=False),
    Comparison("assumed: 0.5 ms of a layer outside experts; TPOT of fMoE over", "as Figure 9", "host", "tpot_s",
               {"mixtral-offloading": 0.39, "promoe": 0.45, "moe-infinity-sync": 0.52}, of="fmoe",
               where={"dense_s": 0.0005}, headline=False),
    Comparison("assumed: 1,000 maps; hit rate of fMoE over", "as Figure 9", "maps", "hit_rate",
               {"mixtral-offloading": 1.11, "promoe": 1.34, "moe-infinity-sync": 1.63}, of="fmoe", headline=False),
    Comparison("assumed: 1,000 maps, 20 ms; TPOT of fMoE over", "as Figure 9", "maps", "tpot_s",
               {"mixtral-offloading": 0.39, "promoe": 0.45, "moe-infinity-sync": 0.52}, of="fmoe",
               where={"dense_s": 0.02}, headline=False),
    Comparison("assumed: next-router recall 0.45; TPOT of fMoE over", "as Figure 9", "recall", "tpot_s",
               {"mixtral-offloading": 0.39}, of="fmoe", headline=False),
    Comparison("assumed: next-router recall 0.45; hit rate of fMoE over", "as Figure 9", "recall", "hit_rate",
               {"mixtral-offloading": 1.11}, of="fmoe", headline=False),
)  # fmt: skip


def _cell_0(row: Row) -> str:
    return f"{row['context']}, {row['dense_s'] * 1e3:g} ms"


_TABLES = {
    "fig9": pivot([("policy", "{policy}")], "{shape}", "{ttft_ms:.1f} ms, {tpot_ms:.1f} ms, {hit_rate:.1%}",
                  each=("family",), heading="Routing {family}; TTFT, TPOT, hit rate:", section="fig9"),
    "fig10": pivot([("policy", "{policy}")], "{shape}",
                   "{latency_p50_s:.2f} s half, {latency_p99_s:.2f} s 99%, {queue_s:.2f} s queue", section="fig10"),
    "fig11": pivot([("policy", "{policy}")], "{shape}", "{tpot_ms:.1f} ms, {hit_rate:.1%}", section="fig11"),
    "fig12": pivot([("variant", "{policy}")], "{context}", "{hit_rate:.1%}", section="fig12"),
    "distance": pivot([("variant", "{policy}")], lambda row: f"{row['shape']}, lag {row['matcher_s'] * 1e3:g} ms",
                      "{ttft_ms:.1f} ms, {tpot_ms:.1f} ms, {hit_rate:.1%}", section="distance"),
    "fig14a-and-8": pivot([("trace", "{context}"), ("search", "{search}")], "{capacity} maps",
                          "similarity {mean_score:.3f}, r {r:.2f}", source="map_search"),
    "fig14b": pivot([("policy", "{policy}")], "batch {batch}", "{ttft_ms:.1f} ms, {tpot_ms:.1f} ms", section="fig14b"),
    "fig16": pivot([("model", "{shape}")], "{capacity} maps", lambda row: f"{row['bytes'] / 1e6:.1f} MB",
                   source="map_memory"),
    "host": pivot([("policy", "{policy}")], _cell_0, "{tpot_ms:.1f} ms, {hit_rate:.1%}", section="host"),
    "maps": pivot([("policy", "{policy}")], lambda row: f"{row['dense_s'] * 1e3:g} ms",
                  "{tpot_ms:.1f} ms, {hit_rate:.1%}", section="maps"),
    "recall": pivot([("policy", "{policy}")], _cell_0, "{tpot_ms:.1f} ms, {hit_rate:.1%}", section="recall"),
}  # fmt: skip


_DISTANCE = 3  # layers ahead of the expert maps


def experiment() -> Experiment:
    """fMoE against its baselines on six RTX 3090: published figure, ours, and their ratio."""
    return Experiment(
        name="paper-fmoe", title="fMoE's figures, simulated", command="papers --only fmoe",
        sections=_SECTIONS, after=_after, tables=CLAIMS | ROUTING | _TABLES,
    )  # fmt: skip


def _after(study: Study) -> dict[str, Any]:
    """The comparisons, and of the traces of `fig12`: similarity of the matched maps by capacity, and its correlation.

    map_memory: bytes of a full store.
    """
    rows = [
        {"context": f"{shape}, {family}", "capacity": capacity} | row
        for family, shape, capacity in product(FIG12_TRACES.families, FIG12_TRACES.shapes, (16, 64, 256))
        for row in map_correlations(FIG12_TRACES.recorded(study, family, shape), capacity)
    ]
    memory = []
    for name, size in product(("mixtral-8x7b", "qwen1.5-moe-a2.7b", "phi-3.5-moe"), (1000, 32000)):
        shape = shape_named(name)
        store = ExpertMapStore(shape.moe_layers, shape.experts, Sketch(shape.hidden).width, _DISTANCE, size)
        memory.append({"shape": name, "capacity": size, "bytes": store.nbytes})
    return judged(COMPARISONS, study) | {"map_search": rows, "map_memory": memory}


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
