"""When an expert may be replaced: the gates of BuddyMoE (section 3.1), pure.

Logarithms and exponentials are computed from additions, multiplications and divisions of doubles alone. IEEE 754 rounds
those alike everywhere, while every library has its own `log`: so NumPy, torch, C++ and Triton agree on which side of a
threshold a token lies, to the last bit.

Buddy expert substitution: Algorithm 1 of BuddyMoE with the gates and the score of section 3.1, pure and sequential.

This is the reference. `kernels/substitute.py` has the same as a C++ function and as
vectorised torch, and `kernels/triton/substitute.py` as a Triton kernel; all give the same numbers.
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
    """Natural logarithm of normal positive doubles, within 1e-13 of the exact one; of 0 it is some finite number."""
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
    """Exponential of doubles in [-690, 0], relatively within 1e-12 of the exact one; of lesser ones it is next to 0."""
    power = np.maximum(np.floor(x * INVERSE_LN2 + 0.5), _EXP_LOWEST)
    rest = np.maximum(x - power * LN2, -1.0)
    series = np.full_like(rest, EXP_TERMS[-1])
    for term in reversed(EXP_TERMS[:-1]):
        series = series * rest + term
    return np.ldexp(series, power.astype(np.int32))


def shares(weights: NDArray[np.floating], temperature: float = 1.0) -> Doubles:
    """p-tilde of equation 1: probabilities renormalized over the selected experts [T, K] float64.

    Args:
        weights: routing weights [T, K], >= 0. Models that renormalize or scale them do so by one factor for a token,
            which cancels here: so the router's probabilities are not needed.
        temperature: T of the smoothing; softmax(z / T) over the selection is p^(1/T) renormalized.

    A token whose weights are all zero has shares of zero.
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
    """Token activating entropy (equation 1) of each token [T], in [0, 1]; 0 where K = 1.

    Args:
        weights, temperature: as for `shares`.
    """
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
    """Which tokens tolerate a replacement [T]: not (TAE <= tau or margin >= gamma).

    Args:
        tau, gamma: None: without that gate.
    """
    allowed = np.ones(len(weights), bool)
    if tau is not None:
        allowed &= token_entropy(weights, temperature) > tau
    if gamma is not None:
        allowed &= margin(weights, temperature) < gamma
    return allowed


def replaceable(
    ids: NDArray[np.int64], resident: NDArray[np.bool_], beta: float | None, shard_of: NDArray[np.int64] | None = None
) -> NDArray[np.bool_]:
    """The distribution gate (equation 2): which experts of the layer may be replaced [E].

    delta = distinct requested experts that are not resident / distinct requested experts, for each shard by its own
    experts. A shard with delta >= beta replaces none.

    Args:
        ids: routing of the micro-batch [T, K].
        resident: [E].
        beta: None: no gate, so whatever is missing may be replaced.
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


def missing_share(ids: NDArray[np.int64], resident: NDArray[np.bool_]) -> tuple[float, int]:
    """delta of equation 2 over all shards, and how many distinct requested experts are missing."""
    return _share(np.unique(ids), resident)


def missing_shares(
    ids: NDArray[np.int64], resident: NDArray[np.bool_], shard_of: NDArray[np.int64], shards: int
) -> list[tuple[float, int]]:
    """`missing_share` of each shard by its own experts [G]; (0, 0) where nothing of a shard's is requested."""
    requested = np.unique(ids)
    owner = shard_of[requested]
    return [_share(requested[owner == shard], resident) for shard in range(shards)]


def _share(requested: NDArray[np.int64], resident: NDArray[np.bool_]) -> tuple[float, int]:
    absent = int((~resident[requested]).sum())
    return (absent / len(requested) if len(requested) else 0.0), absent


@dataclass
class AdaptiveBeta:
    """beta from a transfer budget (section 3.1): the least with n-cpu(l) * w <= B over the last calls of a layer.

    A call whose delta reaches beta is bypassed, and loads its n missing experts; one under beta loads none. So the
    bytes that a beta would have cost are the mean of n over the remembered calls with delta >= beta, times w. The least
    beta within the budget replaces no more than the link requires: with link to spare it is 0, and nothing is replaced.

    Of several shards each has a link of its own, which is taken to be as fast as the lead's: a call is then seen once
    for each shard, by its own experts, and the one beta is compared with each shard's delta.

    State: (delta, n) of the last `window` calls. Cost: O(window log window) for each `beta()`.

    Args:
        expert_bytes: w. budget_s: seconds of link that the loads of a call may take. window: remembered calls.
        link_bytes_per_s: of the link, as the bandwidth meter has it now; B is that times `budget_s`.
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
        """A call of the layer: share and number of the missing experts, before anything is replaced."""
        self._calls.append((delta, missing))

    def beta(self) -> float:
        """For the next call; over 1 (no call is bypassed) where even one whose experts all miss is too much."""
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
