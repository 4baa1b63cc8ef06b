"""H, P and PH against a direct simulation, token by token."""

from __future__ import annotations

from collections import OrderedDict

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from traces import picks_of

from tiermoe.actors.policies.eviction import CacheOrder
from tiermoe.actors.policies.moepic import Lcp
from tiermoe.actors.policies.moepic.split import Picks, observe

E, K = 7, 2


def draw(seed: int, tokens: int, scored: bool = True) -> tuple[NDArray[np.int64], NDArray[np.float64] | None]:
    rng = np.random.default_rng(seed)
    popular = 1.0 / (1 + np.arange(E))
    ids = np.array([rng.choice(E, K, replace=False, p=popular / popular.sum()) for _ in range(tokens)])
    ids = ids.reshape(tokens, K).astype(np.int64)
    return ids, rng.permuted(np.tile(np.arange(E) / E, (tokens, 1)), axis=1) if scored else None


def priority(
    order: CacheOrder, mu: list[int], last: list[int | None], now: int, e: int, rho: float, omega: float
) -> float:
    """Before token `now`: equation 4, or the last use."""
    seen = last[e]
    if seen is None:
        return 0.0 if order == "lcp" else -1.0
    return mu[e] * rho ** ((now - 1 - seen) / omega) if order == "lcp" else float(seen)


def by_hand(
    ids: NDArray[np.int64], scores: NDArray[np.float64] | None, order: CacheOrder, rho: float, omega: float
) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]:
    """The definitions of section 3.4.2: H [E + 1], P [E], PH [E, E + 1]."""
    mu, last = [0] * E, [None] * E  # type: list[int], list[int | None]
    h, p, ph = np.zeros(E + 1), np.zeros(E), np.zeros((E, E + 1))
    for now, picked in enumerate(ids.tolist()):
        values = [priority(order, mu, last, now, e, rho, omega) for e in range(E)]
        ranked = sorted(range(E), key=lambda e: (-round(values[e], 12), e))
        for c in range(E + 1):
            cached = set(ranked[:c])
            h[c] += len(cached & set(picked))
            if scores is not None:
                for y, e in enumerate(sorted(range(E), key=lambda e: (-scores[now, e], e))):
                    ph[y, c] += e in cached
                    p[y] += c == 0 and e in picked
        for e in picked:
            mu[e], last[e] = mu[e] + 1, now
    return h / (len(ids) * K), p / len(ids), ph / len(ids)


@pytest.mark.parametrize("order", ["lcp", "lru"])
class TestObserve:
    @settings(max_examples=40, deadline=None)
    @given(seed=st.integers(0, 10**6), tokens=st.integers(1, 30), omega=st.sampled_from([3.3, 17.7]))
    def test_definitions(self, order: CacheOrder, seed: int, tokens: int, omega: float) -> None:
        ids, scores = draw(seed, tokens)
        found, _ = observe(picks_of(ids, E, scores), order, rho=0.3, omega=omega)
        h, p, ph = by_hand(ids, scores, order, 0.3, omega)
        np.testing.assert_allclose(found.hit_rate, h)
        np.testing.assert_allclose(found.accuracy, p)
        np.testing.assert_allclose(found.predicted_hit_rate, ph)
        assert found.per_step == K
        assert found.steps == found.predicted == tokens


def _with_experts(drawn: tuple[NDArray[np.int64], NDArray[np.float64] | None]) -> tuple:  # type: ignore[type-arg]
    return drawn[0], E, drawn[1]


