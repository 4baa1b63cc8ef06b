"""Confidence intervals by bootstrap over documents.

Tokens of one document are not independent draws, documents are: so whole documents are drawn with replacement, as
often as there are documents, and the percentiles of the resampled figure bound it. Every figure here is a ratio of
two sums over documents, so all resamples are one matrix product. One seed draws the same resamples for every figure
and every policy: differences between policies are paired.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]
Transform = Callable[[Array], Array]
LEVEL = 0.95


@dataclass(frozen=True)
class Estimate:
    """A figure and its 95% confidence interval."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class Ratio:
    """Sums over each document [D], and what is made of their ratio."""

    numerator: Array
    denominator: Array
    transform: Transform

    def over(self, counts: Array) -> Array:
        """The figure of each resample in counts [R, D]; not a number where a resample's denominator is zero."""
        numerator, denominator = counts @ self.numerator, counts @ self.denominator
        with np.errstate(divide="ignore", invalid="ignore"):
            return self.transform(np.where(denominator > 0, numerator / denominator, np.nan))

    @property
    def value(self) -> float:
        return float(self.over(np.ones((1, len(self.numerator))))[0])


def resample_counts(documents: int, resamples: int, seed: int) -> Array:
    """How often each resample draws each document: [resamples, documents], rows sum to `documents`."""
    rng = np.random.default_rng(seed)
    return rng.multinomial(documents, np.full(documents, 1 / documents), size=resamples).astype(np.float64)


def estimate(ratio: Ratio, counts: Array) -> Estimate:
    """The figure with the percentile interval over resamples [R, D]."""
    return _interval(ratio.value, ratio.over(counts))


def difference(ratio: Ratio, other: Ratio, counts: Array) -> Estimate:
    """`ratio` less `other`, both over the same documents, with the interval of the paired difference."""
    return _interval(ratio.value - other.value, ratio.over(counts) - other.over(counts))


def _interval(value: float, resampled: Array) -> Estimate:
    """Resamples without a figure (they drew no document that has one) are left out."""
    resampled = resampled[~np.isnan(resampled)]
    tail = (1 - LEVEL) / 2
    low, high = np.quantile(resampled, (tail, 1 - tail)) if len(resampled) else (value, value)
    return Estimate(value, float(low), float(high))
