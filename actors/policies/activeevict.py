"""ActiveEvict: importance eviction, pre-eviction to a release target, and routing by available slots.

eviction importance      recent use and the next layer's predicted distribution (section 3.2)
pre_evict release-target slots that the next layer will need free (section 3.3)
routing budget-aware     each token uses as many of its experts as are resident or fit (section 3.4)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from .eviction import EvictionPolicy, lowest_evictable, lowest_values
from .prefetch import predicted_experts
from .registry import PolicyContext, PolicyOptions, register
from .routing import Ids, Rerouted, RerouteView, Rerouting, RoutingOptions, Weights, drop_pairs, softmax

if TYPE_CHECKING:
    from ..policy_settings import PolicySettings

Floats = NDArray[np.float64]


class Hotness:
    """Time-decayed use of each expert by the last tokens of its layer (ActiveEvict, equation 8), incremental.

    u(e) = sum over the last T tokens t, the newest being T, of gamma^(T-t) * I_t(e); u(e) `values`, gamma `gamma`, T
    `window`, I_t(e) the rows of `ids`, in order. A new token multiplies u by gamma, adds 1 for its picks and subtracts
    gamma^T for those of the token that leaves the window: O(E + K). State: u [L, E], and the picks within the window.

    Args:
        layers, experts: L and E. gamma: in (0, 1]. window: tokens, at least 1.
    """

    def __init__(self, layers: int, experts: int, gamma: float, window: int) -> None:
        check_decay(gamma, window)
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


def check_decay(gamma: float, window: int) -> None:
    """Raises ValueError: gamma is not in (0, 1], or the window holds no token."""
    if not 0 < gamma <= 1:
        raise ValueError(f"gamma is {gamma}, not in (0, 1]")
    if window < 1:
        raise ValueError(f"the window holds {window} tokens, not at least 1")


class Importance(Protocol):
    """The state behind `ImportanceEviction`; the reference is `ImportanceState`.

    Attributes:
        values: u [L, E]. predicted: p-hat [L, E]. resident: [L*E]. stamp: number of the last use [L*E].
    """

    values: Floats
    predicted: Floats
    resident: NDArray[np.bool_]
    stamp: NDArray[np.int64]

    def saw(self, layer: int, ids: NDArray[np.int64]) -> None:
        """Tokens of a layer picked these distinct experts: ids [n, K]."""
        ...

    def target(
        self, layer: int, logits: NDArray[np.floating], held: NDArray[np.bool_], threshold: float, most: int
    ) -> int:
        """Predict a layer from its router's logits [T, E]; the slots of its release target, as `PreEviction.slots`."""
        ...

    def release(
        self, seen: int, ids: NDArray[np.int64], layer: int, logits: NDArray[np.floating],
        states: NDArray[np.uint8], evictable: NDArray[np.uint8], free: int, threshold: float, most: int,
    ) -> list[int]:  # fmt: skip
        """`saw` of the layer `seen`, `target` of `layer`, and the evictable residents of least s that free its slots.

        Args:
            states, evictable: as the core has them (`engine.cache.residency`) [L*E]. free: slots that are free.
        """
        ...

    def lowest(self, count: int) -> list[int]:
        """The first `count` residents by rising s, then least recently used, then by key."""
        ...


MakeImportance = Callable[[int, int, float, float, int, int], Importance]  # arguments of `ImportanceState`


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

    def release(
        self, seen: int, ids: NDArray[np.int64], layer: int, logits: NDArray[np.floating],
        states: NDArray[np.uint8], evictable: NDArray[np.uint8], free: int, threshold: float, most: int,
    ) -> list[int]:  # fmt: skip
        self.saw(seen, ids)
        experts = self.values.shape[1]
        held = states[layer * experts : (layer + 1) * experts] != 0
        slots = self.target(layer, logits, held, threshold, most)
        return lowest_evictable(self.lowest, slots - free, evictable.__getitem__)

    def lowest(self, count: int) -> list[int]:
        scores = importance(self.values, self.predicted, self.resident, self._alpha)
        return lowest_values(scores, self.stamp, self.resident, count)


