"""How many of its experts each token really uses: adaptive gating."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from .routing import Ids, Rerouted, RerouteView, Rerouting, Weights, drop_pairs, drop_places


class AdaptiveGating(Rerouting):
    """Sensitivity-based adaptive gating (AdapMoE, arXiv 2408.10284; its public code where the text leaves a choice).

    The original, for top-2: with routing weights a >= 1 - a, running only the first expert changes the layer's output
    by (1 - a) * (E_1(x) - E_2(x)), and the loss, to second order, by (1 - a)^2 * s_l. s_l is the layer's sensitivity,
    from the diagonal of the Fisher information. The second expert is dropped where (1 - a)^2 * s_l < threshold.

    Here, for any top-k: a token's experts are dropped from the least weight upwards while d^2 * s_l < threshold, d the
    sum of the weights dropped so far; the last one always stays. That is the same rule at k = 2, and the same estimate
    at any k: where the kept weights are scaled to the old sum, the output changes by d times (mean of the kept outputs
    - mean of the dropped ones). Where the model does not normalise its weights they stay as they are, and the change
    is d times the mean of the dropped ones.

    State: none. Threshold 0 drops nothing; what a threshold drops, a greater one drops too. Every row is treated alike,
    those of prompts as well (the original's code leaves prompts alone). Cost: O(T K log K).

    Args:
        sensitivity: s_l of each layer, in nats per squared dropped weight (`cluster.jobs.prepare.sensitivity`).
        threshold: the increase of a token's loss that a layer may cost by this estimate, in nats.
        renormalise: whether the model normalises the weights of the experts that it picks.

    Raises:
        ValueError: a negative threshold or sensitivity.
    """

    name: ClassVar[str] = "adaptive"
    needs_view: ClassVar[bool] = False

    def __init__(self, sensitivity: Sequence[float], threshold: float, renormalise: bool = True) -> None:
        if threshold < 0 or min(sensitivity, default=0.0) < 0:
            raise ValueError("threshold and sensitivity of adaptive gating are not negative")
        self._renormalise = renormalise
        self._most = [np.sqrt(threshold / s) if s > 0 else (np.inf if threshold else 0.0) for s in sensitivity]

    def reroute(
        self,
        layer: int,
        ids: Ids,
        weights: Weights,
        probabilities: NDArray[np.floating] | None,
        view: RerouteView,
    ) -> Rerouted:
        most = self._most[layer]
        if len(weights) == 1:
            gone = self._one(weights[0].tolist(), most)
            return drop_places(ids, weights, gone, self._renormalise) if gone else Rerouted(ids, weights)
        if not weights.min(initial=np.inf) < most:
            return Rerouted(ids, weights)
        order = np.argsort(weights, axis=1, kind="stable")  # least first; of equals the one picked first goes first
        sums = np.cumsum(np.take_along_axis(weights, order, axis=1), axis=1, dtype=np.float64)
        goes = sums < most
        goes[:, -1] = False
        dropped = np.zeros_like(goes)
        np.put_along_axis(dropped, order, goes, axis=1)
        return drop_pairs(ids, weights, dropped, self._renormalise)

    @staticmethod
    def _one(weights: list[float], most: float) -> list[int]:
        """The places of a single token that go."""
        order = sorted(range(len(weights)), key=weights.__getitem__)
        gone, total = list[int](), 0.0
        for place in order[:-1]:
            total += weights[place]
            if not total < most:
                break
            gone.append(place)
        return gone
