"""Where a layer's experts run: what placements answer, each forward and each layer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ..core import _core
from ..policies.plan import Where
from .cache.cache import ExpertCache

if TYPE_CHECKING:
    from ..policies.routing import SequenceRows
    from ..store.learned import Uses


class Placer:
    """Decides where a layer's experts run; this class: all on this device.

    Attributes:
        local: every expert of the present forward runs here and is loaded on a miss, so `where` need not be asked.
        keep: residents that are evicted last.
        hot_per_layer: experts of each layer in the hot set; None: no fixed number.
        native: decides in place of `where`; None: `where` does.
    """

    local = True
    hot_per_layer: int | None = None
    keep: frozenset[int] = frozenset()
    native: _core.Placement | None = None

    def __init__(self, cache: ExpertCache) -> None:
        self._cache = cache

    def preload(self) -> None:
        """Load experts before the first request. Raises RuntimeFailure: a copy or a shard failed."""
        return None

    def begin_with(self, uses: Uses) -> bool:
        """Earlier runs used experts so often. Whether free slots may be filled by that: a placement with a hot set of
        its own fills them itself.
        """
        return True

    def begin_serving(self) -> None:
        """The first requests have run, by which the start tried itself, and the cache is empty again."""
        return None

    def begin_forward(self, sequences: Sequence[SequenceRows]) -> None:
        """The next forward carries these rows."""
        return None

    def end_sequence(self, name: str) -> None:
        """A sequence is over; from any thread."""
        return None

    def scored_at(self, layer: int) -> Sequence[int]:
        """The layers whose routers' scores on this layer's input it reads."""
        return ()

    def show(self, layer: int, view: Any) -> None:
        """A layer's routing is known, and `native` decides next: read the routers' scores."""
        return None

    def resized(self) -> None:
        """The cache has another number of slots."""
        return None

    def displaced(self) -> None:
        """Experts of a lost peer were loaded here and may have displaced others."""
        return None

    def where(self, layer: int, needed: Sequence[int], routing: _core.Routing, view: Any) -> Where:
        """Who runs a layer's experts. needed: segments of `routing.experts`. view: has the ids and weights that run."""
        return Where(needed, self.keep)
