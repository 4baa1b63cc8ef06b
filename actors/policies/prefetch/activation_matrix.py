"""Prefetch by the activation matrix of the most similar earlier request (MoE-Infinity)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from .base import LayerSeen, PrefetchPolicy, Span, Wanted, by_sequence, most_probable, ranked

_EPSILON = 1e-6


class MatrixCollection:
    """Expert activation matrices of finished requests, at most `capacity` (MoE-Infinity's EAMC).

    Rule of replacement: a full collection gives up the matrix nearest to the new one, so that it keeps its spread. (The
    paper clusters its history by K-means off line and takes one matrix of each cluster; on line, dropping the most
    redundant one serves the same end. This rule is ours.)

    Attributes:
        counts: [C, L, E] int64. unit: the same with rows of length 1 [C, L, E], zero rows left zero.
    """

    def __init__(self, layers: int, experts: int, capacity: int = 128) -> None:
        if capacity < 1:
            raise ValueError(f"capacity is {capacity}, one matrix at least must fit")
        self.capacity, self._size = capacity, 0
        self._counts = np.zeros((capacity, layers, experts), np.int64)
        self._unit = np.zeros((capacity, layers, experts), np.float32)

    def __len__(self) -> int:
        return self._size

    @property
    def counts(self) -> NDArray[np.int64]:
        return self._counts[: self._size]

    @property
    def unit(self) -> NDArray[np.float32]:
        return self._unit[: self._size]

    def add(self, counts: NDArray[np.int64]) -> None:
        """Take in a request's matrix [L, E]; one without any activation is left out."""
        if not counts.any():
            return
        place = self._size
        if place == self.capacity:
            place = int(row_similarity(unit_rows(counts), self.unit).sum(axis=1).argmax())
        else:
            self._size += 1
        self._counts[place], self._unit[place] = counts, unit_rows(counts)


@dataclass(eq=False)
class _Request:
    """counts: its matrix so far [L, E]. cosines: of its rows with each stored matrix's [C, L],
    of the collection as it was at `version`."""

    counts: NDArray[np.int64]
    cosines: NDArray[np.float32]
    version: int


class ActivationMatrixPrefetch(PrefetchPolicy):
    """Request-level expert activation matrices (MoE-Infinity, arXiv 2401.14361, section 4).

    State: the EAM M [L, E] of each running request, counts of (token, expert) pairs over all its iterations, and a
    collection of the EAMs of finished requests.

    Rule: the predicted EAM is the stored one at the least distance
        d(M1, M2) = 1 - 1/L * sum_l cos(M1[l] / sum(M1[l]), M2[l] / sum(M2[l]))
    (a row without counts has cosine 0). Of each later layer l, the experts with the greatest share
    p = M[l,e] / sum(M[l]) are asked for with priority (p + epsilon) * (1 - (l - l_now) / L): likely experts and near
    layers first. Before a request's first layer nothing is matched, and the experts most popular over the whole
    collection are asked for. What is asked for ends with `top` experts of each of `distance` layers, where the paper
    goes on through all layers until its buffers are full: beyond that, guesses only push each other out.

    Cost: O(C * E) per layer and sequence: only the row that has changed is compared again; C * L * E * 12 bytes.
    The paper evicts by this matrix too; as a baseline of fMoE (its section 6.5) it goes with LFU.

    Args:
        layers, experts: L and E. top: experts per layer to ask for. distance: layers ahead.
        collection: to go on with; None: an empty one of the default capacity.
        learn: finished requests are taken into the collection.
        synchronous: the forward waits for what was asked for, as MoE-Infinity's does.
    """

    name: ClassVar[str] = "activation-matrix"

    def __init__(
        self,
        layers: int,
        experts: int,
        top: int,
        distance: int = 3,
        collection: MatrixCollection | None = None,
        learn: bool = True,
        synchronous: bool = False,
    ) -> None:
        self.collection = MatrixCollection(layers, experts) if collection is None else collection
        self._layers, self._experts, self._top, self._learn = layers, experts, top, learn
        self.distance, self.synchronous = distance, synchronous
        self._requests: dict[str, _Request] = {}
        self._version = 0  # of the collection

    def begin_forward(self, spans: Sequence[Span]) -> list[Wanted]:
        wanted: list[Wanted] = []
        for span in spans:
            request = self._requests.get(span.sequence)
            if request is None:
                counts = np.zeros((self._layers, self._experts), np.int64)
                self._requests[span.sequence] = _Request(counts, self._compare(counts), self._version)
                if len(self.collection):
                    wanted += self._wanted(self.collection.counts.sum(axis=0), -1)
            else:
                wanted += self._predicted(request, -1)
        return ranked(wanted)

    def observed(self, seen: LayerSeen) -> list[Wanted]:
        wanted: list[Wanted] = []
        for span, ids in by_sequence(seen, seen.ids):
            request, layer = self._requests[span.sequence], seen.layer
            request.counts[layer] += np.bincount(ids.ravel(), minlength=self._experts)
            if request.version == self._version:
                row = request.counts[layer] / np.linalg.norm(request.counts[layer])
                request.cosines[:, layer] = self.collection.unit[:, layer] @ row.astype(np.float32)
            wanted += self._predicted(request, layer)
        return ranked(wanted)

    def end(self, sequence: str) -> None:
        request = self._requests.pop(sequence, None)
        if request is not None and self._learn:
            self.collection.add(request.counts)
            self._version += 1

    def nearest(self, sequence: str) -> int | None:
        """Which stored matrix a running request is matched with; the first of equals, None where there is none."""
        return self._nearest(self._requests[sequence])

    def _nearest(self, request: _Request) -> int | None:
        if request.version != self._version:
            request.cosines, request.version = self._compare(request.counts), self._version
        return int(request.cosines.sum(axis=1).argmax()) if len(self.collection) else None

    def _predicted(self, request: _Request, now: int) -> list[Wanted]:
        place = self._nearest(request)
        return [] if place is None else self._wanted(self.collection.counts[place], now)

    def _wanted(self, counts: NDArray[np.int64], now: int) -> list[Wanted]:
        wanted = []
        for layer in range(now + 1, min(now + 1 + self.distance, self._layers)):
            row = counts[layer]
            share, near = row / max(1, row.sum()), 1.0 - (layer - now) / self._layers
            for e in most_probable(share, self._top):
                wanted.append(Wanted(layer * self._experts + e, (float(share[e]) + _EPSILON) * near))
        return wanted

    def _compare(self, counts: NDArray[np.int64]) -> NDArray[np.float32]:
        return row_similarity(unit_rows(counts), self.collection.unit)


def unit_rows(counts: NDArray[np.int64]) -> NDArray[np.float32]:
    """[..., E] with rows of length 1; zero rows stay zero. Scaling a row to shares first changes no cosine."""
    norms = np.linalg.norm(counts, axis=-1, keepdims=True)
    return np.divide(counts, norms, out=np.zeros(counts.shape), where=norms > 0).astype(np.float32)


def row_similarity(unit: NDArray[np.float32], stored: NDArray[np.float32]) -> NDArray[np.float32]:
    """Cosines of the rows of one matrix [L, E] with those of the stored ones [C, L, E]: [C, L]."""
    return np.einsum("le,cle->cl", unit, stored)
