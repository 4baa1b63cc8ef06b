"""Pre-eviction: how many slots the next layer is going to need free (ActiveEvict, sections 3.2 and 3.3).

Who gives its slot up is the eviction policy's affair: the paper's is `eviction.ImportanceEviction`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .prefetch.next_gate import predicted_experts

Floats = NDArray[np.float64]


def predicted_distribution(logits: NDArray[np.floating]) -> Floats:
    """p-hat of the next layer's experts [E] (equations 10 to 12): the mean over tokens of softmax(r-hat).

    Args:
        logits: r-hat, the next layer's router on this layer's hidden states [T, E], T at least 1.
    """
    shifted = logits.astype(np.float64)
    shifted -= shifted.max(axis=1, keepdims=True)
    np.exp(shifted, out=shifted)
    shifted /= shifted.sum(axis=1, keepdims=True)
    mean: Floats = shifted.mean(axis=0)
    return mean


@dataclass(frozen=True, slots=True)
class ReleaseTarget:
    """Slots that should be free before the next layer: Delta = gap + redundancy (equation 17).

    width: k, experts that the layer is expected to run. gap: k - H-hat(k), those of them without a slot (14).
    redundancy: r_k, further ones in case the prediction errs at its boundary (16).
    """

    width: int
    gap: int
    redundancy: int

    @property
    def slots(self) -> int:
        return self.gap + self.redundancy


@dataclass(frozen=True, slots=True)
class PreEviction:
    """The release target of ActiveEvict (section 3.3). State: none. O(T*E + E log E) per layer.

    Symbols: p_(j) the j-th greatest of p-hat, ties by number; k the width; delta_j = p_(j) - p_(j+1) (15);
    tau `threshold`; r_max `most`. r_k counts the flat places among delta_k .. delta_(k+r_max-1), those under tau;
    beyond the last expert there is none. The paper's k is the routing width of one token. The tokens of a batch
    share the slots, so k is then the number of different experts that their predictions pick.

    Args:
        top_k: of the router. threshold: in probability, 0: no redundancy. most: slots of redundancy at most.
    """

    top_k: int
    threshold: float = 0.02
    most: int = 2

    def target(self, logits: NDArray[np.floating], predicted: Floats, held: NDArray[np.bool_]) -> ReleaseTarget:
        """What should be free before a layer.

        Args:
            logits: as for `predicted_distribution` [T, E]. predicted: what that gave [E].
            held: experts of the layer that have a slot [E].
        """
        width = self.top_k if len(logits) == 1 else len(predicted_experts(logits, self.top_k))
        return self.target_for(width, predicted, held)

    def target_for(self, width: int, predicted: Floats, held: NDArray[np.bool_]) -> ReleaseTarget:
        """The same for a known width k, at most E."""
        order = np.argsort(-predicted, kind="stable")
        gap = width - int(np.count_nonzero(held[order[:width]]))
        boundary = predicted[order[width - 1 : width + self.most]]  # p_(k) .. p_(k + r_max)
        redundancy = int(np.count_nonzero(boundary[:-1] - boundary[1:] < self.threshold))
        return ReleaseTarget(width, gap, redundancy)
