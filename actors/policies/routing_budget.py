"""Routing width by the slots at hand: budget-aware dynamic top-k (ActiveEvict, section 3.4)."""

from __future__ import annotations

from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from .rerouting import Ids, Rerouted, RerouteView, Rerouting, Weights, drop_pairs


def routing_widths(
    ids: NDArray[np.integer],
    weights: NDArray[np.floating],
    resident: NDArray[np.bool_],
    available: int,
    narrowest: int = 1,
) -> NDArray[np.int64]:
    """k_l of each token (equations 18 to 21): the widest prefix of its experts whose misses fit.

    Symbols: C_l `resident`; C_avail `available`; e_(1), e_(2), .. a row of `ids` by falling weight, ties by place;
    k_max the K of `ids`; k_min `narrowest`. For one token k is the greatest with u(k) = |{e_(j) not in C_l, j <= k}|
    at most C_avail. The paper says nothing of C_avail under u(k_min): the k_min are loaded all the same, and u(k) may
    then be as much as u(k_min), for residents behind them load nothing.

    The tokens of a batch share the slots, so u counts the union of their misses. It is filled rank by rank: every
    token's first k_min experts, whether they fit or not; then second places, third places and so on, within a rank by
    falling weight, ties by token. A token whose next expert does not fit ends there: what it keeps is a prefix.
    Where each would fit alone, wide tokens never push out the first choices of others.

    Args:
        ids: the model's picks [T, K], those of a row differ. weights: their routing weights [T, K].
        resident: of the layer's experts [E], here or on their way. available: slots for others.

    Returns:
        Experts that each token keeps [T], in [min(narrowest, K), K]. O(T * K log(T * K)).
    """
    tokens, top_k = ids.shape
    narrowest = min(narrowest, top_k)
    order = np.argsort(-weights, axis=1, kind="stable")
    by_rank = np.take_along_axis(ids, order, axis=1)  # [T, K]
    missing = ~resident[by_rank]
    widths = np.full(tokens, top_k, np.int64)
    if len(np.unique(by_rank[missing])) <= available:
        return widths
    granted = set(by_rank[:, :narrowest][missing[:, :narrowest]].tolist())
    ranked = np.take_along_axis(weights, order, axis=1)
    for rank in range(narrowest, top_k):
        for token in np.argsort(-ranked[:, rank], kind="stable").tolist():
            if widths[token] < rank or not missing[token, rank]:
                continue
            expert = int(by_rank[token, rank])
            if expert in granted:
                continue
            if len(granted) < available:
                granted.add(expert)
            else:
                widths[token] = rank
    return widths


def kept_pairs(weights: NDArray[np.floating], widths: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Which pairs the widths leave [T, K]: of each token those of greatest weight, ties by place."""
    order = np.argsort(-weights, axis=1, kind="stable")
    kept = np.zeros(weights.shape, bool)
    np.put_along_axis(kept, order, np.arange(weights.shape[1]) < widths[:, None], axis=1)
    return kept


class BudgetAwareTopK(Rerouting):
    """Each token runs as many of its experts as are here or fit into free slots (ActiveEvict, section 3.4).

    Pre-eviction has freed slots for what was predicted (`pre_evict`); where more is missing, the experts of least
    weight are left out instead of waited for. C_avail is `RerouteView.vacant`, C_l `RerouteView.available`; see
    `routing_widths`. State: none. Rows of prompts are treated like others.

    Args:
        renormalise: whether the model normalises the weights of the experts that it picks (equation 4).
        narrowest: k_min, experts that every token keeps.
    """

    name: ClassVar[str] = "budget-aware"

    def __init__(self, renormalise: bool = True, narrowest: int = 1) -> None:
        self._renormalise, self._narrowest = renormalise, narrowest

    def reroute(
        self,
        layer: int,
        ids: Ids,
        weights: Weights,
        probabilities: NDArray[np.floating] | None,
        view: RerouteView,
    ) -> Rerouted:
        widths = routing_widths(ids, weights, view.available, view.vacant, self._narrowest)
        if (widths == ids.shape[1]).all():
            return Rerouted(ids, weights)
        return drop_pairs(ids, weights, ~kept_pairs(weights, widths), self._renormalise)
