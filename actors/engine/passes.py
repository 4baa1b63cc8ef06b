"""What the layers of one cache share in a forward, and the passes that native code has noted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..core import _core
from .placer import Placer


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


class Shared:
    """What the layers of one cache share.

    Args:
        last: the last layer; -1: nobody asks for a forward's end.
        passes: of the core; None: of layers whose kernels are not the simulator's.

    Attributes:
        planned: whether the placement plans the present forward.
        inputs, out: of the present pass, or of several that run together.
        into: where native launches leave the sums of the present pass; None: in a new tensor.
        on_passed: as `hooks.Hooks.passed`.
        at_end: called when a forward's last layer has run.
    """

    def __init__(self, last: int = -1, passes: _core.Passes | None = None) -> None:
        self.last, self.planned = last, _core.Planned()
        # what the layers' executor takes: a `_core.CpuLayers`, of recorded layers their run's
        self.passes: Any = _core.CpuLayers() if passes is None else passes
        self.inputs: Sequence[Any] = ()
        self.out: Any = None
        self.into: Any = None
        self.on_passed: OnPassed | None = None
        self.at_end: list[Callable[[], object]] = []

    def begin(self, inputs: Sequence[Any], placer: Placer) -> None:
        """A pass of these inputs begins, or several."""
        self.inputs, self.planned.now = inputs, not placer.local

    def report(self) -> None:
        """Give the passes so far to the watcher."""
        if self.on_passed is not None:
            for found in self.passes.take():
                self.on_passed(Passed._make(found))

    def end_forward(self) -> None:
        """The model's last layer has run."""
        self.report()
        for end in self.at_end:
            end()
