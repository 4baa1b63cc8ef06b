"""Runs a pre-eviction policy: frees slots before the next layer's router has run, for its demand loads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ..core import _core
from ..policies.activeevict import ImportanceEviction, PreEviction
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
        self._routers = routers
        self._decide, self._cache, self._layers, self._experts, self._score = decide, cache, layers, experts, score
        self._importance = cache.eviction.state if isinstance(cache.eviction, ImportanceEviction) else None
        self._first = _core.FirstScores()  # logits of the first layer, one row a sequence

    def begin_forward(self, last_rows: Sequence[int]) -> None:
        """A forward begins; last_rows: the last row of each sequence."""
        self._first.last_rows = list(last_rows)

    def scored_at(self, index: int) -> list[int]:
        """The layers whose scores `layer` reads."""
        following = [index + 1] if index + 1 < self._layers else []
        return [0, *following] if index == 0 else following

    def layer(self, index: int, view: Any) -> None:
        """A layer's routing is known and its loads are queued: free slots."""
        if index == 0:
            own = self._score(0, view)
            self._first.keep(np.empty((0, self._experts)) if own is None else np.asarray(own, np.float64))
        following = index + 1 if index + 1 < self._layers else 0
        logits = self._score(following, view) if following else self._first.scores
        if self._importance is None:
            if logits is not None:
                self._release(following, logits)
        elif logits is None:
            self._importance.saw(index, view.picked)
        else:
            cache, decide, residency = self._cache, self._decide, self._cache.residency
            victims = self._importance.release(
                index, view.picked, following, logits, residency.states, residency.evictable_now, residency.free_slots,
                decide.threshold, decide.most,
            )  # fmt: skip
            if victims:
                cache.core.leave(victims, following)

    def native(self, index: int, to: Native) -> Callable[[], object] | None:
        """As of `hooks.AheadHook`; None: the eviction is not native code's."""
        state = getattr(self._importance, "handle", None)  # of the state in native code
        if state is None or not self._routers:
            return None
        own, *later = [Asked(router, softmax=False) for router in self._routers]
        first, asked = None if index else own, later[index] if index + 1 < self._layers else None
        if not all(one is None or to.finds(one) for one in (first, asked)):
            return None
        rule, release = self._decide, to.core.release_slots
        return lambda: release(to.router(first), to.router(asked), rule.threshold, rule.most, state, self._first)

    def _release(self, layer: int, logits: NDArray[np.floating]) -> None:
        """Free the release target of a layer, in the order of an eviction that knows no prediction."""
        residency, first = self._cache.residency, layer * self._experts
        held = residency.occupied(first, first + self._experts)
        slots = self._decide.slots(logits, held)
        if slots > residency.free_slots:
            self._cache.core.vacate(slots, layer)


def last_rows(spans: Sequence[Any]) -> list[int]:
    """The last row of each sequence."""
    return [span.stop - 1 for span in spans]
