"""Expert maps behind the protocol of all prefetch policies: for executors that search where they run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from .base import LayerSeen, PrefetchPolicy, Span, Wanted
from .expert_map import ExpertMapPrefetch, Forecast, probability_of

Expect = Callable[[Sequence[int], Sequence[float]], None]


class ExpertMapPolicy(PrefetchPolicy):
    """`ExpertMapPrefetch` in the forward itself: what the matcher does beside it, at once and for nothing.

    State: that of `ExpertMapPrefetch`. Each span of a forward is a sequence; its map is the mean over its rows, its
    embedding the span's. After layer m the forecast is for layer m + 1 + d: d counts from the layer that runs when a
    matcher's command would have come. Cost: a search per span and layer, O(C * J).

    Args:
        maps: store, distance and top-k.
        hidden: H, width of embeddings.
        expect: told the probabilities of each forecast's layers; `ExpertMapEviction.expect`.
    """

    name: ClassVar[str] = "expert-map"
    needs_ids = False
    needs_probabilities: ClassVar[bool] = True
    needs_embeddings: ClassVar[bool] = True

    def __init__(self, maps: ExpertMapPrefetch, hidden: int, expect: Expect | None = None) -> None:
        self._maps, self._hidden, self._expect = maps, hidden, expect
        self.distance = maps.store.distance

    def begin_forward(self, spans: Sequence[Span]) -> list[Wanted]:
        rows: list[NDArray[np.float32]] = [
            np.zeros(self._hidden, np.float32) if span.embedding is None else span.embedding for span in spans
        ]
        return self._wanted(self._maps.begin(np.stack(rows)))

    def observed(self, seen: LayerSeen) -> list[Wanted]:
        """Raises ValueError: the model exposes no probabilities, or no forward has begun."""
        if seen.probabilities is None:
            raise ValueError("expert maps need the router's probabilities, which this model does not expose")
        means = [seen.probabilities[span.start : span.stop].mean(axis=0, dtype=np.float64) for span in seen.spans]
        wanted = self._wanted(self._maps.observe(seen.layer, np.stack(means).astype(np.float32)))
        if seen.layer == self._maps.store.layers - 1:
            self._maps.end()
        return wanted

    def _wanted(self, forecast: Forecast | None) -> list[Wanted]:
        if forecast is None:
            return []
        if self._expect is not None:
            layers = forecast.keys // self._maps.store.experts
            probabilities = probability_of(forecast.priorities, layers, forecast.now)
            self._expect(forecast.keys.tolist(), probabilities.tolist())
        n = forecast.wanted
        pairs = zip(forecast.keys[:n].tolist(), forecast.priorities[:n].tolist(), strict=True)
        return [Wanted(key, priority) for key, priority in pairs]
