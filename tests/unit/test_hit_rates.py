"""Hit rates of eviction policies on routing made by hand, and Belady's against every other way of evicting."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tiermoe.cluster.simulate.hit_rates import POLICIES, hit_rates, policies


def rates(ids: list[list[int]], size: int, names: tuple[str, ...] = POLICIES) -> dict[str, float]:
    found = hit_rates(np.array([ids]), [size], policies(names))
    return {row.policy: row.overall for row in found}


def best_hits(ids: tuple[tuple[int, ...], ...], size: int) -> int:
    """The most hits of any demand cache, by trying every victim."""

    @cache
    def most(step: int, held: frozenset[int]) -> int:
        if step == len(ids):
            return 0
        needed = frozenset(ids[step])
        after, spare = held | needed, sorted(held - needed)
        going = max(0, len(after) - size)

        def drop(left: frozenset[int], count: int, options: list[int]) -> list[frozenset[int]]:
            if count == 0:
                return [left]
            return [
                out
                for i in range(len(options) - count + 1)
                for out in drop(left - {options[i]}, count - 1, options[i + 1 :])
            ]

        return len(held & needed) + max(most(step + 1, left) for left in drop(after, going, spare))

    return most(0, frozenset())


class TestByHand:
    def test_recency_wins(self) -> None:
        """0 is used often, then never again: who counts uses keeps it."""
        found = rates([[0], [0], [0], [0], [1], [2], [1], [2], [1], [2]], 2, ("lru", "lfu", "belady"))
        assert found == {"lru": 7 / 10, "lfu": 3 / 10, "belady": 7 / 10}

    def test_frequency_wins(self) -> None:
        """0 is hot, and others pass by in between."""
        found = rates([[0], [0], [1], [2], [0], [3], [4], [0], [5], [1], [0]], 2, ("lru", "lfu", "lcp"))
        assert found["lru"] == 1 / 11
        assert found["lfu"] == found["lcp"] == 4 / 11

    def test_priority_forgets_what_was_hot_long_ago(self) -> None:
        """0 was picked 300 times, then no more: who only counts keeps it to the end, LCP for about one window."""
        found = rates([[0]] * 300 + [[1], [2]] * 150, 2, ("lcp", "lfu", "lru"))
        assert found["lfu"] == 299 / 600
        assert found["lru"] == 597 / 600
        assert 440 / 600 < found["lcp"] < 470 / 600

    @pytest.mark.parametrize("name", POLICIES)
    def test_all_fit(self, name: str) -> None:
        assert rates([[0, 1], [2, 3], [0, 3], [1, 2]], 4, (name,)) == {name: 4 / 8}

    @pytest.mark.parametrize("name", POLICIES)
    def test_a_cache_smaller_than_a_token(self, name: str) -> None:
        assert 0 <= rates([[0, 1, 2], [0, 1, 2], [2, 3, 0]], 1, (name,))[name] <= 2 / 9

    def test_counted_tokens_only(self) -> None:
        ids = np.array([[[0], [0], [1], [0]], [[1], [1], [1], [1]]])
        [row] = hit_rates(ids, [1], policies(("lru",)), np.array([False, True, False, True]))
        assert row.per_layer == (0.5, 1.0)
        assert row.overall == 0.75
        assert row.size == 1

    def test_unknown(self) -> None:
        with pytest.raises(KeyError):
            policies(("fifo",))


class TestBelady:
    @settings(max_examples=40, deadline=None)
    @given(
        ids=st.lists(st.sets(st.integers(0, 5), min_size=2, max_size=2).map(sorted), min_size=1, max_size=12),
        size=st.integers(2, 4),
    )
    def test_is_the_most(self, ids: list[list[int]], size: int) -> None:
        found = rates(ids, size)
        assert found["belady"] * 2 * len(ids) == pytest.approx(best_hits(tuple(map(tuple, ids)), size))
        assert all(found["belady"] >= other - 1e-12 for other in found.values())
