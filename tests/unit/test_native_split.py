"""Layers of split experts in native calls, against the step in Python: same outputs, decisions, counters, records."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
import torch
from cache_rigs import EXPERTS, KEYS
from hypothesis import given, settings
from hypothesis import strategies as st
from native_rigs import CUTS, HOLD_S, RATE_GBPS, SplitStack, forwards, unhurried
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


@pytest.mark.parametrize(("min_useful", "configured"), [(0.6, True), (0.0, False)])
def test_a_governor_that_judges_and_a_fixed_cut(min_useful: float, configured: bool) -> None:
    native, python = (
        SplitStack(CUTS["halves"], on, min_useful=min_useful, configured=configured) for on in (True, False)
    )
    for passes, spans in forwards(1, 40, 2):
        native.forward(passes, spans), python.forward(passes, spans)
        assert native.known() == python.known()
    native.cache.close(), python.cache.close()


@pytest.mark.parametrize("by_use", [False, True])
def test_a_new_cut_between_forwards(by_use: bool) -> None:
    native, python = (SplitStack(CUTS["halves"], on, by_use=by_use) for on in (True, False))
    for number, (passes, spans) in enumerate(forwards(2, 24, 2)):
        if number % 6 == 5:
            for stack in (native, python):
                cut = CUTS["uneven" if number % 12 == 5 else "halves"]
                stack.cache.set_split(cut, stack.cache.eviction.ranked(range(KEYS)))
                stack.settle()
        for one, other in zip(native.forward(passes, spans), python.forward(passes, spans), strict=True):
            assert torch.equal(one, other)
        assert native.known() == python.known()
    native.cache.close(), python.cache.close()


def test_prefetches_under_way() -> None:
    """Needed ones are promoted and late, stale ones dropped: as in Python."""
    unhurried(_prefetches_under_way)


def _prefetches_under_way(held_s: float) -> None:
    native, python = (SplitStack(CUTS["halves"], on, RATE_GBPS, configured=False) for on in (True, False))
    rng = np.random.default_rng(3)
    for passes, spans in forwards(3, 6, 2):
        for stack in (native, python):
            stack.ahead.begin_forward(spans)
        for index, inputs in enumerate(passes):
            wanted, outs = (rng.permutation(EXPERTS)[:2] + index * EXPERTS).tolist(), []
            for stack in (native, python):
                stack.hold(held_s)
                stack.cache.prefetch(wanted, source="test")
                outs.append(stack.layers[index].forward(*inputs))
                stack.settle()
            assert torch.equal(*outs)
            assert native.known() == python.known()
    source = native.stats.source("test")
    assert min(source.late, source.cancelled) > 0
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
    assert not any(map(stack.cache.residency.pinned, range(2 * KEYS)))
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
        allowed = set(rng.permutation(2 * keys)[: keys].tolist())
        count = int(rng.integers(0, keys + 1))
        mask = np.isin(np.arange(2 * keys), list(allowed)).astype(np.uint8)
        for slot_class in range(layers + 1):
            wanted = policy.of_class(slot_class).victims(count, allowed.__contains__)
            assert native.handle.victims(slot_class, count, mask) == wanted
        assert native.victims(count, allowed.__contains__) == policy.victims(count, allowed.__contains__)
        assert native.ranked(range(keys)) == policy.ranked(range(keys))


def test_the_order_refuses_what_cannot_be() -> None:
    order = make_eviction(options("eviction", "lcp"), PolicyContext(2, 3), split=True)
    order.admitted(0)
    for wrong in (
        lambda: order.admitted(0), lambda: order.removed(1), lambda: order.used([7]), lambda: order.admitted(12),
        lambda: order.routed([2, 3], [1, 1], 1), lambda: order.routed([6], [1], 1),
        lambda: order.handle.victims(3, 1, np.ones(12, np.uint8)),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=r"slot|segment|expert|class"):
            wrong()
