"""Synthetic routing, calibrated on published statistics: families of routing for a model of any shape.

    types     each token has a type, drawn by Zipf's law; a type has a fixed vector of M dimensions
    state     topic of the request + slow and fast decayed sums of the types' vectors + a vector of the token's own type
    logits    of layer l: popularity_l + W_l state + noise of that layer alone            (variance 1 beside popularity)
    routing   the K greatest logits; softmax of the logits times a sharpness

All layers read one state, so a layer's routing tells of later layers', and an earlier token of the same type in a
similar context is routed alike: maps and predictors find what they find in a real model. A later layer's router, asked
early, sees that layer's logits with as much noise as gives the family's recall.

Scripted families are of no real model: each is hard for one simple rule. Which experts are *in use* changes by a
script, and those get logits above all others; which of them a token picks is as in the family `flat`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from pathlib import Path
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from .hit_rates import hit_rates, policies
from .shapes import ModelShape
from .statistics import CACHES, Routing, figures_of, next_router_recall
from .trace import TraceHeader
from .trace_writer import Rows, TraceWriter

Floats = NDArray[np.float64]
TYPES = 1000
DIMENSIONS = 64
_PROBE = 256  # tokens by which the noise of a recall is found


@dataclass(frozen=True)
class Family:
    """How routing varies. Shares of the logits' variance; the rest of 1 is `type`.

    Attributes:
        popularity: standard deviation of the experts' constant logits. tail: their heavier upper tail.
        topic: constant in a request. drift: how much of a request's topic the next one does not have.
        slow, fast: decayed sums; `slow_decay`, `fast_decay` are the weights of one token more.
        private: noise of one layer alone.
        sharpness: factor of the logits before the softmax.
        recalls: share of a layer's experts that its router names 1, 2, .. layers before.
        script: of the experts in use; None: all are, always.
    """

    popularity: float
    tail: float
    topic: float
    drift: float
    slow: float
    slow_decay: float
    fast: float
    fast_decay: float
    private: float
    sharpness: float
    recalls: tuple[float, ...] = (0.86, 0.78, 0.71, 0.65)
    script: Script | None = None

    @property
    def type(self) -> float:
        """Share of the variance that the token's own type determines."""
        return 1.0 - self.topic - self.slow - self.fast - self.private


# -- scripts: what is added to the logits of a request of one layer [t, E]

Script = Callable[["Part", np.random.Generator], Floats]
_IN_USE = 12.0  # logits of experts in use above those of the others


