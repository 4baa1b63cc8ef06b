"""Prefetch by running a later layer's router on this layer's post-attention hidden state."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def predicted_experts(logits: NDArray[np.floating], top: int) -> list[int]:
    """Experts that a later router would pick, most wanted first.

    Each token votes for its `top` experts, ties by number; experts are ordered by votes, then by their
    highest logit, then by number (deterministic). This is the gate look-ahead of Mixtral-Offloading,
    AdapMoE and MoEpic (section on the speculative prefetcher), taken over all tokens of a batch.

    Args:
        logits: router logits [T, E].
        top: experts per token, at most E.
    """
    tokens, experts = logits.shape
    top = min(top, experts)
    if tokens == 1:
        return np.argsort(-logits[0], kind="stable")[:top].tolist()
    last = np.partition(logits, experts - top, axis=1)[:, experts - top, None]  # [T, 1], the top-th largest
    picked = logits >= last  # [T, E]
    if np.count_nonzero(picked) != tokens * top:  # ties at the last place: lowest numbers first
        above = logits > last
        tied = logits == last
        picked = above | (tied & (tied.cumsum(axis=1) <= top - above.sum(axis=1, keepdims=True)))
    votes = picked.sum(axis=0)
    order = np.lexsort((-logits.max(axis=0), -votes))  # stable: then by number
    return order[: np.count_nonzero(votes)].tolist()
