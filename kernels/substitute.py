"""Buddy expert substitution (Algorithm 1 of BuddyMoE) on tensors.

The reference, with the arguments, is `actors/policies/buddymoe/substitution.py`. All implementations give its ids,
weights and counts bit for bit: `substitute_arrays` (C++), `substitute_tensors` (torch, one slot after another for all
tokens at once), and `triton/substitute.py` (one program for each token).
"""

from __future__ import annotations

import math
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from . import _cpu

# Terms of the series that all implementations evaluate, for equal bits.
LOG_TERMS = tuple(1.0 / (2 * i + 1) for i in range(8))
EXP_TERMS = tuple(1.0 / math.factorial(i) for i in range(12))
_LN2 = math.log(2.0)
_EXPONENT_BIAS, _MANTISSA_BITS = 1023, 52  # of a double
_LOWEST_POWER = -1000.0


class Options(Protocol):
    """The fields of `SubstitutionOptions`."""

    @property
    def rho(self) -> int | None: ...
    @property
    def search(self) -> int | None: ...
    @property
    def temperature(self) -> float: ...
    @property
    def gamma(self) -> float | None: ...
    @property
    def eta(self) -> float: ...
    @property
    def reuse(self) -> float: ...
    @property
    def fallback(self) -> Literal["load", "drop"]: ...
    @property
    def weights(self) -> Literal["slot", "buddy"]: ...
    @property
    def renormalise(self) -> bool: ...


Numbers = tuple[
    int, int, int, int, int, int, float, float, float, float, float, float, bool, bool, bool
]  # `tiermoe::Options`


class BuddyLists(Protocol):
    """The fields of `Buddies`, one layer's buddy lists."""

    @property
    def ids(self) -> NDArray[np.int32]: ...
    @property
    def similarity(self) -> NDArray[np.float32]: ...


class ReplacedArrays(NamedTuple):
    """ids [T, K] int64, weights [T, K] float32, pairs replaced, pairs dropped."""

    ids: NDArray[np.int64]
    weights: NDArray[np.float32]
    substituted: int
    dropped: int


class ReplacedTensors(NamedTuple):
    """As `ReplacedArrays`, on the device of the routing.

    counts [2] int64: pairs replaced and pairs dropped. Reading one waits for a GPU.
    """

    ids: torch.Tensor
    weights: torch.Tensor
    counts: torch.Tensor

    @property
    def substituted(self) -> int:
        return int(self.counts[0])

    @property
    def dropped(self) -> int:
        return int(self.counts[1])

    @staticmethod
    def untouched(ids: torch.Tensor, weights: torch.Tensor) -> ReplacedTensors:
        """The given routing, with counts of zero."""
        return ReplacedTensors(ids, weights, torch.zeros(2, dtype=torch.int64, device=ids.device))


class BuddyTensors(NamedTuple):
    """Buddy lists of a layer on a device: ids [E, R] int32, similarity [E, R] float32."""

    ids: torch.Tensor
    similarity: torch.Tensor

    @staticmethod
    def of(buddies: BuddyLists, device: torch.device | str = "cpu") -> BuddyTensors:
        return BuddyTensors(torch.from_numpy(buddies.ids).to(device), torch.from_numpy(buddies.similarity).to(device))


def require_probabilities(probabilities: torch.Tensor | None, options: Options) -> None:
    """Raise ValueError if the options need the router's probabilities and there are none."""
    if probabilities is None and (options.eta > 0 or options.weights == "buddy"):
        raise ValueError("eta, and weights by the buddy, need the router's probabilities")


def replaceable_arrays(
    ids: NDArray[np.int64], resident: NDArray[np.bool_], beta: float | None, shard_of: NDArray[np.int64] | None = None
) -> NDArray[np.bool_]:
    """The distribution gate in C++; see `policies/buddymoe/substitution.py`.

    Raises:
        ValueError: an array has another layout, type or shape, or an expert or shard does not exist.
    """
    out = np.empty(len(resident), np.bool_)
    shards = 1 if shard_of is None else int(shard_of.max()) + 1
    _cpu.replaceable(ids, resident, math.inf if beta is None else beta, shard_of, shards, out)
    return out


