"""Prefetch whole layers, whatever the routing says (DeepSpeed-Inference)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from .base import LayerSeen, PrefetchPolicy, Span, Wanted


class LayerwisePrefetch(PrefetchPolicy):
    """Expert-agnostic, layer-wise parameter offloading (ZeRO-Inference in DeepSpeed, arXiv 2207.00032, section 6).

    State: none. Rule: when layer l's router has run, ask for every expert of layer l + distance, lowest number first.
    With distance 0 these are the other experts of l itself: the layer comes whole and on demand, which is how fMoE
    (section 6.1) runs DeepSpeed-Inference as a baseline. Cost: O(E) per layer, and E experts of traffic.

    Args:
        layers, experts: L and E.
        distance: 0 or 1.
        synchronous: the layer waits until all of it is there, as DeepSpeed's gather does.
    """

    name: ClassVar[str] = "layerwise"
    stateless: ClassVar[bool] = True
    needs_ids = False

    def __init__(self, layers: int, experts: int, distance: int = 1, synchronous: bool = False) -> None:
        if distance not in (0, 1):
            raise ValueError(f"layer-wise prefetch is for this layer (0) or the next (1), not {distance}")
        self._layers, self._experts = layers, experts
        self.distance, self.synchronous = distance, synchronous

    def begin_forward(self, spans: Sequence[Span]) -> list[Wanted]:
        return self._all_of(0) if self.distance else []

    def observed(self, seen: LayerSeen) -> list[Wanted]:
        return self._all_of(seen.layer + self.distance)

    def _all_of(self, layer: int) -> list[Wanted]:
        if layer >= self._layers:
            return []
        base = layer * self._experts
        return [Wanted(base + e, 1.0 - e / self._experts) for e in range(self._experts)]