class TestAgainstCaches:
    @settings(max_examples=30, deadline=None)
    @given(seed=st.integers(0, 10**6), size=st.integers(1, E - 1))
    def test_lru_is_a_real_cache(self, seed: int, size: int) -> None:
        """One expert a token: hits are those of an LRU cache, but for experts that were never used before."""
        rng = np.random.default_rng(seed)
        ids = np.concatenate([np.arange(E), rng.integers(0, E, 60)])[:, None]
        cache, hits = OrderedDict[int, None](), 0
        for t, e in enumerate(ids[:, 0].tolist()):
            hits += t >= E and e in cache
            cache[e] = None
            cache.move_to_end(e)
            if len(cache) > size:
                cache.popitem(last=False)
        _first, then = observe(picks_of(ids[:E], E, None), "lru")
        rest, _ = observe(picks_of(ids[E:], E, None), "lru", then)
        assert rest.hits[size] == hits

    def test_lcp_ranks_as_the_policy_does(self) -> None:
        """The ranks are those of the eviction policy fed with the same tokens."""
        ids, _ = draw(3, 40, scored=False)
        policy, ranks = Lcp(1, E), []
        for picked in ids.tolist():
            order = policy.ranked(list(range(E)))
            ranks += [order.index(e) for e in picked]
            policy.routed(picked, [1] * K, 1)
        found, _ = observe(picks_of(ids, E, None), "lcp")
        np.testing.assert_array_equal(np.diff(found.hits), np.bincount(ranks, minlength=E))


class TestOtherOrders:
    def test_lfu_ranks_by_count(self) -> None:
        ids, _ = draw(4, 50, scored=False)
        counts, ranks = np.zeros(E, int), []
        for picked in ids.tolist():
            order = sorted(range(E), key=lambda e: (-counts[e], e))
            ranks += [order.index(e) for e in picked]
            counts[picked] += 1
        found, _ = observe(picks_of(ids, E, None), "lfu")
        np.testing.assert_array_equal(np.diff(found.hits), np.bincount(ranks, minlength=E))


@pytest.mark.parametrize("order", ["lcp", "lru", "lfu", "random"])
def test_layers_together_are_as_each_alone(order: CacheOrder) -> None:
    """Also where some have no prediction, and over two windows of which steps do not count."""
    drawn = [picks_of(*_with_experts(draw(seed, 40, scored=True))) for seed in range(3)]
    counts, scores = (np.stack([getattr(of, name) for of in drawn], axis=1) for name in ("counts", "scores"))
    scores[::3, 1] = np.nan
    counted, tokens = np.arange(40) % 5 > 0, 1 + np.arange(40) % 2
    whole, after = observe(Picks(counts[:25], tokens[:25], scores[:25]), order, None, counted[:25])
    then, after = observe(Picks(counts[25:], tokens[25:], scores[25:]), order, after, counted[25:])
    for layer, found in enumerate((whole + then).by_layer()):
        alone = [Picks(counts[part, layer], tokens[part], scores[part, layer]) for part in (np.s_[:25], np.s_[25:])]
        first, end = observe(alone[0], order, None, counted[:25])
        second, end = observe(alone[1], order, end, counted[25:])
        for name in ("steps", "needed", "hits", "predicted", "named", "held"):
            np.testing.assert_array_equal(getattr(found, name), getattr(first + second, name))
        np.testing.assert_array_equal(after.last[layer], end.last)
        np.testing.assert_array_equal(after.counts[layer], end.counts)


class TestPicks:
    def test_steps_of_several_tokens(self) -> None:
        """A forward of 3 tokens counts as one step that needs the union, and as 3 tokens of age."""
        counts, tokens = np.array([[2, 1, 0], [0, 0, 1], [1, 0, 0]]), np.array([3, 1, 1])
        found, after = observe(Picks(counts, tokens, None), "lcp")
        assert found.needed == 4
        assert found.per_step == pytest.approx(4 / 3)
        assert after.now == 5
        assert after.last.tolist() == [5, 3, 4]
        assert after.counts.tolist() == [3, 1, 1]
        assert found.predicted == 0
        assert not found.accuracy.any()

    def test_steps_without_a_prediction(self) -> None:
        scores = np.array([[np.nan] * 3, [0.1, 0.7, 0.2]])
        found, _ = observe(picks_of(np.array([[0], [1]]), 3, scores), "lcp")
        assert found.predicted == 1
        assert found.accuracy.tolist() == [1, 0, 0]
        assert found.predicted_hit_rate[1].tolist() == [0, 0, 0, 1]  # 0 ranks first, then 1, then 2 by number
