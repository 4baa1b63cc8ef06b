"""What becomes of experts that are not at hand, other than loading them: BuddyMoE, and what it is compared with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import ClassVar, Protocol

import numpy as np
from numpy.typing import NDArray

from ..routing import Ids, Rerouted, RerouteView, Rerouting, Weights
from .buddies import BuddyTable
from .substitution import (
    AdaptiveBeta,
    Buddies,
    SubstitutionOptions,
    missing_share,
    missing_shares,
    reach,
    replaceable,
    substitute,
)


class Found(Protocol):
    """What an implementation of Algorithm 1 answers: `Substituted`."""

    @property
    def ids(self) -> Ids: ...
    @property
    def weights(self) -> Weights: ...
    @property
    def substituted(self) -> int: ...
    @property
    def dropped(self) -> int: ...


Replaceable = Callable[[Ids, NDArray[np.bool_], float | None, NDArray[np.int64] | None], NDArray[np.bool_]]
Substitute = Callable[
    [
        Ids, Weights, NDArray[np.float32] | None, NDArray[np.bool_], NDArray[np.float32], Buddies, SubstitutionOptions,
        float | None,
    ],
    Found,
]  # fmt: skip


class MissRule(Rerouting):
    """Algorithm 1 with its gates in order (BuddyMoE, section 3.1), on the experts that are not here.

        the layer's slots were never all in use     -> all misses are loaded: the paper's cache begins full
        delta(B) >= beta                           -> all misses of the batch are loaded
        TAE(x) <= tau, or margin >= gamma          -> the token's misses are loaded
        rho replacements of the token              -> its further misses are loaded
        buddies by Psi, resident, each once        -> replaced
        none                                       -> loaded, or dropped (`options.fallback`)

    Of several shards the first two are decided for each by its own experts: one whose cache still fills, or that misses
    too much, loads its misses, while others' are replaced. A buddy may be on any shard; hop(j) of equation 3 is 0 on
    the lead, where the tokens' rows are, and 1 elsewhere: the paper penalises "candidates that require cross-link
    traffic", as a function of j alone, "0 for same-GPU". What the lead knows of the others is as old as their last
    answers, so a buddy may be gone: its shard then loads it, which costs that load and changes no result.

    Experts on their way to their GPU count as here. Dropping alone is this rule with empty lists (`no_buddies`).

    State: whether each layer's slots on the lead were all in use once, and that of the adaptive betas. Cost: O(E) where
    nothing is missing, else that of `substitute`.

    Args:
        buddies: of each layer. options: of all layers.
        taus: of each layer; None: no entropy gate.
        beta: fixed; None: no distribution gate, unless `betas`, one of each layer, adapts it.
        replaceable, substitute: implementations of the distribution gate and of Algorithm 1; by default in NumPy.
    """

    name: ClassVar[str] = "substituting"

    def __init__(
        self,
        buddies: Sequence[Buddies],
        options: SubstitutionOptions,
        taus: Sequence[float] | None = None,
        beta: float | None = None,
        betas: Sequence[AdaptiveBeta] | None = None,
        replaceable: Replaceable = replaceable,
        substitute: Substitute = substitute,
    ) -> None:
        for each in (taus, betas):
            if each is not None and len(each) != len(buddies):
                raise ValueError(f"{len(each)} thresholds for {len(buddies)} layers")
        if beta is not None and not 0 <= beta <= 1:
            raise ValueError(f"beta is a share, not {beta}")
        self._buddies, self.options, self._taus, self._beta, self._betas = buddies, options, taus, beta, betas
        self._replaceable, self._substitute, self._full = replaceable, substitute, [False] * len(buddies)
        self.needs_probabilities = options.needs_probabilities

    def reroute(
        self,
        layer: int,
        ids: Ids,
        weights: Weights,
        probabilities: NDArray[np.floating] | None,
        view: RerouteView,
    ) -> Rerouted:
        here, shard_of = view.available, view.shard_of
        if not self._full[layer]:
            self._full[layer] = view.vacant == 0
            if view.vacant and shard_of is None:
                return Rerouted(ids, weights)
        filling = self._filling(layer, view)
        if here[ids].all():
            if self._betas is not None:
                self._saw(layer, [(0.0, 0)] * len(filling), filling)
            return Rerouted(ids, weights)
        ids, weights = np.ascontiguousarray(ids), np.ascontiguousarray(weights)
        replace = self._replaceable(ids, here, self._threshold(layer, ids, view, filling), shard_of)
        if shard_of is not None:
            replace &= ~filling[shard_of]
        if not replace.any():
            return Rerouted(ids, weights)
        found = self._substitute(
            ids, weights, self._compatibility(ids, probabilities, len(here)),
            replace, reach(here, self.options.kappa, None if shard_of is None else shard_of > 0), self._buddies[layer],
            self.options, None if self._taus is None else self._taus[layer],
        )  # fmt: skip
        return Rerouted(found.ids, found.weights, found.substituted, found.dropped)

    def measured(self, link_bytes_per_s: float) -> None:
        """What the link carries, for betas that adapt to it."""
        for beta in self._betas or ():
            beta.link_bytes_per_s = link_bytes_per_s

    def _filling(self, layer: int, view: RerouteView) -> NDArray[np.bool_]:
        """Which shards' slots for the layer were never all in use [G]."""
        if view.filling is None:
            return np.array([not self._full[layer]])
        filling = view.filling.copy()
        filling[0] = not self._full[layer]
        return filling

    def _threshold(self, layer: int, ids: Ids, view: RerouteView, filling: NDArray[np.bool_]) -> float | None:
        if self._betas is None:
            return self._beta
        beta = self._betas[layer].beta()
        if view.shard_of is None:
            shares = [missing_share(ids, view.available)]
        else:
            shares = missing_shares(ids, view.available, view.shard_of, len(filling))
        self._saw(layer, shares, filling)
        return beta

    def _saw(self, layer: int, shares: Sequence[tuple[float, int]], filling: NDArray[np.bool_]) -> None:
        """Tell the layer's adaptive beta what each shard misses; one that still fills its cache is no measure."""
        assert self._betas is not None  # the caller looked
        for (delta, missing), fills in zip(shares, filling, strict=True):
            if not fills:
                self._betas[layer].saw(delta, missing)

    def _compatibility(
        self, ids: Ids, probabilities: NDArray[np.floating] | None, experts: int
    ) -> NDArray[np.float32] | None:
        """z-hat of equation 3 [T, E]."""
        return None if probabilities is None else np.ascontiguousarray(probabilities, np.float32)


