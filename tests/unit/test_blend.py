"""Expert maps and next-gate joined: exact decisions on a tiny model."""

from __future__ import annotations

import numpy as np
import pytest

from tiermoe.actors.policies.fmoe import GATE, MAP, BlendPrefetch
from tiermoe.actors.policies.prefetch import LayerSeen, Span, Wanted

LAYERS, EXPERTS = 4, 4
SPANS = (Span("a", 0, 1, True),)


def _seen(layer: int, picked: list[int], ahead: dict[int, list[float]]) -> LayerSeen:
    return LayerSeen(
        layer, SPANS, np.array([picked]), None,
        lambda distance: np.array([ahead[distance]], np.float32) if distance in ahead else None,
    )  # fmt: skip


def _keys(wanted: list[Wanted]) -> list[int]:
    return [want.key for want in wanted]


def test_agreement_goes_first_and_no_more_is_asked_than_the_better_source_asks() -> None:
    tested = BlendPrefetch(LAYERS, EXPERTS, top=2, distance=1)
    tested.begin_forward(SPANS)
    wanted = tested.merged(_seen(0, [0, 1], {1: [0, 3, 2, 0]}), [Wanted(6, 0.9), Wanted(7, 0.5)])
    assert wanted == [Wanted(6, pytest.approx(0.75), "both"), Wanted(5, pytest.approx(0.5), GATE)]


def test_the_source_that_was_right_is_believed() -> None:
    tested = BlendPrefetch(LAYERS, EXPERTS, top=2, distance=1, fade=1.0)
    assert tested.precision(MAP, 1, 1) == tested.precision(GATE, 1, 1) == 0.5
    for _ in range(5):  # next-gate says 0 and 1, the map 2 and 3, which is what is picked
        tested.begin_forward(SPANS)
        tested.merged(_seen(0, [0, 1], {1: [2, 1, 0, 0]}), [Wanted(6, 0.9), Wanted(7, 0.5)])
        tested.merged(_seen(1, [2, 3], {}), [])
    assert tested.precision(MAP, 1, 1) == pytest.approx(11 / 12)
    assert tested.precision(GATE, 1, 1) == pytest.approx(1 / 12)
    tested.begin_forward(SPANS)
    wanted = tested.merged(_seen(0, [0, 1], {1: [2, 1, 0, 0]}), [Wanted(6, 0.9), Wanted(7, 0.5)])
    assert [(want.key, want.source) for want in wanted] == [(6, MAP), (7, MAP)]


def test_the_past_fades() -> None:
    tested = BlendPrefetch(LAYERS, EXPERTS, top=1, distance=1, fade=0.5)
    for picked in ([0], [1]):
        tested.begin_forward(SPANS)
        tested.merged(_seen(0, [0], {1: [1, 0, 0, 0]}), [])
        tested.merged(_seen(1, picked, {}), [])
    assert tested.precision(GATE, 1, 1) == pytest.approx((0.5 * 1 + 0 + 1) / (0.5 * 1 + 1 + 2))


def test_a_map_keeps_its_distance_and_counts_until_its_layer() -> None:
    tested = BlendPrefetch(LAYERS, EXPERTS, top=1, distance=2)
    tested.begin_forward(SPANS)
    first = tested.merged(_seen(0, [0], {}), [Wanted(2 * EXPERTS + 3, 0.9)])
    assert first == [Wanted(11, pytest.approx(0.25), MAP)]  # two layers ahead
    second = tested.merged(_seen(1, [0], {}), [])
    assert second == [Wanted(11, pytest.approx(0.5), MAP)]  # said again, now one ahead
    assert tested.merged(_seen(2, [3], {}), []) == []
    assert tested.precision(MAP, 2, 2) == pytest.approx(2 / 3)
    assert tested.precision(MAP, 2, 1) == 0.5


def test_an_unfinished_forward_is_forgotten() -> None:
    tested = BlendPrefetch(LAYERS, EXPERTS, top=1, distance=1)
    tested.begin_forward(SPANS)
    tested.merged(_seen(0, [0], {1: [1, 0, 0, 0]}), [])
    tested.begin_forward(SPANS)
    tested.merged(_seen(1, [3], {}), [])
    assert tested.precision(GATE, 1, 1) == 0.5


def test_without_guesses_nothing_is_wanted() -> None:
    tested = BlendPrefetch(LAYERS, EXPERTS, top=1, distance=3)
    tested.begin_forward(SPANS)
    assert _keys(tested.merged(_seen(0, [0], {}), [])) == []
