"""ActiveEvict's equations in NumPy: `kernels/cpu/importance.cpp` decides the same."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tiermoe.actors.core import _core
from tiermoe.actors.policies import activeevict
from tiermoe.actors.policies.routing import drop_pairs, softmax

Floats = NDArray[np.float64]
Ids = NDArray[np.int64]
Weights = NDArray[np.float32]


class Hotness:
    """Time-decayed use of each expert by the last tokens of its layer (ActiveEvict, equation 8), incremental.

    u(e) = sum over the last T tokens t, the newest being T, of gamma^(T-t) * I_t(e); u(e) `values`, gamma `gamma`, T
    `window`, I_t(e) the rows of `ids`, in order. A new token multiplies u by gamma, adds 1 for its picks and subtracts
    gamma^T for those of the token that leaves the window: O(E + K). State: u [L, E], and the picks within the window.

    Args:
        layers, experts: L and E. gamma: in (0, 1]. window: tokens, at least 1.
    """

    def __init__(self, layers: int, experts: int, gamma: float, window: int) -> None:
        self._window = window
        self._powers: Floats = gamma ** np.arange(2 * window, dtype=np.float64)  # by age; batches as long as the window
        self.values: Floats = np.zeros((layers, experts))  # [L, E]
        self._picked: list[NDArray[np.int64] | None] = [None] * layers  # of each a ring [T, K]
        self._tokens = [0] * layers  # seen since the beginning

    def saw(self, layer: int, ids: NDArray[np.integer]) -> None:
        """Tokens of a layer picked these distinct experts: ids [n, K]."""
        window, values = self._window, self.values[layer]
        ids = ids[-window:]
        n = len(ids)
        if n == 0:
            return
        ring = self._picked[layer]
        if ring is None:
            ring = self._picked[layer] = np.zeros((window, ids.shape[1]), np.int64)
        seen = self._tokens[layer]
        counted = min(seen, window)
        if n == window:
            values[:] = 0.0
        else:
            values *= self._powers[n]
            leaving = counted + n - window
            if leaving > 0:
                rows = np.arange(seen - counted, seen - counted + leaving) % window
                ages = np.arange(counted + n - 1, counted + n - 1 - leaving, -1)
                np.subtract.at(values, ring[rows], self._powers[ages, None])
                np.maximum(values, 0.0, out=values)  # what rounding leaves of an expert that is out of the window
        np.add.at(values, ids, self._powers[n - 1 :: -1, None] if n > 1 else 1.0)
        ring[np.arange(seen, seen + n) % window] = ids
        self._tokens[layer] = seen + n


class ImportanceState:
    """u, p-hat and the residents as arrays, and what follows from them (equations 8 to 17).

    Args:
        layers, experts: L and E. alpha: weight of h in s. gamma, window: see `Hotness`. top_k: K.
    """

    def __init__(self, layers: int, experts: int, alpha: float, gamma: float, window: int, top_k: int) -> None:
        self._alpha, self._top_k, self._hotness = alpha, top_k, Hotness(layers, experts, gamma, window)
        self.values, self.predicted = self._hotness.values, np.zeros((layers, experts))
        self.resident, self.stamp = np.zeros(layers * experts, np.bool_), np.zeros(layers * experts, np.int64)

    def saw(self, layer: int, ids: NDArray[np.int64]) -> None:
        self._hotness.saw(layer, ids)

    def target(
        self, layer: int, logits: NDArray[np.floating], held: NDArray[np.bool_], threshold: float, most: int
    ) -> int:
        self.predicted[layer] = predicted_distribution(logits)
        return PreEviction(self._top_k, threshold, most).slots(logits, self.predicted[layer], held)

    def lowest(self, count: int) -> list[int]:
        scores = importance(self.values, self.predicted, self.resident, self._alpha)
        keys = self.resident.nonzero()[0]
        return keys[np.lexsort((self.stamp[keys], scores[keys]))[:count]].tolist()


class NativeState:
    """The native state with the methods of `ImportanceState`, by what `_core.PreEviction` does with it."""

    def __init__(self, of: activeevict.ImportanceState) -> None:
        self._of = of
        self.values, self.predicted = of.values, of.predicted

    def saw(self, layer: int, ids: NDArray[np.int64]) -> None:
        states = np.zeros(len(self._of.resident), np.uint8)
        _core.PreEviction(self._of.native, 0.0, 0).slots(layer, ids, None, None, states)

    def target(
        self, layer: int, logits: NDArray[np.floating], held: NDArray[np.bool_], threshold: float, most: int
    ) -> int:
        native, none = _core.PreEviction(self._of.native, threshold, most), np.empty((0, self._of.top_k), np.int64)
        layers, experts = self.values.shape
        states = np.zeros(layers * experts, np.uint8)
        states[layer * experts : (layer + 1) * experts] = held
        logits = np.ascontiguousarray(logits, np.float32)
        if layer:
            return native.slots(layer - 1, none, None, logits, states)
        native.slots(0, none, logits, None, states)  # which the last layer goes by
        return native.slots(layers - 1, none, None, None, states)


def importance(values: Floats, predicted: Floats, residents: NDArray[np.bool_], alpha: float) -> Floats:
    """s of every expert, by key [L*E]; of experts that are not resident only the second part."""
    used = values * residents.reshape(values.shape)
    sums = used.sum(axis=1, keepdims=True)
    hot = np.divide(used, sums, out=np.zeros_like(used), where=sums > 0)
    scores: Floats = (alpha * hot + (1 - alpha) * predicted).ravel()
    return scores


def predicted_distribution(logits: NDArray[np.floating]) -> Floats:
    """p-hat of the next layer's experts [E] (equations 10 to 12): the mean over tokens of softmax(r-hat).

    Args:
        logits: r-hat, the next layer's router on this layer's hidden states [T, E], T at least 1.
    """
    mean: Floats = softmax(logits).mean(axis=0)
    return mean


@dataclass(frozen=True, slots=True)
class ReleaseTarget:
    """Slots that should be free before the next layer: Delta = gap + redundancy (equation 17).

    width: k, experts that the layer should run. gap: k - H-hat(k), those of them without a slot (14). redundancy: r_k,
    further slots for an uncertain prediction (16).
    """

    width: int
    gap: int
    redundancy: int

    @property
    def slots(self) -> int:
        return self.gap + self.redundancy


def routing_widths(
    ids: NDArray[np.integer],
    weights: NDArray[np.floating],
    resident: NDArray[np.bool_],
    available: int,
    min_top_k: int = 1,
) -> NDArray[np.int64]:
    """k_l of each token (equations 18 to 21): the widest prefix of its experts whose misses fit.

    Symbols: C_l `resident`; C_avail `available`; e_(1), e_(2), .. a row of `ids` by falling weight, ties by place;
    k_max the K of `ids`; k_min `min_top_k`. For one token k is the greatest with u(k) = |{e_(j) not in C_l, j <= k}| at
    most max(C_avail, u(k_min)): the first k_min are always loaded, which the paper leaves open.

    For a batch, u counts the union of misses, filled rank by rank: first every token's k_min, then second places, third
    places and so on, within a rank by falling weight, ties by token. A token ends at its first expert that does not
    fit, so wide tokens never displace the first choices of others. O(T * K log(T * K)).

    Args:
        ids: the model's distinct picks [T, K]. weights: their routing weights [T, K].
        resident: of the layer's experts [E], here or in flight. available: slots for others.

    Returns:
        Experts that each token keeps [T], in [min(min_top_k, K), K].
    """
    tokens, top_k = ids.shape
    min_top_k = min(min_top_k, top_k)
    widths = np.full(tokens, top_k, np.int64)
    if misses_fit(ids, resident, available):
        return widths
    order = np.argsort(-weights, axis=1, kind="stable")
    by_rank = np.take_along_axis(ids, order, axis=1)  # [T, K]
    missing = ~resident[by_rank]
    if tokens == 1:
        misses = missing[0].cumsum()  # u(1) .. u(K)
        widths[0] = np.count_nonzero(misses <= max(available, int(misses[min_top_k - 1])))
        return widths
    granted = set(by_rank[:, :min_top_k][missing[:, :min_top_k]].tolist())
    ranked = np.take_along_axis(weights, order, axis=1)
    for rank in range(min_top_k, top_k):
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


def misses_fit(ids: NDArray[np.integer], resident: NDArray[np.bool_], available: int) -> bool:
    """Whether all missing experts of a routing [T, K] fit into `available` slots."""
    missing = ids[~resident[ids]]
    return missing.size <= available or len(set(missing.tolist())) <= available


def kept_pairs(weights: NDArray[np.floating], widths: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Which pairs remain [T, K]: of each token those of greatest weight, ties by place."""
    order = np.argsort(-weights, axis=1, kind="stable")
    kept = np.zeros(weights.shape, bool)
    np.put_along_axis(kept, order, np.arange(weights.shape[1]) < widths[:, None], axis=1)
    return kept


