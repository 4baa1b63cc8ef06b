"""Split experts: tops are cached by layer, bottoms share one buffer.

The option of a preset, the division of memory, the segments of experts, and the statistics of a layer's routing that
choose the division: hits at every cache size, and prediction accuracy.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import accumulate
from math import ceil, log
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, model_validator

from ..eviction import CacheOrder
from ..registry import PolicyOptions, Preset, policy_class, register

RHO, OMEGA = 0.25, 128  # of LCP


@register("split", "off", "fixed", "adaptive")
class SplitOptions(PolicyOptions):
    """How experts are split in a cached top and a bottom that is loaded for each use (MoEpic).

    off: not split. fixed: every layer at `theta`. adaptive: begins so; then each layer's ratio and share of the memory
    follow the measurements.
    """

    kind: str = "off"
    theta: float = Field(default=0.5, ge=0, le=1, description="share of an expert's neurons in its top; 0: no cache")
    buffer: int | None = Field(
        default=None, ge=1,
        description="full experts of memory for bottoms; none: top-k, and room for the bottoms of two layers' top-k",
    )  # fmt: skip
    tau: int = Field(default=5000, ge=1, description="tokens between configurations")
    zeta: float = Field(default=0.01, gt=0, lt=1, description="share of a layer's memory that is moved at a time")
    min_gain: float = Field(default=0.01, ge=0, lt=1, description="predicted gain below which nothing is changed")
    allocation: Literal["moepic", "dynamic-programming"] = "moepic"

    @model_validator(mode="after")
    def _consistent(self) -> SplitOptions:
        fields = type(self).model_fields
        changed = {name for name, field in fields.items() if getattr(self, name) != field.default} - {"kind"}
        if self.kind == "off" and changed:
            raise ValueError(f"split is off: leave {', '.join(sorted(changed))} out, or give its kind")
        if self.kind == "fixed" and changed - {"theta", "buffer"}:
            raise ValueError(f"{', '.join(sorted(changed - {'theta', 'buffer'}))}: only an adaptive split has that")
        if self.allocation == "dynamic-programming" and self.theta != 1:
            raise ValueError("dynamic programming gives layers whole experts: say theta 1")
        return self

    def check(self, policy: Preset) -> None:
        if self.kind == "off":
            return
        eviction = policy_class("eviction", policy.eviction.kind)
        if self.kind == "adaptive" and eviction.counted_as is None:
            raise ValueError(f"hit rates of every cache size cannot be counted for eviction {policy.eviction.kind}")
        if policy.uses_ndp:
            raise ValueError(f"placement {policy.placement.kind} moves whole experts: leave split out")
        if policy.preload != "none":
            raise ValueError("split experts are never resident as a whole for good: leave preload out")
        if policy.pre_evict.kind != "off" or policy.evict_writeback:
            raise ValueError("pre_evict and evict_writeback go by whole experts: leave split out")
        if not eviction.per_layer:
            raise ValueError(
                f"eviction {policy.eviction.kind} weighs the experts of all layers, split those of each apart"
            )


@dataclass(frozen=True)
class SplitLayout:
    """One division of expert memory (MoEpic section 4.1); sizes are in neurons.

    The top of an expert of layer l is its neurons [0, n_l), its bottom the others. A layer with n_l = I has no bottoms
    and is a plain cache; one with n_l = 0 has no tops.

    Attributes:
        neurons: I, those of one expert.
        tops: n_l of each layer, 0 to I.
        slots: C_l, cached tops of each layer; 0 where n_l = 0, else at least 1.
        buffer_slots: slots for bottoms, each of the size of the largest; 0 where no layer has bottoms.

    Raises:
        ValueError: the numbers are inconsistent.
    """

    neurons: int
    tops: tuple[int, ...]
    slots: tuple[int, ...]
    buffer_slots: int

    def __post_init__(self) -> None:
        if self.neurons < 1 or not self.tops or len(self.tops) != len(self.slots):
            raise ValueError(f"{len(self.tops)} tops and {len(self.slots)} numbers of slots, of {self.neurons} neurons")
        for layer, (top, slots) in enumerate(zip(self.tops, self.slots, strict=True)):
            if not 0 <= top <= self.neurons:
                raise ValueError(f"the top of layer {layer} has {top} of {self.neurons} neurons")
            if slots < 0 or (top == 0) != (slots == 0):
                raise ValueError(f"layer {layer} has {slots} slots for tops of {top} neurons")
        if self.buffer_slots < 0 or (self.buffer_neurons == 0) != (self.buffer_slots == 0):
            raise ValueError(f"{self.buffer_slots} buffer slots for bottoms of up to {self.buffer_neurons} neurons")

    @property
    def buffer_neurons(self) -> int:
        """Neurons of one buffer slot: of the largest bottom."""
        return self.neurons - min(self.tops)

    @property
    def total_neurons(self) -> int:
        """Neurons of all slots together."""
        cached = sum(top * slots for top, slots in zip(self.tops, self.slots, strict=True))
        return cached + self.buffer_slots * self.buffer_neurons

    @staticmethod
    def uniform(
        layers: int, experts: int, neurons: int, budget_neurons: int, theta: float, buffer_experts: int
    ) -> SplitLayout:
        """The fixed split: tops of round(theta * I) neurons, and as many slots in each layer as fit beside the buffer.

        The buffer has the memory of `buffer_experts` experts, less where a layer would have no slot. The remainder
        gives the first layers one more slot; where all tops are cached it goes to the buffer. With theta = 0 there is
        only the buffer, and further memory stays unused.

        Raises:
            ValueError: theta is not 0 to 1, or the budget does not hold one slot of each kind.
        """
        if not 0 <= theta <= 1 or min(layers, experts, neurons) < 1 or buffer_experts < 1:
            raise ValueError(f"no split of {layers} x {experts} experts by theta {theta}, buffer {buffer_experts}")
        top = round(theta * neurons)
        bottom, every = neurons - top, layers * experts
        if top == 0:
            slots = min(budget_neurons // neurons, buffer_experts, every)
            _least(slots, neurons, budget_neurons)
            return SplitLayout(neurons, (0,) * layers, (0,) * layers, slots)
        buffer = 0
        if bottom:
            spare = budget_neurons - layers * top  # beside one top of each layer
            buffer = min(buffer_experts * neurons // bottom, spare // bottom, every)
            _least(buffer, layers * top + bottom, budget_neurons)
        cached = min((budget_neurons - buffer * bottom) // top, every)
        _least(cached // layers, layers * top + bottom, budget_neurons)
        if bottom and cached == every:
            buffer = min((budget_neurons - every * top) // bottom, every)
        each, over = divmod(cached, layers)
        slots_of = tuple(each + (layer < over) for layer in range(layers))
        return SplitLayout(neurons, (top,) * layers, slots_of, buffer)


def buffer_for(theta: float, top_k: int) -> int:
    """Full experts of buffer that hold the bottoms of two layers' top-k, at least top-k of them.

    The next layer's bottoms arrive while one layer's are in use; the paper's K experts are too few for theta < 0.5.
    """
    return max(top_k, ceil(2 * top_k * (1 - theta) - 1e-9))


def _least(slots: int, needed: int, budget: int) -> None:
    if slots < 1:
        raise ValueError(f"the split needs {needed} neurons at least, the budget holds {budget}")


class Segments:
    """Segments and slots of one layout.

    Of N experts, where keys l * E to (l + 1) * E - 1 are those of layer l, the top of expert k is segment k and its
    bottom segment N + k. Slot class l holds the tops of layer l, class L (the buffer) all bottoms. Slots are numbered,
    and lie in the pool, in order of class.

    Attributes:
        neurons: of each segment [2 N]; 0 where there is no such segment.
        begins: number of its first neuron within its expert [2 N].
        class_of: slot class of each segment [2 N].
        slots, slot_neurons: number of slots of each class, and neurons of one [L + 1].
        first: first neuron of each slot in the pool.
        shown: of each expert [N] the segment that represents it: its top, or its bottom where there are no tops.

    Raises:
        ValueError: a layer has more slots than experts.
    """

    def __init__(self, split: SplitLayout, experts: int) -> None:
        if max(split.slots) > experts:
            raise ValueError(f"a layer has {max(split.slots)} slots for tops of {experts} experts")
        layers, whole = range(len(split.tops)), split.neurons
        self.split, self.keys = split, len(split.tops) * experts
        self.neurons = [n for n in split.tops for _ in range(experts)]
        self.neurons += [whole - n for n in self.neurons]
        self.begins = [0] * self.keys + self.neurons[: self.keys]
        self.class_of = [layer for layer in layers for _ in range(experts)] + [len(split.tops)] * self.keys
        self.slots = [*split.slots, split.buffer_slots]
        self.slot_neurons = [*split.tops, split.buffer_neurons]
        sizes = [n for n, count in zip(self.slot_neurons, self.slots, strict=True) for _ in range(count)]
        self.first = [0, *accumulate(sizes)][:-1]
        self.shown = [key if self.neurons[key] else self.keys + key for key in range(self.keys)]
        pairs = [(key, self.keys + key) for key in range(self.keys)]
        self._of = [tuple([part for part in pair if self.neurons[part]]) for pair in pairs]

    def of(self, keys: Iterable[int]) -> list[int]:
        """The segments of these experts, each expert's top before its bottom."""
        parts = self._of
        return [segment for key in keys for segment in parts[key]]


Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
_CHUNK_BYTES = 1 << 22  # of one array [steps, E] at work: what a step costs in memory does not grow with the window


