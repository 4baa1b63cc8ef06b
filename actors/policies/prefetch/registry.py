"""Prefetch policies by name: what presets and the command line choose from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .activation_matrix import ActivationMatrixPrefetch
from .base import PrefetchPolicy
from .layerwise import LayerwisePrefetch
from .next_gate import NextGatePrefetch
from .popularity import PopularityPrefetch
from .stride import Predictor, StridePrefetch

PREFETCH = ("none", "next-gate", "popularity", "activation-matrix", "stride", "layerwise")


@dataclass(frozen=True)
class PrefetchOptions:
    """What the policies are made from.

    layers, experts: L and E. top: experts per token, or per layer, to ask for. distance: layers ahead. predictors: of
    layers 0..L-distance-1, for stride.
    """

    layers: int
    experts: int
    top: int
    distance: int = 1
    synchronous: bool = False
    predictors: Sequence[Predictor] | None = None


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
            return NextGatePrefetch(o.layers, o.experts, o.top, o.distance, o.synchronous)
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
