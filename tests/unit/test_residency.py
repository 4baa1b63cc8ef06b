"""Slots, states and pins of the core, and the plan of a layer on them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from tiermoe.actors.core import _core
from tiermoe.actors.policies.residency import ResidencyError, State

KEYS, SLOTS, BYTES = 10, 4, 100  # experts of layer 0; layer 1 has as many
ABSENT, LOADING, RESIDENT = map(int, State)


def core_of(slots: Sequence[int] = (SLOTS,), keys: int = KEYS, most: int = 0) -> _core.Core:
    """By last use, with copies of a second; with two classes of slots the second is for replicas."""
    parts = len(slots)
    class_of = [0] * 2 * keys + [1] * 2 * keys if parts > 1 else []
    layout = _core.Layout(2, keys, parts, class_of, list(slots), [], [BYTES] * (2 * keys * parts), False, most)
    order = _core.WholeOrder("lru", 2, max(1, keys))
    clock = _core.Clock()
    return _core.Core(layout, _core.VirtualLink(clock, lambda nbytes: 1.0, 0.0), order, _core.Governor())


def seen(core: _core.Core) -> dict[str, Any]:
    """All that a test can see of slots."""
    found = {name: getattr(core, name).tolist() for name in ("states", "evictable", "slots", "pins")}
    return found | {"free": core.free_slots, "under way": core.under_way, "emptied": core.emptied}


def refused(core: _core.Core, call: Callable[[], Any], match: str) -> None:
    """The call raises, and nothing differs afterwards."""
    before = seen(core)
    with pytest.raises(ResidencyError, match=match):
        call()
    assert seen(core) == before
    assert core.check() == ""


def load(core: _core.Core, *keys: int) -> None:
    core.prefetch(list(keys), [], 1)
    core.wait_all()


@pytest.fixture
def core() -> _core.Core:
    return core_of()


@pytest.mark.parametrize("key", [-1, -2 * KEYS, 2 * KEYS])
def test_keys_that_do_not_exist_are_refused(core: _core.Core, key: int) -> None:
    """Guards negative keys, which Python takes for keys from the end: one expert then had two slots."""
    text = f"expert {key} is not one of"
    load(core, 0)
    for call in (
        lambda: core.prefetch([1, key], [], 1), lambda: core.prefetch([1], [key], 1), lambda: core.preload([1, key]),
        lambda: core.migrate([1, key], False), lambda: core.finish_prefetch([key], 0), lambda: core.leave([key], 0),
        lambda: core.plan([1, key], []), lambda: core.plan([1], [key]), lambda: core.open(0, [1, key], [1, 1], 1, []),
    ):  # fmt: skip
        refused(core, call, text)


@pytest.mark.parametrize("layer", [-1, 2])
def test_layers_that_do_not_exist_are_refused(core: _core.Core, layer: int) -> None:
    for call in (
        lambda: core.open(layer, [], [], 1, []), lambda: core.vacate(1, layer), lambda: core.leave([], layer),
        lambda: core.finish_prefetch([], layer),
    ):  # fmt: skip
        refused(core, call, f"no MoE layer {layer}")


def test_a_layer_runs_experts_of_its_own_and_has_a_count_of_each(core: _core.Core) -> None:
    refused(core, lambda: core.open(0, [KEYS], [1], 1, []), "is not one of 0 to 9")
    refused(core, lambda: core.open(0, [0, 1], [1], 1, []), "as many counts")


def test_a_pass_runs_experts_of_its_layer_only(core: _core.Core) -> None:
    """Guards counters of experts beside those of the layer, which were written without asking."""
    core.open(1, [KEYS], [1], 1, [])
    core.plan([0], [])
    refused(core, core.begin, "segment 0 is not of layer 1")


def test_nothing_runs_before_a_pass_is_opened(core: _core.Core) -> None:
    for call in (core.begin, core.load, core.next, core.close):
        refused(core, call, "no pass is open")


@pytest.mark.parametrize(("keys", "slots"), [(0, 1), (1, 0), (-1, 2)])
def test_an_empty_cache_is_refused(keys: int, slots: int) -> None:
    with pytest.raises(ValueError, match="there are no"):
        core_of([slots], keys)


@pytest.mark.parametrize(
    ("array", "key", "value"),
    [
        ("slots", 5, 0),  # shared
        ("slots", 0, -1),  # lost
        ("states", 0, ABSENT),
        ("states", 5, RESIDENT),
        ("evictable", 0, 0),
        ("pins", 5, 1),
        ("pins", 0, -1),
    ],
)
def test_check_sees(array: str, key: int, value: int, core: _core.Core) -> None:
    load(core, 0, 1)
    assert core.check() == ""
    getattr(core, array)[key] = value
    assert core.check() != ""
