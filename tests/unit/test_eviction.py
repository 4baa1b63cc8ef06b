"""Eviction policies: a contract that every one keeps, and the exact order of each."""

from __future__ import annotations

from copy import deepcopy

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tiermoe.actors.policies.eviction import EVICTION, EvictionPolicy, Lru

KEYS = 6
EVENTS = st.lists(st.tuples(st.sampled_from(["admit", "use", "remove"]), st.integers(0, KEYS - 1)), max_size=30)


def anything(key: int) -> bool:
    return True


def play(policy: EvictionPolicy, events: list[tuple[str, int]]) -> set[int]:
    """Feed what a cache would, leaving out what it never does; the keys admitted at the end."""
    admitted: set[int] = set()
    for event, key in events:
        if event == "admit" and key not in admitted:
            policy.admitted(key)
            admitted.add(key)
        elif event == "use" and key in admitted:
            policy.used([key])
        elif event == "remove" and key in admitted:
            policy.removed(key)
            admitted.remove(key)
    return admitted


@pytest.mark.parametrize("name", EVICTION)
class TestContract:
    @settings(max_examples=50, deadline=None)
    @given(events=EVENTS, protected=st.sets(st.integers(0, KEYS - 1)), count=st.integers(-2, KEYS + 1))
    def test_victims(self, name: str, events: list[tuple[str, int]], protected: set[int], count: int) -> None:
        policy = EVICTION[name]()
        admitted = play(policy, events)
        before = deepcopy(vars(policy))
        victims = policy.victims(count, lambda key: key not in protected)
        assert len(victims) == len(set(victims)) == max(0, min(count, len(admitted - protected)))
        assert set(victims) <= admitted - protected
        assert vars(policy) == before
        assert policy.victims(count, lambda key: key not in protected) == victims

    @settings(max_examples=50, deadline=None)
    @given(events=EVENTS)
    def test_two_of_a_kind_agree(self, name: str, events: list[tuple[str, int]]) -> None:
        one, other = EVICTION[name](), EVICTION[name]()
        play(one, events)
        play(other, events)
        assert one.victims(KEYS, anything) == other.victims(KEYS, anything)

    @settings(max_examples=50, deadline=None)
    @given(events=EVENTS)
    def test_fewer_victims_are_the_first_of_more(self, name: str, events: list[tuple[str, int]]) -> None:
        policy = EVICTION[name]()
        play(policy, events)
        order = policy.victims(KEYS, anything)
        for count in range(KEYS):
            assert policy.victims(count, anything) == order[:count]

    def test_a_new_policy_has_no_victims(self, name: str) -> None:
        assert EVICTION[name]().victims(3, anything) == []


def lru(*admitted: int) -> Lru:
    policy = Lru()
    for key in admitted:
        policy.admitted(key)
    return policy


def test_lru_order_of_admission() -> None:
    assert lru(3, 1, 2, 0).victims(4, anything) == [3, 1, 2, 0]


def test_lru_use_moves_to_the_end_in_the_order_of_use() -> None:
    policy = lru(3, 1, 2, 0)
    policy.used([2, 3])
    assert policy.victims(4, anything) == [1, 0, 2, 3]


def test_lru_forgets_what_is_removed_and_readmits_it_as_newest() -> None:
    policy = lru(3, 1, 2)
    policy.removed(3)
    assert policy.victims(4, anything) == [1, 2]
    policy.admitted(3)
    assert policy.victims(4, anything) == [1, 2, 3]


def test_lru_skips_what_may_not_go() -> None:
    assert lru(3, 1, 2, 0).victims(2, lambda key: key not in (3, 2)) == [1, 0]


def test_lru_stops_looking_once_it_has_enough() -> None:
    asked = []

    def evictable(key: int) -> bool:
        asked.append(key)
        return key != 3

    assert lru(3, 1, 2, 0).victims(1, evictable) == [1]
    assert asked == [3, 1]