class BudgetDrops:
    """The decisions of `BudgetAwareTopK`, in NumPy: the reference. State: none."""

    def fits(self, ids: Ids, resident: NDArray[np.bool_], available: int) -> bool:
        """`misses_fit`."""
        return misses_fit(ids, resident, available)

    def drop(
        self, ids: Ids, weights: Weights, resident: NDArray[np.bool_], available: int, min_top_k: int,
        renormalise: bool,
    ) -> tuple[Ids, Weights, int]:  # fmt: skip
        """The routing without the pairs beyond `routing_widths`, as of `drop_pairs`, and how many they are."""
        widths = routing_widths(ids, weights, resident, available, min_top_k)
        if widths.min() == ids.shape[1]:
            return ids, weights, 0
        found = drop_pairs(ids, weights, ~kept_pairs(weights, widths), renormalise)
        return found.ids, found.weights, found.dropped


@dataclass(frozen=True, slots=True)
class PreEviction:
    """As `activeevict.PreEviction`."""

    top_k: int
    threshold: float = 0.02
    most: int = 2

    def target(self, logits: NDArray[np.floating], predicted: Floats, held: NDArray[np.bool_]) -> ReleaseTarget:
        """The release target of a layer.

        Args:
            logits: as for `predicted_distribution` [T, E]. predicted: what that gave [E].
            held: experts of the layer that have a slot [E].
        """
        picked = np.argsort(-logits, axis=1, kind="stable")[:, : self.top_k]
        width = self.top_k if len(logits) == 1 else len(np.unique(picked))
        return self.target_for(width, predicted, held)

    def slots(self, logits: NDArray[np.floating], predicted: Floats, held: NDArray[np.bool_]) -> int:
        """The slots of `target`, at most as many as the layer has experts without a slot."""
        return min(self.target(logits, predicted, held).slots, len(held) - int(np.count_nonzero(held)))

    def target_for(self, width: int, predicted: Floats, held: NDArray[np.bool_]) -> ReleaseTarget:
        """`target` for a known width k, at most E."""
        order = (-predicted).argsort(kind="stable")
        gap = width - int(np.count_nonzero(held[order[:width]]))
        boundary = predicted[order[width - 1 : width + self.most]]  # p_(k) .. p_(k + r_max)
        redundancy = int(np.count_nonzero(boundary[:-1] - boundary[1:] < self.threshold))
        return ReleaseTarget(width, gap, redundancy)
