"""Buddy expert substitution: Algorithm 1 of BuddyMoE with the gates and the score of section 3.1, pure and sequential.

This is the reference. `kernels/substitute.py` has the same as a C++ function, `kernels/substitute_torch.py` as
vectorised torch, and `kernels/triton/substitute.py` as a Triton kernel; all give the same numbers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from .substitution_gates import permitted

Floats = NDArray[np.float32]
Ids = NDArray[np.int64]
Mask = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class SubstitutionOptions:
    """How experts are replaced, for all layers.

    Args:
        rho: replacements of one token at most; None: no limit.
        search: H, ranks of a buddy list that are looked at; None: all.
        temperature: T of the token entropy.
        gamma: a token whose margin reaches it keeps its experts; None: no margin gate.
        eta: weight of the router's own opinion of a buddy, z-hat: its probability for the token.
        kappa: penalty of a buddy on another shard than the lead, for each hop.
        reuse: factor on the score of a buddy for each time that the token has taken it already; 0: never again, which
            is Algorithm 1's uniqueness. Experts that the router picked are never buddies of the same token.
        fallback: what becomes of an expert without a resident buddy: loaded, or left out. Experts of tokens that the
            gates protect, and those over rho, are always loaded.
        weights: `slot`: a buddy has the weight of the expert that it replaces. `buddy`: times the ratio of the router's
            probabilities of both.
        renormalise: the weights of a token that left an expert out, or that has weights by `buddy`, are scaled so that
            their sum stays; as the model does with its own top-k where it has `norm_topk_prob`.
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
        """Whether the router's probabilities of all experts take part, not only the weights of the chosen."""
        return self.eta > 0 or self.weights == "buddy"


@dataclass(frozen=True, slots=True)
class Buddies:
    """Buddy lists of one layer, best first.

    Args:
        ids: [E, R] int32. Places after the end of a list hold any expert, with similarity 0.
        similarity: q(j|i) [E, R] float32, > 0 within a list. By equation 3 it is also the score where eta, kappa and
            reuse are 0; of equal scores the earlier rank wins.
    """

    ids: NDArray[np.int32]
    similarity: Floats

    def __post_init__(self) -> None:
        ids, similarity = self.ids, self.similarity
        if ids.ndim != 2 or ids.shape != similarity.shape or 0 in ids.shape:
            raise ValueError(f"buddies must both be [E, R], not {list(ids.shape)} and {list(similarity.shape)}")
        if ids.dtype != np.int32 or similarity.dtype != np.float32:
            raise ValueError(f"buddies are int32 and float32, not {ids.dtype} and {similarity.dtype}")
        if ids.min() < 0 or ids.max() >= len(ids):
            raise ValueError(f"a buddy is one of the layer's {len(ids)} experts")
        if not np.isfinite(similarity).all() or similarity.min() < 0:
            raise ValueError("similarities are finite and not negative")


@dataclass(frozen=True, slots=True)
class Substituted:
    """ids [T, K] int64 and weights [T, K] float32 with experts replaced; how many pairs were replaced, and left out."""

    ids: Ids
    weights: Floats
    substituted: int
    dropped: int


def reach(resident: Mask, kappa: float, hop: NDArray[np.integer] | Mask | None = None) -> Floats:
    """The last factor of equation 3 for each expert [E]: 1 - kappa * hop, not under 0; 0 where it is not resident.

    Args:
        resident: on the shard that computes it [E]. hop: from the lead, where a token's rows are, to that shard: 0 for
            the lead's own, 1 for another [E]; None: there is one shard.
    """
    if hop is None:
        return resident.astype(np.float32)
    factor = np.maximum(1.0 - kappa * hop, 0.0)
    return np.where(resident, factor, 0.0).astype(np.float32)