def substitute_arrays(
    ids: NDArray[np.int64],
    weights: NDArray[np.float32],
    probabilities: NDArray[np.float32] | None,
    replace: NDArray[np.bool_],
    reach: NDArray[np.float32],
    buddies: BuddyLists,
    options: Options,
    tau: float | None = None,
) -> ReplacedArrays:
    """Substitute in C++.

    Raises:
        ValueError: an array has another layout, type or shape, an expert does not exist, or the router's probabilities
            are missing.
    """
    out_ids, out_weights = np.empty_like(ids), np.empty_like(weights)
    substituted, dropped = _cpu.substitute(
        ids, weights, probabilities, replace, reach, buddies.ids, buddies.similarity, out_ids, out_weights,
        numbers(ids.shape, buddies, options, tau),
    )  # fmt: skip
    return ReplacedArrays(out_ids, out_weights, substituted, dropped)


def numbers(
    shape: tuple[int, ...], buddies: BuddyLists, options: Options, tau: float | None = None
) -> Numbers:
    """Sizes and options as C++ reads them. shape: of the routing, (T, K)."""
    (tokens, top_k), (experts, ranks) = shape, buddies.ids.shape
    return (
        tokens, top_k, experts, ranks,
        top_k if options.rho is None else options.rho,
        ranks if options.search is None else min(options.search, ranks),
        -math.inf if tau is None else tau,
        math.inf if options.gamma is None else options.gamma,
        options.temperature, math.log(top_k), options.eta, options.reuse,
        options.fallback == "drop", options.weights == "buddy", options.renormalise,
    )  # fmt: skip


class _HostBuddies(NamedTuple):
    ids: Any
    similarity: Any


def substitute(
    ids: torch.Tensor,
    weights: torch.Tensor,
    probabilities: torch.Tensor | None,
    replace: torch.Tensor,
    reach: torch.Tensor,
    buddies: BuddyTensors,
    options: Options,
    tau: float | None = None,
) -> ReplacedTensors:
    """Substitute by C++ on the CPU, by Triton on a GPU, by torch if Triton is not installed.

    Raises:
        ValueError: as `substitute_arrays`.
    """
    if ids.device.type == "cpu":
        host = _HostBuddies(buddies.ids.numpy(), buddies.similarity.numpy())
        some = None if probabilities is None else probabilities.numpy()
        out = substitute_arrays(ids.numpy(), weights.numpy(), some, replace.numpy(), reach.numpy(), host, options, tau)
        counts = torch.tensor((out.substituted, out.dropped))
        return ReplacedTensors(torch.from_numpy(out.ids), torch.from_numpy(out.weights), counts)
    try:
        from .triton.substitute import substitute_triton
    except ImportError:
        return substitute_tensors(ids, weights, probabilities, replace, reach, buddies, options, tau)
    return substitute_triton(ids, weights, probabilities, replace, reach, buddies, options, tau)


def substitute_tensors(
    ids: torch.Tensor,
    weights: torch.Tensor,
    probabilities: torch.Tensor | None,
    replace: torch.Tensor,
    reach: torch.Tensor,
    buddies: BuddyTensors,
    options: Options,
    tau: float | None = None,
) -> ReplacedTensors:
    """Substitute in torch, slot by slot for all tokens at once: uniqueness joins the slots of one token only.

    Raises:
        ValueError: the router's probabilities are needed and missing.
    """
    by_buddy = options.weights == "buddy"
    require_probabilities(probabilities, options)
    todo = replace[ids] & permitted(weights, tau, options.gamma, options.temperature)[:, None]  # [T, K]
    if not todo.any():
        return ReplacedTensors.untouched(ids, weights)
    tokens, top_k = ids.shape
    rho = top_k if options.rho is None else options.rho
    lists, similarity = buddies.ids[:, : options.search].long(), buddies.similarity[:, : options.search]
    eta, reuse = (torch.tensor(x, dtype=torch.float32, device=ids.device) for x in (options.eta, options.reuse))
    claims = torch.ones(tokens, len(lists), dtype=torch.float32, device=ids.device).scatter_(1, ids, 0.0)
    out, replaced, left_out = ids.clone(), torch.zeros_like(todo), torch.zeros_like(todo)
    count = torch.zeros(tokens, dtype=torch.int64, device=ids.device)
    for k in range(top_k):
        candidates = lists[ids[:, k]]  # [T, R]
        score = similarity[ids[:, k]]
        if options.eta > 0 and probabilities is not None:
            score = score * (1.0 + eta * probabilities.gather(1, candidates))
        score = score * reach[candidates] * claims.gather(1, candidates)
        best, at = score.max(dim=1)  # the first of equals
        wanted = todo[:, k] & (count < rho)
        replaced[:, k] = wanted & (best > 0)
        left_out[:, k] = wanted & (best <= 0)
        buddy = candidates.gather(1, at[:, None])  # [T, 1]
        claim = claims.gather(1, buddy)
        claims.scatter_(1, buddy, torch.where(replaced[:, k : k + 1], claim * reuse, claim))
        out[:, k] = torch.where(replaced[:, k], buddy[:, 0], ids[:, k])
        count += replaced[:, k]
    if options.fallback == "load":
        left_out.zero_()
    left_out[:, 0] &= ~left_out.all(dim=1)
    counts = torch.stack((replaced.sum(), left_out.sum()))
    dropped = bool(counts[1])
    if dropped:
        remaining = (~left_out).int().argmax(dim=1, keepdim=True)
        out = torch.where(left_out, out.gather(1, remaining), out)
    if not dropped and not by_buddy:
        return ReplacedTensors(out, weights, counts)
    values = torch.where(left_out, 0.0, weights.double())
    if by_buddy and probabilities is not None:
        theirs, own = probabilities.gather(1, out).double(), probabilities.gather(1, ids).double()
        values = torch.where(replaced & (own > 0), values * theirs / torch.where(own > 0, own, 1.0), values)
    if options.renormalise:
        values = _renormalised(values, weights, left_out.any(dim=1) | (replaced.any(dim=1) & by_buddy))
    return ReplacedTensors(out, values.float(), counts)


