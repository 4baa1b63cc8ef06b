"""Which experts can stand in for another (BuddyMoE, sections 3.2, 3.3), from a profile of a model's experts.

Token activating entropy, how evenly a token's routing spreads over its k experts (eq. 1):

    TAE(x) = - sum over i in S(x) of p~(i|x) log p~(i|x), over log k      in [0, 1]; 0 for k = 1

p~ is the routing probability renormalised over the picked experts. At temperature T it is softmax(z / T) over them,
which is p~^(1/T) renormalised. tau is a percentile of each layer's TAE, from a histogram of `BINS` for each of
`TEMPERATURES`.

Buddies:

    A_l(i)      tokens that pick expert i                                              `Coactivations.activations`
    M_l(i,j)    tokens that pick i and j; or the sum of min(p~(i|x), p~(j|x)) of them  `.binary`, `.weighted`
    q(j|i)      M(i,j) + epsilon over the row's sum, q(i|i) = 0              (eq. 4)   `coactivation_shares`
    t_i(alpha)  the shortest prefix, by descending q, that holds alpha       (eq. 5)   `buddy_sizes`
    B(i;alpha)  that prefix, K_max at most                                   (eq. 6)   `buddy_table`

The paper's method is co-activation; its introduction also names output similarity. q may come from either or from both
(`BuddyOptions.by`), since experts picked together need not compute alike. Ties in q: the lower number first. By
co-activation alone, an expert that no token picked has an empty list, and one never picked with another (top-1) a
uniform q.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

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
    """tau of a layer: the lowest edge of a bin below which `percentile` % of the tokens lie, interpolated over
    temperature.

    Args:
        counts: [temperatures, BINS] of `entropy_counts`; tau is 0 where nothing was counted.

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


Ranking = Literal["coactivation", "output", "blend"]
_ROUNDING = 1e-12  # of a sum of shares: alpha = 1 is reached where the rest is zero


class Coactivations:
    """A and M of one layer, counted incrementally.

    Attributes:
        activations: A [E], tokens. binary, weighted: M [E, E], symmetric, zero on the diagonal.
    """

    def __init__(self, experts: int) -> None:
        self.experts = experts
        self.activations = np.zeros(experts)
        self.binary = np.zeros((experts, experts))
        self.weighted = np.zeros((experts, experts))

    def add(self, ids: NDArray[Any], shares: NDArray[Any], token_weights: NDArray[Any] | None = None) -> None:
        """Count tokens.

        Args:
            ids: [T, K], the distinct experts that each token picks. shares: [T, K], p~(i|x), which sum to one.
            token_weights: [T], weight of each token, see `warmup_weights`; None: one.
        """
        experts, top = self.experts, ids.shape[1]
        chosen = ids.astype(np.int64)
        counts = np.ones(len(chosen)) if token_weights is None else token_weights.astype(np.float64)
        self.activations += np.bincount(chosen.ravel(), np.repeat(counts, top), experts)
        pairs = (chosen[:, :, None] * experts + chosen[:, None, :])[:, ~np.eye(top, dtype=bool)]  # [T, K (K - 1)]
        least = np.minimum(shares[:, :, None], shares[:, None, :])[:, ~np.eye(top, dtype=bool)]
        for into, amounts in ((self.binary, np.ones_like(least)), (self.weighted, least)):
            found = np.bincount(pairs.ravel(), (amounts * counts[:, None]).ravel(), experts * experts)
            into += found.reshape(experts, experts)


def renormalised(weights: NDArray[Any]) -> Floats:
    """p~ [T, K] from the routing weights of the picked experts; uniform where all are zero."""
    held = weights.astype(np.float64)
    total = held.sum(axis=1, keepdims=True)
    return np.divide(held, total, out=np.full_like(held, 1 / held.shape[1]), where=total > 0)


def warmup_weights(steps: NDArray[Any], warmup: int, weight: float) -> Floats:
    """Weight of tokens at these steps of their sequence: `weight` below step `warmup`, else one (section 3.3)."""
    return np.where(steps < warmup, weight, 1.0)


