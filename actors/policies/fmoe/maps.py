"""The expert maps of past iterations: sketches of embeddings, and the bounded store (fMoE section 4.4).

The search of one iteration, layer by layer (4.2), is `_core.MapSearch`, native as the store's record (`core/maps.hpp`):
with NumPy a layer took 120 us, most of it in calls.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...core import _core

WIDTH = 512  # of a stored embedding at most


class Sketch:
    """Maps embeddings of width H to width D <= H and nearly preserves cosine similarities.

    H <= D: the embedding itself. Else a count sketch with balanced buckets (Charikar, Chen and Farach-Colton 2002;
    feature hashing): coordinate i is added to bucket i mod D with a random sign. Inner products are preserved in
    expectation, with a standard error of at most about sqrt(2 / D) of the product of the norms (0.06 for D = 512). The
    signs hash i, so they are the same in every process and release. O(H) per embedding.

    Args:
        hidden: H. width: D at most.
    """

    def __init__(self, hidden: int, width: int = WIDTH) -> None:
        if hidden < 1 or width < 1:
            raise ValueError(f"an embedding of width {hidden} cannot be kept in {width}")
        self.hidden, self.width = hidden, min(hidden, width)
        self._signs = np.where(_hash_bits(hidden), np.float32(1), np.float32(-1))

    def __call__(self, embeddings: NDArray[np.float32]) -> NDArray[np.float32]:
        """[S, H] -> [S, D], of unit length; a zero row stays zero."""
        rows = np.asarray(embeddings, np.float32)
        if rows.ndim != 2 or rows.shape[1] != self.hidden:
            raise ValueError(f"embeddings of shape {rows.shape} are not [S, {self.hidden}]")
        if self.width < self.hidden:
            spare = -self.hidden % self.width
            signed = np.pad(rows * self._signs, ((0, 0), (0, spare)))
            rows = signed.reshape(len(rows), -1, self.width).sum(axis=1)
        return unit_rows(rows)


def unit_rows(rows: NDArray[np.float32]) -> NDArray[np.float32]:
    """Each row divided by its length [S, D]; zero rows stay zero."""
    lengths = np.sqrt(np.einsum("sd,sd->s", rows, rows, dtype=np.float64))
    inverse = np.divide(1.0, lengths, out=np.zeros_like(lengths), where=lengths > 0)
    return (rows * inverse[:, None]).astype(np.float32)


def _hash_bits(count: int) -> NDArray[np.bool_]:
    """One pseudo-random bit for each of 0..count-1 (splitmix64's finalizer)."""
    x = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return ((x ^ (x >> np.uint64(31))) & np.uint64(1)).astype(bool)


DEFAULT_CAPACITY = 1000  # maps (fMoE section 6.6)


class ExpertMapStore:
    """Up to C entries, each the embedding and the expert map of one sequence in one iteration.

    State, contiguous arrays for C entries, C * (4D + 4LJ + 8L) bytes:
        embeddings [C, D] float32, of unit length: the semantic embedding, see `Sketch`.
        maps [L, C, J] float32: map {P_1..P_L} of each entry, by layer, so that a search reads one block per layer.
        squares [L, C] float64: squared length of each P_l, for cosines over any set of layers.

    Rule: append while there is room; then replace the old entry y with the highest redundancy (fMoE section 4.4),

        RDY_y = (d/L) * score_sem_y + ((L-d)/L) * score_map_y

    the cosines of the embeddings and of the flattened maps (of a zero vector: 0); ties to the lowest row. Cost: `add`
    O(C + LJ + D) with known scores (a search has them), else O(C * (LJ + D)).

    Args:
        layers, experts: L MoE layers of J experts. width: D, of stored embeddings. capacity: C.
        distance: d, the prefetch distance; more than L counts as L.

    Attributes:
        generation: counts changes, so that a search notices one.
    """

    def __init__(self, layers: int, experts: int, width: int, distance: int, capacity: int = DEFAULT_CAPACITY) -> None:
        if min(layers, experts, width, capacity) < 1 or distance < 0:
            raise ValueError(
                f"no store of {capacity} maps of {layers} x {experts} with embeddings of {width}, distance {distance}"
            )
        self.layers, self.experts, self.width, self.capacity = layers, experts, width, capacity
        self.distance = distance
        self._embeddings = np.zeros((capacity, width), np.float32)
        self._maps = np.zeros((layers, capacity, experts), np.float32)
        self._squares = np.zeros((layers, capacity), np.float64)
        share = min(distance, layers) / layers  # d/L
        self._native = _core.MapStore(self._embeddings, self._maps, self._squares, share)

    def __len__(self) -> int:
        return self._native.count

    @property
    def generation(self) -> int:
        return self._native.generation

    @property
    def full(self) -> bool:
        return len(self) == self.capacity

    @property
    def nbytes(self) -> int:
        """Bytes of the arrays at full capacity."""
        return self._embeddings.nbytes + self._maps.nbytes + self._squares.nbytes

    def maps_of(self, entries: Sequence[int], layer: int) -> NDArray[np.float32]:
        """P_layer of these entries [S, J]."""
        return self._maps[layer, entries]

    def search(self, embeddings: NDArray[np.float32]) -> _core.MapSearch:
        """A search for S sequences by their embeddings [S, D], of unit length or zero (`Sketch`).

        It ends when the store changes. Raises ValueError: the shape is wrong.
        """
        return _core.MapSearch(self._native, embeddings)

    def add(self, embedding: NDArray[np.float32], maps: NDArray[np.float32]) -> int:
        """Store one entry without a search; the row that it took.

        Args:
            embedding: [D], of unit length or zero. maps: [L, J].

        Raises:
            ValueError: a shape is wrong, or a number is not finite.
        """
        return self._native.add(embedding, maps)

    def arrays(self) -> dict[str, NDArray[np.float32]]:
        """A copy of the entries: embeddings [n, D], maps [L, n, J]; for files and replicas."""
        return {
            "embeddings": self._embeddings[: len(self)].copy(),
            "maps": self._maps[:, : len(self)].copy(),
        }

    def load(self, arrays: Mapping[str, NDArray[Any]]) -> None:
        """Begin with these entries of `arrays`; of more than C the last C.

        Raises:
            ValueError: the store is not empty, or the arrays are not valid (`checked_arrays`).
        """
        if len(self):
            raise ValueError(f"the store holds {len(self)} maps already")
        embeddings, maps = checked_arrays(arrays, self.layers, self.experts, self.width)
        count = min(len(embeddings), self.capacity)
        if count:
            self._embeddings[:count] = embeddings[-count:]
            self._maps[:, :count] = maps[:, -count:]
        self._native.fill(count)


def checked_arrays(
    arrays: Mapping[str, NDArray[Any]], layers: int, experts: int, width: int
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """embeddings [n, D] and maps [L, n, J] of `ExpertMapStore.arrays`.

    Raises:
        ValueError: an array is missing, has a wrong shape or numbers that are not finite, or an embedding is neither of
            unit length nor zero.
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
