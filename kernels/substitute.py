"""Buddy expert substitution (Algorithm 1 of BuddyMoE, section 3.1, with its gates), in C++ (`cpu/substitute.cpp`).

For each token whose gates permit it, slot by slot in the router's order: a missing expert that the distribution gate
lets go is replaced by the buddy of greatest score

    Psi(j) = q(j|i) (1 + eta z-hat_j) max(0, 1 - kappa hop_j) reuse^(uses of j by the token)

until rho of them are; an expert that the router picked is never a buddy of the same token. One without a buddy of
positive score is loaded, or dropped: it gets weight 0 and the expert of the token's first remaining pair. A token that
would drop all its experts keeps the first. tests/buddymoe_reference.py is the same in NumPy, to the last bit.
"""

from __future__ import annotations

import math
from typing import Literal, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from . import _cpu


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


class Replaced(NamedTuple):
    """ids [T, K] int64, weights [T, K] float32, pairs replaced, pairs dropped."""

    ids: NDArray[np.int64]
    weights: NDArray[np.float32]
    substituted: int
    dropped: int


def replaceable(
    ids: NDArray[np.int64], resident: NDArray[np.bool_], beta: float | None, shard_of: NDArray[np.int64] | None = None
) -> NDArray[np.bool_]:
    """The distribution gate (equation 2): which missing experts of the layer may be replaced [E].

    delta = distinct requested missing experts / distinct requested experts, of each shard. With delta >= beta none may.

    Args:
        ids: routing of the micro-batch [T, K]. resident: [E]. beta: None: no gate.
        shard_of: shard of each expert [E]; None: there is one.

    Raises:
        ValueError: an array has another layout, type or shape, or an expert or shard does not exist.
    """
    out = np.empty(len(resident), np.bool_)
    shards = 1 if shard_of is None else int(shard_of.max()) + 1
    _cpu.replaceable(ids, resident, math.inf if beta is None else beta, shard_of, shards, out)
    return out


def substitute(
    ids: NDArray[np.int64],
    weights: NDArray[np.float32],
    probabilities: NDArray[np.float32] | None,
    replace: NDArray[np.bool_],
    reach: NDArray[np.float32],
    buddies: BuddyLists,
    options: Options,
    tau: float | None = None,
) -> Replaced:
    """Algorithm 1 with the gates by entropy and margin: not (TAE <= tau or margin >= gamma).

    Args:
        ids, weights: routing [T, K], each token's slots in the router's order.
        probabilities: of the router [T, E], if eta or weights by the buddy need them.
        replace: missing experts that the distribution gate allows to replace [E].
        reach: of equation 3 [E], 0 for experts that are no candidates.
        buddies: of the layer. tau: of the layer; None: no entropy gate.

    Raises:
        ValueError: an array has another layout, type or shape, an expert does not exist, or the router's probabilities
            are missing.
    """
    out_ids, out_weights = np.empty_like(ids), np.empty_like(weights)
    substituted, dropped = _cpu.substitute(
        ids, weights, probabilities, replace, reach, buddies.ids, buddies.similarity, out_ids, out_weights,
        numbers(ids.shape, buddies, options, tau),
    )  # fmt: skip
    return Replaced(out_ids, out_weights, substituted, dropped)


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
