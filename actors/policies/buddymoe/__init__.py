"""BuddyMoE: a resident expert replaces a missing one; and the paper's baselines.

    MissRule      Algorithm 1 with its gates (section 3.1); kind substitute
    RandomRule    any resident expert; kind random
    DropRule      missing experts are left out; kind drop

`buddies` has the ranking of buddies and its profile, `substitution` the options; the gates and Algorithm 1 are native
(`core/rules.hpp`, `kernels/cpu/substitute.cpp`), tests/buddymoe_reference.py is the same in Python.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, model_validator

from ...core import _core
from ..registry import NotPrepared, PolicyContext, PolicyOptions, register
from ..routing import MissOptions, NativeRule, Rerouting
from .buddies import BuddyOptions, ExpertProfile, OutputsMissing, alpha_schedule
from .substitution import AdaptiveBeta, Buddies, SubstitutionOptions

_CALLS = 64  # of a layer that an adaptive beta remembers
_PROFILE = "make it with `tiermoe prepare MODEL --profile TEXT`"


class DropOptions(MissOptions):
    """The gates: percentile or tau, gamma, beta or link_ms. Without a gate every miss is replaced or left out."""

    refusal: ClassVar[str] = "on_miss {kind} does not use substitution's {keys}"
    kind: str = "drop"
    percentile: float | None = Field(
        default=None, ge=0, le=100, description="percentile of token entropies; tokens below it keep their experts"
    )
    tau: float | None = Field(default=None, ge=0, le=1, description="entropy; tokens below it keep their experts")
    temperature: float = Field(default=1.0, ge=0.8, le=1.2, description="of the softmax for the entropy")
    gamma: float | None = Field(default=None, gt=0, description="tokens with this margin or more keep their experts")
    beta: float | None = Field(
        default=None, ge=0, le=1, description="share of misses among the requested experts at which all are loaded"
    )
    link_ms: float | None = Field(
        default=None, ge=0, description="in place of beta: ms of link for a layer's loads, to which beta adapts"
    )

    @model_validator(mode="after")
    def _gates_agree(self) -> DropOptions:
        if self.percentile is not None and self.tau is not None:
            raise ValueError("tau is either given or a percentile")
        if self.beta is not None and self.link_ms is not None:
            raise ValueError("beta is either given or adapts to link_ms")
        if self.temperature != 1.0 and self.percentile is None and self.tau is None and self.gamma is None:
            raise ValueError("temperature is of the gates by entropy and margin, of which there is none")
        return self

    @property
    def needs(self) -> frozenset[str]:
        return frozenset({"profile"} if self.percentile is not None else ())

    def gates(self, context: PolicyContext) -> dict[str, Any]:
        """The arguments of `MissRule` after its options."""
        taus, adaptive = None if self.tau is None else (self.tau,) * context.layers, None
        if self.percentile is not None:
            taus = profile_of(context).taus(self.percentile, self.temperature)
        if self.link_ms is not None:
            adaptive = AdaptiveBeta(context.expert_bytes, self.link_ms * 1e-3, _CALLS * context.gpus)
        return {"taus": taus, "beta": self.beta, "adaptive": adaptive}

    def substitution(self, context: PolicyContext) -> SubstitutionOptions:
        """The options of Algorithm 1; defaults for those that a kind lacks."""
        names = ("rho", "search", "temperature", "gamma", "eta", "kappa", "reuse", "fallback", "weights")
        given = {name: getattr(self, name) for name in names if name in type(self).model_fields}
        return SubstitutionOptions(**given, renormalise=context.renormalise)


class RandomOptions(DropOptions):
    """Of replacement by any expert."""

    kind: str = "random"
    rho: int | None = Field(default=None, ge=1, description="most replacements of a token in a layer")
    reuse: float = Field(
        default=0.0, ge=0, lt=1, description="factor on a buddy that the token uses already; 0: never again"
    )
    fallback: Literal["load", "drop"] = Field(default="load", description="for a miss without a resident buddy")


class SubstituteOptions(RandomOptions):
    """Of replacement by buddies."""

    kind: str = "substitute"
    search: int | None = Field(default=None, ge=1, description="H: ranks of a buddy list that are tried; default: all")
    eta: float = Field(default=0.0, ge=0, description="weight of the router's probability of the buddy")
    kappa: float = Field(default=0.0, ge=0, le=1, description="penalty of a buddy on another GPU than the lead's")
    weights: Literal["slot", "buddy"] = Field(default="slot", description="expert whose routing weight is used")
    by: Literal["coactivation", "output", "blend"] = Field(
        default="coactivation", description="what buddies are ranked by"
    )
    alpha: float = Field(default=0.95, gt=0, le=1, description="CFT: coverage of a buddy list")
    alpha_last: float | None = Field(
        default=None, gt=0, le=1, description="alpha of the last layer, in equal steps; default: alpha"
    )
    max_buddies: int = Field(default=16, ge=1, le=1 << 16, description="K_max: most buddies in a list")
    weighted: bool = Field(default=False, description="weight co-activation by probability")
    epsilon: float = Field(default=1.0, ge=0, description="Laplace smoothing of co-activation, in tokens")
    mix: float = Field(default=0.5, ge=0, le=1, description="share of co-activation in a blend")

    @model_validator(mode="after")
    def _ranking_agrees(self) -> SubstituteOptions:
        if self.by != "blend" and self.mix != 0.5:
            raise ValueError("mix is of the ranking by a blend")
        if self.by == "output" and (self.weighted or self.epsilon != 1.0):
            raise ValueError("weighted and epsilon are of co-activation, which the ranking by output leaves out")
        return self

    @property
    def needs(self) -> frozenset[str]:
        return frozenset({"profile"})

    @property
    def uses_hops(self) -> bool:
        return self.kappa > 0

    def buddies(self, context: PolicyContext) -> list[Buddies]:
        """The buddy lists of each layer.

        Raises:
            NotPrepared: there is no profile, or the ranking needs output similarity that it lacks.
        """
        alpha: float | tuple[float, ...] = self.alpha
        if self.alpha_last is not None:
            alpha = alpha_schedule(self.alpha, self.alpha_last, context.layers)
        ranking = BuddyOptions(self.by, alpha, self.max_buddies, self.weighted, self.epsilon, self.mix)
        try:
            table = profile_of(context).buddies(ranking)
        except OutputsMissing as error:
            raise NotPrepared(f"needs output similarity: {error}", _PROFILE) from error
        return [
            Buddies(np.ascontiguousarray(ids, np.int32), np.ascontiguousarray(q, np.float32))
            for ids, q in zip(table.ids, table.q, strict=True)
        ]


def profile_of(context: PolicyContext) -> ExpertProfile:
    """Raises NotPrepared: there is none."""
    if context.profile is None:
        raise NotPrepared("needs a profile of the experts", _PROFILE)
    profile: ExpertProfile = context.profile
    return profile


@register("on_miss", "substitute")
class MissRule(NativeRule):
    """Algorithm 1 with its gates in order (BuddyMoE, section 3.1), on missing experts; those in flight count as
    resident.

        slots of the layer never used, since empty -> all misses are loaded: the paper's cache begins full
        delta(B) >= beta                           -> all misses of the batch are loaded
        TAE(x) <= tau, or margin >= gamma          -> the token's misses are loaded
        rho replacements of the token              -> its further misses are loaded
        buddies by Psi, resident, each once        -> replaced
        none                                       -> loaded, or dropped (`options.fallback`)

    The first two gates are separate for each shard, by its own experts. A buddy may be on any shard: hop(j) of equation
    3 is 0 on the lead, where the tokens' rows are, and 1 elsewhere (the paper penalises "candidates that require
    cross-link traffic" and has "0 for same-GPU"). The lead's view of other shards dates from their last answers; a
    shard loads a buddy that it has evicted since, which changes no result.

    State: whether each layer's slots on the lead were ever all in use since the cache was empty, and the adaptive
    betas. Cost: O(K) without misses, else O(E + T K H), and of an adaptive beta O(window log window).

    Args:
        buddies: of each layer, at least one. options: of all layers.
        taus: of each layer; None: no entropy gate.
        beta: fixed; None: no distribution gate, unless it is `adaptive`.
        draw: gives so many random numbers in place of the router's probabilities; None: those are read.
    """

    Options: ClassVar[type[PolicyOptions]] = SubstituteOptions
    name: ClassVar[str] = "substituting"
    traced: ClassVar[bool] = True
    handle: _core.MissRule

    @classmethod
    def make(cls, options: Any, context: PolicyContext) -> Rerouting:
        return cls(options.buddies(context), options.substitution(context), **options.gates(context))

    def __init__(
        self, buddies: Sequence[Buddies], options: SubstitutionOptions, taus: Sequence[float] | None = None,
        beta: float | None = None, adaptive: AdaptiveBeta | None = None,
        draw: Callable[[int], NDArray[np.float32]] | None = None,
    ) -> None:  # fmt: skip
        if beta is not None and not 0 <= beta <= 1:
            raise ValueError(f"beta is a share, not {beta}")
        lists = [(of.ids, of.similarity) for of in buddies]
        super().__init__(_core.MissRule(len(lists[0][0]), lists, options.numbers, taus, beta, adaptive, draw))
        self.needs_probabilities = options.needs_probabilities and draw is None

    def measured(self, link_bytes_per_s: float) -> None:
        self.handle.link_bytes_per_s = link_bytes_per_s


@register("on_miss", "random")
class RandomRule(MissRule):
    """The paper's random replacement: any resident expert that the token does not use yet, with equal probability.

    `MissRule` with all experts in every list, equally similar, and random probabilities per token.

    Args:
        layers, experts: L and E. options: with the default `eta` and `weights`. gates: as for `MissRule`.
        seed: of the draws.
    """

    Options = RandomOptions

    @classmethod
    def make(cls, options: Any, context: PolicyContext) -> Rerouting:
        gates = options.gates(context)
        return cls(context.layers, context.experts, options.substitution(context), **gates, seed=context.seed)

    def __init__(self, layers: int, experts: int, options: SubstitutionOptions, seed: int = 0, **gates: Any) -> None:
        if options.needs_probabilities or options.search is not None or options.kappa:
            raise ValueError("random replacement goes by no probabilities, no ranks and no hops")
        everyone = Buddies(
            np.tile(np.arange(experts, dtype=np.int32), (experts, 1)), np.ones((experts, experts), np.float32)
        )
        drawing = SubstitutionOptions(
            rho=options.rho, temperature=options.temperature, gamma=options.gamma, eta=1.0, reuse=options.reuse,
            fallback=options.fallback, renormalise=options.renormalise,
        )  # fmt: skip
        generator = np.random.default_rng(seed)
        super().__init__(
            [everyone] * layers, drawing, **gates, draw=lambda count: generator.random(count, np.float32)
        )


@register("on_miss", "drop")
class DropRule(MissRule):
    """Missing experts are left out: `MissRule` with empty lists."""

    Options = DropOptions

    @classmethod
    def make(cls, options: Any, context: PolicyContext) -> Rerouting:
        dropping = replace(options.substitution(context), fallback="drop")
        return cls(no_buddies(context.layers, context.experts), dropping, **options.gates(context))


def no_buddies(layers: int, experts: int) -> list[Buddies]:
    """Empty lists: with the fallback `drop` every miss is left out."""
    return [Buddies(np.zeros((experts, 1), np.int32), np.zeros((experts, 1), np.float32))] * layers
