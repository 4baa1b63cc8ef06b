"""Traces that `bench gpu` replays: experts that a device rounds to, and predictions of the recall that is stated."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tiermoe.benchmarks.gpu.routing import FAMILY, draw
from tiermoe.cluster.simulate.synthetic import FAMILIES


def test_a_draw_has_no_expert_twice_and_logits_that_agree_in_bfloat16() -> None:
    trace = draw(40, 3, 12, 4, seed=1)
    assert trace.ids.shape == (40, 3, 4)
    assert all(len(set(row)) == 4 for row in trace.ids.reshape(-1, 4).tolist())
    best = torch.from_numpy(trace.logits).bfloat16().topk(4)[1].numpy()
    assert (np.sort(best, axis=2) == np.sort(trace.ids, axis=2)).all()
    assert (draw(40, 3, 12, 4, seed=1).ids == trace.ids).all()


def test_what_is_foreseen_has_the_family_s_recall() -> None:
    trace = draw(150, 4, 64, 6, seed=2)
    for scores, recall in zip(trace.ahead, FAMILIES[FAMILY].recalls, strict=False):
        named = np.argsort(-scores, axis=2, kind="stable")[:, :, :6]
        found = (named[..., :, None] == trace.ids[..., None, :]).any(-1).mean()
        assert found == pytest.approx(recall, abs=0.05)
