"""Statistics of a routing trace: how skewed, how sticky and how predictable a model's choice of experts is.

Functions take the ids [L, n, K] of n tokens in the order in which they ran, and the request [n] of each token. No
loop runs over tokens, but for the caches whose order depends on their contents (`cache_hits`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .trace import Request, TraceHeader

OVERLAP_DISTANCES = (1, 2, 4, 8, 16, 32)
WINDOWS = (8, 16, 32, 64)
CACHES = ("random", "lru", "lfu", "belady")
SIZES = (0.25, 0.5, 0.75)  # of a layer's experts
PHASES = ("prefill", "decode")
_REUSED_WITHIN = (1, 2, 4, 8, 16, 32, 64)
_QUANTILES = (0.25, 0.5, 0.75, 0.9)

Ids = NDArray[np.integer]
Floats = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Routing:
    """All routing of a trace, in recorded order.

    Attributes:
        ids: [L, n, K]. request: [n], ascending. decode: [n], False for tokens of prefill.
        experts: E.
        entropy: mean entropy of a token's router probabilities over log E, by layer [L]; None: not recorded.
        next_router: share of a layer's experts that its router names d layers before [D, L], NaN where no layer is so
            far before; None: not recorded.
    """

    ids: Ids
    request: NDArray[np.int64]
    decode: NDArray[np.bool_]
    experts: int
    entropy: Floats | None = None
    next_router: Floats | None = None


def routing_of(header: TraceHeader, requests: Iterable[Request]) -> Routing:
    """Read a trace's requests once; holds their ids, and no probabilities."""
    parts: list[Ids] = []
    request, decode = [np.empty(0, np.int64)], [np.empty(0, np.bool_)]
    entropy = np.zeros(header.layers)
    found = np.zeros((header.distances, header.layers))
    for one in requests:
        for step in one.iterations:
            rows = len(step.tokens)
            parts.append(step.ids)
            request.append(np.full(rows, one.number))
            decode.append(np.full(rows, step.decode))
        ids = np.concatenate([step.ids for step in one.iterations])  # [t, L, K]
        entropy += entropies(np.concatenate([step.probabilities for step in one.iterations])).sum(0)
        named = np.concatenate([step.next_ids for step in one.iterations])  # [t, L, D, K]
        found += np.nan_to_num(next_router_recall(named, ids)) * ids.shape[0]
    empty = np.empty((0, header.layers, header.top_k), header.id_dtype)
    ids = np.concatenate([empty, *parts]).transpose(1, 0, 2)
    tokens = max(1, ids.shape[1])
    recall = found / tokens
    for d in range(header.distances):
        recall[d, : d + 1] = np.nan
    known = entropy / (tokens * math.log(max(2, header.experts))) if header.probabilities else None
    return Routing(
        ids, np.concatenate(request), np.concatenate(decode), header.experts, known,
        recall if header.distances else None,
    )  # fmt: skip


def next_router_recall(named: Ids, ids: Ids) -> Floats:
    """Share of ids [t, L, K] that `named` [t, L, D, K] has d layers before [D, L]; NaN: no layer is so far before."""
    found = np.full((named.shape[2], ids.shape[1]), np.nan)
    for d in range(1, min(len(found), ids.shape[1] - 1) + 1):
        found[d - 1, d:] = _common(named[:, :-d, d - 1], ids[:, d:]).mean(0) / ids.shape[2]
    return found


def entropies(probabilities: NDArray[np.floating]) -> Floats:
    """Of distributions [..., E], which are normalised first, in nats [...]."""
    p = probabilities.astype(np.float64)
    p /= np.maximum(p.sum(-1, keepdims=True), 1e-12)
    found: Floats = -(p * np.log(np.maximum(p, 1e-12))).sum(-1)
    return found


def _common(first: Ids, second: Ids) -> NDArray[np.int64]:
    """Number of common ids [...] of two choices [..., K]."""
    found = np.zeros(first.shape[:-1], np.int64)
    for k in range(second.shape[-1]):
        found += (first == second[..., k, None]).any(-1)
    return found


def loads(ids: Ids, experts: int) -> Floats:
    """Uses of each expert [L, E]."""
    keys = ids.reshape(len(ids), -1).astype(np.int64) + experts * np.arange(len(ids))[:, None]
    return np.bincount(keys.ravel(), minlength=len(ids) * experts).reshape(-1, experts).astype(np.float64)


