"""What profiling found out about a model's experts, and the buddies that follow: arrays in, arrays out."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .buddies import (
    BuddyOptions,
    BuddyTable,
    Coactivations,
    blended_shares,
    buddy_table,
    coactivation_shares,
    output_shares,
)
from .entropy import entropy_counts, entropy_threshold

Floats = NDArray[np.float64]


class OutputsMissing(ValueError):
    """Buddies by output similarity are asked of a profile that has none: it was made from a trace."""


@dataclass(frozen=True, eq=False)
class Outputs:
    """Products of expert outputs on the same inputs. Row i sums over the tokens x that pick i, by the square of its
    routing weight w_i(x): what an error in f_i does to the layer's output.

    dots:  sum of w_i^2 <f_i(x), f_j(x)>    [L, E, E]
    norms: sum of w_i^2 |f_j(x)|^2          [L, E, E]
    """

    dots: Floats
    norms: Floats

    def cosine(self) -> Floats:
        """How alike j's outputs are to i's on i's inputs [L, E, E], in [-1, 1]; zero without inputs."""
        own = np.diagonal(self.norms, axis1=1, axis2=2)[:, :, None]
        length = np.sqrt(own * self.norms)
        found: Floats = np.divide(self.dots, length, out=np.zeros_like(self.dots), where=length > 0)
        return np.clip(found, -1.0, 1.0)

    def error(self) -> Floats:
        """|f_i - f_j|^2 over |f_i|^2 on i's inputs [L, E, E]: below 1, j is better than nothing; 1 without inputs."""
        own = np.diagonal(self.norms, axis1=1, axis2=2)[:, :, None]
        distance = np.maximum(own - 2 * self.dots + self.norms, 0.0)
        return np.divide(distance, own, out=np.ones_like(distance), where=own > 0)

    def scale(self) -> Floats:
        """The factor on j that leaves the least error, <f_i, f_j> / |f_j|^2, none below zero [L, E, E].

        The error that is left is 1 - cosine^2 of i's: never more than dropping i, which is the factor 0.
        """
        found: Floats = np.divide(self.dots, self.norms, out=np.zeros_like(self.dots), where=self.norms > 0)
        return np.maximum(found, 0.0)


@dataclass(frozen=True, eq=False)
class ExpertProfile:
    """Statistics of all MoE layers, float64.

    Attributes:
        activations: A [L, E]. binary, weighted: M [L, E, E].
        entropies: [L, temperatures, BINS], histograms of TAE.
        outputs: None where no inputs were seen.
    """

    activations: Floats
    binary: Floats
    weighted: Floats
    entropies: Floats
    outputs: Outputs | None

    @property
    def layers(self) -> int:
        return len(self.activations)

    @property
    def experts(self) -> int:
        return self.activations.shape[1]

    def shares(self, options: BuddyOptions) -> Floats:
        """q(j|i) [L, E, E] by the ranking that is asked for.

        Raises:
            OutputsMissing: outputs are asked for, and there are none.
        """
        if options.by != "output":
            counts = self.weighted if options.weighted else self.binary
            coactivation = coactivation_shares(counts, self.activations, options.epsilon)
            if options.by == "coactivation":
                return coactivation
        if self.outputs is None:
            raise OutputsMissing(f"a ranking by {options.by} needs output similarity, and the profile has none")
        output = output_shares(self.outputs.cosine())
        return output if options.by == "output" else blended_shares(coactivation, output, options.mix)

    def buddies(self, options: BuddyOptions) -> BuddyTable:
        """The buddy lists.

        Raises:
            OutputsMissing: as `shares`. ValueError: alpha is for another number of layers.
        """
        alphas = options.alphas(self.layers)
        return buddy_table(self.shares(options), alphas, options.max_buddies)

    def taus(self, percentile: float, temperature: float = 1.0) -> tuple[float, ...]:
        """tau of each layer: the percentile of its TAE.

        Raises:
            ValueError: percentile or temperature is out of range.
        """
        return tuple(entropy_threshold(counts, percentile, temperature) for counts in self.entropies)


class RoutingCounts:
    """Routing of one layer as it comes: A, M and the histograms of TAE.

    Attributes:
        pairs: A and M. entropies: [temperatures, BINS].
    """

    def __init__(self, experts: int) -> None:
        self.pairs = Coactivations(experts)
        self.entropies = entropy_counts(np.full((0, 2), 0.5), np.zeros(0))

    def add(self, ids: NDArray[np.integer], shares: Floats, token_weights: Floats) -> None:
        """ids, shares p~ [T, K]; token_weights [T], how much each token counts."""
        self.pairs.add(ids, shares, token_weights)
        self.entropies += entropy_counts(shares, token_weights)
