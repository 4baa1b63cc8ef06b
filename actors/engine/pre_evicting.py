"""Runs a pre-eviction policy: frees slots before the next layer's router has run, for its demand loads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ..core import _core
from ..policies.activeevict import ImportanceEviction, ImportanceState, PreEviction
from .cache.cache import ExpertCache
from .host_view import Asked

if TYPE_CHECKING:
    from .hooks import Native

Score = Callable[[int, Any], NDArray[np.floating] | None]


class PreEvicting:
    """ActiveEvict's pre-eviction on one cache (`policies.activeevict`).

    Once a layer's own loads are queued, the next layer's router runs on this layer's input; the eviction policy gets
    the prediction and names residents until the release target is free. Nothing is copied. Experts of the present layer
    are pinned and stay. At most as many slots are freed as the next layer has absent experts. The paper does not cover
    the first layer; its prediction here is its own distribution in the forward before, of each sequence's last row.

    Args:
        decide: gives the release target.
        layers, experts: L and E.
        score: (layer, view) -> logits [T, E] of that layer's router on the viewed layer's input; None: the router
            cannot be asked, and nothing is freed.
        routers: whose scores these are, for native code; empty: unknown.
    """

    def __init__(
        self, decide: PreEviction, cache: ExpertCache, layers: int, experts: int, score: Score,
        routers: Sequence[Any] = (),
    ) -> None:  # fmt: skip
        self._routers, self._cache, self._layers, self._score = routers, cache, layers, score
        order = cache.eviction
        # another order goes by no prediction: it is kept here alone
        state = order.state if isinstance(order, ImportanceEviction) else ImportanceState(
            layers, experts, alpha=0.0, gamma=1.0, window=1, top_k=decide.top_k
        )  # fmt: skip
        self._native = _core.PreEviction(state.native, decide.threshold, decide.most)

    def begin_forward(self, last_rows: Sequence[int]) -> None:
        """A forward begins; last_rows: the last row of each sequence."""
        self._native.begin_forward(list(last_rows))

    def scored_at(self, index: int) -> list[int]:
        """The layers whose scores `layer` reads."""
        following = [index + 1] if index + 1 < self._layers else []
        return [0, *following] if index == 0 else following

    def layer(self, index: int, view: Any) -> None:
        """A layer's routing is known and its loads are queued: free slots."""
        own, following = None, None
        for later in self.scored_at(index):
            found = self._score(later, view)
            logits = None if found is None else np.ascontiguousarray(found, np.float32)
            if later == index:
                own = logits
            else:
                following = logits
        core, ids = self._cache.core, np.ascontiguousarray(view.picked, np.int64)
        core.vacate(self._native.slots(index, ids, own, following, core.states), (index + 1) % self._layers)

    def native(self, index: int, to: Native) -> Callable[[], object] | None:
        """As of `hooks.AheadHook`; None: the routers are unknown."""
        if not self._routers:
            return None
        own, *later = [Asked(router, softmax=False) for router in self._routers]
        first, asked = None if index else own, later[index] if index + 1 < self._layers else None
        if not all(one is None or to.finds(one) for one in (first, asked)):
            return None
        return lambda: to.core.release_slots(to.router(first), to.router(asked), self._native)


def last_rows(spans: Sequence[Any]) -> list[int]:
    """The last row of each sequence."""
    return [span.stop - 1 for span in spans]