class RandomRule(MissRule):
    """The paper's random replacement: any expert that is here and that the token does not use yet, each as likely.

    It is `MissRule` with all experts in every list, alike, and an opinion of them drawn anew for each token.

    Args:
        layers, experts: L and E. options: with `eta` and `weights` as they are by default.
        seed: the same seed and the same calls give the same experts.
    """

    def __init__(
        self,
        layers: int,
        experts: int,
        options: SubstitutionOptions,
        taus: Sequence[float] | None = None,
        beta: float | None = None,
        betas: Sequence[AdaptiveBeta] | None = None,
        replaceable: Replaceable = replaceable,
        substitute: Substitute = substitute,
        seed: int = 0,
    ) -> None:
        if options.needs_probabilities or options.search is not None or options.kappa:
            raise ValueError("random replacement goes by no probabilities, no ranks and no hops")
        everyone = Buddies(
            np.tile(np.arange(experts, dtype=np.int32), (experts, 1)), np.ones((experts, experts), np.float32)
        )
        drawing = SubstitutionOptions(
            rho=options.rho, temperature=options.temperature, gamma=options.gamma, eta=1.0, reuse=options.reuse,
            fallback=options.fallback, renormalise=options.renormalise,
        )  # fmt: skip
        super().__init__([everyone] * layers, drawing, taus, beta, betas, replaceable, substitute)
        self.needs_probabilities = False
        self._draw = np.random.default_rng(seed)

    def _compatibility(
        self, ids: Ids, probabilities: NDArray[np.floating] | None, experts: int
    ) -> NDArray[np.float32] | None:
        return self._draw.random((len(ids), experts), np.float32)


def lists_of(table: BuddyTable) -> list[Buddies]:
    """The buddy lists of each layer."""
    return [
        Buddies(np.ascontiguousarray(ids, np.int32), np.ascontiguousarray(q, np.float32))
        for ids, q in zip(table.ids, table.q, strict=True)
    ]


def no_buddies(layers: int, experts: int) -> list[Buddies]:
    """Empty lists: with the fallback `drop` every miss is left out."""
    return [Buddies(np.zeros((experts, 1), np.int32), np.zeros((experts, 1), np.float32))] * layers
