"""Prefetch by running a later layer's router on this layer's post-attention hidden state."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def predicted_experts(logits: NDArray[np.floating], top: int) -> list[int]:
    """Experts that a later router would pick, most wanted first.

    Each token votes for its `top` experts; experts are ordered by votes, then by their highest
    logit, then by number (deterministic). This is the gate look-ahead of Mixtral-Offloading,
    AdapMoE and MoEpic (section on the speculative prefetcher), taken over all tokens of a batch.

    Args:
        logits: router logits [T, E].
        top: experts per token, at most E.
    """
    tokens, experts = logits.shape
    top = min(top, experts)
    if tokens == 1:
        row = logits[0]
        if top == experts:
            return np.argsort(-row, kind="stable").tolist()
        picked = np.sort(np.argpartition(-row, top - 1)[:top])
        return picked[np.argsort(-row[picked], kind="stable")].tolist()
    picked = np.argpartition(-logits, top - 1, axis=1)[:, :top] if top < experts else np.tile(np.arange(experts), (tokens, 1))
    votes = np.bincount(picked.ravel(), minlength=experts)
    best = logits.max(axis=0)
    order = np.lexsort((np.arange(experts), -best, -votes))
    return [int(e) for e in order if votes[e]]
