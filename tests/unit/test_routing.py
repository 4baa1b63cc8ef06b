"""A layer's routing in native code, against NumPy: its experts and pairs, and the part of it that a peer gets."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiermoe.actors.core._core import Routing

E, LAYER = 6, 2
BASE = LAYER * E


@st.composite
def routings(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray | None]:
    """ids [T, K], and which pairs run."""
    tokens, top_k = draw(st.integers(1, 5)), draw(st.integers(1, 4))
    pairs = tokens * top_k
    ids = draw(st.lists(st.integers(0, E - 1), min_size=pairs, max_size=pairs))
    runs = draw(st.none() | st.lists(st.booleans(), min_size=pairs, max_size=pairs))
    shape = tokens, top_k
    return np.array(ids).reshape(shape), None if runs is None else np.array(runs).reshape(shape)


@given(routings())
def test_pairs_by_expert(case: tuple[np.ndarray, np.ndarray | None]) -> None:
    ids, runs = case
    found = Routing(LAYER, E, ids, runs)
    flat = np.flatnonzero(np.ones(ids.size, bool) if runs is None else runs)
    order = flat[np.argsort(ids.ravel()[flat], kind="stable")]
    used = ids.ravel()[flat]
    if len(ids) == 1 and len(set(used.tolist())) == len(used):  # as picked
        order = flat
    experts = list(dict.fromkeys(ids.ravel()[order].tolist()))
    assert found.experts == experts
    assert found.counts == [int((used == e).sum()) for e in experts]
    assert found.order.tolist() == order.tolist()
    assert (found.layer, found.tokens, found.top_k, found.pairs) == (LAYER, *ids.shape, len(flat))
    if found.in_order:
        assert found.order.tolist() == list(range(found.pairs))


@given(routings(), st.randoms(use_true_random=False))
def test_what_a_peer_gets(case: tuple[np.ndarray, np.ndarray | None], random: np.random.Generator) -> None:
    ids, runs = case
    found, weights = Routing(LAYER, E, ids, runs), np.arange(ids.size, dtype=np.float32).reshape(ids.shape)
    some = found.experts[: random.randint(0, len(found.experts))]  # type: ignore[attr-defined]
    random.shuffle(some)  # type: ignore[attr-defined]
    experts, starts, rows, weight, tokens = found.part([BASE + e for e in some], weights)
    there = np.ones(ids.shape, bool) if runs is None else runs
    pairs = [np.flatnonzero(((ids == e) & there).ravel()) for e in some]
    chosen = np.concatenate([np.zeros(0, np.int64), *pairs])
    expected, places = np.unique(chosen // ids.shape[1], return_inverse=True)
    assert experts.tolist() == some
    assert starts.tolist() == np.cumsum([0, *map(len, pairs)]).tolist()
    assert (tokens.tolist(), rows.tolist()) == (expected.tolist(), places.tolist())
    assert weight.tolist() == weights.ravel()[chosen].tolist()
    assert found.pairs_of([BASE + e for e in some]).tolist() == chosen.tolist()


def test_rows_that_come_by_expert_are_the_pairs() -> None:
    found = Routing.of_counts(LAYER, E, 3, [4, 1], [2, 1])
    assert (found.experts, found.counts, found.order.tolist()) == ([4, 1], [2, 1], [0, 1, 2])
    assert (found.layer, found.tokens, found.top_k, found.pairs, found.in_order) == (LAYER, 3, 1, 3, False)
    twice = Routing.of_counts(LAYER, E, 1, [4], [2])  # a row that runs one expert two times
    assert (twice.order.tolist(), twice.in_order) == ([0, 1], False)
    assert Routing.of_counts(LAYER, E, 1, [4], [1]).in_order
    with pytest.raises(ValueError, match="in no token"):
        twice.part([BASE + 4], np.ones((1, 1), np.float32))


def test_what_is_no_routing_is_refused() -> None:
    ids, weights = np.array([[0, 1]]), np.ones((1, 2), np.float32)
    for wrong in (-1, E):
        with pytest.raises(ValueError, match="there is no such expert"):
            Routing(LAYER, E, np.array([[0, wrong]]))
        with pytest.raises(ValueError, match="there is no such expert"):
            Routing.of_counts(LAYER, E, 1, [wrong], [1])
    with pytest.raises(ValueError, match="there is no such layer"):
        Routing(-1, E, ids)
    with pytest.raises(ValueError, match="pairs that run are as ids"):
        Routing(LAYER, E, ids, np.ones((2, 2), bool))
    for needed, counts in (([1, 1], [1, 1]), ([1], [0]), ([1], [])):
        with pytest.raises(ValueError, match="experts come once"):
            Routing.of_counts(LAYER, E, 1, needed, counts)
    for counts in ([1 << 40], [1 << 62, 1 << 62]):
        with pytest.raises(ValueError, match="has fewer rows"):
            Routing.of_counts(LAYER, E, 1, [1, 2][: len(counts)], counts)
    with pytest.raises(ValueError, match="there is no such layer"):
        Routing((1 << 63) - 1, E, ids)
    found = Routing(LAYER, E, ids)
    for key in (BASE + 2, BASE - 1, BASE + E, -1):
        with pytest.raises(ValueError, match="the layer does not need expert"):
            found.part([key], weights)
    with pytest.raises(ValueError, match="weights are"):
        found.part([BASE], np.ones((2, 2), np.float32))
