"""Iterations for the tests of the matcher: embeddings and router probabilities that can be told apart."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tiermoe.actors.policies.fmoe import ExpertMapPrefetch, Forecast, MapOptions
from tiermoe.actors.policies.fmoe.maps import ExpertMapStore
from tiermoe.actors.settings import MatcherSettings
from tiermoe.actors.store.artifacts import MapShape
from tiermoe.proto.messages import Context

SHAPE = MapShape("toy", layers=6, experts=8, hidden=12)
SETTINGS = MatcherSettings(capacity=20, snapshot_s=600.0)
MAPS = MapOptions(kind="expert-map", distance=2)
TOP_K = 2


@dataclass(frozen=True)
class Iteration:
    """What a forward of S sequences shows: embeddings [S, H], probabilities [L, S, J]."""

    number: int
    sequences: NDArray[np.int64]
    embeddings: NDArray[np.float32]
    probabilities: NDArray[np.float32]

    def first(self) -> Context:
        nothing = np.empty((len(self.sequences), 0), np.float32)
        return Context(self.number, 0, self.sequences, self.embeddings, nothing)

    def at(self, layer: int) -> Context:
        nothing = np.empty((len(self.sequences), 0), np.float32)
        return Context(self.number, layer, self.sequences, nothing, self.probabilities[layer])

    def contexts(self) -> list[Context]:
        return [self.first(), *map(self.at, range(SHAPE.layers))]


def iteration(number: int, sequences: int = 1, seed: int | None = None) -> Iteration:
    """The same for the same seed; its number is the seed where none is given."""
    random = np.random.default_rng(number if seed is None else seed)
    raw = np.exp(2 * random.standard_normal((SHAPE.layers, sequences, SHAPE.experts)))
    return Iteration(
        number,
        np.arange(sequences, dtype=np.int64),
        random.standard_normal((sequences, SHAPE.hidden), np.float32),
        (raw / raw.sum(axis=-1, keepdims=True)).astype(np.float32),
    )


def reference() -> ExpertMapPrefetch:
    """What a matcher of `SETTINGS` does, without the matcher."""
    store = ExpertMapStore(SHAPE.layers, SHAPE.experts, SHAPE.hidden, MAPS.distance, SETTINGS.capacity)
    return ExpertMapPrefetch(store, SHAPE.hidden, TOP_K)


def forecasts(policy: ExpertMapPrefetch, shown: Iteration) -> list[Forecast | None]:
    """Of a whole iteration, which is stored then; as many as `contexts`."""
    out = [policy.begin(shown.embeddings)]
    out += [policy.observe(layer, shown.probabilities[layer]) for layer in range(SHAPE.layers)]
    policy.end()
    return out
