"""Eviction policies by name, for a model of known shape."""

from __future__ import annotations

from . import EVICTION, LAYER_EVICTION
from .base import EvictionPolicy
from .importance import ImportanceEviction
from .split import SplitEviction
from .two_widths import TwoWidths


def make_eviction(
    kind: str,
    layers: int,
    experts: int,
    split: bool = False,
    low_bit: bool = False,
    *,
    alpha: float = 0.5,
    gamma: float = 0.97,
    window: int = 128,
) -> EvictionPolicy:
    """A policy in its first state.

    Args:
        kind: a name in `EVICTION`, or importance. layers, experts: MoE layers and experts of each.
        split: the cache is cut, so that the tops of each layer have an order of their own.
        low_bit: replicas have slots of their own.
        alpha, gamma, window: of importance, see `ImportanceEviction`.

    Raises:
        KeyError: there is no such policy, or none for a cut.
    """
    if split:
        return SplitEviction(LAYER_EVICTION[kind], layers, experts)
    if kind == "importance":
        return ImportanceEviction(layers, experts, alpha, gamma, window)
    return TwoWidths(EVICTION[kind](), layers * experts) if low_bit else EVICTION[kind]()
