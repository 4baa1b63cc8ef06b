"""ExpertSplit, the two allocations and the configurator: direct transcriptions, brute force, properties."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from traces import picks_of

from tiermoe.actors.policies.moepic.configure import (
    LayerModel,
    Room,
    Times,
    allocate,
    cache_sizes,
    configure,
    expected,
    expected_s,
    expert_split,
    load_costs,
    total_s,
)
from tiermoe.actors.policies.moepic.split import LayerStatistics, SplitLayout, observe

E, K, N = 6, 2, 16
TIMES = Times(attention_s=1.0, moe_s=2.0, head_s=0.5, load_s=3.0)


def layer(seed: int, skew: float = 1.0, tokens: int = 60, skill: float = 1.0) -> LayerStatistics:
    """Statistics of a made-up layer: popularity skewed by `skew`, predictions right the more the greater `skill`."""
    rng = np.random.default_rng(seed)
    popular = 1.0 / (1 + np.arange(E)) ** skew
    ids = np.array([rng.choice(E, K, replace=False, p=popular / popular.sum()) for _ in range(tokens)])
    scores = rng.random((tokens, E))
    np.put_along_axis(scores, ids, np.take_along_axis(scores, ids, 1) + skill, axis=1)
    return observe(picks_of(ids, E, scores), "lcp")[0]


def layers_of(seeds: list[int]) -> list[LayerStatistics]:
    return [layer(s, skew=0.3 + s % 4, skill=0.25 * (s % 5)) for s in seeds]


def transcribed(
    stats: LayerStatistics, v: float, window: float, t: Times, sizes: range = range(1, E + 1)
) -> tuple[float, int, float]:
    """Equations 9 to 11 as they stand: (m, C, theta) of the best C."""
    h, p, ph = stats.hit_rate, stats.accuracy, stats.predicted_hit_rate
    best = (-1.0, 0, 0.0)
    for c in sizes:
        theta = min(1.0, v / c)
        spent, m = 0.0, stats.per_step * h[c] * theta
        for y in range(E):
            spent += (1 - ph[y, c] * theta) * t.load_s
            if spent > window:
                break
            m += (1 - ph[y, c] * theta) * p[y]
        m = min(m, stats.per_step)
        if m > best[0] + 1e-12:
            best = (m, c, theta)
    return best


def transcribed_split(stats: list[LayerStatistics], v: list[float], t: Times) -> list[tuple[float, int, float]]:
    """ExpertSplit of Algorithm 1: (exposed, C, theta) of each layer."""
    window, out = t.head_s + t.attention_s, []
    for one, budget in zip(stats, v, strict=True):
        m, c, theta = transcribed(one, budget, window, t)
        hide = m * t.moe_s / one.per_step
        miss = (one.per_step - m) * t.load_s
        out.append((max(0.0, miss - hide), c, theta))
        window = (t.moe_s - min(hide, miss)) + t.attention_s
    return out


times_drawn = st.builds(
    Times,
    attention_s=st.floats(0, 4),
    moe_s=st.floats(0.1, 4),
    head_s=st.floats(0, 4),
    load_s=st.floats(0.1, 6),
)
SEEDS = st.lists(st.integers(0, 19), min_size=1, max_size=4)


class TestExpertSplit:
    @settings(max_examples=60, deadline=None)
    @given(seed=st.integers(0, 30), v=st.floats(0.05, 7), window=st.floats(0, 12), times=times_drawn)
    def test_one_layer(self, seed: int, v: float, window: float, times: Times) -> None:
        stats = layer(seed, skill=0.2 * (seed % 6))
        found = LayerModel(stats, times).best(v, window)
        m, _c, _theta = transcribed(stats, v, window, times)
        assert found.loaded == pytest.approx(m)
        at_c, *_ = transcribed(stats, v, window, times, range(found.slots, found.slots + 1))
        assert at_c == pytest.approx(m)  # another C only where it is as good
        assert found.theta == pytest.approx(min(1.0, v / found.slots))
        again = LayerModel(stats, times).of(found.slots, found.theta, window)
        assert again == found

    @settings(max_examples=40, deadline=None)
    @given(seeds=SEEDS, times=times_drawn, v=st.floats(0.2, 5))
    def test_all_layers(self, seeds: list[int], times: Times, v: float) -> None:
        stats = layers_of(seeds)
        models = [LayerModel(s, times) for s in stats]
        found = expert_split(models, [v] * len(stats), times)
        wanted = transcribed_split(stats, [v] * len(stats), times)
        assert [s.exposed_s for s in found] == pytest.approx([w[0] for w in wanted], abs=1e-9)
        cut = [s.slots for s in found], [s.theta for s in found]
        assert expected(models, *cut, times) == found


def transcribed_allocation(stats: list[LayerStatistics], t: Times, total: int, zeta: float) -> list[int]:
    """VramAllocation of Algorithm 1, in neurons, with V_i > 0 of equation 8."""
    n, step = len(stats), max(1, round(zeta * total))
    v = [total // n + (i < total % n) for i in range(n)]

    def latency(budgets: list[int]) -> list[float]:
        models = [LayerModel(s, t) for s in stats]
        return [s.exposed_s for s in expert_split(models, [b / N for b in budgets], t)]

    while n > 1:
        t1, t2, t3 = latency(v), latency([x + step for x in v]), latency([max(1, x - step) for x in v])
        i1 = max(range(n), key=lambda i: (t1[i] - t2[i], -i))
        able = [i for i in range(n) if i != i1 and v[i] - step > 0]
        if not able:
            break
        i2 = min(able, key=lambda i: (t3[i] - t1[i], i))
        tried = list(v)
        tried[i1] += step
        tried[i2] -= step
        if sum(latency(tried)) - sum(t1) >= 0:
            break
        v = tried
    return v


class TestAllocation:
    @settings(max_examples=40, deadline=None)
    @given(
        seeds=SEEDS, times=times_drawn, total=st.integers(8, 4 * E * N), zeta=st.sampled_from([0.01, 0.05, 0.2, 0.6])
    )
    def test_algorithm_1(self, seeds: list[int], times: Times, total: int, zeta: float) -> None:
        stats = layers_of(seeds)
        models = [LayerModel(s, times) for s in stats]
        found = allocate(models, times, total, N, zeta)
        assert list(found.budgets) == transcribed_allocation(stats, times, total, zeta)
        assert sum(found.budgets) == total
        assert min(found.budgets) > 0
        each, over = divmod(total, len(stats))
        uniform = [(each + (i < over)) / N for i in range(len(stats))]
        assert total_s(found.splits) <= total_s(expert_split(models, uniform, times)) + 1e-12
        again = expert_split(models, [b / N for b in found.budgets], times)
        assert list(found.splits) == again


class TestDynamicProgramming:
    @settings(max_examples=80, deadline=None)
    @given(
        costs=st.integers(1, 4).flatmap(
            lambda n: st.lists(
                st.lists(st.integers(0, 9), min_size=5, max_size=5).map(lambda r: sorted(r, reverse=True)),
                min_size=n,
                max_size=n,
            )
        ),
        spare=st.integers(0, 14),
    )
    def test_brute_force(self, costs: list[list[int]], spare: int) -> None:
        table, slots = np.array(costs, float), len(costs) + spare
        sizes = cache_sizes(table, slots)
        assert sum(sizes) <= slots
        assert all(1 <= s <= 4 for s in sizes)
        least = min(
            sum(row[s] for row, s in zip(costs, choice, strict=True))
            for choice in product(range(1, 5), repeat=len(costs))
            if sum(choice) <= slots
        )
        assert sum(row[s] for row, s in zip(costs, sizes, strict=True)) == least

    def test_load_costs(self) -> None:
        """Nothing predicted: the misses. All predicted: nothing."""
        blind, _ = observe(picks_of(np.array([[0, 1], [0, 2], [0, 1]]), E, None), "lru")
        sure = layer(0, skill=9.0)
        costs = load_costs([blind, sure], K)
        np.testing.assert_allclose(costs[0], K * (1 - blind.hit_rate))
        np.testing.assert_allclose(costs[1], 0, atol=1e-12)


class TestConfigure:
    @settings(max_examples=40, deadline=None)
    @given(
        seeds=SEEDS, times=times_drawn, experts=st.integers(3, 4 * E), buffer=st.integers(1, 3),
        kind=st.sampled_from(["moepic", "dynamic-programming"]),
    )  # fmt: skip
    def test_fits_and_gains(self, seeds: list[int], times: Times, experts: int, buffer: int, kind: str) -> None:
        stats, n = layers_of(seeds), len(seeds)
        pool = max(experts, 2 * n + 1) * N
        present = SplitLayout.uniform(n, E, N, pool, 0.5, buffer)
        found = configure(stats, times, Room(N, pool, K, buffer), present, allocation=kind, zeta=0.05)
        if found is None:
            return
        cut = found.layout
        assert cut.total_neurons <= pool
        assert all(s <= E for s in cut.slots)
        assert min(cut.slots) >= 1
        assert found.gain >= 0.01
        assert found.after_s < found.before_s
        models = [LayerModel(s, times) for s in stats]
        assert expected_s(models, times, cut) == pytest.approx(found.after_s)
        assert expected_s(models, times, present) == pytest.approx(found.before_s)
        if cut.buffer_neurons:
            assert cut.buffer_slots * cut.buffer_neurons <= max(buffer * N, cut.buffer_neurons)
        if kind == "dynamic-programming":
            assert set(cut.tops) == {N}
            assert cut.buffer_slots == 0

    def test_keeps_what_is_as_good(self) -> None:
        """From the cut that it chose itself there is nothing to gain."""
        stats, room = layers_of([1, 2, 3]), Room(N, 8 * N, K, 2)
        present = SplitLayout.uniform(3, E, N, 8 * N, 0.5, 2)
        found = configure(stats, TIMES, room, present, zeta=0.05)
        assert found is not None
        assert configure(stats, TIMES, room, found.layout, zeta=0.05) is None
        assert configure(stats, TIMES, room, present, zeta=0.05, min_gain=found.gain + 0.01) is None
