"""Embeddings of a bounded width, so that a store of many maps stays small whatever the model's hidden size is."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

WIDTH = 512  # of a stored embedding at most


class Sketch:
    """Maps embeddings of width H to width D <= H so that cosine similarities are nearly kept.

    H <= D: the embedding itself, exactly. Else a count sketch with balanced buckets (Charikar, Chen and Farach-Colton
    2002; feature hashing): coordinate i is added to bucket i mod D with a random sign. Inner products are kept in
    expectation with a standard error of at most about sqrt(2 / D) of the product of the norms (0.06 for D = 512); two
    equal embeddings stay equal. The signs come from a hash of i, so every process and release has the same sketch.
    O(H) per embedding, H bytes of state.

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
    """Each row divided by its length [S, D]; a zero row stays zero."""
    lengths = np.sqrt(np.einsum("sd,sd->s", rows, rows, dtype=np.float64))
    inverse = np.divide(1.0, lengths, out=np.zeros_like(lengths), where=lengths > 0)
    return (rows * inverse[:, None]).astype(np.float32)


def _hash_bits(count: int) -> NDArray[np.bool_]:
    """One pseudo-random bit for each of 0..count-1 (splitmix64's finalizer)."""
    x = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return ((x ^ (x >> np.uint64(31))) & np.uint64(1)).astype(bool)