def _renormalised(values: torch.Tensor, weights: torch.Tensor, changed: torch.Tensor) -> torch.Tensor:
    """values [T, K], scaled in `changed` rows [T] to the sums of weights [T, K]."""
    before, after = _summed(weights.double()), _summed(values)
    scaled = values * before[:, None] / torch.where(after > 0, after, 1.0)[:, None]
    return torch.where((changed & (after > 0))[:, None], scaled, values)


def permitted(weights: torch.Tensor, tau: float | None, gamma: float | None, temperature: float) -> torch.Tensor:
    """Whether the entropy and margin gates permit each token [T]; see `policies/buddymoe/substitution.py`."""
    tokens, top_k = weights.shape
    allowed = torch.ones(tokens, dtype=torch.bool, device=weights.device)
    if tau is None and gamma is None:
        return allowed
    if top_k < 2:
        return allowed & ((tau is None or tau < 0) and (gamma is None or gamma > 1))
    values = weights.double()
    if temperature != 1.0:
        logs = torch.where(values > 0, _log(values), -math.inf)
        top = logs.max(dim=1, keepdim=True).values
        scaled = torch.where(values > 0, logs - torch.where(values > 0, top, 0.0), 0.0) / _divisor(temperature, values)
        values = torch.where(values > 0, _exp(scaled), 0.0)
    total = _summed(values)
    p = values / torch.where(total > 0, total, 1.0)[:, None]
    if tau is not None:
        entropy = 0.0 - _summed(torch.where(p > 0, p * _log(p), 0.0))
        allowed &= entropy / _divisor(math.log(top_k), p) > tau
    if gamma is not None:
        largest = p.topk(2, dim=1).values
        allowed &= largest[:, 0] - largest[:, 1] < gamma
    return allowed


def _divisor(value: float, like: torch.Tensor) -> torch.Tensor:
    """A device tensor: a GPU divides by a host number through its reciprocal."""
    return torch.full((), value, dtype=like.dtype, device=like.device)


def _summed(values: torch.Tensor) -> torch.Tensor:
    """[T] of [T, K], added slot after slot."""
    total = torch.zeros_like(values[:, 0])
    for k in range(values.shape[1]):
        total = total + values[:, k]
    return total


def _log(x: torch.Tensor) -> torch.Tensor:
    mantissa, exponent = torch.frexp(x)
    low = mantissa < math.sqrt(0.5)
    mantissa = torch.where(low, mantissa * 2.0, mantissa)
    power = (exponent - low.int()).double()
    ratio = (mantissa - 1.0) / (mantissa + 1.0)
    square = ratio * ratio
    series = torch.full_like(square, LOG_TERMS[-1])
    for term in reversed(LOG_TERMS[:-1]):
        series = series * square + term
    return power * _LN2 + (ratio + ratio) * series


def _exp(x: torch.Tensor) -> torch.Tensor:
    power = torch.floor(x * (1.0 / _LN2) + 0.5).clamp(min=_LOWEST_POWER)
    rest = (x - power * _LN2).clamp(min=-1.0)
    series = torch.full_like(rest, EXP_TERMS[-1])
    for term in reversed(EXP_TERMS[:-1]):
        series = series * rest + term
    return series * ((power.long() + _EXPONENT_BIAS) << _MANTISSA_BITS).view(torch.float64)
