"""Eviction by importance: recent use and what the next layer's router is predicted to ask for (ActiveEvict)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from .base import EvictionPolicy, first_evictable

Floats = NDArray[np.float64]


class Hotness:
    """Time-decayed use of each expert by the last tokens of its layer (ActiveEvict, equation 8), kept incrementally.

    Symbols: u(e) `values`, gamma `gamma`, T `window`, I_t(e) the rows of `ids`. With t counted so that the newest token
    is T, u(e) = sum over the last T tokens of gamma^(T-t) * I_t(e). A new token multiplies u by gamma, adds 1 to what
    it picked and takes gamma^T from what the token that leaves the window had picked: O(E + K) per token. Rows of a
    batch are tokens in the order of the rows.

    State: u [L, E], and the picks of the window's tokens per layer.

    Args:
        layers, experts: L and E. gamma: in (0, 1]. window: tokens, at least 1.
    """

    def __init__(self, layers: int, experts: int, gamma: float, window: int) -> None:
        if not 0 < gamma <= 1:
            raise ValueError(f"gamma is {gamma}, not in (0, 1]")
        if window < 1:
            raise ValueError(f"the window holds {window} tokens, not at least 1")
        self._window = window
        self._powers: Floats = gamma ** np.arange(2 * window, dtype=np.float64)  # by age; batches as long as the window
        self.values: Floats = np.zeros((layers, experts))  # [L, E]
        self._picked: list[NDArray[np.int64] | None] = [None] * layers  # of each a ring [T, K]
        self._tokens = [0] * layers  # seen since the beginning

    def saw(self, layer: int, ids: NDArray[np.integer]) -> None:
        """Tokens of a layer picked these experts: ids [n, K], those of a row differ."""
        window, values = self._window, self.values[layer]
        ids = ids[-window:]
        n = len(ids)
        if n == 0:
            return
        ring = self._picked[layer]
        if ring is None:
            ring = self._picked[layer] = np.zeros((window, ids.shape[1]), np.int64)
        seen = self._tokens[layer]
        held = min(seen, window)
        if n == window:
            values[:] = 0.0
        else:
            values *= self._powers[n]
            leaving = held + n - window
            if leaving > 0:
                places = np.arange(seen - held, seen - held + leaving) % window
                ages = np.arange(held + n - 1, held + n - 1 - leaving, -1)
                np.subtract.at(values, ring[places], self._powers[ages, None])
                np.maximum(values, 0.0, out=values)  # what rounding leaves of an expert that is out of the window
        np.add.at(values, ids, self._powers[n - 1 :: -1, None] if n > 1 else 1.0)
        ring[np.arange(seen, seen + n) % window] = ids
        self._tokens[layer] = seen + n


class ImportanceEviction(EvictionPolicy):
    """Evicts the expert of least importance (ActiveEvict, section 3.2, equations 9 and 13).

    Symbols: u(e) `Hotness.values`; h(e) = u(e) / sum of u over the residents C_l of its layer; p-hat(e), the predicted
    probability that was told last for its layer (`expect`); s(e) = alpha * h(e) + (1 - alpha) * p-hat(e), `scores`.
    Where the residents of a layer were not used within the window, h is 0. The paper gives each layer slots of its own.
    Where one pool serves all layers their experts compare by s, which has the same scale in each: both parts sum to
    1 in a layer at most, so a layer that holds more gives way sooner.

    State: u [L, E], p-hat [L, E], what is held, and when each was used last. Ties: least recently used first, then by
    key. O(1) per key admitted, used or removed; the order is made anew, O(L*E + n log n) for n held, by the first
    `victims` after a change.

    Args:
        layers, experts: L and E. alpha: 1 is use alone, 0 is prediction alone. gamma, window: see `Hotness`.
    """

    def __init__(self, layers: int, experts: int, alpha: float = 0.5, gamma: float = 0.97, window: int = 128) -> None:
        if not 0 <= alpha <= 1:
            raise ValueError(f"alpha is {alpha}, not in [0, 1]")
        self._alpha = alpha
        self.hotness = Hotness(layers, experts, gamma, window)
        self._predicted: Floats = np.zeros((layers, experts))
        self._held = np.zeros(layers * experts, bool)
        self._stamp = np.zeros(layers * experts, np.int64)
        self._clock = 0
        self._order: list[int] | None = None  # of what is held, first to go first; None: to be made

    def saw(self, layer: int, ids: NDArray[np.integer]) -> None:
        """Tokens of a layer picked these experts: ids [n, K]."""
        self.hotness.saw(layer, ids)
        self._order = None

    def expect(self, layer: int, probabilities: NDArray[np.floating]) -> None:
        """p-hat of a layer's experts [E], for its next forward."""
        self._predicted[layer] = probabilities
        self._order = None

    def scores(self) -> Floats:
        """s of every expert, by key [L*E]; of those that are not held only the second part."""
        return self._scores(self._held)

    def admitted(self, key: int) -> None:
        self._held[key] = True
        self._touch(key)

    def used(self, keys: Iterable[int]) -> None:
        for key in keys:
            self._touch(key)

    def removed(self, key: int) -> None:
        if not self._held[key]:
            raise KeyError(key)
        self._held[key] = False
        self._order = None

    def victims(self, count: int, evictable: Callable[[int], bool]) -> list[int]:
        if count <= 0:  # as asked wherever slots are free: no reason to make the order
            return []
        if self._order is None:
            keys = self._held.nonzero()[0]
            self._order = keys[np.lexsort((self._stamp[keys], self.scores()[keys]))].tolist()
        return first_evictable(self._order, count, evictable)

    def ranked(self, keys: Sequence[int]) -> list[int]:
        """Most worth keeping first: by falling s as if these were the residents, then most recently used first."""
        asked = np.zeros_like(self._held)
        asked[list(keys)] = True
        scores = self._scores(asked)
        return sorted(keys, key=lambda key: (-scores[key], -self._stamp[key]))

    def _scores(self, residents: NDArray[np.bool_]) -> Floats:
        used = self.hotness.values * residents.reshape(self._predicted.shape)
        sums = used.sum(axis=1, keepdims=True)
        hot = np.divide(used, sums, out=np.zeros_like(used), where=sums > 0)
        scores: Floats = (self._alpha * hot + (1 - self._alpha) * self._predicted).ravel()
        return scores

    def _touch(self, key: int) -> None:
        self._clock += 1
        self._stamp[key] = self._clock
        self._order = None