@dataclass(frozen=True, eq=False)
class Picks:
    """Routing of one layer, or of L at once, step by step. A step is a token, or the tokens of one forward.

    counts [n, E] or [n, L, E]: tokens of each step that picked each expert. tokens [n]: of each step, at least 1.
    scores, as counts: predicted before the routing was known, NaN in rows without a prediction; None: no predictions.

    Raises:
        ValueError: the shapes are inconsistent.
    """

    counts: NDArray[np.integer]
    tokens: NDArray[np.integer]
    scores: NDArray[np.floating] | None

    def __post_init__(self) -> None:
        n = len(self.counts)
        if self.counts.ndim not in (2, 3) or self.tokens.shape != (n,) or (n and int(self.tokens.min()) < 1):
            raise ValueError(f"counts {self.counts.shape} and tokens {self.tokens.shape} are not of the same steps")
        if self.scores is not None and self.scores.shape != self.counts.shape:
            raise ValueError(f"scores {self.scores.shape} are not of counts {self.counts.shape}")


@dataclass(frozen=True, eq=False)
class Priorities:
    """The order of a layer's experts before a step, or of those of L layers.

    counts [E] or [L, E]: tokens that picked each one so far (mu of LCP). last, as counts: step clock, in tokens, of its
    last pick; negative: never. now: tokens so far.
    """

    counts: Ints
    last: Ints
    now: int

    @staticmethod
    def none(*shape: int) -> Priorities:
        """Before the first token. shape: E, or L and E."""
        return Priorities(np.zeros(shape, np.int64), np.full(shape, -1, np.int64), 0)


