"""fMoE: the native search and store against the paper's equations in NumPy, their edges and the sketch."""

from __future__ import annotations

import numpy as np
import pytest
from map_contexts import SHAPE, TOP_K, forecasts, iteration, reference
from map_reference import NumpyMaps, prefetch_priority
from numpy.typing import NDArray

from tiermoe.actors.core._core import MapSearch
from tiermoe.actors.policies.fmoe import (
    ExpertMapEviction,
    ExpertMapPolicy,
    ExpertMapPrefetch,
    probability_of,
)
from tiermoe.actors.policies.fmoe.maps import ExpertMapStore, Sketch, unit_rows
from tiermoe.actors.policies.prefetch import LayerSeen, Span, Wanted

L, J, D, K = 6, 5, 7, 2
Floats = NDArray[np.float32]


def softmax(random: np.random.Generator, *shape: int) -> Floats:
    raw = np.exp(2 * random.standard_normal(shape))
    return (raw / raw.sum(axis=-1, keepdims=True)).astype(np.float32)


def embeddings(random: np.random.Generator, count: int, width: int = D) -> Floats:
    return unit_rows(random.standard_normal((count, width), np.float32))


def store_of(
    random: np.random.Generator, count: int, capacity: int = 100, distance: int = 2
) -> tuple[ExpertMapStore, Floats, Floats]:
    """A store, and its embeddings [n, D] and maps [n, L, J]."""
    store = ExpertMapStore(L, J, D, distance, capacity)
    e, m = embeddings(random, count), softmax(random, count, L, J)
    for i in range(count):
        store.add(e[i], m[i])
    return store, e, m


def cosine(a: NDArray[np.floating], b: NDArray[np.floating]) -> float:
    a, b = a.ravel().astype(np.float64), b.ravel().astype(np.float64)
    lengths = np.linalg.norm(a) * np.linalg.norm(b)
    return float(a @ b / lengths) if lengths > 0 else 0.0


def test_priority_and_back() -> None:
    p = np.array([0.5, 0.25], np.float32)
    priorities = prefetch_priority(p, np.array([5, 5]), 3)  # layers 0..2 have run; l - l_now = 3
    assert priorities.tolist() == pytest.approx([0.5 / 3, 0.25 / 3])
    assert probability_of(priorities, np.array([5, 5], np.int32), 3).tolist() == pytest.approx([0.5, 0.25])


def matched(search: MapSearch, by_embedding: bool) -> tuple[list[int], list[float]] | None:
    """The most similar entry of each sequence and its score."""
    found = search.match(by_embedding)
    return None if found is None else (found[0], found[1].tolist())


class TestSearch:
    def test_many_layers_lose_no_precision(self) -> None:
        random = np.random.default_rng(0)
        store = ExpertMapStore(60, 64, D, 3, 200)
        m = softmax(random, 200, 60, 64)
        for i in range(200):
            store.add(np.zeros(D, np.float32), m[i])
        new = softmax(random, 1, 60, 64)
        search = store.search(np.zeros((1, D), np.float32))
        for layer in range(60):
            search.observe(layer, new[:, layer])
        direct = [cosine(new[0], m[y]) for y in range(200)]
        np.testing.assert_allclose(search.scores()[0], direct, atol=1e-6)

    def test_ties_go_to_the_lowest_row(self) -> None:
        store = ExpertMapStore(L, J, D, 2, 8)
        e, m = np.eye(D, dtype=np.float32)[0], np.zeros((L, J), np.float32)
        m[:, 0] = 1.0
        for _ in range(3):
            store.add(e, m)
        search = store.search(e[None])
        search.observe(0, m[None, 0])
        assert matched(search, True) == matched(search, False) == ([0], [1.0])

    def test_zero_vectors_score_zero(self) -> None:
        random = np.random.default_rng(3)
        store, _, _ = store_of(random, 2)
        store.add(np.zeros(D, np.float32), np.zeros((L, J), np.float32))
        search = store.search(np.zeros((1, D), np.float32))
        search.observe(0, np.zeros((1, J), np.float32))
        assert matched(search, True) is None  # an unknown embedding
        assert matched(search, False) == ([0], [0.0])
        other = store.search(embeddings(random, 1))
        other.observe(0, softmax(random, 1, J))
        assert other.scores()[0, 2] == 0.0

    def test_what_does_not_fit_is_refused(self) -> None:
        random = np.random.default_rng(5)
        store, _, _ = store_of(random, 3)
        with pytest.raises(ValueError, match="embeddings"):
            store.search(np.zeros((1, D + 1), np.float32))
        search = store.search(embeddings(random, 2))
        with pytest.raises(ValueError, match="probabilities"):
            search.observe(0, softmax(random, 1, J))
        with pytest.raises(ValueError, match="no layer"):
            search.observe(L, softmax(random, 2, J))
        search.observe(0, softmax(random, 2, J))
        with pytest.raises(ValueError, match="seen before"):
            search.observe(0, softmax(random, 2, J))
        for layer in (-1, L, 2**62, -(2**62)):
            with pytest.raises(ValueError, match="no layer"):
                search.observe(layer, softmax(random, 2, 2 * J))
        for first, stop, now in ((0, 1, 1), (2, 1, 1), (L, L + 1, 1), (-1, 1, -1), (2**62, 2**62, 0)):
            with pytest.raises(ValueError, match="layers ahead"):
                search.forecast(False, first, stop, now, K, True)


