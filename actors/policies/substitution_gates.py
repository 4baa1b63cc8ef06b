"""When an expert may be replaced: the gates of BuddyMoE (section 3.1), pure.

Logarithms and exponentials are computed from additions, multiplications and divisions of doubles alone. IEEE 754 rounds
those alike everywhere, while every library has its own `log`: so NumPy, torch, C++ and Triton agree on which side of a
threshold a token lies, to the last bit.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field

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
