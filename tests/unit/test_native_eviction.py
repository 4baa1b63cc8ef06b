"""Native orders of eviction decide as their policies in Python, in whatever order events come."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
from activeevict_reference import ImportanceState, NativeState
from orders_reference import ImportanceOrder, MapOrder, reference_of

from tiermoe.actors.policies.activeevict import ImportanceEviction
from tiermoe.actors.policies.eviction import EvictionPolicy, NativeOrder
from tiermoe.actors.policies.fmoe import ExpertMapEviction
from tiermoe.actors.policies.registry import PolicyContext, options
from tiermoe.actors.policies.slot_classes import make_eviction

LAYERS, EXPERTS, TOP = 3, 7, 2
KEYS = LAYERS * EXPERTS


def changes(draw: random.Random, policies: list[EvictionPolicy]) -> None:
    """What a policy is told from outside: of maps, or of routing and predictions."""
    layer = draw.randrange(LAYERS)
    row = np.array([draw.choice([0.0, 0.25, 0.25, 0.5, 1.0]) for _ in range(EXPERTS)], np.float32)
    ids = np.array([draw.sample(range(EXPERTS), TOP)], np.int64)
    for policy in policies:
        if isinstance(policy, ExpertMapEviction | MapOrder):
            policy.expect(np.arange(EXPERTS) + layer * EXPERTS, row)
        if isinstance(policy, ImportanceEviction | ImportanceOrder):
            state = state_of(policy)
            state.saw(layer, ids)
            state.target(layer, row[None] * 4, np.zeros(EXPERTS, np.bool_), 0.0, 0)


def state_of(policy: ImportanceEviction | ImportanceOrder) -> ImportanceState | NativeState:
    return NativeState(policy.state) if isinstance(policy, ImportanceEviction) else policy.state


@pytest.mark.parametrize("kind", ["lru", "lru-sweep", "lfu", "lfu-decay", "lcp", "expert-map", "importance", "worth"])
@pytest.mark.parametrize("seed", range(8))
def test_victims_are_those_of_the_reference(kind: str, seed: int) -> None:
    draw, context = random.Random(seed), PolicyContext(LAYERS, EXPERTS, TOP)
    reference = reference_of(options("eviction", kind), context)
    native, held = make_eviction(options("eviction", kind), context), set[int]()
    assert isinstance(native, NativeOrder)
    both: list[EvictionPolicy] = [reference, native]
    for _ in range(150):
        absent = sorted(set(range(KEYS)) - held)
        layer = draw.randrange(LAYERS)
        picked = [layer * EXPERTS + e for e in draw.sample(range(EXPERTS), TOP)]
        for policy in both:
            policy.routed(picked, [1] * TOP, 1)
        match draw.randrange(5):
            case 0 | 1 if absent:
                for key in draw.sample(absent, min(3, len(absent))):
                    held.add(key)
                    for policy in both:
                        policy.admitted(key)
            case 2:
                for policy in both:
                    policy.used([key for key in picked if key in held])
            case 3:
                changes(draw, both)
        may = {key for key in held if draw.random() < 0.8}
        count = draw.randrange(1, 5)
        found = [policy.victims(count, may.__contains__) for policy in both]
        assert found[0] == found[1]
        for key in found[0][: draw.randrange(3)]:
            held.discard(key)
            for policy in both:
                policy.removed(key)


def _importance(gamma: float) -> list[Any]:
    """An order whose window is 128, and the reference."""
    return [made(2, 4, 0.5, gamma, 128, 2) for made in (ImportanceEviction, ImportanceOrder)]


@pytest.mark.parametrize("sign", [1, -1])
def test_a_layer_is_evicted_again_after_logits_that_are_no_numbers(sign: int) -> None:
    both = _importance(0.97)
    for policy in both:
        for key in range(8):
            policy.admitted(key)
    for logits in ([sign * np.nan] * 4, [-9.0, 3.0, 3.0, 0.0]):
        for of in both:
            state_of(of).target(0, np.array([logits], np.float32), np.ones(4, np.bool_), 0.02, 2)
            state_of(of).target(1, np.zeros((1, 4), np.float32), np.ones(4, np.bool_), 0.02, 2)
        native, reference = (policy.victims(8, lambda key: True) for policy in both)
        assert native == reference


def test_what_is_left_of_a_layer_has_its_shares_however_much_more_important_the_evicted_were() -> None:
    both = _importance(0.5)
    for of in both:
        for pair in ([2, 3], *[[1, 3]] * 62, *[[0, 3]] * 62):
            state_of(of).saw(0, np.array([pair]))
        state_of(of).target(1, np.zeros((1, 4), np.float32), np.ones(4, np.bool_), 0.02, 2)
    for policy in both:
        for key in (0, 1, 2, 4, 5):
            policy.admitted(key)
        policy.victims(1, lambda key: True)
        for key in (0, 1):
            policy.removed(key)
    assert [policy.victims(3, lambda key: True) for policy in both] == [[4, 5, 2]] * 2
