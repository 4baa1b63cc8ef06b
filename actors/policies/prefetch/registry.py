"""Prefetch policies by name: what presets and the command line choose from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .activation_matrix import ActivationMatrixPrefetch
from .base import PrefetchPolicy
from .expert_map import ExpertMapPrefetch
from .layerwise import LayerwisePrefetch
from .map_policy import Expect, ExpertMapPolicy
from .map_store import ExpertMapStore
from .mixed_gate import MixedGatePrefetch
from .next_gate import NextGatePrefetch
from .popularity import PopularityPrefetch
from .pre_gated import PreGatedPrefetch
from .random_guess import RandomPrefetch
from .speculative import SpeculativePrefetch
from .stride import Predictor, StridePrefetch

PREFETCH = (
    "none", "next-gate", "speculative", "pre-gated", "random", "expert-map", "popularity", "activation-matrix",
    "stride", "layerwise",
)  # fmt: skip
_WIDTH = 512  # of a stored embedding, as `MatcherOptions.width` has it


@dataclass(frozen=True)
class PrefetchOptions:
    """What the policies are made from.

    layers, experts: L and E. top: experts per token, or per layer, to ask for. distance: layers ahead. predictors: of
    layers 0..L-distance-1, for stride. hidden, capacity, semantic, dynamic, expect: for expert maps, see
    `ExpertMapPolicy`, `ExpertMapStore` and `ExpertMapPrefetch`. precisions: T1 and T2, by which next-gate's guesses are
    asked for in full or in low precision; None: all in full.
    """

    layers: int
    experts: int
    top: int
    distance: int = 1
    synchronous: bool = False
    predictors: Sequence[Predictor] | None = None
    hidden: int = 0
    capacity: int = 1000
    semantic: bool = True
    dynamic: bool = True
    expect: Expect | None = None
    precisions: tuple[float, float] | None = None


def make_prefetch(kind: str, options: PrefetchOptions) -> PrefetchPolicy | None:
    """A policy in its first state; None for `none`.

    Raises:
        ValueError: unknown kind, a distance that it does not have, or stride without predictors.
    """
    o = options
    match kind:
        case "none":
            return None
        case "next-gate":
            if o.precisions is not None:
                return MixedGatePrefetch(o.layers, o.experts, o.top, o.distance, o.synchronous, *o.precisions)
            return NextGatePrefetch(o.layers, o.experts, o.top, o.distance, o.synchronous)
        case "speculative":
            return SpeculativePrefetch(o.layers, o.experts, o.top, o.synchronous)
        case "pre-gated":
            return PreGatedPrefetch(o.layers, o.experts, o.top, o.synchronous)
        case "random":
            return RandomPrefetch(o.layers, o.experts, o.top, o.synchronous)
        case "expert-map":
            store = ExpertMapStore(o.layers, o.experts, min(o.hidden, _WIDTH), o.distance, o.capacity)
            return ExpertMapPolicy(ExpertMapPrefetch(store, o.hidden, o.top, o.semantic, o.dynamic), o.hidden, o.expect)
        case "popularity":
            return PopularityPrefetch(o.layers, o.experts, o.top, o.distance, o.synchronous)
        case "activation-matrix":
            return ActivationMatrixPrefetch(o.layers, o.experts, o.top, o.distance, synchronous=o.synchronous)
        case "layerwise":
            return LayerwisePrefetch(o.layers, o.experts, o.distance, o.synchronous)
        case "stride":
            if o.predictors is None:
                raise ValueError("stride prefetch needs predictors")
            return StridePrefetch(o.predictors, o.experts, o.top, o.distance, o.synchronous)
    raise ValueError(f"no prefetch policy '{kind}'; there are {', '.join(PREFETCH)}")
