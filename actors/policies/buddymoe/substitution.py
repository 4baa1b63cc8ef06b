"""Buddy expert substitution: the gates, the score and Algorithm 1 of BuddyMoE (section 3.1), pure and sequential.

This is the reference of `kernels/substitute.py` (C++ and vectorised torch) and `kernels/triton/substitute.py`, which
give the same numbers to the last bit. To that end logarithms and exponentials use only additions, multiplications and
divisions of doubles, which IEEE 754 rounds alike everywhere; the `log` of libraries differs.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from numpy.typing import NDArray

# 2 atanh(x) = 2 (x + x^3/3 + ...): here |x| <= (sqrt 2 - 1) / (sqrt 2 + 1), and the next term is under 1e-14
LOG_TERMS = tuple(1.0 / (2 * i + 1) for i in range(8))
# exp(x) = 1 + x + x^2/2 + ...: here |x| <= ln 2 / 2, and the next term is under 1e-14
EXP_TERMS = tuple(1.0 / math.factorial(i) for i in range(12))
LN2 = math.log(2.0)
INVERSE_LN2 = 1.0 / LN2
HALF_ROOT = math.sqrt(0.5)
_EXP_LOWEST = -1000.0  # of the power of two: what lies below is nothing beside the largest, which is 1

Doubles = NDArray[np.float64]


def log(x: Doubles) -> Doubles:
    """Natural logarithm of normal positive doubles, within 1e-13; of 0 some finite number."""
    mantissa, exponent = np.frexp(x)  # in [0.5, 1)
    low = mantissa < HALF_ROOT
    mantissa = np.where(low, mantissa * 2.0, mantissa)
    power = (exponent - low).astype(np.float64)
    ratio = (mantissa - 1.0) / (mantissa + 1.0)
    square = ratio * ratio
    series = np.full_like(square, LOG_TERMS[-1])
    for term in reversed(LOG_TERMS[:-1]):
        series = series * square + term
    return power * LN2 + (ratio + ratio) * series


def exp(x: Doubles) -> Doubles:
    """Exponential of doubles in [-690, 0], relatively within 1e-12; of lower ones nearly 0."""
    power = np.maximum(np.floor(x * INVERSE_LN2 + 0.5), _EXP_LOWEST)
    rest = np.maximum(x - power * LN2, -1.0)
    series = np.full_like(rest, EXP_TERMS[-1])
    for term in reversed(EXP_TERMS[:-1]):
        series = series * rest + term
    return np.ldexp(series, power.astype(np.int32))


def shares(weights: NDArray[np.floating], temperature: float = 1.0) -> Doubles:
    """p-tilde of equation 1: probabilities renormalised over the selected experts [T, K] float64; zeros stay zeros.

    Args:
        weights: routing weights [T, K], >= 0. A model's own normalisation is one factor per token and cancels.
        temperature: T of the smoothing; softmax(z / T) over the selection is p^(1/T) renormalised.
    """
    values = np.asarray(weights, np.float64)
    if temperature != 1.0:
        logs = np.where(values > 0, log(values), -np.inf)
        top = logs.max(axis=1, keepdims=True)
        scaled = np.where(values > 0, logs - np.where(values > 0, top, 0.0), 0.0) / temperature
        values = np.where(values > 0, exp(scaled), 0.0)
    total = np.zeros(len(values))
    for k in range(values.shape[1]):  # one after another, as every implementation adds them
        total = total + values[:, k]
    return values / np.where(total > 0, total, 1.0)[:, None]


def token_entropy(weights: NDArray[np.floating], temperature: float = 1.0) -> Doubles:
    """Token activating entropy (equation 1) of each token [T], in [0, 1]; 0 where K = 1. Arguments as for `shares`."""
    p = shares(weights, temperature)
    if p.shape[1] < 2:
        return np.zeros(len(p))
    terms = np.where(p > 0, p * log(p), 0.0)
    total = np.zeros(len(p))
    for k in range(p.shape[1]):
        total = total + terms[:, k]
    return (0.0 - total) / math.log(p.shape[1])


def margin(weights: NDArray[np.floating], temperature: float = 1.0) -> Doubles:
    """m(x) = largest share - second largest [T]; 1 where K = 1."""
    p = shares(weights, temperature)
    if p.shape[1] < 2:
        return np.ones(len(p))
    ordered = np.sort(p, axis=1)
    return ordered[:, -1] - ordered[:, -2]


def permitted(
    weights: NDArray[np.floating], tau: float | None, gamma: float | None, temperature: float = 1.0
) -> NDArray[np.bool_]:
    """Which tokens allow a replacement [T]: not (TAE <= tau or margin >= gamma). A None: without that gate."""
    allowed = np.ones(len(weights), bool)
    if tau is not None:
        allowed &= token_entropy(weights, temperature) > tau
    if gamma is not None:
        allowed &= margin(weights, temperature) < gamma
    return allowed


def replaceable(
    ids: NDArray[np.int64], resident: NDArray[np.bool_], beta: float | None, shard_of: NDArray[np.int64] | None = None
) -> NDArray[np.bool_]:
    """The distribution gate (equation 2): which missing experts of the layer may be replaced [E].

    delta = distinct requested missing experts / distinct requested experts, of each shard. With delta >= beta none may.

    Args:
        ids: routing of the micro-batch [T, K]. resident: [E]. beta: None: no gate.
        shard_of: shard of each expert [E]; None: there is one.
    """
    missing = np.zeros(len(resident), bool)
    missing[ids.ravel()] = True
    if beta is None:
        return missing & ~resident
    shards = np.zeros(len(resident), np.int64) if shard_of is None else shard_of
    requested = np.bincount(shards[missing])
    missing &= ~resident
    absent = np.bincount(shards[missing], minlength=len(requested))
    closed = absent / np.maximum(requested, 1) >= beta
    missing[missing] &= ~closed[shards[missing]]
    return missing


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
Ids = NDArray[np.int64]
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


@dataclass(frozen=True, slots=True)
class Substituted:
    """ids [T, K] int64 and weights [T, K] float32 after replacement; numbers of replaced and of dropped pairs."""

    ids: Ids
    weights: Floats
    substituted: int
    dropped: int


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
    """Algorithm 1, token by token and slot by slot, O(T * K * H) in Python.

    A dropped pair gets weight 0 and the expert of the token's first remaining pair, so nothing is loaded for it. A
    token that would drop all its experts keeps the first.

    Args:
        ids, weights: routing [T, K] int64 and float32, each token's slots in the router's order.
        probabilities: of the router [T, E] float32, if `options.needs_probabilities`.
        replace: missing experts that the distribution gate allows to replace [E].
        reach: of equation 3 [E] float32, 0 for experts that are no candidates.
        buddies: of the layer. tau: of the layer; None: no entropy gate.
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
    """Changes one token's ids [K]; returns the replaced slots with their former experts, and the dropped slots."""
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
    """Changes one token's weights [K], in doubles and in slot order, as every implementation does."""
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
