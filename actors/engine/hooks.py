"""What a policy adds to each layer's pass: hooks of its rule, its watchers, and what looks ahead."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from ..core import _core

if TYPE_CHECKING:
    from .host_view import Asked

NO_KEYS: frozenset[int] = frozenset()


class View(Protocol):
    """One layer of one forward, as the policies see it: `host_view.LayerView`, or a recorded layer.

    picked: experts as the model picked them [T, K]. ids, weights: as they will run [T, K']. tokens: T.
    """

    picked: NDArray[Any]
    ids: NDArray[Any]
    tokens: int

    @property
    def weights(self) -> NDArray[np.float32]: ...

    def reroute(self, ids: NDArray[Any], weights: NDArray[np.floating], dropped: bool) -> None:
        """From now on the layer runs these [T, K]. dropped: pairs of weight 0 do not run."""
        ...

    def routing(self, layer: int, experts: int) -> _core.Routing:
        """The pairs that run, by expert. experts: of a layer."""
        ...


class Native(Protocol):
    """A layer in native code, for hooks whose rule native code has.

    on_host: its inputs are in host memory, so that each of Python's parts may read them for itself.
    """

    on_host: bool

    @property
    def core(self) -> _core.Layer:
        """Takes the rule."""
        ...

    def finds(self, asked: Asked) -> bool:
        """Whether native code finds a router's scores."""
        ...

    def router(self, asked: Asked | None) -> int:
        """The number of a router in native code; -1: of none."""
        ...


class RerouteHook(Protocol):
    def layer(self, index: int, view: Any) -> frozenset[int]:
        """May change the view's routing; returns the keys of experts that run on low-bit replicas."""
        ...

    def native(self, index: int, to: Native) -> Callable[[], object] | None:
        """What gives a layer of native kernels this rule; None: native code does not have it."""
        ...


class Watcher(Protocol):
    """Is told of each pass in Python."""

    def routed(self, layer: int, routing: _core.Routing) -> None:
        """A layer's final routing is known."""
        ...

    def ran(self, layer: int) -> None:
        """A layer's experts have run."""
        ...


class AheadHook(Protocol):
    def native(self, index: int, to: Native) -> Callable[[], object] | None:
        """As of `RerouteHook`."""
        ...

    def layer(self, index: int, view: Any) -> None:
        """The layer's demand loads are queued: prefetch for later layers, or free slots for them."""
        ...


class Passed(NamedTuple):
    """Passes of n layers, one behind the other, that native code has run.

    layer: the first. tokens: of each. counts: rows of each expert [n, E]. scores: predicted for the next layer's
    experts, the highest of any row [n, E], NaN where there are none; None: there are none at all. began_s, ended_s: of
    the link's clock [n]; waited_s: for copies, in between [n].
    """

    layer: int
    tokens: int
    counts: NDArray[np.int64]
    scores: NDArray[np.float64] | None
    began_s: list[float]
    ended_s: list[float]
    waited_s: list[float]


OnPassed = Callable[[Passed], object]


@dataclass(frozen=True)
class Hooks:
    """A policy's additions to each layer's step.

    passed: called with the layers that have run, once a forward and before what looks ahead in Python; None: nobody is.
    """

    reroute: Sequence[RerouteHook] = ()
    watch: Sequence[Watcher] = ()
    ahead: Sequence[AheadHook] = ()
    passed: OnPassed | None = None
