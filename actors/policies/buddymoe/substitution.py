"""Buddy expert substitution (BuddyMoE, section 3.1): its options, the buddy lists, and beta.

For each token whose gates permit it, slot by slot in the router's order: a missing expert that the distribution gate
lets go is replaced by the buddy of greatest score

    Psi(j) = q(j|i) (1 + eta z-hat_j) max(0, 1 - kappa hop_j) reuse^(uses of j by the token)

until rho of them are; an expert that the router picked is never a buddy of the same token. One without a buddy of
positive score is loaded, or dropped: it gets weight 0 and the expert of the token's first remaining pair. A token that
would drop all its experts keeps the first.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray


class AdaptiveBeta(NamedTuple):
    """beta from a transfer budget (section 3.1): the least with n-cpu(l) * w <= B over the last calls of a layer.

    A call with delta >= beta loads its n missing experts, another none. So a beta costs w times the mean of n over the
    remembered calls with delta >= beta. With bandwidth to spare beta is 0, and nothing is replaced. Of several shards,
    whose links are assumed to be as fast as the lead's, each counts as a call of its own.

    expert_bytes: w. budget_s: seconds of link for a call's loads; B is that times the measured bandwidth.
    window: remembered calls of a layer.
    """

    expert_bytes: int
    budget_s: float
    window: int = 64


# rho, search, gamma, temperature, kappa, eta, reuse, drop, by_buddy, renormalise
Numbers = tuple[int | None, int | None, float | None, float, float, float, float, bool, bool, bool]


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

    @property
    def numbers(self) -> Numbers:
        """For `_core.MissRule`."""
        return (
            self.rho, self.search, self.gamma, self.temperature, self.kappa, self.eta, self.reuse,
            self.fallback == "drop", self.weights == "buddy", self.renormalise,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Buddies:
    """Buddy lists of one layer, best first.

    Args:
        ids: [E, R] int32, padded with any expert at similarity 0.
        similarity: q(j|i) [E, R] float32, > 0 within a list: the score of equation 3 where eta, kappa and reuse are 0.
            Ties: the earlier rank.
    """

    ids: NDArray[np.int32]
    similarity: NDArray[np.float32]

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
