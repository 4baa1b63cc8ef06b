"""What of a recorded routing matters to an expert cache, and traces of other shapes that have as much of it.

    recorded routing of a small model -> Locality -> Stickiness (fitted) -> routing for a model of any shape

The weights of the measured models are random, so their routers have nothing to say: their choices are replaced by a
trace. What it keeps of the recorded one: how often experts are used (the curve of shares, resampled to the other
number of experts, in another order in each layer), how soon they are used again (hit rates of an LRU cache at several
sizes, by which the process is fitted), how sure the router is (mean sorted probabilities), and how well a later layer
is foreseen (recall of its router on an earlier layer's hidden state, by distance). What it does not keep: which
experts of one layer go with which of another one (a policy that follows trajectories, such as fMoE, has nothing to
find there), nor whatever else a real router of that shape would do.

NumPy only, deterministic.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

FRACTIONS = (0.1, 0.25, 0.5, 0.75)  # of a layer's experts that an LRU cache holds
SHARES = (0.0, 0.2, 0.4, 0.6, 0.7, 0.8, 0.9, 0.95)
DECAYS = (0.0, 0.5, 0.8, 0.9, 0.97)
_FIT_TOKENS = 192
_MARGIN = 0.1  # logits between what a router picks and what it does not: more than bfloat16 rounds away

Floats = NDArray[np.float32]
Ids = NDArray[np.int64]


@dataclass(frozen=True)
class Locality:
    """Of a recorded routing.

    Attributes:
        popularity: [E], shares of a layer's uses, descending, mean over layers.
        probabilities: [E], a token's router probabilities, descending, mean over tokens and layers.
        hit_rates: of an LRU cache of `FRACTIONS` of each layer's experts.
        recalls: share of a layer's experts that its router picks on the hidden state of 1, 2, ... layers before.
        top_k: experts per token.
    """

    popularity: tuple[float, ...]
    probabilities: tuple[float, ...]
    hit_rates: tuple[float, ...]
    recalls: tuple[float, ...]
    top_k: int


@dataclass(frozen=True)
class Stickiness:
    """How the next token's experts depend on those before: p = (1 - share) popularity + share recent use.

    Attributes:
        decay: what a use counts for after one further token; 0: only the token before counts.
        error: root mean square difference of the hit rates to those of the recorded routing.
        hit_rates: those of the fitted process, at the recorded shape.
    """

    share: float
    decay: float
    error: float
    hit_rates: tuple[float, ...]


@dataclass(frozen=True)
class RoutingTrace:
    """Routing of T tokens in L layers of E experts, K of which a token uses.

    Attributes:
        ids: int64 [T, L, K], most probable first.
        logits: float32 [T, L, E], log-probabilities that agree with `ids`.
    """

    ids: Ids
    logits: Floats


def lru_hit_rates(ids: Ids, experts: int, fractions: Sequence[float] = FRACTIONS) -> tuple[float, ...]:
    """Of one LRU cache per layer that holds a share of its experts, at least K; the first half of the tokens warms it.

    Args:
        ids: [T, L, K].
    """
    tokens, layers, top_k = ids.shape
    last = np.full((layers, experts), -1.0)
    last -= np.arange(experts) * 1e-6  # a fixed order of those that were never used
    slots = [max(top_k, round(share * experts)) for share in fractions]
    hits, asked = np.zeros(len(slots)), 0
    rows = np.arange(layers)[:, None]
    for t in range(tokens):
        chosen = ids[t]  # [L, K]
        if 2 * t >= tokens:
            used = last[rows, chosen]
            depth = (last[:, None, :] > used[:, :, None]).sum(axis=2)  # experts used since [L, K]
            known = used >= 0
            hits += [(known & (depth < held)).sum() for held in slots]
            asked += chosen.size
        last[rows, chosen] = t + np.arange(top_k) * 1e-3
    return tuple((hits / max(1, asked)).tolist())


def popularity_of(ids: Ids, experts: int) -> tuple[float, ...]:
    """Shares of the uses of ids [T, L, K], descending, mean over layers."""
    counts = np.stack([np.bincount(ids[:, layer].ravel(), minlength=experts) for layer in range(ids.shape[1])])
    shares = np.sort(counts / counts.sum(axis=1, keepdims=True), axis=1)[:, ::-1]
    return tuple(shares.mean(axis=0).tolist())


def recall(guessed: Ids, picked: Ids) -> float:
    """Share of picked [N, K] that is in guessed [N, K]."""
    return float((guessed[:, :, None] == picked[:, None, :]).any(axis=1).mean())


def resampled(curve: Sequence[float], size: int) -> NDArray[np.float64]:
    """A descending curve of shares for another number of experts: the same Lorenz curve, normalised [size]."""
    cumulative = np.concatenate([[0.0], np.cumsum(curve)])
    places = np.linspace(0.0, 1.0, len(cumulative))
    shares = np.diff(np.interp(np.linspace(0.0, 1.0, size + 1), places, cumulative))
    return np.asarray(shares / shares.sum(), np.float64)


def draw(
    locality: Locality, share: float, decay: float, tokens: int, layers: int, experts: int, top_k: int, seed: int
) -> RoutingTrace:
    """A routing of any shape: each token draws K experts of each layer without repetition, as `Stickiness` says.

    Raises:
        ValueError: a layer has fewer experts than a token uses.
    """
    if not 0 < top_k <= experts:
        raise ValueError(f"a token cannot use {top_k} of {experts} experts")
    rng = np.random.default_rng(seed)
    curve = resampled(locality.popularity, experts)
    popularity = np.stack([rng.permutation(curve) for _ in range(layers)])  # [L, E]
    profile = np.log(np.maximum(resampled(locality.probabilities, experts), 1e-6))
    profile[:top_k] += _MARGIN
    recent = popularity.copy()
    ids = np.empty((tokens, layers, top_k), np.int64)
    logits = np.empty((tokens, layers, experts), np.float32)
    rows = np.arange(layers)[:, None]
    for t in range(tokens):
        chance = (1.0 - share) * popularity + share * recent / recent.sum(axis=1, keepdims=True)
        scores = np.log(np.maximum(chance, 1e-9)) + rng.gumbel(size=chance.shape)  # the top K: K draws without repeat
        order = np.argsort(-scores, axis=1, kind="stable")
        ids[t] = order[:, :top_k]
        logits[t][rows, order] = profile
        recent *= decay
        recent[rows, ids[t]] += 1.0
    return RoutingTrace(ids, logits)


def fit(locality: Locality, layers: int, seed: int = 0) -> Stickiness:
    """The share and the decay whose LRU hit rates, at the recorded shape, are nearest to the recorded ones."""
    experts = len(locality.popularity)
    best: Stickiness | None = None
    for share, decay in itertools.product(SHARES, DECAYS):
        trace = draw(locality, share, decay, _FIT_TOKENS, layers, experts, locality.top_k, seed)
        rates = lru_hit_rates(trace.ids, experts)
        error = float(np.sqrt(np.mean(np.square(np.subtract(rates, locality.hit_rates)))))
        if best is None or error < best.error:
            best = Stickiness(share, decay, error, rates)
    assert best is not None
    return best


def foreseen(trace: RoutingTrace, recall_share: float, seed: int) -> Floats:
    """Logits [T, L, E] whose K greatest agree with the trace's choice as often as `recall_share` says.

    Each expert of a token's choice is missed with probability 1 - recall_share; those that would have come next take
    the places of the missed ones.
    """
    tokens, layers, top_k = trace.ids.shape
    rng = np.random.default_rng(seed)
    order = np.argsort(-trace.logits, axis=2, kind="stable")  # [T, L, E]
    profile = np.take_along_axis(trace.logits, order, axis=2)
    kept = rng.random((tokens, layers, top_k)) < recall_share
    missed = top_k - kept.sum(axis=2, keepdims=True)  # [T, L, 1]
    place = np.broadcast_to(np.arange(order.shape[2]), order.shape)
    guessed = (place >= top_k) & (place < top_k + missed)
    guessed[:, :, :top_k] = kept
    new = np.take_along_axis(order, np.argsort(~guessed, axis=2, kind="stable"), axis=2)
    out = np.empty_like(trace.logits)
    np.put_along_axis(out, new, profile, axis=2)
    return out
