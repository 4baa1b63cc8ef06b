"""ActiveEvict: importance eviction, pre-eviction to a release target, and routing by available slots.

eviction importance      recent use and the next layer's predicted distribution (section 3.2)
pre_evict release-target slots that the next layer will need free (section 3.3)
routing budget-aware     each token uses as many of its experts as are resident or fit (section 3.4)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from ..core import _core
from .eviction import NativeOrder
from .registry import PolicyContext, PolicyOptions, Preset, register
from .routing import NativeRule, Rerouting, RoutingOptions


class ImportanceState:
    """u, p-hat and the residents (equations 8 to 13), which native code reads and writes in place.

    Attributes:
        values: u [L, E]. predicted: p-hat [L, E]. resident: [L*E]. stamp: number of the last use [L*E]. top_k: K.
        native: for `_core.WholeOrder` and `_core.PreEviction`.

    Args:
        layers, experts: L and E. alpha: weight of h in s. gamma, window: of u. top_k: K.
    """

    def __init__(self, layers: int, experts: int, alpha: float, gamma: float, window: int, top_k: int) -> None:
        self.values, self.predicted, self.top_k = np.zeros((layers, experts)), np.zeros((layers, experts)), top_k
        self.resident, self.stamp = np.zeros(layers * experts, np.bool_), np.zeros(layers * experts, np.int64)
        powers: NDArray[np.float64] = gamma ** np.arange(2 * window, dtype=np.float64)
        picked, seen = np.zeros((layers, window, top_k), np.int64), np.zeros(layers, np.int64)
        self.native = _core.Importance(
            alpha, powers, self.values, picked, seen, self.predicted, self.resident.view(np.uint8), self.stamp
        )


@register("eviction", "importance")
class ImportanceEviction(NativeOrder):
    """Evicts the expert of least importance (ActiveEvict, section 3.2, equations 9 and 13).

    Symbols: u(e) = sum over the last T tokens t of the layer, the newest being T, of gamma^(T-t) * I_t(e), `values`
    (equation 8); h(e) = u(e) / sum of u over the residents C_l of its layer, 0 where none was used within the window;
    p-hat(e), the mean over tokens of softmax(r-hat), of the latest prediction (equations 10 to 12), `predicted`; s(e) =
    alpha * h(e) + (1 - alpha) * p-hat(e). The paper gives each layer its own slots. In a pool for all layers s compares
    across layers: both parts sum to at most 1 per layer.

    State: u [L, E], p-hat [L, E], residents and their last use. Ties: least recently used, then by key. O(1) per key
    admitted, used or removed, `victims` O(L*E + n log count) for n resident.

    Attributes:
        state: u and p-hat, which the layers' routing and predictions change.

    Args:
        layers, experts: L and E. alpha: 1 is use alone, 0 is prediction alone. gamma: in (0, 1]. window: T, at least 1.
        top_k: of the router.
    """

    class Options(PolicyOptions):
        alpha: float = Field(
            default=0.5, ge=0, le=1, description="weight of recent use; the rest: predicted probability"
        )
        gamma: float = Field(default=0.97, gt=0, le=1, description="factor on a use for each later token")
        window: int = Field(default=128, ge=1, le=1 << 16, description="tokens after which a use has no weight")

        def check(self, policy: Preset) -> None:
            if policy.pre_evict.kind == "off":
                raise ValueError("eviction importance goes by what pre_evict predicts: set pre_evict.kind")

    per_layer = False

    @classmethod
    def make(cls, options: Any, context: PolicyContext) -> ImportanceEviction:
        sizes = context.layers, context.experts, options.alpha, options.gamma, options.window, context.top_k
        return cls(*sizes)

    def __init__(
        self, layers: int, experts: int, alpha: float = 0.5, gamma: float = 0.97, window: int = 128, top_k: int = 1
    ) -> None:
        if not 0 <= alpha <= 1:
            raise ValueError(f"alpha is {alpha}, not in [0, 1]")
        if not 0 < gamma <= 1:
            raise ValueError(f"gamma is {gamma}, not in (0, 1]")
        if window < 1:
            raise ValueError(f"the window holds {window} tokens, not at least 1")
        self.state = ImportanceState(layers, experts, alpha, gamma, window, top_k)
        super().__init__(_core.WholeOrder("importance", layers, experts, importance=self.state.native))


@register("pre_evict", "off")
class PreEvictOptions(PolicyOptions):
    """Slots that are freed before the next layer's router runs; kind off: none. Eviction chooses the victims."""

    kind: str = "off"


class ReleaseOptions(PreEvictOptions):
    """Options of `PreEviction`."""

    kind: str = "release-target"
    tau: float = Field(default=0.02, ge=0, le=1, description="two probabilities are uncertain if they differ by less")
    r_max: int = Field(default=2, ge=0, le=64, description="most slots freed because of uncertain probabilities")

    def check(self, policy: Preset) -> None:
        if policy.uses_ndp or policy.preload != "none":
            raise ValueError("pre_evict is for caches that fill on demand: leave placement and preload out")


@register("pre_evict", "release-target")
@dataclass(frozen=True, slots=True)
class PreEviction:
    """The release target of ActiveEvict (section 3.3), native (`core/pre_eviction.hpp`). O(T*E + E log E) per layer.

    Symbols: p_(j) the j-th greatest of p-hat, ties by number; k the width; delta_j = p_(j) - p_(j+1) (15); tau
    `threshold`; r_max `most`. r_k counts those of delta_k .. delta_(k+r_max-1) that exist and are under tau. The
    target is k less those of the k that have a slot, and r_k, at most as many as the layer has experts without a slot.
    The paper's k is one token's routing width; for a batch, k is the number of distinct experts in the predictions.

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


@register("routing", "budget-aware")
class BudgetAwareTopK(NativeRule):
    """Each token runs as many of its experts as are resident or fit into free slots (ActiveEvict, section 3.4).

    `pre_evict` has freed slots for the predicted experts; of further misses the experts of least weight are dropped.
    C_avail is `RerouteView.vacant`, C_l `RerouteView.available`. State: none. Prompts are no exception.

    Rule (equations 18 to 21): e_(1), e_(2), .. a token's experts by falling weight, ties by place. For one token k is
    the greatest with u(k) = |{e_(j) not in C_l, j <= k}| at most max(C_avail, u(k_min)): the first k_min are always
    loaded, which the paper leaves open. For a batch, u counts the union of misses, filled rank by rank: first every
    token's k_min, then second places, third places and so on, within a rank by falling weight, ties by token. A token
    ends at its first expert that does not fit, so wide tokens never displace the first choices of others. A dropped
    pair is that of `routing.drop_pairs`. Cost: O(T * K log(T * K)).

    Args:
        renormalise: whether the model normalises the weights of the experts that it picks (equation 4).
        min_top_k: k_min, experts that every token keeps.
    """

    class Options(RoutingOptions):
        def check(self, policy: Preset) -> None:
            if policy.pre_evict.kind == "off":
                raise ValueError("routing budget-aware goes by the slots that pre_evict frees: set pre_evict.kind")

    name: ClassVar[str] = "budget-aware"
    traced: ClassVar[bool] = True

    @classmethod
    def make(cls, options: Any, context: PolicyContext) -> Rerouting:
        return cls(context.renormalise, options.min_top_k)

    def __init__(self, renormalise: bool = True, min_top_k: int = 1) -> None:
        super().__init__(_core.BudgetRule(min_top_k, renormalise))
