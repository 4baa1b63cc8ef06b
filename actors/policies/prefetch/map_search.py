"""The search of fMoE (section 4.2) for one iteration, layer by layer."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .map_store import ExpertMapStore, cosines


@dataclass(frozen=True, eq=False)
class Match:
    """The most similar entry for each sequence.

    Attributes:
        entries: row in the store [S]; of equally similar ones the lowest.
        scores: its cosine similarity [S], in [-1, 1].
    """

    entries: NDArray[np.int64]
    scores: NDArray[np.float64]


class MapSearch:
    """S sequences of one iteration against the n entries that the store has.

    Semantic (equation 4): score_sem = cos(embedding, embedding_y). Trajectory (equation 5): score_map = cos of the
    flattened probabilities of the layers seen so far with the same layers of map_y. Incremental: dots [S, n] and the
    squared lengths of both sides are kept, each layer adds its own, so that a layer costs O(S * n * J) and not
    O(S * n * l * J). A layer that was not seen (a message was dropped) is left out on both sides.

    After the last layer the scores over whole maps are there too, so `commit` stores the iteration without another
    pass over the store.

    Args:
        store: not changed by others before the search ends.
        embeddings: [S, D], of unit length or zero (`Sketch`).
    """

    def __init__(self, store: ExpertMapStore, embeddings: NDArray[np.float32]) -> None:
        sequences, width = embeddings.shape
        if width != store.width or sequences < 1:
            raise ValueError(f"embeddings of shape {embeddings.shape} are not [S, {store.width}]")
        self._store, self._generation, self._embeddings = store, store.generation, embeddings
        entries = len(store)
        self._semantic = np.empty((sequences, entries), np.float32)
        for i, embedding in enumerate(embeddings):
            self._semantic[i] = store.semantic_scores(embedding)
        self._dots = np.zeros((sequences, entries))
        self._old_squares = np.zeros(entries)
        self._new_squares = np.zeros((sequences, 1))
        self._maps = np.zeros((sequences, store.layers, store.experts), np.float32)
        self._seen = [False] * store.layers

    @property
    def sequences(self) -> int:
        return len(self._embeddings)

    @property
    def complete(self) -> bool:
        """Whether every layer was seen."""
        return all(self._seen)

    def semantic(self) -> Match | None:
        """By embedding; None: the store is empty."""
        return _best(self._semantic)

    def observe(self, layer: int, probabilities: NDArray[np.float32]) -> None:
        """One more layer's router probabilities [S, J].

        Raises:
            ValueError: the shape is wrong, the layer was seen before, or the store changed.
        """
        shape = (self.sequences, self._store.experts)
        if probabilities.shape != shape:
            raise ValueError(f"probabilities of shape {probabilities.shape}, not {shape}")
        if not 0 <= layer < self._store.layers or self._seen[layer]:
            raise ValueError(f"there is no layer {layer}, or it was seen before")
        self._check_unchanged()
        self._seen[layer] = True
        self._maps[:, layer] = probabilities
        maps, squares = self._store.layer(layer)
        self._old_squares += squares
        for i, row in enumerate(self._maps[:, layer]):  # one product each: BLAS is slower on few rows at once
            self._dots[i] += maps @ row
        self._new_squares += np.einsum("sj,sj->s", probabilities, probabilities, dtype=np.float64)[:, None]

    def trajectory_scores(self) -> NDArray[np.float64]:
        """score_map of the layers seen [S, n]."""
        return cosines(self._dots, self._old_squares, self._new_squares)

    def trajectory(self) -> Match | None:
        """By the layers seen; None: the store is empty or nothing was seen."""
        return _best(self.trajectory_scores()) if any(self._seen) else None

    def commit(self) -> list[int]:
        """Store the iteration, one entry for each sequence, one after the other; the rows that they took.

        A later sequence is compared with the earlier ones' entries too, so equal ones take one row where the store is
        full. The search is over then.

        Raises:
            ValueError: a layer was not seen, or the store changed.
        """
        self._check_unchanged()
        if not self.complete:
            raise ValueError("a map with layers that were not seen is not stored")
        store, before = self._store, len(self._store)
        after = min(store.capacity, before + self.sequences)
        if after < store.capacity:  # none gives way
            return [store.add(e, m) for e, m in zip(self._embeddings, self._maps, strict=True)]
        redundancy = np.zeros((self.sequences, after))
        redundancy[:, :before] = store.redundancy(self._semantic, self.trajectory_scores())
        among = self._redundancy_among()
        rows = []
        for i in range(self.sequences):
            row = store.add(self._embeddings[i], self._maps[i], redundancy[i, : len(store)])
            redundancy[i + 1 :, row] = among[i + 1 :, i]
            rows.append(row)
        return rows

    def _redundancy_among(self) -> NDArray[np.float64]:
        """RDY of the sequences with each other [S, S]."""
        flat = self._maps.reshape(self.sequences, -1).astype(np.float64)
        maps = cosines(flat @ flat.T, self._new_squares.T, self._new_squares)
        return self._store.redundancy(self._embeddings @ self._embeddings.T, maps)

    def _check_unchanged(self) -> None:
        if self._store.generation != self._generation:
            raise ValueError("the store changed under the search")


def _best(scores: NDArray[np.floating]) -> Match | None:
    if scores.shape[1] == 0:
        return None
    entries = scores.argmax(axis=1)
    return Match(entries, scores[np.arange(len(entries)), entries].astype(np.float64))
