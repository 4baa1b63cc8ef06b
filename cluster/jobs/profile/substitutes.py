"""Rules for experts that are not at hand, one for each way of choosing a substitute: what the trial compares.

Plain on purpose: no gates, no limits, slot by slot. The served policy is `policies/substitution.py`; here only the
choice of the buddy differs from row to row.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.int64]
Weights = NDArray[np.float32]
Rule = Callable[[int, Ids, Weights, Weights], tuple[Ids, Weights]]
"""(layer, ids [T, K], weights [T, K], router probabilities [T, E]) -> ids and weights of what is run instead."""


def resident_at_random(layers: int, experts: int, rate: float, seed: int) -> NDArray[np.bool_]:
    """[L, E] with `rate` of each layer's experts resident."""
    generator = np.random.default_rng(seed)
    held = np.zeros((layers, experts), bool)
    for row in held:
        row[generator.permutation(experts)[: round(rate * experts)]] = True
    return held


def substitute(resident: NDArray[np.bool_], scores: NDArray[Any], scale: NDArray[Any] | None = None) -> Rule:
    """The resident expert of the greatest score takes the place of an absent one; none above zero: it is dropped.

    Args:
        resident: [L, E]. scores: [L, E, E], of j (last) for i.
        scale: [L, E, E], what the slot's routing weight is multiplied by; None: it stays as it is.
    """

    def rule(layer: int, ids: Ids, weights: Weights, probabilities: Weights) -> tuple[Ids, Weights]:
        factors = None if scale is None else scale[layer]
        return _in_turn(ids, weights, resident[layer], lambda wanted: scores[layer][wanted], factors)

    return rule


def substitute_likely(resident: NDArray[np.bool_], similarity: NDArray[Any]) -> Rule:
    """Like `substitute`, by similarity [L, E, E] times the router's probability for this token."""

    def rule(layer: int, ids: Ids, weights: Weights, probabilities: Weights) -> tuple[Ids, Weights]:
        return _in_turn(ids, weights, resident[layer], lambda wanted: similarity[layer][wanted] * probabilities)

    return rule


def next_best(resident: NDArray[np.bool_]) -> Rule:
    """The resident expert that the router itself would take next, of those that the token does not use yet."""

    def rule(layer: int, ids: Ids, weights: Weights, probabilities: Weights) -> tuple[Ids, Weights]:
        return _in_turn(ids, weights, resident[layer], lambda wanted: probabilities)

    return rule


def own_weight(rule: Rule) -> Rule:
    """After `rule`: every kept expert weighs what its own probability says, and the weights' sum is as before."""

    def reweighed(layer: int, ids: Ids, weights: Weights, probabilities: Weights) -> tuple[Ids, Weights]:
        found, kept = rule(layer, ids, weights, probabilities)
        own = np.where(kept > 0, np.take_along_axis(probabilities, found, axis=1), np.float32(0))
        total = own.sum(axis=1, keepdims=True)
        factor = np.divide(weights.sum(axis=1, keepdims=True), total, out=np.zeros_like(total), where=total > 0)
        return found, own * factor

    return reweighed


def at_random(resident: NDArray[np.bool_], seed: int) -> Rule:
    """Any resident expert that the token does not use yet; a draw of its own for every slot."""
    generator = np.random.default_rng(seed)

    def rule(layer: int, ids: Ids, weights: Weights, probabilities: Weights) -> tuple[Ids, Weights]:
        experts = resident.shape[1]
        return _in_turn(ids, weights, resident[layer], lambda wanted: 1 - generator.random((len(wanted), experts)))

    return rule


def _in_turn(
    ids: Ids,
    weights: Weights,
    resident: NDArray[np.bool_],
    scores_of: Callable[[Ids], NDArray[Any]],
    scale: NDArray[Any] | None = None,
) -> tuple[Ids, Weights]:
    """Slot by slot: the best of `scores_of` the wanted experts [T] -> [T, E]."""
    ids, weights = ids.copy(), weights.copy()
    rows = np.arange(len(ids))
    free = np.broadcast_to(resident, (len(ids), len(resident))).copy()  # [T, E]
    free[rows[:, None], ids] = False  # a token uses no expert twice
    for slot in range(ids.shape[1]):
        wanted = ids[:, slot]
        absent = ~resident[wanted]
        held = np.where(free, scores_of(wanted), 0.0)
        best = held.argmax(axis=1)
        found = absent & (held[rows, best] > 0)
        if scale is not None:
            weights[found, slot] *= scale[wanted[found], best[found]].astype(np.float32)
        weights[absent & ~found, slot] = 0.0
        ids[found, slot] = best[found]
        free[rows[found], best[found]] = False
    return ids, weights


def drop(resident: NDArray[np.bool_], renormalise: bool) -> Rule:
    """Absent experts contribute nothing; with `renormalise` the rest takes over their weight, where there is a rest."""

    def rule(layer: int, ids: Ids, weights: Weights, probabilities: Weights) -> tuple[Ids, Weights]:
        kept = np.where(resident[layer, ids], weights, np.float32(0))
        if renormalise:
            left = kept.sum(axis=1, keepdims=True)
            factor = np.divide(weights.sum(axis=1, keepdims=True), left, out=np.ones_like(left), where=left > 0)
            kept = kept * factor
        return ids, kept

    return rule