def popularity(uses: Floats) -> dict[str, float]:
    """Skew of uses [L, E], in the mean over layers.

    gini: 0 uniform, 1 all in one. lognormal_sigma: standard deviation of the logarithm of the used experts' uses.
    max_over_mean. top_quarter: share of the uses in the most used quarter of the experts. entropy: of the pooled uses,
    over log E. unused: share of experts without a use.
    """
    experts = uses.shape[1]
    total = np.maximum(uses.sum(1, keepdims=True), 1.0)
    shares = np.sort(uses / total, axis=1)
    rank = np.arange(1, experts + 1)
    logs = np.log(np.where(uses > 0, uses, 1.0))
    used = np.maximum((uses > 0).sum(1), 1)
    mean = np.where(uses > 0, logs, 0.0).sum(1) / used
    variance = np.where(uses > 0, np.square(logs - mean[:, None]), 0.0).sum(1) / used
    figures = {
        "gini": ((2 * rank - experts - 1) * shares).sum(1) / experts,
        "lognormal_sigma": np.sqrt(variance),
        "max_over_mean": shares[:, -1] * experts,
        "top_quarter": shares[:, experts - max(1, experts // 4) :].sum(1),
        "entropy": entropies(shares) / math.log(max(2, experts)),
        "unused": (uses == 0).mean(1),
    }
    return {name: float(values.mean()) for name, values in figures.items()}


def overlap(ids: Ids, request: NDArray[np.integer], distance: int) -> Floats:
    """Share of a token's experts that the token `distance` before, of its request, has too [L]; NaN: no such token."""
    same = request[distance:] == request[:-distance]
    common = _common(ids[:, distance:], ids[:, :-distance])
    return np.asarray(common[:, same].mean(1) / ids.shape[2] if same.any() else np.full(len(ids), np.nan))


def chance_overlap(uses: Floats, top_k: int) -> Floats:
    """Overlap [L] of two independent tokens that use experts as often as uses [L, E] say."""
    share = top_k * uses / np.maximum(uses.sum(1, keepdims=True), 1.0)
    return np.asarray(np.square(share).sum(1) / top_k)


def last_uses(ids: Ids, experts: int) -> NDArray[np.int64]:
    """When each expert was last used before each token of one layer, and at the end [n + 1, E]; ids [n, K].

    A use is counted by token and place: token * K + place; -1: none before.
    """
    tokens, top_k = ids.shape
    table = np.full((tokens + 1, experts), -1, np.int64)
    table[np.arange(1, tokens + 1)[:, None], ids] = np.arange(tokens * top_k).reshape(tokens, top_k)
    return np.asarray(np.maximum.accumulate(table, axis=0))


def distinct_in_windows(ids: Ids, request: NDArray[np.integer], experts: int, windows: Sequence[int]) -> Floats:
    """Mean number of distinct experts in windows of so many tokens of one request [windows, L]; NaN: none so long."""
    tokens, top_k = ids.shape[1:]
    found = np.full((len(windows), len(ids)), np.nan)
    starts = np.searchsorted(request, request)  # first token of each token's request
    place = np.arange(tokens) - starts
    for layer, chosen in enumerate(ids):
        last = last_uses(chosen, experts)[1:]  # up to each token
        for i, window in enumerate(windows):
            ends = np.flatnonzero(place >= window - 1)
            if len(ends):
                found[i, layer] = (last[ends] >= ((ends - window + 1) * top_k)[:, None]).sum(1).mean()
    return found


@dataclass(frozen=True, eq=False)
class Reuse:
    """Distances to the last use of the same expert in one layer [n, K].

    tokens: to the token that used it last; 0: no earlier use. depth: distinct other experts used since, which is its
    place in the order of an LRU cache; E: no earlier use.
    """

    tokens: NDArray[np.int64]
    depth: NDArray[np.int64]


def reuse(ids: Ids, experts: int) -> Reuse:
    """Reuse distances of one layer's ids [n, K]. The experts of one token are used in their order."""
    tokens, top_k = ids.shape
    last = last_uses(ids, experts)[:-1]
    used = np.take_along_axis(last, ids.astype(np.int64), 1)  # [n, K]
    depth = np.stack([(last > used[:, k, None]).sum(1) for k in range(top_k)], axis=1)
    gap = np.arange(tokens)[:, None] - used // top_k
    return Reuse(np.where(used < 0, 0, gap), np.where(used < 0, experts, depth))


def phase_cosines(
    ids: Ids, request: NDArray[np.integer], later: NDArray[np.bool_], experts: int
) -> tuple[Floats, Floats] | None:
    """Cosines [L] of the load of requests' later tokens and of the earlier ones, of the same and of other requests.

    later: [n], the decode tokens, or the second half of each request. None: fewer than two requests have both.
    """
    numbers = np.unique(request)
    first, second = [], []
    for number in numbers:
        own = request == number
        early, late = own & ~later, own & later
        if early.any() and late.any():
            first.append(loads(ids[:, early], experts))
            second.append(loads(ids[:, late], experts))
    if len(first) < 2:
        return None
    a, b = (np.stack(x, 1) for x in (first, second))  # [L, requests, E]
    a, b = (x / np.linalg.norm(x, axis=-1, keepdims=True) for x in (a, b))
    cosines = b @ a.transpose(0, 2, 1)  # [L, requests, requests]
    count = len(first)
    own_sum = np.trace(cosines, axis1=1, axis2=2)
    return own_sum / count, (cosines.sum((1, 2)) - own_sum) / (count * (count - 1))


def cache_hits(
    ids: Ids, experts: int, sizes: Sequence[int], weights: NDArray[np.integer] | None = None, seed: int = 0
) -> NDArray[np.int64]:
    """Hits of caches of single layers that load on demand and are empty at first [CACHES, sizes, L, phases].

    Each token needs its K experts at once: none of them is evicted for another. LFU counts every use since the start,
    and evicts of equal counts the one used longest ago. Tokens run one by one in both phases. LRU, LFU and Belady
    count what the engine's own policies count (`hit_rates.hit_rates`), to the last hit; random is another draw.

    Args:
        sizes: slots of each layer, from K to E.
        weights: phase [n] of each token, from 0; None: all of one phase.

    Raises:
        ValueError: a size is out of range.
    """
    layers, tokens, top_k = ids.shape
    if any(not top_k <= size <= experts for size in sizes):
        raise ValueError(f"{list(sizes)} slots, not from {top_k} to {experts}")
    phase = np.zeros(tokens, np.int64) if weights is None else weights.astype(np.int64)
    phases = int(phase.max(initial=0)) + 1
    hits = np.zeros((len(CACHES), len(sizes), layers, phases), np.int64)
    after = np.empty((layers, tokens, top_k), np.int64)  # the token that uses the expert next
    for layer, chosen in enumerate(ids):
        depth = reuse(chosen, experts).depth
        later = last_uses(chosen[::-1], experts)[:-1]
        following = np.take_along_axis(later, chosen[::-1].astype(np.int64), 1)[::-1]
        after[layer] = np.where(following < 0, tokens, tokens - 1 - following // top_k)
        for i, size in enumerate(sizes):
            hits[1, i, layer] = np.bincount(phase, (depth < size).sum(1), minlength=phases)
    _stateful_hits(ids, experts, sizes, after, phase, hits, np.random.default_rng(seed))
    return hits


def _stateful_hits(
    ids: Ids, experts: int, sizes: Sequence[int], after: NDArray[np.int64], phase: NDArray[np.int64],
    hits: NDArray[np.int64], rng: np.random.Generator,
) -> None:  # fmt: skip
    """Count hits of random, LFU and Belady, token by token, all layers and sizes at once."""
    layers, tokens, top_k = ids.shape
    rows, order = np.arange(layers)[:, None], np.arange(top_k)
    span = tokens * top_k + 1
    value = np.zeros((3, 1, layers, experts))  # who stays: the greatest; no two are equal
    value[2] = -(tokens * experts) - np.arange(experts)
    kept = np.zeros((3, len(sizes), layers, experts), np.bool_)
    keyed = np.empty(kept.shape)
    least = np.array([experts - size for size in sizes])
    for t in range(tokens):
        now = ids[:, t]  # [L, K]
        hits[(0, 2, 3), :, :, phase[t]] += kept[:, :, rows, now].sum(-1)
        kept[:, :, rows, now] = True
        value[0, 0] = rng.random((layers, experts))
        value[1, 0, rows, now] += span - value[1, 0, rows, now] % span + t * top_k + order
        value[2, 0, rows, now] = -after[:, t] * experts - now
        np.copyto(keyed, value)
        keyed[~kept] = -np.inf
        keyed[:, :, rows, now] = np.inf
        ranked = np.partition(keyed, np.unique(least), axis=-1)
        bound = ranked[:, np.arange(len(sizes)), :, least].transpose(1, 0, 2)  # [3, sizes, L]
        kept &= keyed >= bound[..., None]


def map_recall(
    ids: Ids, request: NDArray[np.integer], experts: int, ahead: int = 3, queries: int = 256
) -> float | None:
    """Share of a token's experts, `ahead` layers on, that the earlier token of the most similar trajectory has.

    The last third of the requests asks, in the middle layer; the others are the maps. A trajectory is the choices of
    the layers so far; its similarity is the number of common ones (fMoE, Section 4.2, with choices for probabilities).
    None: fewer than three requests, or too few layers.
    """
    numbers = np.unique(request)
    layer = (len(ids) - ahead) // 2
    if len(numbers) < 3 or layer < 1:
        return None
    asked = np.isin(request, numbers[-(len(numbers) // 3) :])
    places = np.flatnonzero(asked)
    places = places[np.linspace(0, len(places) - 1, min(queries, len(places))).astype(np.int64)]
    keys = (ids[:layer].astype(np.int64) + experts * np.arange(layer)[:, None, None]).transpose(1, 0, 2)
    chosen = np.zeros((ids.shape[1], layer * experts), np.float32)
    np.put_along_axis(chosen, keys.reshape(len(chosen), -1), 1.0, axis=1)
    known = np.flatnonzero(~asked)
    best = known[np.argmax(chosen[places] @ chosen[known].T, axis=1)]
    target = ids[layer - 1 + ahead]
    return float(_common(target[places], target[best]).mean() / ids.shape[2])


def figures_of(routing: Routing, sizes: Sequence[int] | None = None, seed: int = 0) -> dict[str, Any]:
    """Every statistic, as `tiermoe trace stats --json` prints it; None where a trace holds nothing to count it from.

    Args:
        sizes: slots of each layer for the caches; None: `SIZES` of its experts, at least K.
    """
    ids, request, experts = routing.ids, routing.request, routing.experts
    layers, tokens, top_k = ids.shape
    uses = loads(ids, experts)
    slots = [max(top_k, round(share * experts)) for share in SIZES] if sizes is None else list(sizes)
    overlaps = [overlap(ids, request, d) for d in OVERLAP_DISTANCES]
    windows = distinct_in_windows(ids, request, experts, WINDOWS)
    cosines = phase_cosines(ids, request, routing.decode, experts)
    return {
        "layers": layers, "experts": experts, "top_k": top_k, "tokens": tokens,
        "decode_tokens": int(routing.decode.sum()), "requests": len(np.unique(request)),
        "popularity": popularity(uses),
        "token_entropy": _mean(routing.entropy), "token_entropy_by_layer": _listed(routing.entropy),
        "overlap": {str(d): _mean(x) for d, x in zip(OVERLAP_DISTANCES, overlaps, strict=True)},
        "overlap_by_layer": {str(d): _listed(x) for d, x in zip(OVERLAP_DISTANCES, overlaps, strict=True)},
        "overlap_by_chance": float(chance_overlap(uses, top_k).mean()),
        "distinct": {str(w): _mean(row) for w, row in zip(WINDOWS, windows, strict=True)},
        "reuse": _reuse_figures(ids, experts),
        "map_recall": map_recall(ids, request, experts),
        "next_router": None if routing.next_router is None else [_mean(row) for row in routing.next_router],
        "prefill_decode_cosine": None if cosines is None else
            {"own": float(cosines[0].mean()), "other": float(cosines[1].mean())},
        "hit_rates": _hit_rates(routing, slots, seed),
    }  # fmt: skip


def _reuse_figures(ids: Ids, experts: int) -> dict[str, Any]:
    """Shares of the uses by distance, and quantiles of the distances, over all layers."""
    found = [reuse(chosen, experts) for chosen in ids]
    gap = np.concatenate([one.tokens.ravel() for one in found])
    depth = np.concatenate([one.depth.ravel() for one in found])[gap > 0]
    uses = max(1, len(gap))
    again = gap[gap > 0]
    return {
        "within": {str(d): float(((gap > 0) & (gap <= d)).sum() / uses) for d in _REUSED_WITHIN},
        "first_uses": float((gap == 0).sum() / uses),
        "tokens_quantiles": {str(q): float(np.quantile(again, q)) if len(again) else None for q in _QUANTILES},
        "experts_quantiles": {str(q): float(np.quantile(depth, q)) if len(depth) else None for q in _QUANTILES},
    }


def _hit_rates(routing: Routing, sizes: Sequence[int], seed: int) -> list[dict[str, Any]]:
    """A line for each size: the hit rates of each cache, of all tokens and by phase."""
    hits = cache_hits(routing.ids, routing.experts, sizes, routing.decode.astype(np.int64), seed).sum(2)
    needs = len(routing.ids) * routing.ids.shape[2]
    counts = np.array([(~routing.decode).sum(), routing.decode.sum()])
    lines = []
    for i, size in enumerate(sizes):
        line: dict[str, Any] = {"size": size}
        for cache, found in zip(CACHES, hits[:, i], strict=True):
            line[cache] = float(found.sum() / (needs * max(1, counts.sum())))
            for p, name in enumerate(PHASES[: len(found)]):
                line[f"{cache}_{name}"] = float(found[p] / (needs * counts[p])) if counts[p] else None
        lines.append(line)
    return lines


def _mean(values: Floats | None) -> float | None:
    """None: nothing was counted."""
    if values is None or np.isnan(values).all():
        return None
    return float(np.nanmean(values))


def _listed(values: Floats | None) -> list[float | None] | None:
    return None if values is None else [None if x != x else float(x) for x in values.tolist()]
