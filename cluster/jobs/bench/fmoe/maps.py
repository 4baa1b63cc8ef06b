"""What expert maps can do on recorded routing: hit rate by distance and capacity, similarity against hit rate, recall.

Here the search takes no time: it runs in the forward (`ExpertMapPolicy`), on the simulated executor's clock.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .....actors.policies.fmoe import ExpertMapEviction, ExpertMapPolicy, ExpertMapPrefetch
from .....actors.policies.fmoe.maps import ExpertMapStore, MapSearch, Sketch
from .....actors.policies.prefetch import PrefetchGovernor, PrefetchPolicy, most_probable
from .....actors.policies.registry import make, options
from ....config import load_policy
from ....simulate.executor import SimulatedEngine, context_of, load_machine
from ....simulate.hit_rates import serve
from ....simulate.predictors import Recall, recall, shown, train_predictors
from ....simulate.trace import Iteration, Request, TraceHeader
from ..recorded import Recorded

DISTANCES = (1, 2, 3, 4, 5, 6)
CAPACITIES = (16, 64, 256, 1024, 4096)
DISTANCE, CAPACITY = 3, 1000  # the preset's and the matcher's own
Stepped = Callable[[], None]


@dataclass(frozen=True)
class Correlation:
    """Pearson's r of a match's similarity and the share of the true top-k among the map's K most probable experts.

    search: semantic or trajectory. layer: the last that was seen, for trajectories; None: all of them together.
    learns: whether iterations that were measured are stored too, as when serving; earlier tokens of a request are then
    among what it is matched with.
    mean_score, mean_hit: of all pairs. r is None where one of the two does not vary.
    """

    search: str
    layer: int | None
    learns: bool
    r: float | None
    mean_score: float
    mean_hit: float
    pairs: int


def hit_rates(
    recorded: Recorded, distances: Sequence[int], capacities: Sequence[int], budget: float, gbps: float,
    stepped: Stepped,
) -> list[dict[str, Any]]:  # fmt: skip
    """Simulated hit rate of `fmoe` by prefetch distance (with the largest capacity) and by capacity (at distance 3)."""
    most = max(capacities)
    cases = [("distance", d, most) for d in distances if d < recorded.header.layers]
    cases += [("capacity", DISTANCE, capacity) for capacity in capacities]
    rows = []
    for varied, distance, capacity in cases:
        rows.append({"varied": varied, "distance": distance, "capacity": capacity, "budget": budget, "link_gbps": gbps}
                    | _replayed(recorded, distance, capacity, budget, gbps))  # fmt: skip
        stepped()
    return rows


def correlations(
    recorded: Recorded, distance: int = DISTANCE, capacity: int = CAPACITY, learns: bool = True
) -> list[Correlation]:
    """Similarity against hit rate over the measured decode iterations, for both searches."""
    header = recorded.header
    policy, store = _policy(header, distance, capacity, None)
    teach(policy, recorded.learn, header)
    sketch, pairs = Sketch(header.hidden), dict[tuple[str, int | None], list[tuple[float, float]]]()
    for request in recorded.measure:
        for step in request.iterations:
            if step.decode:
                search = MapSearch(store, sketch(step.embedding[None]))
                match = search.semantic()
                assert match is not None  # it has learnt
                first = range(min(distance, header.layers))
                shares = [_share(store, match.entries, step.ids[0], layer) for layer in first]
                pairs.setdefault(("semantic", None), []).append((float(match.scores[0]), float(np.mean(shares))))
                for layer in range(header.layers - 1 - distance):
                    search.observe(layer, _mean(step, layer))
                    match = search.trajectory()
                    assert match is not None
                    share = _share(store, match.entries, step.ids[0], layer + 1 + distance)
                    for key in (("trajectory", layer), ("trajectory", None)):
                        pairs.setdefault(key, []).append((float(match.scores[0]), share))
            if learns:
                _store(store, sketch, step)
    return [_correlation(search, layer, learns, found) for (search, layer), found in pairs.items()]


def recalls(recorded: Recorded, distances: Sequence[int], stepped: Stepped) -> list[Recall]:
    """Recall of the true top-k by source and distance; learnt on one part, measured on the other.

    A map's distance here is from the layer that was seen last, as for all sources.
    """
    header = recorded.header

    def plain(kind: str) -> Callable[[int], PrefetchPolicy | None]:
        def source(distance: int) -> PrefetchPolicy | None:
            if kind == "next-gate" and distance > header.distances:
                return None
            predictors = train_predictors(header, recorded.learn, distance) if kind == "stride" else None
            chosen = options("prefetch", {"kind": kind, "distance": distance})
            found: PrefetchPolicy | None = make("prefetch", chosen, context_of(header, predictors=predictors))
            return found

        return source

    def maps(capacity: int) -> Callable[[int], PrefetchPolicy | None]:
        return lambda distance: _policy(header, distance - 1, capacity, None)[0]

    sources = {kind: plain(kind) for kind in ("next-gate", "popularity", "activation-matrix", "stride")}
    sources |= {f"expert-map, {capacity} maps": maps(capacity) for capacity in (CAPACITY, max(CAPACITIES))}
    usable = [d for d in distances if d < header.layers]
    return recall(header, sources, usable, recorded.learn, recorded.measure, stepped)


def balance(recorded: Recorded) -> dict[str, float]:
    """How even routing is over the measured decode rows.

    entropy: of the experts' shares in a layer over log E, mean over layers; 1 is even. top_share: part of all choices
    that falls on the K most popular experts of each layer. persistence: part of a token's experts that the token
    before it used in the same layer.
    """
    header = recorded.header
    counts = np.zeros((header.layers, header.experts))
    kept, asked = 0, 0
    for request in recorded.measure:
        before: NDArray[Any] | None = None
        for step in request.iterations:
            if not step.decode:
                continue
            ids = step.ids[0].astype(np.int64)  # [L, K]
            np.add.at(counts, (np.arange(header.layers)[:, None], ids), 1)
            if before is not None:
                kept += int((ids[:, :, None] == before[:, None, :]).any(axis=2).sum())
                asked += ids.size
            before = ids
    shares = counts / counts.sum(axis=1, keepdims=True)
    entropy = -np.sum(shares * np.log(np.where(shares > 0, shares, 1.0)), axis=1) / np.log(header.experts)
    most = np.sort(shares, axis=1)[:, -header.top_k :].sum(axis=1)
    return {"entropy": float(entropy.mean()), "top_share": float(most.mean()), "persistence": kept / max(asked, 1)}


def teach(policy: PrefetchPolicy, requests: Sequence[Request], header: TraceHeader) -> None:
    """Show a policy what it would have seen while serving these."""
    for request in requests:
        for _ in shown(policy, request, header):
            pass


def _policy(
    header: TraceHeader, distance: int, capacity: int, eviction: ExpertMapEviction | None
) -> tuple[ExpertMapPolicy, ExpertMapStore]:
    width = Sketch(header.hidden).width
    store = ExpertMapStore(header.layers, header.experts, width, distance, capacity)
    maps = ExpertMapPrefetch(store, header.hidden, header.top_k)
    return ExpertMapPolicy(maps, header.hidden, None if eviction is None else eviction.expect), store


def _replayed(recorded: Recorded, distance: int, capacity: int, budget: float, gbps: float) -> dict[str, float]:
    header, preset = recorded.header, load_policy("fmoe")
    eviction = make("eviction", preset.eviction, context_of(header))
    assert isinstance(eviction, ExpertMapEviction)  # the preset's
    policy, store = _policy(header, distance, capacity, eviction)
    teach(policy, recorded.learn, header)
    machine = load_machine(header, None, gbps, 10.0)
    engine = SimulatedEngine(header, machine, budget, eviction, policy, PrefetchGovernor(preset.prefetch.min_useful))
    served = serve(engine, recorded.measure)
    total = engine.stats.total()
    return {
        "hit_rate": engine.stats.hit_rate, "tpot_ms": 1e3 * served.tpot_s, "bytes_wasted": total.bytes_wasted,
        "bytes_loaded_prefetch": total.bytes_loaded_prefetch, "maps": len(store),
    }  # fmt: skip


def _mean(step: Iteration, layer: int) -> NDArray[np.float32]:
    """P_layer of an iteration [1, E]."""
    found: NDArray[np.float32] = step.probabilities[:, layer].astype(np.float32).mean(axis=0, keepdims=True)
    return found


def _store(store: ExpertMapStore, sketch: Sketch, step: Iteration) -> None:
    search = MapSearch(store, sketch(step.embedding[None]))
    for layer in range(store.layers):
        search.observe(layer, _mean(step, layer))
    search.commit()


def _share(store: ExpertMapStore, entries: NDArray[np.int64], ids: NDArray[Any], layer: int) -> float:
    """Of the experts ids [L, K] of a layer, those among the K most probable of the matched map."""
    row = store.maps_of(entries, range(layer, layer + 1))[0, 0]
    return len(set(most_probable(row, ids.shape[1])) & set(ids[layer].tolist())) / ids.shape[1]


def _correlation(
    search: str, layer: int | None, learns: bool, pairs: Sequence[tuple[float, float]]
) -> Correlation:
    scores, hits = np.array(pairs).T
    varies = scores.std() > 0 and hits.std() > 0
    r = float(np.corrcoef(scores, hits)[0, 1]) if varies else None
    return Correlation(search, layer, learns, r, float(scores.mean()), float(hits.mean()), len(pairs))