def coactivation_shares(counts: Floats, activations: Floats, epsilon: float) -> Floats:
    """q [..., E, E] of M [..., E, E] (eq. 4), after Laplace smoothing by `epsilon`; zero rows for experts never picked,
    uniform rows for experts only picked alone.
    """
    experts = counts.shape[-1]
    others = ~np.eye(experts, dtype=bool)
    smoothed = np.where(others, counts + epsilon, 0.0)
    total = smoothed.sum(axis=-1, keepdims=True)
    uniform = np.where(others, 1 / max(1, experts - 1), 0.0)
    q = np.where(total > 0, smoothed / np.where(total > 0, total, 1.0), uniform)
    seen: Floats = np.where(activations[..., None] > 0, q, 0.0)
    return seen


def output_shares(similarity: Floats) -> Floats:
    """q [..., E, E]: the positive output similarities [..., E, E] over the row's sum; q(i|i) = 0. Rows without any stay
    zero.
    """
    others = ~np.eye(similarity.shape[-1], dtype=bool)
    held = np.where(others, np.maximum(similarity, 0.0), 0.0)
    total = held.sum(axis=-1, keepdims=True)
    return np.divide(held, total, out=np.zeros_like(held), where=total > 0)


def blended_shares(coactivation: Floats, output: Floats, mix: float) -> Floats:
    """q = mix * coactivation + (1 - mix) * output, over the row's sum; zero rows without both."""
    q = mix * coactivation + (1 - mix) * output
    total = q.sum(axis=-1, keepdims=True)
    return np.divide(q, total, out=np.zeros_like(q), where=total > 0)


def buddy_sizes(ranked: Floats, alpha: float, most: int) -> NDArray[np.int64]:
    """B(i; alpha)| [E] of q sorted descending in each row [E, E] (eq. 5), at most `most`; 0 for a row of zeros."""
    reached = np.cumsum(ranked, axis=1) >= alpha - _ROUNDING
    sizes = np.where(reached.any(axis=1), reached.argmax(axis=1) + 1, ranked.shape[1])
    sizes = np.minimum(np.minimum(sizes, most), ranked.shape[1] - 1)
    found: NDArray[np.int64] = np.where(ranked[:, 0] > 0, sizes, 0).astype(np.int64)
    return found


@dataclass(frozen=True)
class BuddyOptions:
    """How buddies are ranked, and how many there are.

    Attributes:
        by: the source of q. mix: co-activation's part of a blend.
        alpha: the CFT, (0, 1], of all layers or of each (`alpha_schedule`). max_buddies: K_max.
        weighted: M weighted by probability, not binary. epsilon: of Laplace smoothing, in tokens.

    Raises:
        ValueError: a value is out of range.
    """

    by: Ranking = "coactivation"
    alpha: float | tuple[float, ...] = 0.95
    max_buddies: int = 16
    weighted: bool = False
    epsilon: float = 1.0
    mix: float = 0.5

    def __post_init__(self) -> None:
        alphas = self.alpha if isinstance(self.alpha, tuple) else (self.alpha,)
        if self.by not in get_args(Ranking):
            raise ValueError(f"by is {self.by!r}; give one of {', '.join(get_args(Ranking))}")
        if not alphas or not all(0 < alpha <= 1 for alpha in alphas):
            raise ValueError(f"alpha is {self.alpha}; give numbers above 0, 1 at most")
        if self.max_buddies < 1:
            raise ValueError(f"max_buddies is {self.max_buddies}; give at least 1")
        if not (math.isfinite(self.epsilon) and self.epsilon >= 0):
            raise ValueError(f"epsilon is {self.epsilon}; give a number of at least 0")
        if not 0 <= self.mix <= 1:
            raise ValueError(f"mix is {self.mix}; give a number from 0 to 1")

    def alphas(self, layers: int) -> tuple[float, ...]:
        """alpha of each layer. Raises ValueError: it is given for another number of layers."""
        if not isinstance(self.alpha, tuple):
            return (self.alpha,) * layers
        if len(self.alpha) != layers:
            raise ValueError(f"{len(self.alpha)} alphas for {layers} layers; give one for each, or a single one")
        return self.alpha


def alpha_schedule(first: float, last: float, layers: int) -> tuple[float, ...]:
    """The monotone schedule: alpha from the first layer to the last in equal steps (section 3.3)."""
    return tuple(float(alpha) for alpha in np.linspace(first, last, layers))


