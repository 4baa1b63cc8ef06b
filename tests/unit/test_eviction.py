"""Eviction policies: a contract that every one keeps, and the exact order of each."""

from __future__ import annotations

from copy import deepcopy
from random import Random
from typing import TypeVar

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tiermoe.actors.policies.eviction import EvictionPolicy, Lfu, Lru, SweepLru
from tiermoe.actors.policies.fmoe import ExpertMapEviction
from tiermoe.actors.policies.registry import PolicyContext, kinds, make, options

KEYS = 6
P = TypeVar("P", bound=EvictionPolicy)
EVENTS = st.lists(st.tuples(st.sampled_from(["admit", "use", "remove"]), st.integers(0, KEYS - 1)), max_size=30)


def anything(key: int) -> bool:
    return True


def made(name: str) -> EvictionPolicy:
    policy: EvictionPolicy = make("eviction", options("eviction", name), PolicyContext(2, KEYS // 2))
    return policy


def state(policy: EvictionPolicy) -> dict[str, object]:
    """Of a policy, without the order that some keep until a change."""
    values = {name: value for name, value in vars(policy).items() if name != "_order" or not isinstance(value, list)}
    arrays = {name: value.tolist() for name, value in values.items() if isinstance(value, np.ndarray | memoryview)}
    native = ("state", "_order", "handle")
    plain = {name: value for name, value in values.items() if name not in arrays and name not in native}
    return deepcopy(plain | arrays)


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


@pytest.mark.parametrize("name", kinds("eviction"))
class TestContract:
    @settings(max_examples=50, deadline=None)
    @given(events=EVENTS, protected=st.sets(st.integers(0, KEYS - 1)), count=st.integers(-2, KEYS + 1))
    def test_victims(self, name: str, events: list[tuple[str, int]], protected: set[int], count: int) -> None:
        policy = made(name)
        admitted = play(policy, events)
        before = state(policy)
        victims = policy.victims(count, lambda key: key not in protected)
        assert len(victims) == len(set(victims)) == max(0, min(count, len(admitted - protected)))
        assert set(victims) <= admitted - protected
        assert state(policy) == before
        assert policy.victims(count, lambda key: key not in protected) == victims

    @settings(max_examples=50, deadline=None)
    @given(events=EVENTS)
    def test_two_of_a_kind_agree(self, name: str, events: list[tuple[str, int]]) -> None:
        one, other = made(name), made(name)
        play(one, events)
        play(other, events)
        assert one.victims(KEYS, anything) == other.victims(KEYS, anything)

    @settings(max_examples=50, deadline=None)
    @given(events=EVENTS)
    def test_fewer_victims_are_the_first_of_more(self, name: str, events: list[tuple[str, int]]) -> None:
        policy = made(name)
        play(policy, events)
        order = policy.victims(KEYS, anything)
        for count in range(KEYS):
            assert policy.victims(count, anything) == order[:count]

    def test_a_new_policy_has_no_victims(self, name: str) -> None:
        assert made(name).victims(3, anything) == []


def filled(policy: P, *admitted: int) -> P:
    for key in admitted:
        policy.admitted(key)
    return policy


def lru(*admitted: int) -> Lru:
    return filled(Lru(2, 3), *admitted)


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


class TestLfu:
    def test_the_least_used_goes_first(self) -> None:
        policy = filled(Lfu(2, 3), 0, 1, 2)
        for keys in ([0, 1], [0], [2], [2], [2]):
            policy.used(keys)
        assert policy.victims(3, anything) == [1, 0, 2]

    def test_equal_ones_by_their_last_visit(self) -> None:
        policy = filled(Lfu(2, 3), 3, 1, 2)
        assert policy.victims(3, anything) == [3, 1, 2]
        policy.used([1])
        policy.used([3])
        assert policy.victims(3, anything) == [2, 1, 3]  # 2 has its credit, as many as the others have uses

    def test_admission_counts_once_until_the_first_use(self) -> None:
        policy = filled(Lfu(2, 3), 0, 1)
        policy.used([0])
        policy.used([1])
        policy.used([1])
        assert policy.victims(2, anything) == [0, 1]
        policy.admitted(2)
        assert policy.victims(3, anything) == [0, 2, 1]
        policy.removed(2)
        policy.admitted(2)  # unused so far: no more than before
        policy.used([0])
        assert policy.victims(3, anything) == [2, 1, 0]

    def test_uses_outlive_eviction(self) -> None:
        policy = filled(Lfu(2, 3), 0, 1)
        for _ in range(3):
            policy.used([0])
        policy.removed(0)
        policy.used([1])
        policy.used([1])
        policy.admitted(0)
        assert policy.victims(2, anything) == [1, 0]

    def test_decay_forgets(self) -> None:
        for half_life, first in ((None, 1), (1.0, 0)):
            policy = filled(Lfu(2, 3, half_life), 0, 1)
            for keys in ([0], [0], [0], [1], [1]):
                policy.used(keys)
            # 0: 1/16 + 1/8 + 1/4 by now, 1: 1/2 + 1
            assert policy.victims(1, anything) == [first]

    def test_decay_never_overflows(self) -> None:
        """Counts are rescaled before they overflow, and the order stays."""
        policy = filled(Lfu(2, 3, 0.25), 0, 1, 2)
        for round_ in range(2000):
            policy.used([round_ % 2])
        assert policy.victims(3, anything) == [2, 0, 1]

    def test_a_half_life_of_nothing_is_refused(self) -> None:
        with pytest.raises(ValueError, match="half-life"):
            Lfu(2, 3, 0.0)


class TestExpertMap:
    def test_without_a_map_it_is_lfu(self) -> None:
        one, other = filled(ExpertMapEviction(3, 4), 2, 0, 1), filled(Lfu(3, 4), 2, 0, 1)
        for keys in ([0, 1], [1], [2]):
            one.used(keys)
            other.used(keys)
        assert one.victims(3, anything) == other.victims(3, anything)

    def test_other_layers_count_as_average(self) -> None:
        policy = filled(ExpertMapEviction(3, 4), 0, 1, 5)
        policy.expect(np.array([0, 1, 2, 3]), np.array([0.7, 0.1, 0.1, 0.1]))  # 5 has 0.25
        assert policy.victims(3, anything) == [1, 5, 0]

    def test_equals_a_transcription(self) -> None:
        random = Random(0)
        policy = ExpertMapEviction(3, 4)
        p, freq, last = {}, dict.fromkeys(range(12), 0), {}
        policy.expect(np.arange(12), np.full(12, 1 / 12))
        p = dict.fromkeys(range(12), 1 / 12)
        for time in range(400):
            key = random.randrange(12)
            if key not in last:
                policy.admitted(key)
                last[key] = 2 * time
            elif random.random() < 0.3:
                policy.removed(key)
                del last[key]
                continue
            if random.random() < 0.3:
                layer = range(4 * (key // 4), 4 * (key // 4) + 4)
                p.update((k, random.random()) for k in layer)
                policy.expect(np.array(layer), np.array([p[k] for k in layer]))
            if random.random() < 0.6:
                policy.used([key])
                freq[key] += 1
                last[key] = 2 * time + 1
            order = sorted(last, key=lambda k: (p[k] * max(freq[k], 1), last[k], k))
            assert policy.victims(12, anything) == order


class TestSweepLru:
    """Four layers of two experts: keys 0, 1 | 2, 3 | 4, 5 | 6, 7."""

    def test_a_sweep_evicts_the_layer_whose_next_use_is_farthest(self) -> None:
        policy = filled(SweepLru(4, 2), *range(8))
        policy.routed([2, 3], [5, 9], tokens=9)
        # after layer 1 come 2, 3, 0 and 1 itself, of which 2 was picked less
        assert policy.victims(8, anything) == [2, 3, 0, 1, 6, 7, 4, 5]
        assert policy.victims(3, lambda key: key not in (2, 3)) == [0, 1, 6]

    def test_the_popular_experts_of_a_layer_behind_stay_longest(self) -> None:
        policy = filled(SweepLru(4, 2), *range(8))
        policy.routed([0, 1], [9, 1], tokens=9)
        policy.used([0, 1])
        policy.routed([2, 3], [5, 5], tokens=9)
        assert policy.victims(2, lambda key: key < 2) == [1, 0]
        policy.routed([0, 1], [1, 9], tokens=9)  # the next sweep counts anew
        policy.routed([2, 3], [5, 5], tokens=9)
        assert policy.victims(2, lambda key: key < 2) == [0, 1]

    def test_decode_steps_evict_as_lru(self) -> None:
        policy, lru = filled(SweepLru(4, 2), *range(8)), filled(Lru(4, 2), *range(8))
        policy.routed([2, 3], [5, 9], tokens=9)
        for one in (policy, lru):
            one.routed([4], [1], tokens=1)
            one.used([4, 0])
        assert policy.victims(8, anything) == lru.victims(8, anything) == [1, 2, 3, 5, 6, 7, 4, 0]

    @pytest.mark.parametrize(("share", "sweeps"), [(0.75, True), (0.76, False)])
    def test_a_sweep_needs_a_share_of_the_layer(self, share: float, sweeps: bool) -> None:
        policy = filled(SweepLru(2, 4, share), *range(8))
        policy.routed([4, 5, 6], [1, 1, 1], tokens=3)
        assert policy.victims(1, anything) == ([7] if sweeps else [0])  # 7 was not picked

    def test_prompts_load_what_belady_loads(self) -> None:
        """Prompt after prompt through 8 layers with slots for half of them, one layer at a time."""
        loads = {}
        for policy in (Lru(8, 4), SweepLru(8, 4)):
            held, count = set[int](), 0
            for _ in range(5):
                count = 0  # of the last prompt
                for layer in range(8):
                    keys = list(range(4 * layer, 4 * layer + 4))
                    policy.routed(keys, [1] * 4, tokens=4)
                    for key in keys:
                        if key not in held:
                            count += 1
                            if len(held) == 16:
                                (victim,) = policy.victims(1, lambda key, keys=keys: key not in keys)  # type: ignore[misc]
                                policy.removed(victim)
                                held.remove(victim)
                            policy.admitted(key)
                            held.add(key)
                    policy.used(keys)
            loads[type(policy)] = count
        assert loads == {Lru: 32, SweepLru: 20}  # a layer at least has to be swapped in place of another
