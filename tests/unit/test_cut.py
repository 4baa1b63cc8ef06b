"""Cuts, their segments and slot classes, on tiny cases and for any numbers."""

from __future__ import annotations

from typing import Any

import pytest
from cache_rigs import tops_and_bottoms
from hypothesis import given
from hypothesis import strategies as st

from tiermoe.actors.budget import Budget
from tiermoe.actors.combinations import check_combination
from tiermoe.actors.policies.moepic.split import Segments, SplitLayout, SplitOptions
from tiermoe.actors.policy_settings import PolicySettings
from tiermoe.actors.settings import EngineSettings, ShardSettings
from tiermoe.errors import ConfigError

# Two layers of three experts of 8 neurons: tops of 2 and of 8; the bottoms of layer 0 have 6.
CUT = SplitLayout(8, (2, 8), (2, 1), 2)
EXPERTS, KEYS = 3, 6


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ((0, (0,), (0,), 1), "of 0 neurons"),
        ((8, (), (), 0), "0 tops"),
        ((8, (4, 4), (1,), 1), "2 tops and 1"),
        ((8, (9,), (1,), 0), "9 of 8"),
        ((8, (-1,), (1,), 1), "-1 of 8"),
        ((8, (4,), (0,), 1), "0 slots for tops of 4"),
        ((8, (0,), (1,), 1), "1 slots for tops of 0"),
        ((8, (4,), (-1,), 1), "-1 slots"),
        ((8, (4,), (1,), 0), "0 buffer slots for bottoms of up to 4"),
        ((8, (8,), (1,), 1), "1 buffer slots for bottoms of up to 0"),
        ((8, (4,), (1,), -1), "-1 buffer slots"),
    ],
)
def test_corrupted_cuts_are_refused(values: tuple[Any, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SplitLayout(*values)


@pytest.mark.parametrize(
    ("theta", "budget", "expected"),
    [
        (0.5, 16 * 8, SplitLayout(8, (4, 4), (6, 6), 12)),  # all tops; what is over goes to the buffer
        (0.5, 6 * 8, SplitLayout(8, (4, 4), (4, 4), 4)),
        (0.75, 6 * 8, SplitLayout(8, (6, 6), (3, 2), 8)),  # one slot more for the first layer
        (0.5, 12, SplitLayout(8, (4, 4), (1, 1), 1)),  # the buffer is smaller than asked for
        (1.0, 5 * 8, SplitLayout(8, (8, 8), (3, 2), 0)),
        (0.0, 5 * 8, SplitLayout(8, (0, 0), (0, 0), 2)),
    ],
)
def test_uniform(theta: float, budget: int, expected: SplitLayout) -> None:
    assert SplitLayout.uniform(2, 6, 8, budget, theta, 2) == expected


@given(
    st.integers(1, 6), st.integers(1, 12), st.integers(1, 40), st.integers(0, 4000), st.floats(0, 1), st.integers(1, 9)
)
def test_uniform_keeps_the_budget(
    layers: int, experts: int, neurons: int, budget: int, theta: float, buffer: int
) -> None:
    top = round(theta * neurons)
    try:
        cut = SplitLayout.uniform(layers, experts, neurons, budget, theta, buffer)
    except ValueError:
        assert budget < (layers * top + neurons - top if top else neurons)
        return
    assert cut.total_neurons <= budget
    assert cut.tops == (top,) * layers
    assert max(cut.slots) - min(cut.slots) <= 1
    assert max(cut.slots) <= experts
    assert cut.buffer_slots <= layers * experts
    Segments(cut, experts)


def test_segments() -> None:
    segments = Segments(CUT, EXPERTS)
    assert segments.neurons == [2, 2, 2, 8, 8, 8, 6, 6, 6, 0, 0, 0]
    assert segments.begins == [0] * 6 + [2, 2, 2, 8, 8, 8]
    assert segments.class_of == [0, 0, 0, 1, 1, 1, 2, 2, 2, 2, 2, 2]
    assert (segments.slots, segments.slot_neurons, segments.first) == ([2, 1, 2], [2, 8, 6], [0, 2, 4, 12, 18])
    assert segments.of([4, 0, 2]) == [4, 0, 6, 2, 8]
    assert Segments(SplitLayout(8, (0,), (0,), 1), 2).shown == [2, 3]
    with pytest.raises(ValueError, match="3 slots for tops of 2"):
        Segments(SplitLayout(8, (4,), (3,), 1), 2)


def test_victims_are_of_their_class() -> None:
    eviction = tops_and_bottoms(2, EXPERTS)
    for segment in (0, 1, 6, 3):
        eviction.admitted(segment)
    eviction.used([0, 6, 3])
    assert eviction.victims(3, lambda key: True) == [1, 0, 3]
    assert eviction.victims(9, lambda key: True) == [1, 0, 3, 6]


POLICY: dict[str, Any] = {"name": "test", "lossless": True}


def test_several_shards_are_refused() -> None:
    policy = PolicySettings(**POLICY, split=SplitOptions(kind="fixed"))
    with pytest.raises(ConfigError, match="splits the experts of one GPU"):
        check_combination(EngineSettings(policy=policy, budget=Budget(share=0.5), shards=ShardSettings(count=2)))