@dataclass(frozen=True, eq=False)
class BuddyTable:
    """The buddies of every expert, best first: Algorithm 1's profile B, and q for the priority score.

    Attributes:
        ids: int32 [L, E, R], padded with the expert itself, which is absent whenever its row is searched.
        q: float32 [L, E, R], padded with zeros.
        sizes: int32 [L, E], buddies of each expert.
    """

    ids: NDArray[np.int32]
    q: NDArray[np.float32]
    sizes: NDArray[np.int32]


def buddy_table(q: Floats, alphas: Sequence[float], most: int) -> BuddyTable:
    """The lists of all layers (eq. 6).

    Args:
        q: [L, E, E]. alphas: of each layer. most: K_max.
    """
    layers, experts, _ = q.shape
    width = max(1, min(most, experts - 1))
    order = np.argsort(-q, axis=2, kind="stable")
    ranked = np.take_along_axis(q, order, axis=2)
    sizes = np.stack([buddy_sizes(ranked[layer], alphas[layer], most) for layer in range(layers)])
    within = np.arange(width) < sizes[:, :, None]  # [L, E, R]
    itself = np.broadcast_to(np.arange(experts)[None, :, None], within.shape)
    return BuddyTable(
        ids=np.where(within, order[:, :, :width], itself).astype(np.int32),
        q=np.where(within, ranked[:, :, :width], 0.0).astype(np.float32),
        sizes=sizes.astype(np.int32),
    )


class OutputsMissing(ValueError):
    """Buddies by output similarity from a profile without outputs: it was made from a trace."""


@dataclass(frozen=True, eq=False)
class Outputs:
    """Inner products of expert outputs on the same inputs: row i sums over the tokens x that pick i, weighted by the
    squared routing weight w_i(x), the effect of an error in f_i on the layer's output.

    dots:  sum of w_i^2 <f_i(x), f_j(x)>    [L, E, E]
    norms: sum of w_i^2 |f_j(x)|^2          [L, E, E]
    """

    dots: Floats
    norms: Floats

    def cosine(self) -> Floats:
        """Similarity of j's outputs to i's on i's inputs [L, E, E], in [-1, 1]; zero without inputs."""
        own = np.diagonal(self.norms, axis1=1, axis2=2)[:, :, None]
        length = np.sqrt(own * self.norms)
        found: Floats = np.divide(self.dots, length, out=np.zeros_like(self.dots), where=length > 0)
        return np.clip(found, -1.0, 1.0)

    def error(self) -> Floats:
        """f_i - f_j|^2 over |f_i|^2 on i's inputs [L, E, E]: below 1, j is better than dropping i; 1 without inputs."""
        own = np.diagonal(self.norms, axis1=1, axis2=2)[:, :, None]
        distance = np.maximum(own - 2 * self.dots + self.norms, 0.0)
        return np.divide(distance, own, out=np.ones_like(distance), where=own > 0)


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
        """q(j|i) [L, E, E] by the given ranking. Raises OutputsMissing: it needs outputs, and there are none."""
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
            OutputsMissing: as `shares`. ValueError: alpha is given for another number of layers.
        """
        alphas = options.alphas(self.layers)
        return buddy_table(self.shares(options), alphas, options.max_buddies)

    def taus(self, percentile: float, temperature: float = 1.0) -> tuple[float, ...]:
        """tau of each layer: the percentile of its TAE. Raises ValueError: an argument is out of range."""
        return tuple(entropy_threshold(counts, percentile, temperature) for counts in self.entropies)


class RoutingCounts:
    """A, M and the histograms of TAE of one layer, counted incrementally.

    Attributes:
        pairs: A and M. entropies: [temperatures, BINS].
    """

    def __init__(self, experts: int) -> None:
        self.pairs = Coactivations(experts)
        self.entropies = entropy_counts(np.full((0, 2), 0.5), np.zeros(0))

    def add(self, ids: NDArray[np.integer], shares: Floats, token_weights: Floats) -> None:
        """ids, shares p~ [T, K]; token_weights [T], weight of each token."""
        self.pairs.add(ids, shares, token_weights)
        self.entropies += entropy_counts(shares, token_weights)