@dataclass(frozen=True, eq=False)
class LayerStatistics:
    """H(C), P(y) and PH(y, C) of one layer (MoEpic section 3.4), as counts, which add up over windows.

    Of L layers at once each but `steps` has an axis of layers before its others.

    steps: observed. needed: experts needed in all of them together. hits [E + 1]: of these, those among the C that rank
    highest, C = 0..E. predicted: steps with a prediction. named [E]: steps in which the expert with the y-th highest
    score was needed, y = 0..E-1. held [E, E + 1]: steps in which it was among the C that rank highest.
    """

    steps: int
    needed: Ints
    hits: Ints
    predicted: Ints
    named: Ints
    held: Ints

    @staticmethod
    def none(*shape: int) -> LayerStatistics:
        """Of no step. shape: E, or L and E."""
        *layers, experts = shape
        counts, zeros = np.zeros(layers, np.int64), np.zeros((*layers, experts + 1), np.int64)
        held = np.zeros((*layers, experts, experts + 1), np.int64)
        return LayerStatistics(0, counts, zeros, counts, zeros[..., 1:], held)

    def by_layer(self) -> list[LayerStatistics]:
        """Those of each of L layers."""
        each = zip(self.needed, self.hits, self.predicted, self.named, self.held, strict=True)
        return [LayerStatistics(self.steps, *of_layer) for of_layer in each]

    def __add__(self, other: LayerStatistics) -> LayerStatistics:
        return LayerStatistics(
            self.steps + other.steps, self.needed + other.needed, self.hits + other.hits,
            self.predicted + other.predicted, self.named + other.named, self.held + other.held,
        )  # fmt: skip

    @property
    def experts(self) -> int:
        return len(self.named)

    @property
    def per_step(self) -> float:
        """K: experts needed in a step, on average."""
        return float(self.needed / self.steps) if self.steps else 0.0

    @property
    def hit_rate(self) -> Floats:
        """H(C): share of the needed experts in a cache of C = 0..E experts [E + 1]."""
        return self.hits / max(1, int(self.needed))

    @property
    def accuracy(self) -> Floats:
        """P(y): how often the expert with the (y + 1)-th highest score is needed [E]; zeros without predictions."""
        return self.named / max(1, int(self.predicted))

    @property
    def predicted_hit_rate(self) -> Floats:
        """PH(y, C): how often the expert with the (y + 1)-th highest score is cached [E, E + 1]."""
        return self.held / max(1, int(self.predicted))


