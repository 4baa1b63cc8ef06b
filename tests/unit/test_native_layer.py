"""A layer with native kernels and parts decides as the same layer with Python's: outputs, loads, victims, counters."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from cache_rigs import EXPERTS, KEYS, LAYERS, SHAPE
from native_rigs import HOLD_S, RATE_GBPS, TOP, Stack, routed

from tiermoe.actors.engine.cache.cache import ExpertCache
from tiermoe.actors.engine.hooks import Hooks
from tiermoe.actors.engine.layer import install
from tiermoe.actors.engine.prefetching import RouterPrefetching
from tiermoe.actors.policies.fmoe import ExpertMapEviction
from tiermoe.actors.policies.prefetch import NextGatePrefetch
from tiermoe.actors.policies.residency import ResidencyError
from tiermoe.errors import RuntimeFailure
from tiermoe.kernels.expert_ffn import CPU_MAX_ROWS
from tiermoe.kernels.router import LinearRouter


def next_gate(distance: int, whole_layers: bool = False) -> Callable[[ExpertCache], Hooks]:
    """The preset's prefetch, by random routers; distance 0: none."""
    generator = torch.Generator().manual_seed(8)
    routers = [
        LinearRouter(torch.randn(EXPERTS, SHAPE.hidden, generator=generator), torch.randn(EXPERTS, generator=generator))
        for _ in range(LAYERS)
    ]
    blocks: list[Any] = [SimpleNamespace(router=router) for router in routers]

    def hooks(cache: ExpertCache) -> Hooks:
        if not distance:
            return Hooks()
        policy = NextGatePrefetch(LAYERS, EXPERTS, 2, distance, whole_layers=whole_layers)
        return Hooks(ahead=(RouterPrefetching(policy, cache, blocks, EXPERTS),))

    return hooks


NATIVE_ORDERS = ("lru", "lru-sweep", "lfu", "lfu-decay", "expert-map", "expert-map-decay", "worth")


@pytest.mark.parametrize(
    ("policy", "slots", "ahead"),  # every two of their values together
    [
        (policy, slots, (i + j) % 3)
        for i, policy in enumerate(NATIVE_ORDERS)
        for j, slots in enumerate((EXPERTS, 9, KEYS - 2))
    ],
)
def test_one_native_call_is_the_step_in_python(policy: str, slots: int, ahead: int) -> None:
    """The order of eviction, next-gate and its governor in native code: the same decisions as their references."""
    native = Stack(slots, policy, min_useful=0.4, hooks=next_gate(ahead))
    python = Stack(slots, policy, min_useful=0.4, hooks=next_gate(ahead), native=False)
    rng = np.random.default_rng(slots)
    for step in range(60):
        begin(native, python, rng)
        matched, probabilities = EXPERTS * rng.integers(LAYERS) + np.arange(EXPERTS), rng.random(EXPERTS)
        for stack in (native, python):
            if isinstance(stack.cache.eviction, ExpertMapEviction) and step % 3 == 2:
                stack.cache.eviction.expect(matched, probabilities)
        for index in range(LAYERS):
            inputs = routed(rng, 24)
            if step == 40:
                native.layers[index].observers = python.layers[index].observers = [lambda *seen: None]
            assert torch.equal(native.layers[index].forward(*inputs), python.layers[index].forward(*inputs))
            native.settle(), python.settle()
        assert native.known() == python.known()
        native.layers[step % LAYERS].observers.clear()
    native.cache.close(), python.cache.close()


@pytest.mark.parametrize(("slots", "distance"), [(EXPERTS, 1), (9, 1), (KEYS - 2, 2)])
def test_whole_layers_of_a_prompt_are_prefetched_as_in_python(slots: int, distance: int) -> None:
    """Prompts of so many rows that no router is asked, of fewer, and of few experts, among decode steps."""
    native, python = (
        Stack(slots, "lru-sweep", hooks=next_gate(distance, whole_layers=True), native=on) for on in (True, False)
    )
    rng = np.random.default_rng(slots)
    for step in range(24):
        begin(native, python, rng)
        tokens, experts = int(rng.choice([1, 2, 120, 140])), 2 if step % 5 == 4 else EXPERTS
        for index in range(LAYERS):
            ids = torch.from_numpy(np.argsort(rng.random((tokens, experts)), axis=1)[:, :2].copy())
            inputs = torch.randn(tokens, SHAPE.hidden), ids, torch.rand(tokens, 2)
            assert torch.equal(native.layers[index].forward(*inputs), python.layers[index].forward(*inputs))
            native.settle(), python.settle()
        assert native.known() == python.known()
    assert sum(source.queued for source in native.stats.prefetch_sources.values()) > 0
    native.cache.close(), python.cache.close()


def begin(native: Stack, python: Stack, rng: np.random.Generator) -> None:
    decode = bool(rng.integers(2))
    for stack in (native, python):
        stack.cache.core.decode_only = decode


def step_both(native: Stack, python: Stack, rng: np.random.Generator, step: int) -> None:
    """A step of few rows, each ninth of so many that Python runs it: same outputs, decisions and counters."""
    for mine, reference in zip(native.layers, python.layers, strict=True):
        tokens = int(rng.choice([1, 1, 2, 5])) if step % 9 else CPU_MAX_ROWS + 20
        ids = torch.from_numpy(np.argsort(rng.random((tokens, EXPERTS)), axis=1)[:, :TOP].copy())
        inputs = torch.randn(tokens, SHAPE.hidden), ids, torch.rand(tokens, TOP)
        assert torch.equal(mine.forward(*inputs), reference.forward(*inputs))
        native.settle(), python.settle()
    assert native.known() == python.known()


