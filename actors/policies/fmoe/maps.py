"""The expert maps of past iterations: sketches of embeddings, the bounded store (fMoE section 4.4) and the search of
one iteration, layer by layer (4.2).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

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
    O(C + LJ + D) with known scores (`MapSearch` has them), else O(C * (LJ + D)).

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
        """P_layer of all n entries [n, J] and their squared lengths [n]; views."""
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
            embedding: [D], of unit length or zero. maps: [L, J].
            redundancy: RDY with each of the n entries [n]; None: computed if needed.

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
        """A copy of the entries: embeddings [n, D], maps [L, n, J]; for files and replicas."""
        return {
            "embeddings": self._embeddings[: self._count].copy(),
            "maps": np.ascontiguousarray(self._maps[:, : self._count]),
        }

    def load(self, arrays: Mapping[str, NDArray[Any]]) -> None:
        """Begin with these entries of `arrays`; of more than C the last C.

        Raises:
            ValueError: the store is not empty, or the arrays are not valid (`checked_arrays`).
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


def squared(array: NDArray[Any]) -> float:
    """The squared length of an array as one vector."""
    flat = array.ravel().astype(np.float64)
    return float(flat @ flat)


def cosines(
    dots: NDArray[np.float64], old_squares: NDArray[np.float64], new_squares: NDArray[np.float64] | float
) -> NDArray[np.float64]:
    """dots / (lengths of old and new) where both are above zero, else 0; shapes broadcast to that of `dots`."""
    lengths = np.sqrt(old_squares * new_squares)
    return np.divide(dots, lengths, out=np.zeros(dots.shape), where=lengths > 0)


@dataclass(frozen=True, eq=False)
class Match:
    """The most similar entry for each sequence.

    Attributes:
        entries: row in the store [S], the lowest of equals. scores: its cosine similarity [S], in [-1, 1].
    """

    entries: NDArray[np.int64]
    scores: NDArray[np.float64]


class MapSearch:
    """S sequences of one iteration against the n entries of the store.

    Semantic (equation 4): score_sem = cos(embedding, embedding_y). Trajectory (equation 5): score_map = cos of the
    flattened probabilities of the layers seen so far with the same layers of map_y. Each layer adds to the dots [S, n]
    and the squared lengths, so a layer costs O(S * n * J). A layer that was not seen (a lost message) counts on neither
    side. After the last layer these are the scores of whole maps, which `commit` needs.

    Args:
        store: not changed by others before the search ends. embeddings: [S, D], of unit length or zero (`Sketch`).
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
        return all(self._seen)

    def semantic(self) -> Match | None:
        """By embedding; None: the store is empty."""
        return _best(self._semantic)

    def observe(self, layer: int, probabilities: NDArray[np.float32]) -> None:
        """Add a layer's router probabilities [S, J].

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
        """Store one entry for each sequence and end the search; the rows that they took.

        Later sequences are compared with earlier ones' entries too, so equal ones share a row once the store is full.

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