def observe(
    picks: Picks,
    order: CacheOrder,
    before: Priorities | None = None,
    counted: NDArray[np.bool_] | None = None,
    rho: float = RHO,
    omega: float = OMEGA,
) -> tuple[LayerStatistics, Priorities]:
    """Statistics of these steps for every cache size in one pass, and the priorities after them.

    A cache of C experts holds those that rank highest before the step, in `order`: an access hits at every C above the
    expert's rank (its stack distance). This is exact for LRU; for LCP and LFU it is what the priorities prescribe;
    random draws ranks for each step, those of all layers. Ties rank by number. O(n L E log E).

    Args:
        before: priorities before the first step; None: no picks yet.
        counted: steps to count [n], the others only change priorities; None: all. rho, omega: of LCP.
    """
    shape = picks.counts.shape[1:]
    priorities = Priorities.none(*shape) if before is None else before
    found, step = LayerStatistics.none(*shape), max(1, _CHUNK_BYTES // (8 * math.prod(shape)))
    for start in range(0, len(picks.counts), step):
        part = slice(start, start + step)
        counts, tokens = picks.counts[part].astype(np.int64), picks.tokens[part].astype(np.int64)
        keys, priorities = _values(counts, tokens, priorities, order, rho, omega)
        shown = slice(None) if counted is None else counted[part]
        scores = None if picks.scores is None else picks.scores[part][shown]
        found += _counted(counts[shown] > 0, keys[shown], scores)
    return found, priorities


def _values(
    counts: Ints, tokens: Ints, before: Priorities, order: CacheOrder, rho: float, omega: float
) -> tuple[Floats, Priorities]:
    """Values that order the experts before each step, as counts, highest first; the priorities after the last."""
    clock = before.now + np.cumsum(tokens)  # [n]
    marks = np.where(counts > 0, clock.reshape(-1, *[1] * (counts.ndim - 1)), -1)
    last = np.maximum.accumulate(np.concatenate([before.last[None], marks]), axis=0)  # [n + 1, (L,) E]
    total = before.counts + np.concatenate([np.zeros_like(counts[:1]), np.cumsum(counts, axis=0)])  # [n + 1, (L,) E]
    after = Priorities(total[-1], last[-1], int(clock[-1]))
    if order == "lru":
        return last[:-1].astype(np.float64), after
    if order == "lfu":
        return total[:-1].astype(np.float64), after
    if order == "random":
        n, *layers, experts = counts.shape
        drawn = np.random.default_rng(before.now).random((n, *[1] * len(layers), experts))
        return np.broadcast_to(drawn, counts.shape), after
    with np.errstate(divide="ignore"):  # log 0: never picked, so last of all
        return np.log(total[:-1]) + last[:-1] * (log(1 / rho) / omega), after


def _places(values: NDArray[np.floating]) -> Ints:
    """Numbers by descending value along the last axis."""
    return np.argsort(-values, axis=-1, kind="stable")


def _histogram(cells: Ints, wanted: NDArray[np.bool_], layers: int, count: int) -> Ints:
    """How many of the wanted cells [n, L, ...] have each number below `count`, by layer [L, count]."""
    of_layer = np.arange(0, layers * count, count).reshape(-1, *[1] * (cells.ndim - 2))
    return np.bincount((cells + of_layer)[wanted].ravel(), minlength=layers * count).reshape(layers, count)


def _counted(needed: NDArray[np.bool_], values: Floats, scores: NDArray[np.floating] | None) -> LayerStatistics:
    """needed, values, scores: [n, E] or [n, L, E]."""
    steps, *shape, experts = needed.shape
    layers = math.prod(shape)
    needed, places = needed.reshape(-1, layers, experts), _places(values).reshape(-1, layers, experts)
    ranks = np.empty_like(places)
    np.put_along_axis(ranks, places, np.arange(experts)[None, None], axis=-1)
    none = LayerStatistics.none(layers, experts)
    hits, predicted, named, held = none.hits.copy(), none.predicted, none.named, none.held
    hits[:, 1:] = _histogram(ranks, needed, layers, experts).cumsum(axis=1)
    if scores is not None:
        scores = scores.reshape(-1, layers, experts)
        rows = ~np.isnan(scores[:, :, 0])  # [n, L]
        predicted = rows.sum(axis=0)
        by_score = _places(scores)  # [n, L, y]: the expert with the y-th highest score
        named = (np.take_along_axis(needed, by_score, axis=-1) & rows[:, :, None]).sum(axis=0, dtype=np.int64)
        rank_of = np.take_along_axis(ranks, by_score, axis=-1)  # [n, L, y]
        cells = np.arange(experts) * experts + rank_of
        by_rank = _histogram(cells, rows, layers, experts * experts).reshape(layers, experts, experts)
        held[:, :, 1:] = by_rank.cumsum(axis=-1)
    sums = needed.sum(axis=(0, 2)), hits, predicted, named, held
    return LayerStatistics(steps, *[of.reshape((*shape, *of.shape[1:])) for of in sums])
