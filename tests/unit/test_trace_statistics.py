"""Statistics of routing, by hand on tiny routings, and against the engine's own policies."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import traces
from commands import Command
from orders_reference import Lru

from tiermoe.actors.budget import Budget
from tiermoe.cluster.simulate.executor import Policies, SimulatedEngine
from tiermoe.cluster.simulate.hit_rates import hit_rates, policies, result, serve
from tiermoe.cluster.simulate.machine import Machine
from tiermoe.cluster.simulate.statistics import (
    CACHES,
    Routing,
    cache_hits,
    chance_overlap,
    distinct_in_windows,
    figures_of,
    loads,
    overlap,
    phase_cosines,
    popularity,
    reuse,
    routing_of,
)
from tiermoe.cluster.simulate.trace import Trace


def skewed(layers: int, tokens: int, experts: int, top_k: int, seed: int = 0) -> np.ndarray:
    """Ids [L, n, K], some experts more often than others."""
    rng = np.random.default_rng(seed)
    scores = rng.normal(size=(layers, 1, experts)) + rng.gumbel(size=(layers, tokens, experts))
    return np.argsort(-scores, axis=2)[..., :top_k]


@pytest.mark.parametrize("policy", ["lru", "lfu", "belady"])
def test_hits_equal_those_of_the_engine_s_policies(policy: str) -> None:
    """Two independent computations of one hit rate agree to the last hit."""
    ids, sizes = skewed(3, 300, 12, 3), [3, 4, 7, 12]
    found = cache_hits(ids, 12, sizes)[CACHES.index(policy), :, :, 0] / (300 * 3)
    rows = hit_rates(ids, sizes, policies((policy,)))
    assert found.tolist() == [list(row.per_layer) for row in rows]


def test_popularity_by_hand() -> None:
    flat = popularity(np.full((2, 8), 5.0))
    assert flat == pytest.approx(
        {"gini": 0, "lognormal_sigma": 0, "max_over_mean": 1, "top_quarter": 0.25, "entropy": 1, "unused": 0}
    )
    one = popularity(np.array([[0.0, 0, 0, 8]]))
    assert one == pytest.approx(
        {"gini": 0.75, "lognormal_sigma": 0, "max_over_mean": 4, "top_quarter": 1, "entropy": 0, "unused": 0.75},
        abs=1e-6,
    )


def test_overlap_and_windows_stay_inside_a_request() -> None:
    ids = np.array([[[0, 1], [1, 2], [1, 2], [3, 0]]])
    one, two = np.zeros(4, int), np.array([0, 0, 1, 1])
    assert overlap(ids, one, 1).tolist() == [0.5]  # 1/2, 2/2, 0/2
    assert overlap(ids, two, 1).tolist() == [0.25]  # 1/2, 0/2
    assert np.isnan(overlap(ids, two, 2)).all()
    assert distinct_in_windows(ids, one, 4, [2, 4])[:, 0].tolist() == [pytest.approx(9 / 3), 4]
    assert distinct_in_windows(ids, two, 4, [2])[:, 0].tolist() == [3.5]
    assert loads(ids, 4).tolist() == [[2, 3, 2, 1]]
    assert chance_overlap(np.full((1, 4), 7.0), 2).tolist() == [0.5]


def test_reuse_by_hand() -> None:
    found = reuse(np.array([[0, 1], [1, 2], [2, 3], [0, 1]]), 4)
    assert found.tokens.tolist() == [[0, 0], [1, 0], [1, 0], [3, 2]]
    assert found.depth.tolist() == [[4, 4], [0, 4], [0, 4], [3, 2]]  # before the last: order 3, 2, 1, 0


def test_prefill_predicts_decode_where_requests_reuse_their_experts() -> None:
    ids = np.array([[[0], [0], [1], [1], [1], [0]]])
    request, later = np.array([0, 0, 0, 1, 1, 1]), np.array([False, False, True] * 2)
    found = phase_cosines(ids, request, later, 2)
    assert (found[0].tolist(), found[1].tolist()) == ([0.0], [1.0])
    assert phase_cosines(ids, request, np.zeros(6, bool), 2) is None


def test_statistics_of_a_trace(tmp_path: Path, command: Command) -> None:
    """The look-ahead of these traces is the later layers' own routing, so its recall is 1."""
    traces.write(tmp_path / "t", traces.header(), [[1, 2, 3], [4, 5]], decodes=6)
    record = command.json("trace", "stats", tmp_path / "t", "--slots", "2,3")
    assert (record["tokens"], record["decode_tokens"], record["requests"]) == (17, 12, 2)
    assert record["next_router"] == [1.0, 1.0]
    assert 0 < record["token_entropy"] < 1
    assert [line["size"] for line in record["hit_rates"]] == [2, 3]
    for line in record["hit_rates"]:
        for cache in CACHES:
            whole = (5 * line[f"{cache}_prefill"] + 12 * line[f"{cache}_decode"]) / 17
            assert line[cache] == pytest.approx(whole)
    assert "--slots is '1'" in command.refusal("trace", "stats", tmp_path / "t", "--slots", "1")


def test_a_trace_without_decode(tmp_path: Path) -> None:
    ids = skewed(2, 9, 4, 2)
    record = figures_of(Routing(ids, np.arange(9) // 9, np.zeros(9, bool), 4))
    assert (record["prefill_decode_cosine"], record["next_router"], record["token_entropy"]) == (None, None, None)
    assert "lru_decode" not in record["hit_rates"][0]
    assert record["distinct"]["64"] is None


def test_a_replay_s_hits_by_phase(tmp_path: Path) -> None:
    traces.write(tmp_path / "t", traces.header(), [[1, 2, 3], [4, 5]], decodes=6)
    trace = Trace(tmp_path / "t")
    machine = Machine(name="any", **traces.COSTS.model_dump(), link_gbps=1e-2)
    engine = SimulatedEngine(trace.header, machine, Budget(share=0.5), Policies(Lru()))
    figures = result(engine, serve(engine, trace.requests()))
    routing = routing_of(trace.header, trace.requests())
    needs = routing.decode.sum() * 3 * 2
    assert figures["decode_hits"] + figures["decode_misses"] == needs
    assert figures["decode_hit_rate"] == figures["decode_hits"] / needs
    prompts = figures["hits"] + figures["misses"] - needs
    assert figures["prefill_hit_rate"] == (figures["hits"] - figures["decode_hits"]) / prompts
    assert 0 < figures["decode_blocked_io_s"] < figures["blocked_io_s"]
