"""Prefetch policies, the governor and the registry's prefetch: exact decisions on tiny models."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from tiermoe.actors.core._core import Governor
from tiermoe.actors.policies.baselines import (
    ActivationMatrixPrefetch,
    MatrixCollection,
    StridePrefetch,
    TrainingOptions,
    train_predictor,
)
from tiermoe.actors.policies.prefetch import (
    LayerSeen,
    LayerwisePrefetch,
    NextGatePrefetch,
    PopularityPrefetch,
    Span,
    Wanted,
    WantedKeys,
    by_score,
    joined,
    predicted_experts,
    ranked,
    runs,
)
from tiermoe.actors.policies.registry import PolicyContext, kinds, make, options


def transcription(logits: np.ndarray, top: int) -> list[int]:
    """Each token votes for its `top` experts; by votes, then by highest logit, ties always by number."""
    experts = logits.shape[1]
    votes = np.zeros(experts, int)
    for row in logits:
        votes[sorted(range(experts), key=lambda e: (-row[e], e))[:top]] += 1
    order = sorted(range(experts), key=lambda e: (-votes[e], -logits[:, e].max(), e))
    return [e for e in order if votes[e]]


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_follows_the_transcription_with_ties(data: st.DataObject) -> None:
    """Guards the choice among equal logits: argpartition picked any of them, so predictions hung on the CPU."""
    tokens, experts = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 17))
    top = data.draw(st.integers(1, experts))
    logits = data.draw(arrays(np.float32, (tokens, experts), elements=st.integers(-3, 3)))
    found = predicted_experts(logits, top)
    assert found == transcription(logits, top)
    assert all(type(e) is int for e in found)
    assert predicted_experts(logits, top, 40) == [40 + e for e in found]


def test_scores_of_other_shapes_and_of_none_are_refused() -> None:
    scores = np.array([[3.0, 1.0], [2.0, 0.0]], np.float32)
    assert predicted_experts(scores, 2**62) == [0, 1]
    assert by_score(scores, 2**62) == ([0, 1], [3.0, 1.0])
    for wrong, top in ((scores, 0), (scores, -1), (scores[0], 1), (scores.astype(np.int64), 1)):
        with pytest.raises(ValueError, match=r"at least one|float32 or float64"):
            predicted_experts(wrong, top)


def governor(min_useful: float = 0.5) -> Governor:
    return Governor(min_useful, window=4, rest=3)


def answers(tested: Governor, layers: int) -> list[bool]:
    return [tested.allows() for _ in range(layers)]


def test_what_was_prefetched_before_the_rest_is_not_held_against_the_next_window() -> None:
    """Guards a rest that never ended: leftovers evicted during it filled the next window before one probe."""
    tested = governor()
    tested.wasted(4)
    assert not tested.allows()
    tested.wasted(4)
    assert answers(tested, 6) == [False, False, True, True, True, True]


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.sampled_from(["used", "wasted", "layer"]), max_size=80),
    st.sampled_from([0.0, 0.25, 0.5, 1.0]),
    st.integers(1, 6),
    st.integers(1, 5),
)
def test_follows_the_transcription(events: list[str], min_useful: float, window: int, rest: int) -> None:
    tested = Governor(min_useful, window, rest)
    outcomes: list[bool] = []
    layers_to_rest, fresh = 0, False
    for event in events:
        if event != "layer":
            getattr(tested, event)()
            outcomes.append(event == "used")
            continue
        expected = True
        if layers_to_rest:
            layers_to_rest -= 1
            expected = False
        elif fresh:
            outcomes, fresh = [], False
        elif len(outcomes) >= window:
            if sum(outcomes) < min_useful * len(outcomes):
                layers_to_rest, fresh, expected = rest - 1, True, False
            outcomes = []
        assert tested.allows() is expected


L, E, K = 3, 4, 2


def seen(layer: int, ids: list[list[int]], spans: list[Span] | None = None, **changes: object) -> LayerSeen:
    rows = np.asarray(ids, np.uint8)
    held = {"probabilities": None, "lookahead": lambda distance: None} | changes
    return LayerSeen(layer, spans or [Span("a", 0, len(ids), True)], rows, **held)  # type: ignore[arg-type]


def keys(wanted: list[Wanted]) -> list[int]:
    return [want.key for want in wanted]


def run(policy: ActivationMatrixPrefetch, name: str, layers: list[list[list[int]]]) -> None:
    spans = [Span(name, 0, len(layers[0]), True)]
    policy.begin_forward(spans)
    for layer, ids in enumerate(layers):
        policy.observed(seen(layer, ids, spans))


def distance(m1: np.ndarray, m2: np.ndarray) -> float:
    """d(M1, M2) as the paper writes it, a row without counts having cosine 0."""
    total = 0.0
    for a, b in zip(m1, m2, strict=True):
        if a.sum() and b.sum():
            a, b = a / a.sum(), b / b.sum()
            total += float(a @ b / np.sqrt((a @ a) * (b @ b)))
    return 1 - total / len(m1)


@pytest.mark.parametrize("seed", range(4))
def test_joined_is_ranked_without_objects(seed: int) -> None:
    """Several answers together go to the cache as one run, whatever their layers: none evicts another."""
    rng = np.random.default_rng(seed)
    found = []
    for size in (1, 5, 3):
        priorities = sorted((rng.integers(1, 4, size) / 4).tolist(), reverse=True)  # with ties
        found.append(WantedKeys([rng.permutation(L * E)[:size].tolist()], priorities))
    expected = ranked(want for one in found for want in one)
    assert joined(found) == expected
    assert runs(joined(found), E) == [("", keys(expected))]
    assert joined([]) == []
    assert joined(found[:1]) is found[0]


@pytest.mark.parametrize("seed", range(4))
def test_activation_matrix_finds_the_nearest_at_every_layer(seed: int) -> None:
    rng = np.random.default_rng(seed)
    collection = MatrixCollection(L, E, capacity=8)
    for _ in range(6):
        collection.add(rng.integers(0, 4, (L, E)) * rng.integers(0, 2, (L, 1)))
    policy = ActivationMatrixPrefetch(L, E, K, distance=L, collection=collection)
    counts = {name: np.zeros((L, E), np.int64) for name in "ab"}
    spans = [Span("a", 0, 2, True), Span("b", 2, 3, True)]
    for _ in range(3):
        policy.begin_forward(spans)
        for layer in range(L):
            ids = np.stack([rng.permutation(E)[:K] for _ in range(3)])
            wanted = policy.observed(seen(layer, ids.tolist(), spans))
            expected: dict[int, float] = {}
            for span in spans:
                np.add.at(counts[span.sequence][layer], ids[span.start : span.stop].ravel(), 1)
                distances = [distance(counts[span.sequence], m) for m in collection.counts]
                nearest = policy._nearest(policy._requests[span.sequence])
                assert nearest is not None
                assert distances[nearest] == pytest.approx(min(distances), abs=1e-6)
                m = collection.counts[nearest]
                for later in range(layer + 1, L):
                    share = m[later] / max(1, m[later].sum())
                    for e in [e for e in np.argsort(-share, kind="stable")[:K] if share[e] > 0]:
                        priority = (share[e] + 1e-6) * (1 - (later - layer) / L)
                        key = later * E + int(e)
                        expected[key] = max(priority, expected.get(key, 0.0))
            assert {want.key: pytest.approx(want.priority) for want in wanted} == expected
            assert [want.priority for want in wanted] == sorted((w.priority for w in wanted), reverse=True)


def test_activation_matrix_learns_from_finished_requests() -> None:
    policy = ActivationMatrixPrefetch(L, E, K, distance=1)
    assert policy.begin_forward([Span("a", 0, 1, True)]) == []
    policy.end("a")
    policy.end("nobody")
    assert len(policy.collection) == 0  # no activation: nothing to learn
    run(policy, "one", [[[0, 1]], [[2, 3]], [[1, 2]]])
    run(policy, "two", [[[2, 3]], [[0, 1]], [[0, 3]]])
    policy.end("one")
    policy.end("two")
    assert len(policy.collection) == 2
    spans = [Span("new", 0, 1, False)]
    assert keys(policy.begin_forward(spans)) == [0, 1]  # the most popular of layer 0, ties by number
    assert keys(policy.observed(seen(0, [[3, 2]], spans))) == [E + 0, E + 1]  # as `two` went on
    assert policy.observed(seen(2, [[0, 3]], spans)) == []  # there is no later layer


def test_activation_matrix_follows_a_collection_that_changes_under_a_request() -> None:
    policy = ActivationMatrixPrefetch(L, E, K, distance=1)
    spans = [Span("long", 0, 1, True)]
    policy.begin_forward(spans)
    policy.observed(seen(0, [[2, 3]], spans))
    run(policy, "other", [[[2, 3]], [[0, 1]], [[0, 3]]])
    policy.end("other")
    assert keys(policy.observed(seen(1, [[0, 1]], spans))) == [2 * E + 0, 2 * E + 3]


def test_full_collection_gives_up_the_nearest() -> None:
    collection = MatrixCollection(1, 3, capacity=2)
    for row in ([4, 0, 0], [0, 4, 0], [1, 3, 0]):
        collection.add(np.asarray([row]))
    assert collection.counts[:, 0].tolist() == [[4, 0, 0], [1, 3, 0]]
    with pytest.raises(ValueError, match="capacity is 0"):
        MatrixCollection(1, 3, capacity=0)


def test_layerwise_asks_for_whole_layers() -> None:
    ahead = LayerwisePrefetch(L, E)
    assert keys(ahead.begin_forward([])) == [0, 1, 2, 3]
    assert keys(ahead.observed(seen(1, [[0, 1]]))) == [8, 9, 10, 11]
    assert ahead.observed(seen(2, [[0, 1]])) == []
    present = LayerwisePrefetch(L, E, distance=0)
    assert present.begin_forward([]) == []
    assert keys(present.observed(seen(2, [[0, 1]]))) == [8, 9, 10, 11]
    with pytest.raises(ValueError, match="not 2"):
        LayerwisePrefetch(L, E, distance=2)


def test_popularity_asks_for_the_most_counted() -> None:
    policy = PopularityPrefetch(L, E, K, distance=2)
    assert policy.begin_forward([]) == []
    policy.observed(seen(0, [[0, 1], [0, 2]]))
    assert policy.observed(seen(1, [[3, 1], [3, 2]])) == []  # layer 2 was never seen
    policy.observed(seen(2, [[2, 0]]))
    assert keys(policy.begin_forward([])) == [0, 1, E + 3, E + 1]
    assert keys(policy.observed(seen(0, [[1, 2]]))) == [E + 3, E + 1, 2 * E + 0, 2 * E + 2]


def test_next_gate_asks_nearest_layers_first() -> None:
    scores = {1: np.asarray([[0.1, 0.9, 0.5, 0.0]]), 2: None}
    policy = NextGatePrefetch(L, E, K, distance=2)
    wanted = policy.observed(seen(0, [[0, 1]], lookahead=scores.__getitem__))
    assert keys(wanted) == [E + 1, E + 2]
    assert policy.observed(seen(L - 1, [[0, 1]], lookahead=scores.__getitem__)) == []
    two = {1: scores[1], 2: np.asarray([[0.0, 0.2, 0.3, 0.4]])}
    wanted = policy.observed(seen(0, [[0, 1]], lookahead=two.__getitem__))
    assert keys(wanted) == [E + 1, E + 2, 2 * E + 3, 2 * E + 2]
    assert keys(ranked(wanted)) == keys(wanted)


def test_stride_predictors_learn_a_permutation() -> None:
    """Layer l + 1 picks what layer l found most probable, numbered otherwise: a predictor can know it."""
    rng = np.random.default_rng(0)
    experts, place = 8, np.random.default_rng(1).permutation(8)
    probabilities = rng.dirichlet(np.ones(experts), 600)
    ids = place[np.argsort(-probabilities, axis=1)[:, :K]]
    options = TrainingOptions(epochs=25, batch=64, rate=5e-3)
    predictor = train_predictor(probabilities[:500], ids[:500], options)
    again = train_predictor(probabilities[:500], ids[:500], options)
    np.testing.assert_array_equal(predictor.w1, again.w1)
    picked = np.argsort(-predictor(probabilities[500:]), axis=1)[:, :K]
    recall = np.mean([len(set(a) & set(b)) / K for a, b in zip(picked, ids[500:], strict=True)])
    assert recall > 0.85  # by chance: 0.25
    policy = StridePrefetch([predictor], experts, K, stride=2)
    row = probabilities[500:501]
    wanted = policy.observed(seen(0, ids[500:501].tolist(), probabilities=row))
    assert keys(wanted) == [2 * experts + int(e) for e in picked[0]]
    assert policy.observed(seen(1, ids[500:501].tolist(), probabilities=row)) == []  # beyond the last predictor
    assert policy.observed(seen(0, [[0, 1]])) == []  # no probabilities


def test_registry_makes_each_kind() -> None:
    context = PolicyContext(L, E, K, hidden=8, predictors=[])
    for kind in kinds("prefetch"):
        waits = kind != "expert-map"  # the forward never waits for the matcher
        chosen = options("prefetch", {"kind": kind, "synchronous": waits})
        policy = make("prefetch", chosen, context)
        assert (policy is None) == (kind == "none")
        if policy is not None:
            assert policy.synchronous == waits
    with pytest.raises(ValueError, match="no prefetch policy 'magic'"):
        options("prefetch", "magic")
    with pytest.raises(ValueError, match="needs predictors"):
        make("prefetch", options("prefetch", "stride"), PolicyContext(L, E, K))
