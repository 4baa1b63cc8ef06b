"""fMoE: expert maps of similar iterations guide prefetch (sections 4.1 to 4.4) and eviction (4.5).

    ExpertMapPrefetch   the method: forecasts from the maps that `_core.MapSearch` finds
    ExpertMapPolicy     the method as a prefetch policy that searches during the forward
    ExpertMapEviction   eviction by 1 / (probability x frequency)

`maps` has the store and the sketch of embeddings.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, model_validator

from ...core import _core
from ..eviction import CacheOrder, EvictionPolicy, Lfu, LfuDecay, NativeOrder, decay_growth
from ..prefetch import LayerSeen, PrefetchOptions, PrefetchPolicy, Span, Wanted, WantedKeys
from ..registry import PolicyContext, Preset, register
from .maps import WIDTH, ExpertMapStore, Sketch

_LEAST = 2.0**-150  # probability: below every positive one in float32


class _MapEvictionOptions(Lfu.Options):
    def check(self, policy: Preset) -> None:
        if policy.maps is None:
            raise ValueError(f"eviction {self.kind} goes by maps, which prefetch {policy.prefetch.kind} does not use")


@register("eviction", "expert-map")
class ExpertMapEviction(NativeOrder):
    """Evicts the expert with the highest priority 1 / (p * freq) (fMoE section 4.5).

    State, arrays by key: freq as of `Lfu`, its decay and its credit for admitted experts included; p, the expert's
    probability in the latest matched map of its layer; the residents and their last use. Experts of unmatched layers
    have the mean of the first reported probabilities; before any, this is `Lfu`. Among experts with p = 0 the frequency
    decides, as in the limit. Ties: the expert admitted or used longest ago. O(1) per key admitted, used, removed or
    reported, `victims` O(keys + n log n) for n looked at.

    Args:
        layers, experts: L and E. half_life: of a use, see `Lfu`; None, as in the paper: no decay.

    Attributes:
        probabilities: p by key.
        told: of each layer a number that is another one after its probabilities have changed [L].
    """

    Options = _MapEvictionOptions
    counted_as: ClassVar[CacheOrder | None] = None
    uses_maps = True
    per_layer = False

    @classmethod
    def make(cls, options: Any, context: PolicyContext) -> ExpertMapEviction:
        return cls(context.layers, context.experts, options.half_life)

    def __init__(self, layers: int, experts: int, half_life: float | None = None) -> None:
        self._experts, self._told = experts, False
        self.probabilities, self.told = np.ones(layers * experts), np.zeros(layers, np.int64)
        super().__init__(
            _core.WholeOrder(
                "expert-map", layers, experts, growth=decay_growth(half_life), probabilities=self.probabilities,
                told=self.told,
            )
        )  # fmt: skip

    def expect(self, keys: NDArray[np.integer], probabilities: NDArray[np.floating]) -> None:
        """Probabilities of these experts, resident or not, in the matched map: whole layers of it.

        Experts that the model lacks are left out.
        """
        if len(keys) and keys.max() >= len(self.probabilities):
            known = keys < len(self.probabilities)
            keys, probabilities = keys[known], probabilities[known]
        if not self._told and len(keys):
            self._told = True
            self.probabilities[:] = max(_LEAST, sum(probabilities.tolist()) / len(keys))
            self.told += 1
        self.probabilities[keys] = np.maximum(probabilities, _LEAST, dtype=np.float64)
        self.told[keys // self._experts] += 1

    def expect_map(
        self, keys: NDArray[np.int32], priorities: NDArray[np.float32], now: int, experts: int
    ) -> None:
        """`expect` of a map's experts by their priorities, `now` layers seen."""
        if self._told:
            _core.expect_map(self.probabilities, keys, priorities, now, experts, self.told)
        else:
            self.expect(keys, probability_of(priorities, keys // experts, now))


@register("eviction", "expert-map-decay")
class ExpertMapDecay(ExpertMapEviction):
    """`ExpertMapEviction` with the half-life of `LfuDecay`."""

    class Options(_MapEvictionOptions, LfuDecay.Options):
        pass


class MapOptions(PrefetchOptions):
    """Options of prefetch by expert maps."""

    refusal: ClassVar[str] = "semantic and dynamic are of expert maps, which prefetch {kind} does not use"
    semantic: bool = Field(default=True, description="forecast the first layers by the prompt's embedding")
    dynamic: bool = Field(default=True, description="ask for more experts where the match is less similar")

    @model_validator(mode="after")
    def _waits_for_nothing(self) -> MapOptions:
        if self.synchronous:
            raise ValueError("the forward never waits for the matcher: leave synchronous out")
        return self


@dataclass(frozen=True, eq=False)
class Forecast:
    """What the matched maps predict for later layers.

    Attributes:
        now: number of layers seen, which is the number (from 0) of the layer that runs next.
        keys: [N] layer * J + expert: first those to prefetch, then the other experts of these layers, each part by
            descending priority, then by key.
        priorities: [N], p / (l - l_now).
        wanted: how many of the keys to prefetch.
        scores: similarity of each sequence's match [S].
        semantic: matched by embeddings, not by trajectories.
    """

    now: int
    keys: NDArray[np.int32]
    priorities: NDArray[np.float32]
    wanted: int
    scores: NDArray[np.float64]
    semantic: bool


class ExpertMapPrefetch:
    """fMoE's prefetch, one iteration after another.

    Layers count from 0 here, from 1 in the paper. When n layers were seen, layer n (the paper's l = n + 1) is next:

        n = 0: the semantic match forecasts layers 0..d: the paper's 1..d, and its layer d + 1, for which the
            trajectory of l = 1 is empty.
        n > 0: the trajectory match of layers 0..n-1 forecasts layer n + d; layers seen together, a layer each.

    So each layer gets one forecast. Semantic (equation 4): score_sem = cos(embedding, embedding_y). Trajectory
    (equation 5): score_map = cos of the flattened probabilities of the layers seen so far with the same layers of
    map_y; each layer adds to the dots [S, n] and the squared lengths, so a layer costs O(S * n * J). A layer that was
    not seen (a lost message) counts on neither side. The best match is the lowest of equal entries.

    Of a match's map experts are taken by descending probability, ties by number, until their sum exceeds delta =
    clip(1 - score, 0, 1) and at least K are taken (equations 6 to 8); of a layer of zeros none. The union over the
    sequences is prefetched, each expert at its highest probability p over them, with priority p / (l - l_now) =
    p / (layer + 1 - n), l_now the last layer whose router has run. `end` stores the iteration's maps; later sequences
    are compared with earlier ones' entries too, so equal ones share a row once the store is full.

    Args:
        store: searched, and extended by each whole iteration.
        hidden: H, width of embeddings.
        top_k: K, experts that the router picks for a token.
        semantic: False: no forecast before the first trajectory (the paper's ablation T).
        dynamic: False: K experts whatever the similarity (T and T+S without delta).
        learn: False: the store does not change.
    """

    def __init__(
        self,
        store: ExpertMapStore,
        hidden: int,
        top_k: int,
        semantic: bool = True,
        dynamic: bool = True,
        learn: bool = True,
    ) -> None:
        if not 1 <= top_k <= store.experts:
            raise ValueError(f"top_k is {top_k}, a layer has {store.experts} experts")
        self.store, self._sketch = store, Sketch(hidden, store.width)
        if self._sketch.width != store.width:
            raise ValueError(f"embeddings of {hidden} are kept in {self._sketch.width}, the store's in {store.width}")
        self._top_k, self._semantic, self._dynamic, self._learn = top_k, semantic, dynamic, learn
        self._search: _core.MapSearch | None = None

    @property
    def sequences(self) -> int | None:
        """S of the current iteration; None: there is none."""
        return None if self._search is None else self._search.sequences

    def begin(self, embeddings: NDArray[np.float32]) -> Forecast | None:
        """Begin an iteration with these embeddings [S, H], dropping an unfinished one. A zero row is an unknown
        embedding, which adds nothing to the forecast. Raises ValueError: the shape is wrong.

        Returns:
            The forecast of layers 0..d; None if there is none.
        """
        store = self.store
        self._search = store.search(self._sketch(embeddings))
        return self._forecast(0, 0, min(store.distance + 1, store.layers), True) if self._semantic else None

    def observe(self, layer: int, probabilities: NDArray[np.float32]) -> Forecast | None:
        """The router's probabilities of a layer and the n - 1 behind it [S, n*J], averaged over each sequence's tokens.

        Returns:
            The forecast of the n layers from `layer + 1 + d` on that were not seen; None if there is none.

        Raises:
            ValueError: no iteration has begun, the shape is wrong, or a layer was seen before.
        """
        if self._search is None:
            raise ValueError("no iteration has begun")
        self._search.observe(layer, probabilities)
        store = self.store
        now = layer + probabilities.shape[1] // store.experts
        first, stop = max(layer + 1 + store.distance, now), min(now + 1 + store.distance, store.layers)
        return self._forecast(now, first, stop, False) if first < stop else None

    def end(self) -> int:
        """End the iteration and store its maps if all layers were seen; the number of stored maps."""
        search, self._search = self._search, None
        if search is None or not search.complete or not self._learn:
            return 0
        return len(search.commit())

    def _forecast(self, now: int, first: int, stop: int, semantic: bool) -> Forecast | None:
        assert self._search is not None
        found = self._search.forecast(semantic, first, stop, now, self._top_k, self._dynamic)
        return None if found is None else Forecast(now, *found, semantic)


def probability_of(priorities: NDArray[np.float32], layers: NDArray[np.integer] | int, now: int) -> NDArray[np.float32]:
    """The probabilities p behind priorities p / (l - l_now) (fMoE section 4.5).

    layers: of each, or of all, from 0; `now` were seen: l - l_now = layer + 1 - now.
    """
    return (priorities * (layers + 1 - now)).astype(np.float32, copy=False)


Expect = Callable[[NDArray[np.int32], NDArray[np.float32], int, int], None]


@register("prefetch", "expert-map")
class ExpertMapPolicy(PrefetchPolicy):
    """`ExpertMapPrefetch` within the forward: a matcher process without its delay.

    State: that of `ExpertMapPrefetch`. Each span of a forward is a sequence with its own embedding; its map is the mean
    over its rows. After layer m the forecast is for layer m + 1 + d, as a matcher's command would arrive in layer m +
    1. Cost: a search per span and layer, O(C * J).

    Args:
        maps: store, distance and top-k. hidden: H, width of embeddings.
        expect: receives each forecast's priorities, as `ExpertMapEviction.expect_map`.
    """

    class Options(MapOptions):
        @model_validator(mode="after")
        def _count_is_the_maps(self) -> Self:
            if self.top is not None:
                raise ValueError("how many experts are asked for is what the maps say: leave top out")
            return self

    name: ClassVar[str] = "expert-map"
    of_matcher: ClassVar[bool] = True  # a matcher process may answer, after a time
    needs_ids = False
    needs_probabilities: ClassVar[bool] = True
    needs_embeddings: ClassVar[bool] = True

    @classmethod
    def make(cls, options: Any, context: PolicyContext) -> PrefetchPolicy:
        width = min(context.hidden, WIDTH)
        store = ExpertMapStore(context.layers, context.experts, width, options.distance, context.map_capacity)
        maps = ExpertMapPrefetch(store, context.hidden, options.experts(context), options.semantic, options.dynamic)
        told = context.eviction.expect_map if isinstance(context.eviction, ExpertMapEviction) else None
        return cls(maps, context.hidden, told)

    def __init__(self, maps: ExpertMapPrefetch, hidden: int, expect: Expect | None = None) -> None:
        self._maps, self._hidden, self._expect = maps, hidden, [] if expect is None else [expect]
        self.distance = maps.store.distance

    def tell(self, eviction: EvictionPolicy) -> None:
        """Give another GPU's eviction the probabilities, too."""
        if isinstance(eviction, ExpertMapEviction):
            self._expect.append(eviction.expect_map)

    def begin_forward(self, spans: Sequence[Span]) -> Sequence[Wanted]:
        rows: list[NDArray[np.float32]] = [
            np.zeros(self._hidden, np.float32) if span.embedding is None else span.embedding for span in spans
        ]
        return self._wanted(self._maps.begin(np.stack(rows)))

    def observed(self, seen: LayerSeen) -> Sequence[Wanted]:
        """Raises ValueError: the model exposes no probabilities, or no forward has begun."""
        if seen.probabilities is None:
            raise ValueError("expert maps need the router's probabilities, which this model does not expose")
        rows, spans = seen.probabilities, seen.spans
        if len(spans) < len(rows):
            rows = np.stack([rows[span.start : span.stop].mean(axis=0, dtype=np.float64) for span in spans])
        wanted = self._wanted(self._maps.observe(seen.layer, rows.astype(np.float32)))
        if seen.layer == self._maps.store.layers - 1:
            self._maps.end()
        return wanted

    def _wanted(self, forecast: Forecast | None) -> Sequence[Wanted]:
        if forecast is None:
            return []
        for expect in self._expect:
            expect(forecast.keys, forecast.priorities, forecast.now, self._maps.store.experts)
        n = forecast.wanted
        keys, priorities = forecast.keys[:n].tolist(), forecast.priorities[:n].tolist()
        return WantedKeys([keys], priorities)

