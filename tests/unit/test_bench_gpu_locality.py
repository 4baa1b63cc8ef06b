"""Traces for models of other shapes keep what an expert cache sees of the recorded one."""

from __future__ import annotations

import numpy as np
import pytest

from tiermoe.benchmarks.gpu.routing import (
    Locality,
    draw,
    fit,
    lru_hit_rates,
    popularity_of,
    predicted_logits,
    recall,
    resampled,
)


def locality(hit_rates: tuple[float, ...] = (0.0, 0.0, 0.0, 0.0), experts: int = 16, top_k: int = 2) -> Locality:
    falling = np.arange(experts, 0, -1.0)
    shares = tuple((falling / falling.sum()).tolist())
    return Locality(shares, shares, hit_rates, (0.8, 0.6), top_k)


def test_lru_hit_rates_of_a_known_routing() -> None:
    """Layer 0 repeats one pair, layer 1 goes round over four experts: a cache of two of four holds none of those."""
    steady = np.tile([0, 1], (8, 1))
    round_robin = np.array([[0, 1], [2, 3]] * 4)
    ids = np.stack([steady, round_robin], axis=1)
    assert lru_hit_rates(ids, 4, (0.5, 1.0)) == (0.5, 1.0)


def test_popularity_is_the_mean_of_the_layers_sorted_shares() -> None:
    ids = np.array([[[0], [2]], [[0], [1]]])  # layer 0: all on one expert; layer 1: two of them alike
    assert popularity_of(ids, 3) == (0.75, 0.25, 0.0)


def test_recall_counts_experts_in_any_order() -> None:
    assert recall(np.array([[1, 2], [3, 4]]), np.array([[2, 1], [4, 5]])) == 0.75


@pytest.mark.parametrize("size", [8, 16, 60])
def test_a_resampled_curve_falls_and_sums_to_one(size: int) -> None:
    curve = resampled(locality().popularity, size)
    assert curve.shape == (size,)
    assert curve.sum() == pytest.approx(1.0)
    assert (np.diff(curve) <= 1e-12).all()
    half = curve[: size // 2].sum()
    assert half == pytest.approx(sum(locality().popularity[:8]), abs=0.01)


def test_a_draw_has_no_expert_twice_and_logits_that_agree() -> None:
    trace = draw(locality(), 0.6, 0.8, 40, 3, 12, 4, seed=1)
    assert trace.ids.shape == (40, 3, 4)
    assert all(len(set(row)) == 4 for row in trace.ids.reshape(-1, 4).tolist())
    best = np.argsort(-trace.logits, axis=2, kind="stable")[:, :, :4]
    assert (best == trace.ids).all()
    again = draw(locality(), 0.6, 0.8, 40, 3, 12, 4, seed=1)
    assert (again.ids == trace.ids).all()
    with pytest.raises(ValueError, match="cannot use 5 of 4"):
        draw(locality(), 0.6, 0.8, 4, 1, 4, 5, seed=1)


def test_fit_finds_the_process_again() -> None:
    known = draw(locality(), 0.8, 0.8, 300, 4, 16, 2, seed=5)
    found = fit(locality(lru_hit_rates(known.ids, 16)), layers=4)
    assert found.error < 0.04
    assert found.share >= 0.6


def test_a_stickier_process_hits_more() -> None:
    loose, sticky = (lru_hit_rates(draw(locality(), share, 0.8, 200, 2, 24, 4, 3).ids, 24)[1] for share in (0.0, 0.9))
    assert sticky > loose + 0.1


@pytest.mark.parametrize("share", [0.0, 0.5, 0.85, 1.0])
def test_what_is_foreseen_has_the_recall_asked_for(share: float) -> None:
    trace = draw(locality(), 0.5, 0.8, 150, 4, 24, 4, seed=2)
    scores = predicted_logits(trace, share, seed=3)
    guessed = np.argsort(-scores, axis=2, kind="stable")[:, :, :4]
    assert recall(guessed.reshape(-1, 4), trace.ids.reshape(-1, 4)) == pytest.approx(share, abs=0.04)
    assert np.allclose(np.sort(scores, axis=2), np.sort(trace.logits, axis=2))
