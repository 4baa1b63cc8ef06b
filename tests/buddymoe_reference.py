"""BuddyMoE's rule for misses, plain: `core/rules.cpp` and `kernels/cpu/substitute.cpp` give the same to the last bit.

Logarithms and exponentials use only additions, multiplications and divisions of doubles, which IEEE 754 rounds alike
everywhere; the `log` of libraries differs.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from tiermoe.actors.policies.buddymoe.substitution import AdaptiveBeta, Buddies, SubstitutionOptions
from tiermoe.actors.policies.routing import Rerouted, RerouteView

# 2 atanh(x) = 2 (x + x^3/3 + ...): here |x| <= (sqrt 2 - 1) / (sqrt 2 + 1), and the next term is under 1e-14
LOG_TERMS = tuple(1.0 / (2 * i + 1) for i in range(8))
# exp(x) = 1 + x + x^2/2 + ...: here |x| <= ln 2 / 2, and the next term is under 1e-14
EXP_TERMS = tuple(1.0 / math.factorial(i) for i in range(12))
LN2 = math.log(2.0)
INVERSE_LN2 = 1.0 / LN2
HALF_ROOT = math.sqrt(0.5)
_EXP_LOWEST = -1000.0  # of the power of two: what lies below is nothing beside the largest, which is 1

Doubles = NDArray[np.float64]
Floats = NDArray[np.float32]
Ids = NDArray[np.int64]
Mask = NDArray[np.bool_]


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


def substitute(
    ids: Ids,
    weights: Floats,
    probabilities: Floats | None,
    replace: Mask,
    reach: Floats,
    buddies: Buddies,
    options: SubstitutionOptions,
    tau: float | None = None,
) -> Rerouted:
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
    return Rerouted(ids, weights, substituted, dropped)


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


def reach(resident: Mask, kappa: float, hop: NDArray[np.integer] | Mask | None = None) -> Floats:
    """The last factor of equation 3 [E]: max(0, 1 - kappa * hop); 0 for an expert that is not resident.

    Args:
        resident: on the shard that computes it [E].
        hop: from the lead, where the rows are, to that shard: 0 for the lead, else 1 [E]; None: there is one shard.
    """
    if hop is None:
        return resident.astype(np.float32)
    return np.where(resident, np.maximum(1.0 - kappa * hop, 0.0), 0.0).astype(np.float32)


def missing_shares(ids: Ids, resident: Mask, shard_of: Ids | None = None, shards: int = 1) -> list[tuple[float, int]]:
    """delta of equation 2 and the number of distinct missing experts of each shard [G]; (0, 0) without a request."""
    requested, found = np.unique(ids), []
    for shard in range(shards):
        own = requested if shard_of is None else requested[shard_of[requested] == shard]
        absent = int((~resident[own]).sum())
        found.append((absent / len(own) if len(own) else 0.0, absent))
    return found


@dataclass
class Beta:
    """`AdaptiveBeta` of one layer. State: (delta, n) of the last calls."""

    of: AdaptiveBeta
    calls: deque[tuple[float, int]] = field(default_factory=deque)

    def saw(self, delta: float, missing: int) -> None:
        """A call: share and number of missing experts, before replacement."""
        self.calls.append((delta, missing))
        if len(self.calls) > self.of.window:
            self.calls.popleft()

    def beta(self, link_bytes_per_s: float) -> float:
        """For the next call; over 1 (replace always) where even a call whose experts all miss exceeds the budget."""
        allowed = self.of.budget_s * link_bytes_per_s * len(self.calls)
        cost, least = 0.0, math.nextafter(1.0, 2.0)
        missing_at: dict[float, int] = {}
        for delta, missing in self.calls:
            missing_at[delta] = missing_at.get(delta, 0) + missing
        for delta in sorted(missing_at, reverse=True):
            cost += missing_at[delta] * self.of.expert_bytes
            if cost > allowed:
                return least
            least = delta
        return 0.0


class MissRule:
    """The gates in their order before Algorithm 1; arguments as of `buddymoe.MissRule`."""

    def __init__(
        self, buddies: Sequence[Buddies], options: SubstitutionOptions, taus: Sequence[float] | None = None,
        beta: float | None = None, adaptive: AdaptiveBeta | None = None,
        draw: Callable[[int], Floats] | None = None,
    ) -> None:  # fmt: skip
        self._buddies, self._options, self._taus, self._beta, self._draw = buddies, options, taus, beta, draw
        self._betas = None if adaptive is None else [Beta(adaptive) for _ in buddies]
        self._full, self._emptied = np.zeros(len(buddies), bool), 0
        self.link_bytes_per_s = 0.0

    def reroute(
        self, layer: int, ids: Ids, weights: Floats, probabilities: Floats | None, view: RerouteView
    ) -> Rerouted:
        here, shard_of, options = view.available, view.shard_of, self._options
        if view.emptied != self._emptied:
            self._emptied, self._full[:] = view.emptied, False
        if not self._full[layer]:
            self._full[layer] = view.vacant == 0
            if view.vacant and shard_of is None:
                return Rerouted(ids, weights)
        filling = np.array([False]) if view.filling is None else view.filling.copy()
        filling[0] = not self._full[layer]
        beta = self._beta
        if self._betas is not None:
            beta = self._betas[layer].beta(self.link_bytes_per_s)
            for (delta, missing), fills in zip(missing_shares(ids, here, shard_of, len(filling)), filling, strict=True):
                if not fills:
                    self._betas[layer].saw(delta, missing)
        if here[ids].all():
            return Rerouted(ids, weights)
        replace = replaceable(ids, here, beta, shard_of)
        if shard_of is not None:
            replace &= ~filling[shard_of]
        if not replace.any():
            return Rerouted(ids, weights)
        if self._draw is not None:
            probabilities = self._draw(len(ids) * len(here)).reshape(len(ids), len(here))
        near = reach(here, options.kappa, None if shard_of is None else shard_of > 0)
        tau = None if self._taus is None else self._taus[layer]
        return substitute(ids, weights, probabilities, replace, near, self._buddies[layer], options, tau)
