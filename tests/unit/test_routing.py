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
def routings(draw: st.DrawFn) -> np.ndarray:
    """ids [T, K]; a pair of -1 has no expert."""
    tokens, top_k = draw(st.integers(1, 5)), draw(st.integers(1, 4))
    pairs = tokens * top_k
    lowest = draw(st.sampled_from([-1, 0]))
    ids = draw(st.lists(st.integers(lowest, E - 1), min_size=pairs, max_size=pairs))
    return np.array(ids).reshape(tokens, top_k)


@given(routings())
def test_pairs_by_expert(ids: np.ndarray) -> None:
    found = Routing(LAYER, E, ids, partial=True)
    flat = np.flatnonzero(ids.ravel() >= 0)
    order = flat[np.argsort(ids.ravel()[flat], kind="stable")]
    used = ids.ravel()[flat]
    if len(ids) == 1 and len(set(used.tolist())) == len(used):  # as picked
        order = flat
    experts = list(dict.fromkeys(ids.ravel()[order].tolist()))
    assert found.experts == experts
    assert found.counts == [int((used == e).sum()) for e in experts]
    assert found.order.tolist() == [*order.tolist(), *np.flatnonzero(ids.ravel() < 0).tolist()]
    assert (found.layer, found.tokens, found.top_k, found.pairs) == (LAYER, *ids.shape, len(flat))
    if found.in_order:
        assert found.order.tolist() == list(range(found.pairs))


@given(routings(), st.randoms(use_true_random=False))
def test_what_a_peer_gets(ids: np.ndarray, random: np.random.Generator) -> None:
    found, weights = Routing(LAYER, E, ids, partial=True), np.arange(ids.size, dtype=np.float32).reshape(ids.shape)
    some = found.experts[: random.randint(0, len(found.experts))]  # type: ignore[attr-defined]
    random.shuffle(some)  # type: ignore[attr-defined]
    experts, starts, rows, weight, tokens = found.part([BASE + e for e in some], weights)
    pairs = [np.flatnonzero((ids == e).ravel()) for e in some]
    chosen = np.concatenate([np.zeros(0, np.int64), *pairs])
    expected, places = np.unique(chosen // ids.shape[1], return_inverse=True)
    assert experts.tolist() == some
    assert starts.tolist() == np.cumsum([0, *map(len, pairs)]).tolist()
    assert (tokens.tolist(), rows.tolist()) == (expected.tolist(), places.tolist())
    assert weight.tolist() == weights.ravel()[chosen].tolist()
    assert found.pairs_of([BASE + e for e in some]).tolist() == chosen.tolist()


def test_what_is_no_routing_is_refused() -> None:
    ids, weights = np.array([[0, 1]]), np.ones((1, 2), np.float32)
    for wrong, partial in ((-1, False), (-2, True), (E, False), (E, True)):
        with pytest.raises(ValueError, match="there is no such expert"):
            Routing(LAYER, E, np.array([[0, wrong]]), partial)
    with pytest.raises(ValueError, match="there is no such layer"):
        Routing(-1, E, ids)
    with pytest.raises(ValueError, match="there is no such layer"):
        Routing((1 << 63) - 1, E, ids)
    found = Routing(LAYER, E, ids)
    for key in (BASE + 2, BASE - 1, BASE + E, -1):
        with pytest.raises(ValueError, match="the layer does not need expert"):
            found.part([key], weights)
    with pytest.raises(ValueError, match="weights are"):
        found.part([BASE], np.ones((2, 2), np.float32))
