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
    def test_fewer_victims_are_the_first_of_more(self, name: str, events: list[tuple[str, int]]) -> None:
        policy = made(name)
        play(policy, events)
        order = policy.victims(KEYS, anything)
        for count in range(KEYS):
            assert policy.victims(count, anything) == order[:count]


def filled(policy: P, *admitted: int) -> P:
    for key in admitted:
        policy.admitted(key)
    return policy


class TestLfu:
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


class TestExpertMap:
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
