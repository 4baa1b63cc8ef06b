"""Buddy expert substitution (BuddyMoE, section 3.1): its options, the buddy lists, the score's last factor, and beta.

Algorithm 1 and the gates are native (`kernels.substitute`).
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from numpy.typing import NDArray


def missing_shares(
    ids: NDArray[np.int64], resident: NDArray[np.bool_], shard_of: NDArray[np.int64] | None = None, shards: int = 1
) -> list[tuple[float, int]]:
    """delta of equation 2 and the number of distinct missing experts of each shard [G]; (0, 0) without a request."""
    requested, found = np.unique(ids), []
    for shard in range(shards):
        own = requested if shard_of is None else requested[shard_of[requested] == shard]
        absent = int((~resident[own]).sum())
        found.append((absent / len(own) if len(own) else 0.0, absent))
    return found


@dataclass
class AdaptiveBeta:
    """beta from a transfer budget (section 3.1): the least with n-cpu(l) * w <= B over the last calls of a layer.

    A call with delta >= beta loads its n missing experts, another none. So a beta costs w times the mean of n over the
    remembered calls with delta >= beta. With bandwidth to spare beta is 0, and nothing is replaced. Of several shards,
    whose links are assumed to be as fast as the lead's, each counts as a call of its own.

    State: (delta, n) of the last `window` calls. Cost: O(window log window) per `beta()`.

    Args:
        expert_bytes: w. budget_s: seconds of link for a call's loads. window: remembered calls.
        link_bytes_per_s: current measured bandwidth; B is that times `budget_s`.
    """

    expert_bytes: int
    budget_s: float
    window: int = 64
    link_bytes_per_s: float = 0.0
    _calls: deque[tuple[float, int]] = field(init=False)

    def __post_init__(self) -> None:
        if self.expert_bytes < 1 or self.budget_s < 0 or self.window < 1:
            raise ValueError("experts have bytes, the budget is not negative, and the window holds a call")
        self._calls = deque(maxlen=self.window)

    def saw(self, delta: float, missing: int) -> None:
        """Record a call: share and number of missing experts, before replacement."""
        self._calls.append((delta, missing))

    def beta(self) -> float:
        """For the next call; over 1 (replace always) where even a call whose experts all miss exceeds the budget."""
        allowed = self.budget_s * self.link_bytes_per_s * len(self._calls)
        cost, least = 0.0, math.nextafter(1.0, 2.0)
        missing_at: dict[float, int] = {}
        for delta, missing in self._calls:
            missing_at[delta] = missing_at.get(delta, 0) + missing
        for delta in sorted(missing_at, reverse=True):
            cost += missing_at[delta] * self.expert_bytes
            if cost > allowed:
                return least
            least = delta
        return 0.0


Floats = NDArray[np.float32]
Mask = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class SubstitutionOptions:
    """How experts are replaced, for all layers.

    Args:
        rho: most replacements of one token; None: no limit.
        search: H, ranks of a buddy list to try; None: all.
        temperature: T of the token entropy.
        gamma: tokens with at least this margin are not changed; None: no margin gate.
        eta: weight of z-hat, the router's probability of a buddy for the token.
        kappa: penalty per hop of a buddy on another shard than the lead.
        reuse: factor on a buddy's score for each earlier use by the token; 0: Algorithm 1's uniqueness. Experts that
            the router picked are never buddies of the same token.
        fallback: load or drop an expert without a resident buddy. Experts of protected tokens, and those over rho, are
            always loaded.
        weights: `slot`: a buddy has the weight of the expert that it replaces. `buddy`: times the ratio of the router's
            probabilities of both.
        renormalise: preserve the sum of a token's weights after a drop, or with weights by `buddy`; as the model does
            where it has `norm_topk_prob`.
    """

    rho: int | None = None
    search: int | None = None
    temperature: float = 1.0
    gamma: float | None = None
    eta: float = 0.0
    kappa: float = 0.0
    reuse: float = 0.0
    fallback: Literal["load", "drop"] = "load"
    weights: Literal["slot", "buddy"] = "slot"
    renormalise: bool = False

    def __post_init__(self) -> None:
        if self.rho is not None and self.rho < 0:
            raise ValueError(f"rho counts replacements: {self.rho}")
        if self.search is not None and self.search < 1:
            raise ValueError(f"search looks at one rank at least, not {self.search}")
        if not self.temperature > 0 or not math.isfinite(self.temperature):
            raise ValueError(f"the temperature must be positive, not {self.temperature}")
        if not (0 <= self.eta < math.inf and 0 <= self.kappa < math.inf and 0 <= self.reuse < 1):
            raise ValueError("eta and kappa are at least 0, and reuse lies in [0, 1)")

    @property
    def needs_probabilities(self) -> bool:
        """Whether the router's probabilities of all experts are needed."""
        return self.eta > 0 or self.weights == "buddy"


@dataclass(frozen=True, slots=True)
class Buddies:
    """Buddy lists of one layer, best first.

    Args:
        ids: [E, R] int32, padded with any expert at similarity 0.
        similarity: q(j|i) [E, R] float32, > 0 within a list: the score of equation 3 where eta, kappa and reuse are 0.
            Ties: the earlier rank.
    """

    ids: NDArray[np.int32]
    similarity: Floats

    def __post_init__(self) -> None:
        ids, similarity = self.ids, self.similarity
        if ids.ndim != 2 or ids.shape != similarity.shape or 0 in ids.shape:
            raise ValueError(f"buddies must both be [E, R], not {list(ids.shape)} and {list(similarity.shape)}")
        if ids.dtype != np.int32 or similarity.dtype != np.float32:
            raise ValueError(f"buddies are int32 and float32, not {ids.dtype} and {similarity.dtype}")
        if not (ids.flags.c_contiguous and similarity.flags.c_contiguous):
            raise ValueError("buddies are contiguous, since native code reads them")
        if ids.min() < 0 or ids.max() >= len(ids):
            raise ValueError(f"a buddy is one of the layer's {len(ids)} experts")
        if not np.isfinite(similarity).all() or similarity.min() < 0:
            raise ValueError("similarities are finite and not negative")


def reach(resident: Mask, kappa: float, hop: NDArray[np.integer] | Mask | None = None) -> Floats:
    """The last factor of equation 3 [E]: max(0, 1 - kappa * hop); 0 for an expert that is not resident.

    Args:
        resident: on the shard that computes it [E].
        hop: from the lead, where the rows are, to that shard: 0 for the lead, else 1 [E]; None: there is one shard.
    """
    if hop is None:
        return resident.astype(np.float32)
    factor = np.maximum(1.0 - kappa * hop, 0.0)
    return np.where(resident, factor, 0.0).astype(np.float32)
