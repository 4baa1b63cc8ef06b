"""Layers of split experts in native calls, against the step in Python: same outputs, decisions, counters, records."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from native_rigs import CUTS, HOLD_S, RATE_GBPS, SplitStack, forwards
from orders_reference import reference_of

from tiermoe.actors.policies.registry import PolicyContext, options
from tiermoe.actors.policies.slot_classes import make_eviction
from tiermoe.errors import RuntimeFailure

PREFETCHES = ("speculative", "next-gate", "random", "none")


@pytest.mark.parametrize(
    ("cut", "prefetch", "most", "by_use"),  # every two of their values together
    [
        (cut, prefetch, (8, 24)[(i + j) % 2], (i + j // 2) % 2 == 0)
        for i, cut in enumerate(CUTS)
        for j, prefetch in enumerate(PREFETCHES)
    ],
)
def test_native_calls_are_the_step_in_python(cut: str, prefetch: str, most: int, by_use: bool) -> None:
    """Every decision is the same, forward by forward, at more than 8 rows with experts that a matrix product runs."""
    native, python = (SplitStack(CUTS[cut], on, prefetch=prefetch, by_use=by_use) for on in (True, False))
    for passes, spans in forwards(len(cut), 40, most):
        for one, other in zip(native.forward(passes, spans), python.forward(passes, spans), strict=True):
            assert torch.equal(one, other)
        assert native.known() == python.known()
    waves = sum(layer.waves - layer.forwards for layer in native.stats.layers)
    assert waves > 0 or cut in ("halves", "no tops")
    native.cache.close(), python.cache.close()


@pytest.mark.parametrize("when", ["before", "while it waits"])
def test_a_closed_cache_fails_the_pass_and_pins_nothing(when: str) -> None:
    stack = SplitStack(CUTS["halves"], True, RATE_GBPS)
    if when == "before":
        stack.cache.close()
    else:
        stack.hold(10 * HOLD_S)  # a busy machine may be late to close it
        threading.Timer(HOLD_S / 3, stack.cache.close).start()
    passes, spans = forwards(4, 1, 1)[0]
    with pytest.raises(RuntimeFailure, match="closed"):
        stack.forward(passes, spans)
    assert stack.cache.residency.pins == 0
    assert stack.cache.core.check() == ""


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_the_native_order_is_the_policy(data: st.DataObject) -> None:
    rng = np.random.default_rng(data.draw(st.integers(0, 10**6)))
    layers, experts = int(rng.integers(1, 4)), int(rng.integers(1, 7))
    keys, rho, omega = layers * experts, float(rng.choice([0.25, 0.5, 0.9])), float(rng.choice([1, 4, 128]))
    kind = data.draw(st.sampled_from(["lru", "lcp", "lfu", "lfu-decay", "random"]))
    chosen = options("eviction", {"kind": kind, "rho": rho, "omega": omega} if kind == "lcp" else kind)
    context = PolicyContext(layers, experts)
    native: Any = make_eviction(chosen, context, split=True)
    policy: Any = reference_of(chosen, context, split=True)
    held = set[int]()
    for _ in range(80):
        layer = int(rng.integers(layers))
        some = rng.permutation(experts)[: rng.integers(1, experts + 1)] + layer * experts
        counts, tokens = rng.integers(1, 5, len(some)).tolist(), int(rng.integers(1, 6))
        change = rng.permutation(2 * keys)[:4].tolist()
        for order in (native, policy):
            order.routed(some.tolist(), counts, tokens)
            for key in change:
                (order.removed if key in held else order.admitted)(key)
        held ^= set(change)
        ran = [key for key in rng.permutation(sorted(held)).tolist() if key % keys // experts == layer]
        native.used(ran), policy.used(ran)
        allowed = set(rng.permutation(2 * keys)[:keys].tolist())
        count = int(rng.integers(0, keys + 1))
        mask = np.isin(np.arange(2 * keys), list(allowed)).astype(np.uint8)
        for slot_class in range(layers + 1):
            wanted = policy.of_class(slot_class).victims(count, allowed.__contains__)
            assert native.handle.victims(slot_class, count, mask) == wanted
        assert native.victims(count, allowed.__contains__) == policy.victims(count, allowed.__contains__)
        assert native.ranked(range(keys)) == policy.ranked(range(keys))
