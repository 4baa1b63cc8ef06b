"""Native orders of eviction decide as their policies in Python, in whatever order events come."""

from __future__ import annotations

import random

import numpy as np
import pytest

from tiermoe.actors.engine.cache.native_order import fast_eviction, native_order
from tiermoe.actors.policies.activeevict import ImportanceEviction
from tiermoe.actors.policies.eviction import EvictionPolicy
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
        if isinstance(policy, ExpertMapEviction):
            policy.expect(np.arange(EXPERTS) + layer * EXPERTS, row)
        if isinstance(policy, ImportanceEviction):
            policy.state.saw(layer, ids)
            policy.state.target(layer, row[None] * 4, np.zeros(EXPERTS, np.bool_), 0.0, 0)


@pytest.mark.parametrize("kind", ["lru", "lru-sweep", "lfu", "lfu-decay", "expert-map", "importance", "worth"])
@pytest.mark.parametrize("seed", range(8))
def test_victims_are_those_of_the_reference(kind: str, seed: int) -> None:
    draw, context = random.Random(seed), PolicyContext(LAYERS, EXPERTS, TOP)
    reference = make_eviction(options("eviction", kind), context, split=False, low_bit=False)
    told = fast_eviction(options("eviction", kind), context, split=False, low_bit=False)
    native, held = native_order(told, LAYERS, EXPERTS), set[int]()
    assert native is not None
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
                changes(draw, [reference, told])
        may = {key for key in held if draw.random() < 0.8}
        count = draw.randrange(1, 5)
        found = [policy.victims(count, may.__contains__) for policy in both]
        assert found[0] == found[1]
        for key in found[0][: draw.randrange(3)]:
            held.discard(key)
            for policy in both:
                policy.removed(key)
