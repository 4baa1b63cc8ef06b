"""What a planner of misses hears of the times of the layers that it has planned.

Costs are corrected by what was measured apart: near-data work by the workers' kernels, a message by the time from the
plan to its answer without those where the layer waited for it, other GPUs by the time to their answers, an expert here
by the rest of the layer, which is at most that, the dense part by the time between two layers. The whole time of a
layer says what the parts do not (`Auto.took`). All of decodes, but the whole time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from ...policies.auto import LayerPlan, Part

if TYPE_CHECKING:
    from ..cache.cache import ExpertCache
    from .auto import Planner

_WAITED = 0.1  # share of an answer's time from which a wait for it says that the layer ended with it

# of a layer: answers of NDP workers, seconds of their kernels, and of waits for them, for copies and for other GPUs
Counted = tuple[int, float, float, float, float]


@dataclass(slots=True)
class PlannedLayer:
    """A layer between its plan and its end.

    needed: all its experts; those of other GPUs run there or near data. began_s: its plan. choice: of the planner, if
    there was one. here: experts that run on this GPU. near: experts that are computed near data. loaded: keys.
    announced: the sequences of its rows are known. learns: they all decode. before: counted until it began.
    """

    layer: int
    needed: NDArray[np.int32]
    began_s: float
    choice: LayerPlan | None
    here: int
    near: int
    loaded: Sequence[int]
    announced: bool
    learns: bool
    before: Counted


class LayerTimes:
    """Tells a planner of them.

    Attributes:
        ended_s: the last planned layer's end; 0: it is of an earlier forward's kind.
    """

    def __init__(self, cache: ExpertCache, planner: Planner) -> None:
        self._cache, self._planner, self.ended_s = cache, planner, 0.0

    def begun(self, now_s: float) -> None:
        """A decode's layer begins, and is not the first."""
        if 0.0 < self.ended_s < now_s:
            self._planner.saw(Part.DENSE, self._planner.costs.dense_s, now_s - self.ended_s)

    def counted(self, layer: int) -> Counted:
        """So far."""
        stats, blocked_s = self._cache.stats.layers[layer], self._cache.core.counts(layer).blocked_io_s
        return stats.ndp_calls, stats.ndp_measured_s, stats.ndp_wait_s, blocked_s, stats.shard_wait_s

    def ended(self, found: PlannedLayer, now_s: float, copies: bool) -> None:
        """A layer has ended. copies: some are under way, for this layer or others."""
        choice, self.ended_s = found.choice, now_s
        if choice is not None and found.learns:
            self._correct(found, choice, now_s - found.began_s, copies or bool(found.loaded))
        if choice is not None and found.announced:
            self._planner.took(now_s - found.began_s)

    def _correct(self, found: PlannedLayer, choice: LayerPlan, seen_s: float, copies: bool) -> None:
        """Correct the costs by a layer of a decode that took so long."""
        planner, before = self._planner, found.before
        calls, kernels_s, near_wait_s, copy_wait_s, owner_wait_s = (
            now - then for now, then in zip(self.counted(found.layer), before, strict=True)
        )
        owners_s, costs = seen_s - near_wait_s, planner.costs  # NDP workers are waited for behind other GPUs
        if choice.owner_s > 0.0 and (owner_wait_s > _WAITED * choice.owner_s or owners_s < choice.owner_s):
            planner.saw(Part.OWNER, choice.owner_s, owners_s)
        if found.near and calls > 0 and kernels_s >= 0.0:
            kernel_s = kernels_s / calls
            planner.saw(Part.NEAR_MIXED if copies else Part.NEAR, choice.near_s, kernel_s)
            message_s = seen_s - kernel_s
            # taking an answer that has come is a short wait, too: then the layer's time is that of its experts here;
            # what copies cost beside near data is their source's (`took`)
            waited = near_wait_s > _WAITED * message_s and not copies
            if waited or message_s < costs.message_s:
                planner.saw(Part.MESSAGE, costs.message_s, message_s)
        elif not found.near and found.here:
            here_s = (seen_s - copy_wait_s) / found.here
            if here_s < costs.gpu_s:
                planner.saw(Part.GPU, costs.gpu_s, here_s)
