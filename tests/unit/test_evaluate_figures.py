"""Figures of an evaluation on made-up numbers: comparison of distributions, sums over documents, intervals."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st

from tiermoe.cluster.jobs.evaluate.quality import (
    SUMS,
    EvaluationOptions,
    Quality,
    resample_counts,
)
from tiermoe.cluster.jobs.evaluate.scoring import compare, kl_divergence


def log_probs(*rows: list[float]) -> torch.Tensor:
    return torch.tensor(rows).log()


def test_a_window_by_hand() -> None:
    lossless = log_probs([0.5, 0.25, 0.25], [0.1, 0.1, 0.8])
    policy = log_probs([0.25, 0.5, 0.25], [0.1, 0.1, 0.8])
    found = compare(lossless, policy, torch.tensor([1, 2]))
    assert found.nll.tolist() == pytest.approx([math.log(2), -math.log(0.8)])
    assert found.top1.tolist() == [1, 2]
    assert found.kl.tolist() == pytest.approx([0.5 * math.log(2) - 0.25 * math.log(2), 0.0], abs=1e-7)


@examples(max_examples=50, deadline=None)
@given(seed=st.integers(0, 2**32), scale=st.floats(0.0, 30.0))
def test_kl_is_never_negative_and_survives_fp16(seed: int, scale: float) -> None:
    rng = torch.Generator().manual_seed(seed)
    p, q = (torch.log_softmax(scale * torch.randn(4, 300, generator=rng), -1) for _ in range(2))
    kl = kl_divergence(p, q)
    assert bool((kl >= 0).all())
    assert bool((kl_divergence(p, p) <= 1e-6).all())
    assert bool((kl_divergence(p.half(), p) < 1e-5).all())
    assert torch.allclose(kl_divergence(p.half(), q), kl, rtol=0.02, atol=1e-3)


def quality(name: str = "p", options: EvaluationOptions | None = None, **sums: list[float]) -> Quality:
    documents = len(next(iter(sums.values())))
    arrays = {key: np.array(sums.get(key, [1.0] * documents)) for key in SUMS}
    return Quality(name, False, "emulated", arrays, options or EvaluationOptions())


def test_measures_are_ratios_of_sums_not_means_of_ratios() -> None:
    found = quality(tokens=[10, 30], nll=[10, 50], bytes=[20, 100], extra_nll=[1, 3], agree=[10, 20], kl=[0, 2])
    assert found["perplexity"].value == pytest.approx(math.exp(60 / 40))
    assert found["bits_per_byte"].value == pytest.approx(60 / 120 / math.log(2))
    assert found["perplexity_ratio"].value == pytest.approx(math.exp(0.1))
    assert found["top1_agreement"].value == pytest.approx(0.75)
    assert found["kl_nats"].value == pytest.approx(0.05)


def test_a_difference_of_policies_is_paired() -> None:
    """Documents differ far more than policies do: only the paired interval can tell them apart."""
    rng = np.random.default_rng(3)
    hard = rng.uniform(0, 300, 40)
    tokens = [100.0] * 40
    a = quality("a", tokens=tokens, nll=list(hard))
    b = quality("b", tokens=tokens, nll=list(hard + rng.uniform(1, 3, 40)))
    assert a["perplexity"].high > b["perplexity"].low
    found = b.minus(a, "perplexity")
    assert 0 < found.low < found.value < found.high
    assert a.minus(a, "perplexity").high == 0
    with pytest.raises(ValueError, match="same text"):
        a.minus(replace(a, options=EvaluationOptions(prefix=64)), "kl_nats")


def test_resamples_draw_documents_and_repeat_with_their_seed() -> None:
    counts = resample_counts(7, 50, 1)
    assert counts.shape == (50, 7)
    assert (counts.sum(1) == 7).all()
    assert (counts == resample_counts(7, 50, 1)).all()
    assert (counts != resample_counts(7, 50, 2)).any()
