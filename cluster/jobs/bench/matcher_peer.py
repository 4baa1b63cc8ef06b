"""The other process of `tiermoe bench matcher`: searches and updates stores of expert maps on one thread.

Reads cases as JSON lines and prints their measures as JSON lines; ends with its standard input. A store is built when
its case comes first, and stays.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import psutil

from ....actors.policies.fmoe import ExpertMapPrefetch
from ....actors.policies.fmoe.maps import ExpertMapStore, MapSearch, Sketch, unit_rows

DISTANCE = 3
MB = 1e6


class StoreCase:
    """One full store and the iterations that are shown to it.

    Args:
        layers, experts, hidden, top_k: of the model. capacity: C.
    """

    def __init__(self, layers: int, experts: int, hidden: int, top_k: int, capacity: int) -> None:
        before = psutil.Process().memory_info().rss
        self._random = np.random.default_rng(0)
        self._sketch = Sketch(hidden)
        self._hidden = hidden
        self.store = ExpertMapStore(layers, experts, self._sketch.width, DISTANCE, capacity)
        self.store.load(random_maps(self._random, self.store))
        self._policy = ExpertMapPrefetch(self.store, hidden, top_k, learn=False)
        self._resident = psutil.Process().memory_info().rss - before

    def measure(self) -> dict[str, float]:
        """Microseconds, medians over the layers of one iteration of one sequence; megabytes."""
        store, random = self.store, self._random
        embedding = random.standard_normal((1, self._hidden), np.float32)
        maps = softmax(random, store.layers, 1, store.experts)

        begin_us, _ = _timed(lambda: self._policy.begin(embedding))
        forecasts = [_timed(lambda i=i: self._policy.observe(i, maps[i]))[0] for i in range(store.layers)]  # type: ignore[misc]
        ahead = max(1, store.layers - 1 - DISTANCE)  # layers that have one to forecast

        search = MapSearch(store, self._sketch(embedding))

        def one_layer(layer: int) -> None:
            search.observe(layer, maps[layer])
            search.trajectory()

        searches = [_timed(lambda i=i: one_layer(i))[0] for i in range(store.layers)]  # type: ignore[misc]
        update_us, _ = _timed(search.commit)
        entry = self._sketch(embedding)[0], np.ascontiguousarray(maps[:, 0])
        direct_us, _ = _timed(lambda: store.add(*entry))
        return {
            "layer_search_us": float(np.median(searches)),
            "layer_forecast_us": float(np.median(forecasts[:ahead])),
            "semantic_forecast_us": begin_us,
            "update_us": update_us,
            "update_without_search_us": direct_us,
            "store_mb": store.nbytes / MB,
            "resident_mb": self._resident / MB,
        }


def softmax(random: np.random.Generator, *shape: int) -> np.ndarray:
    """Router probabilities as of random logits, float32."""
    raw = np.exp(2 * random.standard_normal(shape, np.float32))
    raw /= raw.sum(axis=-1, keepdims=True)
    return raw


def random_maps(random: np.random.Generator, store: ExpertMapStore) -> dict[str, np.ndarray]:
    """As many as the store holds."""
    return {
        "embeddings": unit_rows(random.standard_normal((store.capacity, store.width), np.float32)),
        "maps": softmax(random, store.layers, store.capacity, store.experts),
    }


def _timed(work: Callable[[], Any]) -> tuple[float, Any]:
    begin_s = time.perf_counter()
    result = work()
    return (time.perf_counter() - begin_s) * 1e6, result


def main() -> None:
    cases: dict[str, StoreCase] = {}
    for line in sys.stdin:
        asked = json.loads(line)
        if line not in cases:
            cases[line] = StoreCase(**asked)
        print(json.dumps(cases[line].measure()), flush=True)


if __name__ == "__main__":
    main()
