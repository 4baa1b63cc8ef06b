"""Open-loop arrivals: queueing by hand, files in the Azure trace's columns, and the lag of a matcher."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import traces
from orders_reference import Lru

from tiermoe.actors.budget import Budget
from tiermoe.actors.core._core import Clock
from tiermoe.actors.policies.prefetch import LayerSeen, PrefetchPolicy, Span, Wanted
from tiermoe.cluster.simulate.arrivals import Arrival, arriving, azure
from tiermoe.cluster.simulate.executor import Policies, SimulatedEngine
from tiermoe.cluster.simulate.hit_rates import serve
from tiermoe.cluster.simulate.machine import Machine
from tiermoe.cluster.simulate.peers import MatcherLag
from tiermoe.cluster.simulate.trace import Trace
from tiermoe.errors import ConfigError

FREE = Machine(name="one second a forward", forward_s=1, dense_s=0, dense_row_s=0, expert_s=0, expert_row_s=0)


@pytest.fixture
def trace(tmp_path: Path) -> Trace:
    traces.write(tmp_path / "t", traces.header(), [[1, 2, 3], [4], [5, 6]], decodes=2)
    return Trace(tmp_path / "t")


def test_queueing_by_hand(trace: Trace) -> None:
    """Forwards of 1 s, three to a request, one request at a time; arrivals at 0, 1 and 20 s.

    The second waits from 1 to 3; the third finds the device idle since 6.
    """
    engine = SimulatedEngine(trace.header, FREE, Budget(share=1.0), Policies(Lru()))
    served = serve(engine, trace.requests(), 1, None, [Arrival(0), Arrival(1), Arrival(20)])
    assert served.wall_s == pytest.approx(23)
    assert served.queue_s == pytest.approx(2 / 3)
    assert served.ttft_s == pytest.approx((1 + 3 + 1) / 3)
    assert served.latency_s[0] == pytest.approx(3)
    assert served.tpot_s == pytest.approx(1)


def test_an_azure_file(trace: Trace, tmp_path: Path) -> None:
    file = tmp_path / "a.csv"
    file.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:47.5000000,7,9\n2023-11-16 18:15:46.6805900,2,2\n"
    )
    found = azure(file)
    assert found == [Arrival(0, 2, 2), Arrival(pytest.approx(0.81941, abs=1e-5), 7, 9)]
    cut = list(arriving(trace.requests(), found))
    assert [(len(r.iterations), r.prompt_tokens) for _, r in cut] == [(2, 2), (3, 1)]
    assert [len(step.tokens) for step in cut[0][1].iterations] == [2, 1]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("TIMESTAMP,ContextTokens\n", "no column GeneratedTokens"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n", "no request"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\nnoon,1,1\n", "line 2"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46,0,1\n", "0 and 1 tokens"),
    ],
)
def test_a_refused_file(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "a.csv"
    file.write_text(text)
    with pytest.raises(ConfigError, match=message):
        azure(file)


class _Next(PrefetchPolicy):
    """Wants expert 0 of the two layers behind each layer, of 4 experts."""

    name, distance = "next", 2

    def begin_forward(self, spans: Sequence[Span]) -> list[Wanted]:
        return [Wanted(0, 1.0)]

    def observed(self, seen: LayerSeen) -> list[Wanted]:
        return [Wanted((seen.layer + d) * 4, 1.0 / d) for d in (1, 2)]


def test_the_matcher_lags() -> None:
    """Layers of 1 s, a lag of 1.5 s: a command of layer l is there at layer l + 2, and its first key is late."""
    clock = Clock()
    policy = MatcherLag(_Next(), clock, 1.5, 4)
    assert list(policy.begin_forward([])) == []
    keys = []
    for layer in range(4):
        seen = LayerSeen(layer, [], np.empty((0, 0), np.int64), None, lambda distance: None)
        keys.append([want.key for want in policy.observed(seen)])
        clock.advance(1.0)
    assert keys == [[], [], [], []]  # layer l + 2 itself is no longer ahead when the command comes
    quick = MatcherLag(_Next(), Clock(), 0.0, 4)
    quick.begin_forward([])
    seen = LayerSeen(0, [], np.empty((0, 0), np.int64), None, lambda distance: None)
    assert list(quick.observed(seen)) == []  # key 0 is of the present layer
    seen = LayerSeen(1, [], np.empty((0, 0), np.int64), None, lambda distance: None)
    assert [want.key for want in quick.observed(seen)] == [8]