@pytest.mark.parametrize("slots", [2, 9])
def test_experts_are_copied_back(slots: int) -> None:
    native, python = (Stack(slots, "lru", native=on, writeback=True) for on in (True, False))
    rng = np.random.default_rng(slots)
    for step in range(20):
        step_both(native, python, rng, step)
    assert sum(layer.bytes_written_back for layer in native.stats.layers) > 0


@pytest.mark.parametrize("when", ["before", "while it waits", "in a hook"])
def test_a_closed_cache_fails_the_pass_and_pins_nothing(when: str) -> None:
    messages = []
    for stack in (Stack(6, "lru", RATE_GBPS), Stack(6, "lru", RATE_GBPS, native=False)):
        if when == "before":
            stack.cache.close()
        else:
            stack.hold(10 * HOLD_S)  # a busy machine may be late to close it
        if when == "while it waits":
            threading.Timer(HOLD_S / 3, stack.cache.close).start()
        if when == "in a hook":
            stack.ahead.idle = lambda index: False
            stack.ahead.layer = lambda index, view, stack=stack: stack.cache.close()
        with pytest.raises(RuntimeFailure) as failed:
            stack.layers[0].forward(*routed(np.random.default_rng(1), 1))
        messages.append(str(failed.value))
        assert stack.cache.residency.pins == 0
        assert stack.cache.core.check() == ""
    assert messages[0] == messages[1]
    assert "closed" in messages[0]


def test_a_failing_hook_leaves_the_loads_to_arrive() -> None:
    native, python = Stack(6, "lru", RATE_GBPS), Stack(6, "lru", RATE_GBPS, native=False)
    inputs = routed(np.random.default_rng(1), 1)
    for stack in (native, python):
        stack.ahead.wanted = [99]
        with pytest.raises((IndexError, ValueError, ResidencyError)):
            stack.layers[0].forward(*inputs)
        assert stack.cache.residency.pins == 0
        stack.ahead.wanted = []
        stack.settle()
        stack.layers[0].forward(*inputs)
        stack.cache.live_stats()
        assert stack.stats.layers[0].hits == len(inputs[1][0])
    assert native.known() == python.known()


def test_other_types_are_converted() -> None:
    stack = Stack(KEYS, "lru")
    layer, hidden, ids = stack.layers[0], torch.randn(2, SHAPE.hidden), torch.tensor([[0, 1], [1, 2]])
    weights = torch.rand(2, 2).bfloat16()
    expected = layer.forward(hidden, ids, weights.float())
    assert torch.equal(layer.forward(hidden, ids.int(), weights), expected)


def test_watchers_are_told_of_each_pass() -> None:
    """And who asks for passes, once a forward."""
    told = list[Any]()
    watcher: Any = SimpleNamespace(
        routed=lambda *seen: told.append(("routed", seen[0], seen[1].experts)),
        ran=lambda layer: told.append(("ran", layer)),
    )
    hooks = Hooks(watch=(watcher,), passed=lambda found: told.append(("passed", found.layer, found.counts.tolist())))
    stack = Stack(KEYS, "lru", hooks=lambda _: hooks)
    stack.layers[0].forward(torch.randn(2, SHAPE.hidden), torch.tensor([[1], [1]]), torch.rand(2, 1))
    stack.layers[0].shared.end_forward()
    assert told == [("routed", 0, [1]), ("ran", 0), ("passed", 0, [[0, 2, 0, 0]])]


def test_it_refuses_experts_that_do_not_exist() -> None:
    """A router's mistake reads no foreign memory."""
    layer = Stack(KEYS, "lru").layers[0]
    for ids in ([[0, EXPERTS]], [[-1, 0]]):
        with pytest.raises(ValueError, match="no such expert"):
            layer.forward(torch.randn(1, SHAPE.hidden), torch.tensor(ids), torch.rand(1, 2))
    with pytest.raises(ValueError, match="rows"):
        layer.forward(torch.randn(2, SHAPE.hidden), torch.tensor([[0, 1]]), torch.rand(1, 2))
    for tokens, top_k in ((2**62, 4), (4, 2**62), (2**40, 2**40), (-1, 2)):
        with pytest.raises(ValueError, match="rows"):
            layer.executor.core.run(0, 0, 0, tokens, top_k, 0)


@pytest.mark.parametrize("rows", [2, CPU_MAX_ROWS + 1])
def test_rows_of_few_bits_are_computed_in_float32(rows: int) -> None:
    """By native kernels, and by Python's, to which experts of many rows are left; the output is as the input."""
    layer = Stack(KEYS, "lru").layers[0]
    hidden, ids, weights = torch.randn(rows, SHAPE.hidden).bfloat16(), torch.zeros(rows, 1).long(), torch.rand(rows, 1)
    found = layer.forward(hidden, ids, weights)
    assert found.dtype == torch.bfloat16
    assert torch.equal(found, layer.forward(hidden.float(), ids, weights).bfloat16())


def test_a_layer_gets_its_parts_once() -> None:
    layer = Stack(KEYS, "lru").layers[0]
    with pytest.raises(ValueError, match="once"):
        install(layer, layer.executor)