def importance(values: Floats, predicted: Floats, residents: NDArray[np.bool_], alpha: float) -> Floats:
    """s of every expert, by key [L*E]; of experts that are not resident only the second part."""
    used = values * residents.reshape(values.shape)
    sums = used.sum(axis=1, keepdims=True)
    hot = np.divide(used, sums, out=np.zeros_like(used), where=sums > 0)
    scores: Floats = (alpha * hot + (1 - alpha) * predicted).ravel()
    return scores


@register("eviction", "importance")
class ImportanceEviction(EvictionPolicy):
    """Evicts the expert of least importance (ActiveEvict, section 3.2, equations 9 and 13).

    Symbols: u(e) `Hotness.values`; h(e) = u(e) / sum of u over the residents C_l of its layer, 0 where none was used
    within the window; p-hat(e), the latest predicted probability (`target`); s(e) = alpha * h(e) + (1 - alpha) *
    p-hat(e), `scores`. The paper gives each layer its own slots. In a pool for all layers s compares across layers:
    both parts sum to at most 1 per layer.

    State: u [L, E], p-hat [L, E], residents and their last use. Ties: least recently used, then by key. O(1) per key
    admitted, used or removed, `victims` O(L*E + n log count) for n resident.

    Args:
        layers, experts: L and E. alpha: 1 is use alone, 0 is prediction alone. gamma, window: see `Hotness`. top_k: of
            the router. make_state: makes the `Importance`.
    """

    class Options(PolicyOptions):
        alpha: float = Field(
            default=0.5, ge=0, le=1, description="weight of recent use; the rest: predicted probability"
        )
        gamma: float = Field(default=0.97, gt=0, le=1, description="factor on a use for each later token")
        window: int = Field(default=128, ge=1, le=1 << 16, description="tokens after which a use has no weight")

        def check(self, policy: PolicySettings) -> None:
            if policy.pre_evict.kind == "off":
                raise ValueError("eviction importance goes by what pre_evict predicts: set pre_evict.kind")

    per_layer = False

    @classmethod
    def make(cls, options: Any, context: PolicyContext) -> ImportanceEviction:
        made: MakeImportance = ImportanceState if context.importance is None else context.importance
        sizes = context.layers, context.experts, options.alpha, options.gamma, options.window, context.top_k
        return cls(*sizes, made)

    def __init__(
        self, layers: int, experts: int, alpha: float = 0.5, gamma: float = 0.97, window: int = 128, top_k: int = 1,
        make_state: MakeImportance = ImportanceState,
    ) -> None:  # fmt: skip
        if not 0 <= alpha <= 1:
            raise ValueError(f"alpha is {alpha}, not in [0, 1]")
        check_decay(gamma, window)
        self._alpha, self._clock = alpha, 0
        self.state = make_state(layers, experts, alpha, gamma, window, top_k)
        self._resident: Any = self.state.resident.data
        self._stamp: Any = self.state.stamp.data

    def admitted(self, key: int) -> None:
        self._resident[key] = True
        self._clock += 1
        self._stamp[key] = self._clock

    def used(self, keys: Iterable[int]) -> None:
        stamp, clock = self._stamp, self._clock
        for key in keys:
            clock += 1
            stamp[key] = clock
        self._clock = clock

    def removed(self, key: int) -> None:
        if not self._resident[key]:
            raise KeyError(key)
        self._resident[key] = False

    def victims(self, count: int, evictable: Callable[[int], bool]) -> list[int]:
        return lowest_evictable(self.state.lowest, count, evictable)

    def scores(self) -> Floats:
        """s of every expert, by key [L*E]; of experts that are not resident only the second part."""
        return importance(self.state.values, self.state.predicted, self.state.resident, self._alpha)

    def ranked(self, keys: Sequence[int]) -> list[int]:
        """By falling s as if these were the residents, then most recently used first."""
        asked = np.zeros_like(self.state.resident)
        asked[list(keys)] = True
        scores = importance(self.state.values, self.state.predicted, asked, self._alpha)
        return sorted(keys, key=lambda key: (-scores[key], -self._stamp[key]))


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