@dataclass(frozen=True)
class Part:
    """A request at one layer: its tokens, of which the first `prompt` are its prompt, experts and top-K."""

    tokens: int
    prompt: int
    experts: int
    top_k: int

    @property
    def few(self) -> int:
        """Experts that a set in use has: half more than a token needs."""
        return min(self.experts, self.top_k + (self.top_k + 1) // 2)


def _in_use(part: Part, rng: np.random.Generator, size: int, turns: Sequence[int]) -> Floats:
    """Sets of `size` random experts, the turns[t]-th at token t; one set has nothing of the set before it if it can."""
    found, before = np.zeros((part.tokens, part.experts)), np.zeros(0, np.int64)
    for turn in sorted(set(turns)):
        fresh = np.setdiff1d(np.arange(part.experts), before)
        before = np.concatenate([rng.permutation(fresh), rng.permutation(before)])[:size]
        found[np.ix_(np.asarray(turns) == turn, before)] = _IN_USE
    return found


def _phases(part: Part, rng: np.random.Generator) -> Floats:
    """The set changes four times in the answer."""
    length = max(1, -(-(part.tokens - part.prompt) // 5))
    return _in_use(part, rng, part.few, [max(0, t - part.prompt) // length for t in range(part.tokens)])


def _bursts(part: Part, rng: np.random.Generator) -> Floats:
    """The same experts for five tokens, then others."""
    return _in_use(part, rng, part.top_k, [t // 5 for t in range(part.tokens)])


def _unlike_prompt(part: Part, rng: np.random.Generator) -> Floats:
    """The prompt and the answer have a set each, of a quarter of the experts and at least the few."""
    size = max(part.few, part.experts // 4)
    return _in_use(part, rng, size, [int(t >= part.prompt) for t in range(part.tokens)])


def _alternate(part: Part, rng: np.random.Generator) -> Floats:
    """Two sets take turns, token by token."""
    return _in_use(part, rng, part.top_k, [t % 2 for t in range(part.tokens)])


def _cycle(part: Part, rng: np.random.Generator) -> Floats:
    """Three quarters of the experts in a circle, the next K at each token: what LRU has just dropped."""
    circle = rng.permutation(part.experts)[: max(part.top_k + 1, 3 * part.experts // 4)]
    found = np.zeros((part.tokens, part.experts))
    for t in range(part.tokens):
        found[t, circle[(t * part.top_k + np.arange(part.top_k)) % len(circle)]] = _IN_USE
    return found


def _hot(part: Part, rng: np.random.Generator) -> Floats:
    """Half of each token's experts are always the same, the others any."""
    found = rng.normal(scale=3.0, size=(part.tokens, part.experts))
    found[:, rng.permutation(part.experts)[: max(1, part.top_k // 2)]] += _IN_USE
    return found


def _zipf(part: Part, rng: np.random.Generator) -> Floats:
    """Each token draws its experts alone, by Zipf's law (Gumbel's trick), which ranks other experts in each request."""
    ranks = rng.permutation(part.experts) + 1.0
    return np.asarray(_IN_USE * (rng.gumbel(size=(part.tokens, part.experts)) - np.log(ranks)))


FAMILIES: dict[str, Family] = {
    # as published for DeepSeek-V2-Lite on text; at 64 experts, top-6
    "flat": Family(0.08, 0.0, 0.1295, 1.0, 0.0751, 0.93, 0.3014, 0.3472, 0.04, 1.5),
    # as reported for the decode of Qwen3-30B-A3B; at 128 experts, top-8
    "sticky": Family(0.225, 0.0, 0.3376, 1.0, 0.3, 0.9886, 0.1369, 0.6, 0.05, 1.5),
    # popularity that drifts, as MoEpic's Table 1 needs it (Qwen1.5-MoE on MMLU); at 60 experts, top-4
    "drift": Family(0.0916, 0.15, 0.0129, 0.4485, 0.0097, 0.99, 0.0, 0.0, 0.05, 1.5),
}
SCRIPTS: dict[str, Script] = {
    "phases": _phases, "bursts": _bursts, "unlike-prompt": _unlike_prompt, "alternate": _alternate, "cycle": _cycle,
    "hot": _hot, "zipf": _zipf,
}  # fmt: skip
FAMILIES |= {name: replace(FAMILIES["flat"], script=script) for name, script in SCRIPTS.items()}


@dataclass(frozen=True)
class Target:
    """A published figure. tolerance: how far a family may be from it."""

    value: float
    tolerance: float


def _curve(name: str, sizes: tuple[object, ...], values: tuple[float, ...], tolerance: float) -> dict[str, Target]:
    return {f"{name} {size}": Target(value, tolerance) for size, value in zip(sizes, values, strict=True)}


@dataclass(frozen=True)
class Calibration:
    """The shape at which a family is held to published figures: layers, experts, top-K, and requests of one length.

    Attributes:
        source: of the figures. sizes: slots of the caches. targets: by the names of `comparable`.
    """

    source: str
    layers: int
    experts: int
    top_k: int
    requests: int
    length: int
    sizes: tuple[int, ...]
    targets: dict[str, Target]


_QUARTERS, _SIXTHS = ("25%", "50%", "75%"), ("17%", "33%", "50%", "67%")
CALIBRATIONS: dict[str, Calibration] = {
    "flat": Calibration(
        "DeepSeek-V2-Lite on text", 8, 64, 6, 16, 512, (16, 32, 48),
        {
            "entropy": Target(0.994, 0.005), "gini": Target(0.12, 0.03), "max over mean": Target(1.78, 0.3),
            "chance overlap": Target(0.099, 0.005),
            **_curve("overlap", (1, 2, 4, 8, 16, 32), (0.267, 0.204, 0.177, 0.165, 0.157, 0.151), 0.03),
            **_curve("distinct", (8, 16, 32, 64), (27, 40, 51, 58), 1.5),
            **_curve("lru", _QUARTERS, (0.469, 0.715, 0.897), 0.03),
            **_curve("lfu", _QUARTERS, (0.438, 0.663, 0.853), 0.03),
            **_curve("random", _QUARTERS, (0.457, 0.691, 0.867), 0.03),
            **_curve("belady", _QUARTERS, (0.666, 0.871, 0.962), 0.03), "map recall": Target(0.45, 0.1),
        },
    ),
    "sticky": Calibration(
        "Qwen3-30B-A3B, decode", 8, 128, 8, 12, 512, (51,),
        {
            "overlap 1": Target(0.45, 0.03), "reused within 8": Target(0.80, 0.03), "lru 40%": Target(0.925, 0.025),
        },
    ),
    "drift": Calibration(
        "MoEpic, Table 1 (Qwen1.5-MoE on MMLU)", 4, 60, 4, 20, 256, (10, 20, 30, 40),
        {
            "entropy": Target(0.983, 0.01), **_curve("lfu", _SIXTHS, (0.244, 0.437, 0.607, 0.758), 0.03),
            **_curve("lru", _SIXTHS, (0.191, 0.389, 0.564, 0.732), 0.03),
            **_curve("lcp", _SIXTHS, (0.256, 0.454, 0.622, 0.771), 0.03),
        },
    ),
}  # fmt: skip
NOTHING_PUBLISHED = Calibration("nothing published", 8, 64, 6, 16, 512, (16, 32, 48), {})  # of scripted families


def calibrated(name: str, seed: int = 0) -> dict[str, float]:
    """The figures of a family's routing at its calibration's shape."""
    shape, family = CALIBRATIONS[name], FAMILIES[name]
    generator = Generator(family, shape.layers, shape.experts, shape.top_k, seed)
    rows = list(generator.requests(shape.requests, shape.length, min(len(family.recalls), shape.layers - 1)))
    ids = np.concatenate([one.ids for one in rows])
    recall = next_router_recall(np.concatenate([one.next_ids for one in rows]), ids)
    request = np.repeat(np.arange(shape.requests), shape.length)
    decode = np.ones(len(request), np.bool_)
    return comparable(
        Routing(ids.transpose(1, 0, 2), request, decode, shape.experts, None, recall), shape.sizes, seed
    )


def comparable(routing: Routing, sizes: Sequence[int], seed: int = 0) -> dict[str, float]:
    """Figures of a routing by the names of `Calibration.targets`; those that cannot be counted are left out."""
    found = figures_of(routing, sizes, seed)
    percent = {size: f"{100 * size / routing.experts:.0f}%" for size in sizes}
    lcp = hit_rates(routing.ids, sizes, policies(("lcp",)))
    cosine = found["prefill_decode_cosine"] or {}
    named = {
        "entropy": found["popularity"]["entropy"], "token entropy": found["token_entropy"],
        "gini": found["popularity"]["gini"], "lognormal sigma": found["popularity"]["lognormal_sigma"],
        "max over mean": found["popularity"]["max_over_mean"], "top quarter": found["popularity"]["top_quarter"],
        "chance overlap": found["overlap_by_chance"],
        **{f"overlap {d}": value for d, value in found["overlap"].items()},
        **{f"distinct {w}": value for w, value in found["distinct"].items()},
        "reused within 8": found["reuse"]["within"]["8"],
        **{f"{cache} {percent[line['size']]}": line[cache] for cache in CACHES for line in found["hit_rates"]},
        **{f"lcp {percent[row.size]}": row.overall for row in lcp},
        **{f"next router {d}": value for d, value in enumerate(found["next_router"] or [], start=1)},
        "map recall": found["map_recall"], "own cosine": cosine.get("own"), "other cosine": cosine.get("other"),
    }  # fmt: skip
    return {name: value for name, value in named.items() if value is not None}


class Generator:
    """Draws the requests of a model of L layers, E experts and top-K.

    Args:
        family: how routing varies. seed: of everything. prompt: tokens of each request's prompt, for scripts.
    """

    def __init__(
        self, family: Family, layers: int, experts: int, top_k: int, seed: int = 0, prompt: int = 0
    ) -> None:
        self.family, self.layers, self.experts, self.top_k, self.prompt = family, layers, experts, top_k, prompt
        self._rng = rng = np.random.default_rng(seed)
        quantiles = _normal_quantiles(experts)
        curve = family.popularity * (quantiles + family.tail * np.maximum(quantiles, 0.0) ** 2)
        self._popularity = np.stack([rng.permutation(curve) for _ in range(layers)])  # [L, E]
        weights = rng.normal(size=(DIMENSIONS, layers * experts))
        self._weights = weights / np.linalg.norm(weights, axis=0)
        frequency = np.asarray(1.0 / (np.arange(TYPES) + 2.7), np.float64)
        frequency /= frequency.sum()
        self._cumulative = np.cumsum(frequency)
        self.type_vectors, self._own = (_whitened(rng.normal(size=(TYPES, DIMENSIONS)), frequency) for _ in range(2))
        self._topic = rng.normal(size=DIMENSIONS)

    def tokens(self, count: int) -> NDArray[np.int32]:
        """Types of a request's tokens."""
        drawn = np.searchsorted(self._cumulative, self._rng.random(count))
        return np.minimum(drawn, TYPES - 1).astype(np.int32)

    def logits(self, tokens: NDArray[np.int32]) -> Floats:
        """Of the next request [t, L, E]."""
        family, rng = self.family, self._rng
        fresh = rng.normal(size=DIMENSIONS)
        self._topic = np.sqrt(1.0 - family.drift) * self._topic + np.sqrt(family.drift) * fresh
        types = self.type_vectors[tokens]
        state = np.sqrt(family.topic) * self._topic + np.sqrt(family.type) * self._own[tokens]
        for share, decay in ((family.slow, family.slow_decay), (family.fast, family.fast_decay)):
            if share:
                state += np.sqrt(share) * _decayed(types, decay, rng.normal(size=DIMENSIONS))
        found = (state @ self._weights).reshape(len(tokens), self.layers, self.experts)
        found += self._popularity
        if family.private:
            found += np.sqrt(family.private) * rng.normal(size=found.shape)
        if family.script is not None:
            part = Part(len(tokens), min(self.prompt, len(tokens)), self.experts, self.top_k)
            found += np.stack([family.script(part, rng) for _ in range(self.layers)], axis=1)
        return np.asarray(found)

    def requests(self, count: int, length: int, distances: int = 0) -> Iterator[Rows]:
        """Requests of `length` tokens each; next-router predictions for `distances` layers, none past the last."""
        for _ in range(count):
            tokens = self.tokens(length)
            logits = self.logits(tokens)
            ids = top(logits, self.top_k)
            probabilities = _softmax(self.family.sharpness * logits)
            weights = np.take_along_axis(probabilities, ids, -1)
            next_ids = np.zeros((length, self.layers, distances, self.top_k), np.int64)
            next_probabilities = np.zeros(next_ids.shape)
            for d in range(1, min(distances, self.layers - 1) + 1):
                keep = self._agreements[min(d, len(self._agreements)) - 1]
                seen = blurred(logits[:, d:], keep, self._rng)
                named = top(seen, self.top_k)
                next_ids[:, :-d, d - 1] = named
                chance = _softmax(self.family.sharpness * seen)
                next_probabilities[:, :-d, d - 1] = np.take_along_axis(chance, named, -1)
            yield Rows(
                tokens, probabilities, ids, weights / weights.sum(-1, keepdims=True), next_ids, next_probabilities
            )

    @cached_property
    def _agreements(self) -> list[float]:
        """Correlations of early and true logits that give the family's recalls at this shape."""
        family = self.family
        return [agreement(family, self.layers, self.experts, self.top_k, recall) for recall in family.recalls]


@cache
def agreement(family: Family, layers: int, experts: int, top_k: int, recall: float) -> float:
    """Correlation of early and true logits at which an earlier router names such a share of the top K; by bisection."""
    generator = Generator(family, min(layers, 4), experts, top_k, 1)
    logits = np.concatenate([generator.logits(generator.tokens(_PROBE // 4)) for _ in range(4)])
    true = top(logits, top_k)
    low, high = 0.0, 1.0
    for _ in range(12):
        middle = (low + high) / 2
        named = top(blurred(logits, middle, np.random.default_rng(2)), top_k)
        share = (named[..., :, None] == true[..., None, :]).any(-1).mean()
        low, high = (middle, high) if share < recall else (low, middle)
    return (low + high) / 2


def write_synthetic(
    out: Path, name: str, shape_name: str, shape: ModelShape, requests: int, prompt_tokens: int, decode_tokens: int,
    distances: int = 4, seed: int = 0, recalls: tuple[float, ...] | None = None,
) -> TraceHeader:  # fmt: skip
    """Write a trace of a family at a model's shape: `prompt_tokens` are prefilled, the others decoded one by one.

    It has no costs: replay it with a machine. Embeddings are projections of the types' vectors.

    Args:
        recalls: in place of the family's.

    Raises:
        ConfigError: `out` is not empty or cannot be made.
    """
    family = FAMILIES[name] if recalls is None else replace(FAMILIES[name], recalls=recalls)
    generator = Generator(family, shape.moe_layers, shape.experts, shape.top_k, seed, prompt_tokens)
    projection = np.random.default_rng(seed).normal(size=(DIMENSIONS, shape.hidden)) / np.sqrt(DIMENSIONS)
    settings = f"{name} {family} {shape_name} {requests} {prompt_tokens} {decode_tokens} {distances} {seed}"
    header = TraceHeader(
        model=shape_name, fingerprint=hashlib.sha256(settings.encode()).hexdigest(), layers=shape.moe_layers,
        experts=shape.experts, top_k=shape.top_k, hidden=shape.hidden, distances=distances,
        slot_bytes=shape.expert_bytes, expert_dtype="bfloat16", origin=f"synthetic, {name}, seed {seed}",
    )  # fmt: skip
    writer = TraceWriter(out, header, lambda tokens: generator.type_vectors[tokens] @ projection)
    for rows in generator.requests(requests, prompt_tokens + decode_tokens, distances):
        writer.begin(rows.tokens[:prompt_tokens].tolist())
        writer.add(rows.part(0, prompt_tokens), decode=False)
        for t in range(prompt_tokens, len(rows.tokens)):
            writer.add(rows.part(t, t + 1), decode=True)
    return writer.close(complete=True)


def top(logits: Floats, count: int) -> NDArray[np.int64]:
    """The `count` greatest [..., count], greatest first."""
    if count == logits.shape[-1]:
        return np.argsort(-logits, axis=-1)
    some = np.argpartition(-logits, count, axis=-1)[..., :count]
    order = np.argsort(-np.take_along_axis(logits, some, -1), axis=-1, kind="stable")
    return np.asarray(np.take_along_axis(some, order, -1))


def blurred(logits: Floats, agreement: float, rng: np.random.Generator) -> Floats:
    """Logits of the same spread that correlate with the given ones as `agreement` says."""
    mean, spread = logits.mean(-1, keepdims=True), logits.std(-1, keepdims=True)
    noise = np.sqrt(1.0 - agreement**2) * spread * rng.normal(size=logits.shape)
    return np.asarray(mean + agreement * (logits - mean) + noise)


def _decayed(vectors: Floats, decay: float, start: Floats) -> Floats:
    """Decayed sums of variance 1 of vectors [t, M] of variance 1."""
    found, state, fresh = np.empty_like(vectors), start, np.sqrt(1.0 - decay**2)
    for t, vector in enumerate(vectors):
        state = found[t] = decay * state + fresh * vector
    return found


def _whitened(vectors: Floats, frequency: NDArray[np.floating]) -> Floats:
    """The vectors [n, M], moved and stretched to mean 0 and covariance 1 under their frequencies [n]."""
    centred = vectors - frequency @ vectors
    factor = np.linalg.cholesky(centred.T @ (frequency[:, None] * centred))
    return np.asarray(np.linalg.solve(factor, centred.T).T)


def _softmax(logits: Floats) -> Floats:
    shifted = np.exp(logits - logits.max(-1, keepdims=True))
    return np.asarray(shifted / shifted.sum(-1, keepdims=True))


def _normal_quantiles(count: int) -> Floats:
    """Quantiles of a normal distribution at the middles of `count` equal parts."""
    normal = NormalDist()
    return np.array([normal.inv_cdf((i + 0.5) / count) for i in range(count)])
