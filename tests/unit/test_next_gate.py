"""The gate look-ahead's order, exactly and against a direct transcription."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from tiermoe.actors.policies.prefetch import predicted_experts


def transcription(logits: np.ndarray, top: int) -> list[int]:
    """Each token votes for its `top` experts; by votes, then by highest logit, ties always by number."""
    experts = logits.shape[1]
    votes = np.zeros(experts, int)
    for row in logits:
        votes[sorted(range(experts), key=lambda e: (-row[e], e))[:top]] += 1
    order = sorted(range(experts), key=lambda e: (-votes[e], -logits[:, e].max(), e))
    return [e for e in order if votes[e]]


@pytest.mark.parametrize(
    ("logits", "top", "expected"),
    [
        ([[0.1, 0.9, 0.5, 0.7]], 2, [1, 3]),
        ([[0.1, 0.9, 0.5, 0.7]], 4, [1, 3, 2, 0]),
        ([[0.1, 0.9, 0.5, 0.7]], 9, [1, 3, 2, 0]),  # more than there are
        ([[5, 5, 5, 5]], 2, [0, 1]),  # ties by number
        ([[1, 5, 5, 5]], 2, [1, 2]),
        ([[3, 2, 1, 0], [3, 0, 1, 2], [0, 3, 2, 1]], 1, [0, 1]),  # votes
        ([[3, 2, 1, 0], [0, 9, 1, 2]], 1, [1, 0]),  # one vote each: the highest logit first
        ([[4, 3, 2, 1], [1, 2, 3, 4]], 4, [0, 3, 1, 2]),
        ([[1, 1, 0], [0, 1, 1]], 2, [1, 0, 2]),
        ([[1, 1, 1], [2, 2, 2]], 2, [0, 1]),
    ],
)
def test_exact(logits: list[list[float]], top: int, expected: list[int]) -> None:
    assert predicted_experts(np.array(logits, np.float32), top) == expected


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


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(1, 40), st.integers(1, 33))
def test_follows_the_transcription_on_real_logits(seed: int, tokens: int, experts: int) -> None:
    rng = np.random.default_rng(seed)
    logits = rng.standard_normal((tokens, experts)).astype(np.float32)
    for top in {1, min(2, experts), experts}:
        assert predicted_experts(logits, top) == transcription(logits, top)