class TestNative:
    """Whole streams of iterations against NumPy: what is forecast, in its order, and the rows that are replaced."""

    @pytest.mark.parametrize("experts", [3, 16, 37])
    @pytest.mark.parametrize(
        ("sequences", "distance", "dynamic"), [(1, 3, True), (4, 1, True), (3, 2, False), (2, L + 3, True)]
    )
    def test_equals_numpy(self, experts: int, sequences: int, distance: int, dynamic: bool) -> None:
        random = np.random.default_rng(experts + sequences)
        store = ExpertMapStore(L, experts, D, distance, 5)
        native = ExpertMapPrefetch(store, D, K, dynamic=dynamic)
        direct = NumpyMaps(L, distance, 5, K, dynamic)
        for number in range(9):
            e, m = embeddings(random, sequences), softmax(random, sequences, L, experts)
            e[0] *= number % 3 > 0  # an unknown embedding
            m[:, number % L, : experts // 2] = 0
            pairs, layer = [(native.begin(e), direct.begin(e))], int(number == 4)  # a layer that was lost
            while layer < L:
                seen = m[:, layer : layer + 1 + number % 2]  # also two layers at once
                pairs.append((native.observe(layer, seen.reshape(sequences, -1)), direct.observe(layer, seen)))
                layer += seen.shape[1]
            for mine, other in pairs:
                assert (mine is None) == (other is None)
                if mine is not None and other is not None:
                    assert (mine.now, mine.wanted, mine.semantic) == (other.now, other.wanted, other.semantic)
                    assert mine.keys.tolist() == other.keys.tolist()
                    assert mine.priorities.tolist() == other.priorities.tolist()
                    np.testing.assert_allclose(mine.scores, other.scores, atol=1e-6)
            assert native.end() == len(direct.end())
            np.testing.assert_array_equal(store.arrays()["maps"], np.stack(direct.maps, axis=1))


class TestReplacement:
    @pytest.mark.parametrize("distance", [0, 2, L + 3])
    def test_entries_that_are_added_take_the_rows_that_a_search_gives_them(self, distance: int) -> None:
        random = np.random.default_rng(distance)
        added, searched = ExpertMapStore(L, J, D, distance, 6), ExpertMapStore(L, J, D, distance, 6)
        for _ in range(30):
            e, m = embeddings(random, 1), softmax(random, 1, L, J)
            search = searched.search(e)
            for layer in range(L):
                search.observe(layer, m[:, layer])
            assert search.commit() == [added.add(e[0], m[0])]

    def test_what_does_not_fit_is_refused_and_changes_nothing(self) -> None:
        random = np.random.default_rng(1)
        store, e, m = store_of(random, 2)
        with pytest.raises(ValueError, match="does not fit"):
            store.add(e[0], m[0, :-1])
        bad = m[0].copy()
        bad[1, 1] = np.nan
        with pytest.raises(ValueError, match="not finite"):
            store.add(e[0], bad)
        assert len(store) == 2
        assert store.generation == 2


class TestArrays:
    def test_round_trip(self) -> None:
        random = np.random.default_rng(0)
        store, _, _ = store_of(random, 5)
        other = ExpertMapStore(L, J, D, 2, 100)
        other.load(store.arrays())
        e, m = embeddings(random, 1)[0], softmax(random, L, J)
        found = []
        for of in (store, other):
            search = of.search(e[None])
            search.observe(0, m.reshape(1, -1))
            found.append((search.scores().tolist(), matched(search, True)))
        assert found[0] == found[1]

    @pytest.mark.parametrize("fault", ["missing", "shape", "dtype", "nan", "length"])
    def test_refusals(self, fault: str) -> None:
        store, _, _ = store_of(np.random.default_rng(2), 3)
        arrays = store.arrays()
        if fault == "missing":
            del arrays["maps"]
        elif fault == "shape":
            arrays["maps"] = arrays["maps"][:, :-1]
        elif fault == "dtype":
            arrays["maps"] = arrays["maps"].astype(np.float64)
        elif fault == "nan":
            arrays["maps"][0, 0, 0] = np.inf
        else:
            arrays["embeddings"][0] *= 2
        with pytest.raises(ValueError, match=r"arrays|fit|finite|length"):
            ExpertMapStore(L, J, D, 2, 9).load(arrays)


class TestPrefetch:
    def test_ablations(self) -> None:
        random = np.random.default_rng(1)
        store, _, _ = store_of(random, 9, distance=1)
        only_trajectory = ExpertMapPrefetch(store, D, K, semantic=False, dynamic=False, learn=False)
        assert only_trajectory.begin(embeddings(random, 1)) is None
        for layer in range(L):
            forecast = only_trajectory.observe(layer, softmax(random, 1, J))
            if forecast is not None:
                assert forecast.wanted == K
        assert only_trajectory.end() == 0
        assert len(store) == 9


def _seen(layer: int, spans: list[Span], probabilities: np.ndarray | None) -> LayerSeen:
    ids = np.zeros((spans[-1].stop, TOP_K), np.int64)
    return LayerSeen(layer, spans, ids, probabilities, lambda distance: None)


def test_wants_what_the_forecasts_want() -> None:
    """Two sequences, of one and of three rows: rows of a sequence count by their mean."""
    told: list[tuple[int, float]] = []
    maps, direct = reference(), reference()

    def tell(keys: np.ndarray, priorities: np.ndarray, now: int, experts: int) -> None:
        told.extend(zip(keys, probability_of(priorities, keys // experts, now), strict=True))

    policy = ExpertMapPolicy(maps, SHAPE.hidden, tell)
    assert policy.distance == 2
    for number in range(4):
        shown = iteration(number, 2)
        spans = [
            Span("a", 0, 1, True, shown.embeddings[0]),
            Span("b", 1, 4, False, shown.embeddings[1]),
        ]
        expected = forecasts(direct, shown)
        told.clear()
        wanted = [policy.begin_forward(spans)]
        for layer in range(SHAPE.layers):
            p = shown.probabilities[layer].astype(np.float64)
            rows = np.stack([p[0], 0.5 * p[1], p[1], 1.5 * p[1]])
            wanted.append(policy.observed(_seen(layer, spans, rows)))
        for mine, forecast in zip(wanted, expected, strict=True):
            if forecast is None:
                assert mine == []
                continue
            pairs = zip(forecast.keys[: forecast.wanted], forecast.priorities, strict=False)
            assert mine == [Wanted(int(key), pytest.approx(float(priority))) for key, priority in pairs]
        assert [key for key, _ in told] == [key for f in expected if f is not None for key in f.keys.tolist()]
        if number:
            assert sorted(key for key, _ in told) == list(range(SHAPE.layers * SHAPE.experts))  # each expert once
            for layer in range(SHAPE.layers):  # of one matched map or two: probabilities, not priorities
                total = sum(p for key, p in told if key // SHAPE.experts == layer)
                assert 1.0 - 1e-5 <= total <= 2.0
    assert len(maps.store) == 8


def test_eviction_is_told() -> None:
    maps = reference()
    forecasts(maps, iteration(0))
    eviction = ExpertMapEviction(SHAPE.layers, SHAPE.experts)
    shown = iteration(1, seed=0)
    best = shown.probabilities[0, 0].argsort()
    for key in range(SHAPE.experts):
        eviction.admitted(key)
    policy = ExpertMapPolicy(maps, SHAPE.hidden, eviction.expect_map)
    policy.begin_forward([Span("a", 0, 1, True, shown.embeddings[0])])
    assert eviction.victims(SHAPE.experts, lambda key: True) == best.tolist()


def test_wide_embeddings_keep_their_cosines() -> None:
    random = np.random.default_rng(1)
    x = random.standard_normal((200, 2000)).astype(np.float32)
    y = x + random.standard_normal((200, 2000)).astype(np.float32)
    sketch = Sketch(2000, 512)
    before = np.einsum("sh,sh->s", unit_rows(x), unit_rows(y))
    after = np.einsum("sd,sd->s", sketch(x), sketch(y))
    assert np.sqrt(np.mean((before - after) ** 2)) < np.sqrt(2 / 512)
    assert abs(np.mean(before - after)) < 0.01


def test_the_signs_are_those_of_splitmix64() -> None:
    """Its first outputs from seed 0 end in ...DAF, ...5F4, ...54F, ...1EC, ...49B: odd is plus."""
    x = np.eye(5, dtype=np.float32)
    assert Sketch(5, 1)(x).ravel().tolist() == [1, -1, 1, -1, 1]
