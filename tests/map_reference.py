"""fMoE's search, selection and record in NumPy: what `_core.MapSearch` and `_core.MapStore` are compared with."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from tiermoe.actors.policies.fmoe import Forecast

Floats = NDArray[np.floating[Any]]


def cosines(dots: Floats, old_squares: Floats, new_squares: Floats) -> Floats:
    """dots / (lengths of old and new) where both are above zero, else 0; shapes broadcast to that of `dots`."""
    lengths = np.sqrt(old_squares * new_squares)
    return np.divide(dots, lengths, out=np.zeros(dots.shape), where=lengths > 0)


def prefetch_priority(probabilities: Floats, layers: NDArray[np.integer[Any]], now: int) -> NDArray[np.float32]:
    """p / (l - l_now) (fMoE section 4.5); layers from 0, of which `now` were seen: l - l_now = layer + 1 - now."""
    return (probabilities / (layers + 1 - now)).astype(np.float32)


def threshold(scores: Floats) -> Floats:
    """delta = clip(1 - score, 0, 1) (fMoE section 4.3)."""
    return np.clip(1.0 - scores, 0.0, 1.0)


def select(probabilities: Floats, scores: Floats, top_k: int, dynamic: bool = True) -> NDArray[np.bool_]:
    """fMoE equations 6 to 8: whether each expert is taken [S, J], of probabilities [S, J] and scores [S].

    By descending probability, ties by number, until the sum exceeds delta and at least K are taken; not dynamic: K. A
    row of zeros selects nothing.
    """
    order = (-probabilities).argsort(axis=1, kind="stable")
    sums = np.take_along_axis(probabilities, order, axis=1).cumsum(axis=1, dtype=np.float64)
    by_rank = sums[:, -1:].repeat(probabilities.shape[1], axis=1) > 0
    if dynamic:  # the sums rise, so an expert is taken where the sum before it is not above delta
        by_rank[:, top_k:] &= sums[:, top_k - 1 : -1] <= threshold(scores)[:, None]
    else:
        by_rank[:, top_k:] = False
    taken = np.empty_like(by_rank)
    np.put_along_axis(taken, order, by_rank, axis=1)
    return taken


class NumpyMaps:
    """`ExpertMapPrefetch` on embeddings as they are stored, with a store of up to C entries."""

    def __init__(self, layers: int, distance: int, capacity: int, top_k: int, dynamic: bool = True) -> None:
        self.layers, self.distance, self.capacity, self.top_k, self.dynamic = layers, distance, capacity, top_k, dynamic
        self.share = min(distance, layers) / layers
        self.embeddings: list[Floats] = []  # [D]
        self.maps: list[Floats] = []  # [L, J]

    def begin(self, embeddings: Floats) -> Forecast | None:
        self._new, self._seen = embeddings, dict[int, Floats]()
        known = embeddings.any(axis=1)
        if not self.maps or not known.any():
            return None
        return self._forecast(0, self._semantic()[known], range(min(self.distance + 1, self.layers)), True)

    def observe(self, layer: int, probabilities: Floats) -> Forecast | None:
        """probabilities [S, n, J] of this layer and the n - 1 behind it."""
        now = layer + probabilities.shape[1]
        self._seen |= {layer + at: probabilities[:, at] for at in range(now - layer)}
        targets = range(max(layer + 1 + self.distance, now), min(now + 1 + self.distance, self.layers))
        return self._forecast(now, self._trajectory(), targets, False) if targets and self.maps else None

    def end(self) -> list[int]:
        """The rows that the iteration's maps took; none: a layer was not seen."""
        rows = list[int]()
        for s in range(len(self._new) if len(self._seen) == self.layers else 0):
            row = len(self.maps)
            if row == self.capacity:
                both = self._semantic()[s].astype(np.float64), self._trajectory()[s]
                row = int(np.argmax(self.share * both[0] + (1 - self.share) * both[1]))
            self.embeddings[row:row + 1] = [self._new[s]]
            self.maps[row:row + 1] = [np.stack([self._seen[layer][s] for layer in range(self.layers)])]
            rows.append(row)
        return rows

    def _semantic(self) -> Floats:
        """Equation 4 [S, n], of unit or zero embeddings."""
        return self._new @ np.stack(self.embeddings).T

    def _trajectory(self) -> Floats:
        """Equation 5 over the layers seen [S, n]."""
        seen = sorted(self._seen)
        new = np.concatenate([self._seen[layer] for layer in seen], axis=1).astype(np.float64)
        old = np.stack(self.maps)[:, seen].reshape(len(self.maps), -1).astype(np.float64)
        return cosines(new @ old.T, (old**2).sum(axis=1), (new**2).sum(axis=1)[:, None])

    def _forecast(self, now: int, scores: Floats, targets: range, semantic: bool) -> Forecast:
        entries, best = scores.argmax(axis=1), scores.max(axis=1).astype(np.float64)
        maps = np.stack(self.maps)[entries][:, targets.start : targets.stop].transpose(1, 0, 2)  # [T, S, J]
        picked = np.stack([select(of_layer, best, self.top_k, self.dynamic).any(axis=0) for of_layer in maps]).ravel()
        priorities = prefetch_priority(maps.max(axis=1), np.array(targets)[:, None], now).ravel()
        order = np.lexsort((-priorities, ~picked))  # stable: then by key
        keys = (order + targets.start * maps.shape[2]).astype(np.int32)
        return Forecast(now, keys, priorities[order], int(picked.sum()), best, semantic)
