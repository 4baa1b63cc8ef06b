"""The expert map store of fMoE (section 4.4): what past iterations routed to, bounded and without duplicates."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

DEFAULT_CAPACITY = 1000  # maps (fMoE section 6.6)


class ExpertMapStore:
    """Up to C entries, each the embedding and the expert map of one sequence in one iteration.

    State, contiguous arrays allocated for C entries (pages are touched as entries come):
        embeddings [C, D] float32, of unit length: the semantic embedding, see `Sketch`; only cosines need it.
        maps [L, C, J] float32: map {P_1..P_L} of each entry, layer by layer, so that a layer's search reads one block.
        squares [L, C] float64: squared length of each P_l, for the cosine of any set of layers.
    Bytes: C * (4D + 4LJ + 8L).

    Rule: while there is room an entry is appended. When full, the new entry takes the place of the old one y with the
    highest redundancy (fMoE section 4.4),

        RDY_y = (d/L) * score_sem_y + ((L-d)/L) * score_map_y

    the cosines of the embeddings and of the flattened maps; equal ones: the lowest row. A zero vector has cosine 0.
    Cost: `add` O(C + LJ + D) where the scores are known (`MapSearch` has them from its search), else
    O(C * (LJ + D)).

    Args:
        layers, experts: L MoE layers of J experts.
        width: D, of stored embeddings.
        distance: d, the prefetch distance; more than L counts as L.
        capacity: C.

    Attributes:
        generation: counts changes, so that a search notices one.
    """

    def __init__(
        self, layers: int, experts: int, width: int, distance: int, capacity: int = DEFAULT_CAPACITY
    ) -> None:
        if min(layers, experts, width, capacity) < 1 or distance < 0:
            raise ValueError(
                f"no store of {capacity} maps of {layers} x {experts} with embeddings of {width}, distance {distance}"
            )
        self.layers, self.experts, self.width, self.capacity = layers, experts, width, capacity
        self.distance = distance
        self.semantic_share = min(distance, layers) / layers  # d/L
        self._embeddings = np.zeros((capacity, width), np.float32)
        self._maps = np.zeros((layers, capacity, experts), np.float32)
        self._squares = np.zeros((layers, capacity), np.float64)
        self._count = 0
        self.generation = 0

    def __len__(self) -> int:
        return self._count

    @property
    def full(self) -> bool:
        return self._count == self.capacity

    @property
    def nbytes(self) -> int:
        """Bytes of the arrays at full capacity."""
        return self._embeddings.nbytes + self._maps.nbytes + self._squares.nbytes

    def layer(self, layer: int) -> tuple[NDArray[np.float32], NDArray[np.float64]]:
        """P_layer of all n entries [n, J], and their squared lengths [n]; views."""
        return self._maps[layer, : self._count], self._squares[layer, : self._count]

    def maps_of(self, entries: NDArray[np.integer], layers: range) -> NDArray[np.float32]:
        """P_l of these entries [S] in consecutive layers [T]: [T, S, J]."""
        return self._maps[layers.start : layers.stop, entries]

    def semantic_scores(self, embedding: NDArray[np.float32]) -> NDArray[np.float32]:
        """Cosine (fMoE equation 4) of a unit or zero embedding [D] with each of the n entries [n]."""
        scores: NDArray[np.float32] = self._embeddings[: self._count] @ embedding
        return scores

    def map_scores(self, maps: NDArray[np.float32]) -> NDArray[np.float64]:
        """Cosine (fMoE equation 5, over all layers) of a map [L, J] with each of the n entries [n]."""
        dots = np.zeros(self._count)
        for layer in range(self.layers):
            dots += self._maps[layer, : self._count] @ maps[layer]
        return cosines(dots, self._squares[:, : self._count].sum(axis=0), squared(maps))

    def redundancy(self, semantic: NDArray[Any], maps: NDArray[Any]) -> NDArray[np.float64]:
        """RDY from both scores, of any equal shape."""
        share = self.semantic_share
        return np.asarray(share * semantic + (1.0 - share) * maps, np.float64)

    def add(
        self,
        embedding: NDArray[np.float32],
        maps: NDArray[np.float32],
        redundancy: NDArray[np.float64] | None = None,
    ) -> int:
        """Store one entry; the row that it took.

        Args:
            embedding: [D], of unit length or zero.
            maps: [L, J].
            redundancy: RDY with each of the n entries [n]; None: computed here if it is needed.

        Raises:
            ValueError: a shape is wrong, or a number is not finite.
        """
        if embedding.shape != (self.width,) or maps.shape != (self.layers, self.experts):
            raise ValueError(
                f"an entry of {embedding.shape} and {maps.shape} does not fit a store of "
                f"({self.width},) and ({self.layers}, {self.experts})"
            )
        if not (np.isfinite(embedding).all() and np.isfinite(maps).all()):
            raise ValueError("an entry has numbers that are not finite")
        if not self.full:
            row = self._count
            self._count += 1
        else:
            if redundancy is None:
                redundancy = self.redundancy(self.semantic_scores(embedding), self.map_scores(maps))
            row = int(np.argmax(redundancy))
        self._embeddings[row] = embedding
        self._maps[:, row] = maps
        self._squares[:, row] = np.einsum("lj,lj->l", maps, maps, dtype=np.float64)
        self.generation += 1
        return row

    def arrays(self) -> dict[str, NDArray[np.float32]]:
        """A copy of the entries: embeddings [n, D], maps [L, n, J]; for files and for other replicas."""
        return {
            "embeddings": self._embeddings[: self._count].copy(),
            "maps": np.ascontiguousarray(self._maps[:, : self._count]),
        }

    def load(self, arrays: Mapping[str, NDArray[Any]]) -> None:
        """Begin with these entries, as `arrays` gave them; of more than C the last C.

        Raises:
            ValueError: there are entries already, an array is missing, or of a wrong shape, or has numbers that are
                not finite, or an embedding is neither of unit length nor zero.
        """
        if self._count:
            raise ValueError(f"the store holds {self._count} maps already")
        embeddings, maps = checked_arrays(arrays, self.layers, self.experts, self.width)
        count = min(len(embeddings), self.capacity)
        if count:
            self._embeddings[:count] = embeddings[-count:]
            self._maps[:, :count] = maps[:, -count:]
            for layer in range(self.layers):
                rows = self._maps[layer, :count]
                self._squares[layer, :count] = np.einsum("cj,cj->c", rows, rows, dtype=np.float64)
        self._count = count
        self.generation += 1


def checked_arrays(
    arrays: Mapping[str, NDArray[Any]], layers: int, experts: int, width: int
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """embeddings [n, D] and maps [L, n, J] of `ExpertMapStore.arrays`.

    Raises:
        ValueError: as in `ExpertMapStore.load`.
    """
    if set(arrays) != {"embeddings", "maps"}:
        raise ValueError(f"the arrays are {sorted(arrays)}, not embeddings and maps")
    embeddings, maps = arrays["embeddings"], arrays["maps"]
    if embeddings.dtype != np.float32 or maps.dtype != np.float32:
        raise ValueError(f"the arrays are {embeddings.dtype} and {maps.dtype}, not float32")
    if embeddings.ndim != 2 or embeddings.shape[1] != width or maps.shape != (layers, len(embeddings), experts):
        raise ValueError(
            f"embeddings {embeddings.shape} and maps {maps.shape} do not fit [n, {width}] and [{layers}, n, {experts}]"
        )
    if not (np.isfinite(embeddings).all() and all(np.isfinite(layer).all() for layer in maps)):
        raise ValueError("there are numbers that are not finite")
    squares = np.einsum("nd,nd->n", embeddings, embeddings, dtype=np.float64)
    if not (np.isclose(squares, 1.0, atol=1e-3) | (squares == 0)).all():
        raise ValueError("an embedding is neither of unit length nor zero")
    return embeddings, maps


def squared(array: NDArray[Any]) -> float:
    """The squared length of an array as one vector."""
    flat = array.ravel().astype(np.float64)
    return float(flat @ flat)


def cosines(
    dots: NDArray[np.float64], old_squares: NDArray[np.float64], new_squares: NDArray[np.float64] | float
) -> NDArray[np.float64]:
    """dots / (lengths of old and new) where both are above zero, else 0; shapes broadcast to that of `dots`."""
    lengths = np.sqrt(old_squares * new_squares)
    return np.divide(dots, lengths, out=np.zeros_like(dots), where=lengths > 0)
