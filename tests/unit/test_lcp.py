"""Least cache priority and random replacement: their order against the formula, and what it costs to keep it."""

from __future__ import annotations

from collections import Counter
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tiermoe.actors.policies.eviction import RandomOrder
from tiermoe.actors.policies.moepic import Lcp
from tiermoe.actors.policies.slot_classes import SlotClasses

EXPERTS, LAYERS = 6, 3


def anything(key: int) -> bool:
    return True


def priorities(steps: list[list[set[int]]], keys: int, rho: float, omega: float) -> list[float]:
    """Equation 4 token by token: steps[t][layer] are the keys that token t picked."""
    mu, nu = [0] * keys, [0] * keys
    for token in steps:
        for layer, picked in enumerate(token):
            for key in range(layer * EXPERTS, (layer + 1) * EXPERTS):
                nu[key] += 1
                if key in picked:
                    mu[key] += 1
                    nu[key] = 0
    return [m * rho ** (n / omega) for m, n in zip(mu, nu, strict=True)]


def draw_steps(seed: int, tokens: int) -> list[list[set[int]]]:
    rng = Random(seed)
    return [
        [{layer * EXPERTS + e for e in rng.sample(range(EXPERTS), 2)} for layer in range(LAYERS)] for _ in range(tokens)
    ]


class TestLcp:
    @settings(max_examples=60, deadline=None)
    @given(seed=st.integers(0, 10**6), tokens=st.integers(1, 40), rho=st.sampled_from([0.25, 0.5, 0.9]))
    def test_one_class_of_slots_for_all_layers(self, seed: int, tokens: int, rho: float) -> None:
        """All keys admitted after the first token: the order of leaving is that of equation 4, over all layers."""
        steps, keys = draw_steps(seed, tokens), EXPERTS * LAYERS
        policy = Lcp(LAYERS, EXPERTS, rho, 8)
        for token in steps:
            for picked in token:
                policy.routed(sorted(picked), [1] * len(picked), 1)
        wanted = priorities(steps, keys, rho, 8)
        for key in range(keys):
            policy.admitted(key)
        order = policy.victims(keys, lambda key: wanted[key] >= 1)  # below it they count as guesses
        assert [wanted[key] for key in order] == pytest.approx(sorted(w for w in wanted if w >= 1))
        ranked = policy.ranked(list(range(keys)))
        assert [wanted[key] for key in ranked] == pytest.approx(sorted(wanted, reverse=True))

    @settings(max_examples=60, deadline=None)
    @given(seed=st.integers(0, 10**6), tokens=st.integers(1, 60))
    def test_a_cache_of_one_layer(self, seed: int, tokens: int) -> None:
        """Three slots, evict on a miss; the victim is always the lowest of equation 4."""
        rng, held = Random(seed), list[int]()
        policy, steps = Lcp(1, EXPERTS, omega=4), []
        for _ in range(tokens):
            key = rng.randrange(EXPERTS)
            steps.append([{key}])
            policy.routed([key], [1], 1)
            if key not in held:
                if len(held) == 3:
                    [victim] = policy.victims(1, anything)
                    now = priorities(steps, EXPERTS, 0.25, 4)
                    assert now[victim] == pytest.approx(min(now[k] for k in held))
                    policy.removed(victim)
                    held.remove(victim)
                policy.admitted(key)
                held.append(key)
            policy.used([key])

    def test_a_guess_is_not_the_first_to_go_for_ever(self) -> None:
        policy = Lcp(1, EXPERTS, omega=1)
        policy.routed([0], [1], 1)
        policy.admitted(0)
        policy.routed([1], [1], 1)
        policy.admitted(1)
        policy.admitted(5)  # never picked: counts as picked once, now
        assert policy.victims(3, anything) == [0, 1, 5]

    @pytest.mark.parametrize(("rho", "omega"), [(0, 1), (1, 1), (0.5, 0)])
    def test_refuses(self, rho: float, omega: float) -> None:
        with pytest.raises(ValueError, match="rho is"):
            Lcp(LAYERS, EXPERTS, rho, omega)


def of_class(policy: SlotClasses, slot_class: int) -> list[int]:
    return policy.handle.victims(slot_class, 2, np.ones(2 * LAYERS * EXPERTS, np.uint8))


class TestSplit:
    def test_each_layer_has_its_own_order(self) -> None:
        policy = SlotClasses([Lcp(1, EXPERTS) for _ in range(LAYERS)], LAYERS, EXPERTS, split=True)
        for key in (0, 1, EXPERTS, EXPERTS + 1):
            policy.admitted(key)
        policy.routed([EXPERTS], [1], 1)
        policy.routed([0], [3], 3)
        policy.used([0, EXPERTS])
        assert of_class(policy, 0) == [1, 0]
        assert of_class(policy, 1) == [EXPERTS + 1, EXPERTS]
        assert policy.victims(3, anything) == [1, 0, EXPERTS + 1]
        policy.removed(EXPERTS + 1)
        assert of_class(policy, 1) == [EXPERTS]


class TestRandom:
    def test_all_are_as_likely(self) -> None:
        policy, gone = RandomOrder(seed=3), Counter[int]()
        for key in range(5):
            policy.admitted(key)
        for _ in range(2000):
            [victim] = policy.victims(1, anything)
            gone[victim] += 1
            policy.removed(victim)
            policy.admitted(victim)
        assert sorted(gone) == list(range(5))
        assert all(300 < count < 500 for count in gone.values())