def substitute(
    ids: Ids,
    weights: Floats,
    probabilities: Floats | None,
    replace: Mask,
    reach: Floats,
    buddies: Buddies,
    options: SubstitutionOptions,
    tau: float | None = None,
) -> Substituted:
    """Algorithm 1, token by token and slot by slot.

    Args:
        ids, weights: routing [T, K] int64 and float32, each token's slots in the router's order.
        probabilities: of the router [T, E] float32, if `options.needs_probabilities`.
        replace: experts that may be replaced [E]: the missing ones that the distribution gate lets pass.
        reach: of equation 3 [E] float32, 0 for experts that are no candidates.
        buddies: of the layer. tau: of the layer; None: no entropy gate.

    A left-out pair gets weight 0 and the expert of the token's first pair that stays, so that it costs no load. A token
    that would leave all its experts out keeps the first.

    Cost: O(T * K * H), in Python.
    """
    if options.needs_probabilities and probabilities is None:
        raise ValueError("eta, and weights by the buddy, need the router's probabilities")
    ids, weights = ids.copy(), weights.copy()
    allowed = permitted(weights, tau, options.gamma, options.temperature)
    substituted = dropped = 0
    for t in range(len(ids)):
        if not allowed[t]:
            continue
        row = None if probabilities is None else probabilities[t]
        replaced, left_out = _token(ids[t], row, replace, reach, buddies, options)
        if replaced or left_out:
            _reweight(ids[t], weights[t], row, dict(replaced), left_out, options)
            substituted += len(replaced)
            dropped += len(left_out)
    return Substituted(ids, weights, substituted, dropped)


def _token(
    ids: Ids, probabilities: Floats | None, replace: Mask, reach: Floats, buddies: Buddies, options: SubstitutionOptions
) -> tuple[list[tuple[int, int]], list[int]]:
    """Changes one token's ids [K]; the slots replaced with what they held, and the slots left out."""
    one, eta, reuse = np.float32(1.0), np.float32(options.eta), np.float32(options.reuse)
    claims = {int(e): np.float32(0.0) for e in ids}  # U_t, as the factor that is left of an expert's score
    replaced: list[tuple[int, int]] = []
    left_out: list[int] = []
    for k, expert in enumerate(ids.tolist()):
        if not replace[expert]:
            continue
        if options.rho is not None and len(replaced) >= options.rho:
            break
        best, best_score = None, np.float32(0.0)
        for r, buddy in enumerate(buddies.ids[expert, : options.search].tolist()):
            score = buddies.similarity[expert, r]
            if options.eta > 0 and probabilities is not None:
                score = score * (one + eta * probabilities[buddy])
            score = score * reach[buddy]
            score = score * claims.get(buddy, one)
            if score > best_score:
                best, best_score = buddy, score
        if best is not None:
            ids[k] = best
            claims[best] = claims.get(best, one) * reuse
            replaced.append((k, expert))
        elif options.fallback == "drop":
            left_out.append(k)
    if len(left_out) == len(ids):
        left_out = left_out[1:]
    kept = next(k for k in range(len(ids)) if k not in left_out)
    for k in left_out:
        ids[k] = ids[kept]
    return replaced, left_out


def _reweight(
    ids: Ids,
    weights: Floats,
    probabilities: Floats | None,
    originals: dict[int, int],
    left_out: list[int],
    options: SubstitutionOptions,
) -> None:
    """Changes one token's weights [K], in doubles and slot after slot, as every implementation does."""
    by_buddy = options.weights == "buddy" and probabilities is not None
    before = after = 0.0
    values = weights.astype(np.float64)
    for k in range(len(values)):
        before += values[k]
        if k in left_out:
            values[k] = 0.0
        elif by_buddy and k in originals and probabilities is not None and probabilities[originals[k]] > 0:
            values[k] = values[k] * float(probabilities[ids[k]]) / float(probabilities[originals[k]])
        after += values[k]
    if options.renormalise and (by_buddy or left_out) and after > 0:
        values = values * before / after
    weights[:] = values
