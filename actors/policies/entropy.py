"""Token activating entropy: how evenly a token's routing is spread over its experts (BuddyMoE, eq. 1).

    TAE(x) = - sum over i in S(x) of p~(i|x) log p~(i|x), over log k      in [0, 1]

p~ is the routing probability renormalised over the picked experts. At temperature T it is softmax(z / T) over them,
which is p~^(1/T) renormalised: so it needs no logits. Where k is 1, TAE is 0: the token wants that expert.

tau is calibrated as a percentile of each layer's distribution, which a histogram of `BINS` keeps for every temperature
of `TEMPERATURES`.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

TEMPERATURES = (0.8, 0.9, 1.0, 1.1, 1.2)  # the paper's range
BINS = 1024

Floats = NDArray[np.float64]


def activating_entropy(shares: NDArray[Any], temperature: float = 1.0) -> Floats:
    """TAE [T] of shares p~ [T, K] that sum to one."""
    top = shares.shape[1]
    if top == 1:
        return np.zeros(len(shares))
    held = np.asarray(shares, np.float64)
    if temperature != 1.0:
        held = (held / held.max(axis=1, keepdims=True)) ** (1 / temperature)
        held /= held.sum(axis=1, keepdims=True)
    logs = np.log(held, out=np.zeros_like(held), where=held > 0)
    found: Floats = np.clip(-(held * logs).sum(axis=1) / math.log(top), 0.0, 1.0)
    return found


def entropy_counts(shares: NDArray[Any], token_weights: Floats) -> Floats:
    """Histograms [temperatures, BINS] of the tokens' TAE; token_weights [T], how much each token counts."""
    found = np.empty((len(TEMPERATURES), BINS))
    for place, temperature in enumerate(TEMPERATURES):
        bins = np.minimum((activating_entropy(shares, temperature) * BINS).astype(np.int64), BINS - 1)
        found[place] = np.bincount(bins, token_weights, BINS)
    return found


def entropy_threshold(counts: Floats, percentile: float, temperature: float = 1.0) -> float:
    """tau of a layer: the least edge of a bin under which `percentile` % of the tokens are, 1 / BINS at the finest.

    Between two recorded temperatures it is interpolated.

    Args:
        counts: [temperatures, BINS], as `entropy_counts` gives them; zero of all where nothing was counted.

    Raises:
        ValueError: percentile or temperature is out of range.
    """
    if not 0 <= percentile <= 100:
        raise ValueError(f"percentile is {percentile}; give a number from 0 to 100")
    if not TEMPERATURES[0] <= temperature <= TEMPERATURES[-1]:
        raise ValueError(f"temperature is {temperature}; give one from {TEMPERATURES[0]} to {TEMPERATURES[-1]}")
    below = np.cumsum(counts, axis=1)
    wanted = percentile / 100 * below[:, -1:]
    edges = np.where(wanted[:, 0] > 0, ((below >= wanted - 1e-9).argmax(axis=1) + 1) / BINS, 0.0)
    return float(np.interp(temperature, TEMPERATURES, edges))