@register("pre_evict", "off")
class PreEvictOptions(PolicyOptions):
    """Slots that are freed before the next layer's router runs; kind off: none. Eviction chooses the victims."""

    kind: str = "off"


class ReleaseOptions(PreEvictOptions):
    """Options of `PreEviction`."""

    kind: str = "release-target"
    tau: float = Field(default=0.02, ge=0, le=1, description="two probabilities are uncertain if they differ by less")
    r_max: int = Field(default=2, ge=0, le=64, description="most slots freed because of uncertain probabilities")

    def check(self, policy: PolicySettings) -> None:
        if policy.uses_ndp or policy.preload != "none":
            raise ValueError("pre_evict is for caches that fill on demand: leave placement and preload out")


@register("pre_evict", "release-target")
@dataclass(frozen=True, slots=True)
class PreEviction:
    """The release target of ActiveEvict (section 3.3). State: none. O(T*E + E log E) per layer.

    Symbols: p_(j) the j-th greatest of p-hat, ties by number; k the width; delta_j = p_(j) - p_(j+1) (15); tau
    `threshold`; r_max `most`. r_k counts those of delta_k .. delta_(k+r_max-1) that exist and are under tau. The
    paper's k is one token's routing width; for a batch, k is the number of distinct experts in the predictions.

    Args:
        top_k: of the router. threshold: in probability, 0: no redundancy. most: slots of redundancy at most.
    """

    Options: ClassVar[type[PolicyOptions]] = ReleaseOptions
    top_k: int
    threshold: float = 0.02
    most: int = 2

    @classmethod
    def make(cls, options: Any, context: PolicyContext) -> PreEviction:
        return cls(context.top_k, options.tau, options.r_max)

    def target(self, logits: NDArray[np.floating], predicted: Floats, held: NDArray[np.bool_]) -> ReleaseTarget:
        """The release target of a layer.

        Args:
            logits: as for `predicted_distribution` [T, E]. predicted: what that gave [E].
            held: experts of the layer that have a slot [E].
        """
        width = self.top_k if len(logits) == 1 else len(predicted_experts(logits, self.top_k))
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


@register("routing", "budget-aware")
class BudgetAwareTopK(Rerouting):
    """Each token runs as many of its experts as are resident or fit into free slots (ActiveEvict, section 3.4).

    `pre_evict` has freed slots for the predicted experts; of further misses the experts of least weight are dropped.
    C_avail is `RerouteView.vacant`, C_l `RerouteView.available`; see `routing_widths`. State: none. Prompts are no
    exception.

    Args:
        renormalise: whether the model normalises the weights of the experts that it picks (equation 4).
        min_top_k: k_min, experts that every token keeps.
        drops: `BudgetDrops`, or the same in native code.
    """

    class Options(RoutingOptions):
        def check(self, policy: PolicySettings) -> None:
            if policy.pre_evict.kind == "off":
                raise ValueError("routing budget-aware goes by the slots that pre_evict frees: set pre_evict.kind")

    name: ClassVar[str] = "budget-aware"
    traced: ClassVar[bool] = True

    @classmethod
    def make(cls, options: Any, context: PolicyContext) -> Rerouting:
        return cls(context.renormalise, options.min_top_k, context.budget)

    def __init__(self, renormalise: bool = True, min_top_k: int = 1, drops: BudgetDrops | None = None) -> None:
        self.renormalise, self.min_top_k = renormalise, min_top_k
        self._drops = BudgetDrops() if drops is None else drops

    def keeps(self, ids: Ids, view: RerouteView) -> bool:
        return self._drops.fits(ids, view.available, view.vacant)

    def reroute(
        self, layer: int, ids: Ids, weights: Weights, probabilities: NDArray[np.floating] | None, view: RerouteView
    ) -> Rerouted:
        found = self._drops.drop(ids, weights, view.available, view.vacant, self.min_top_k, self.renormalise)
        kept, scaled, dropped = found
        return Rerouted(kept, scaled, dropped=dropped)
