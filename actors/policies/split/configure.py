"""The cache configurator: from what was counted and measured to a cut of the slot pool (MoEpic section 3.4)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil
from typing import Literal

from .allocation import allocate, cache_sizes, load_costs
from .cut import CacheCut, buffer_for
from .expert_split import LayerModel, Times, expected, total_s
from .statistics import LayerStatistics

AllocationKind = Literal["moepic", "dynamic-programming"]


@dataclass(frozen=True)
class Room:
    """The memory that a cut divides.

    neurons: I, of one expert. pool_neurons: of all slots together. top_k: experts of a token. buffer_experts: whole
    experts' worth of memory that is the buffer's; None: what `buffer_for` says of the cut. A small pool has less.

    Raises:
        ValueError: the pool does not hold one expert.
    """

    neurons: int
    pool_neurons: int
    top_k: int
    buffer_experts: int | None = None

    def __post_init__(self) -> None:
        if min(self.neurons, self.top_k, self.buffer_experts or 1) < 1 or self.pool_neurons < self.neurons:
            raise ValueError(f"there is no room in {self}")

    def buffer(self, layers: int, experts: int) -> int:
        """Neurons of a buffer of so many whole experts, or fewer, beside `layers` caches of one neuron at least.

        Raises:
            ValueError: beside one whole expert there is no neuron for each layer.
        """
        kept = min(experts, (self.pool_neurons - layers) // self.neurons)
        if kept < 1:
            raise ValueError(f"{self.pool_neurons} neurons hold no buffer and a cache for each of {layers} layers")
        return kept * self.neurons


@dataclass(frozen=True)
class Configured:
    """A better cut, and the exposed latency of a token that is expected of the present one and of it, in seconds."""

    cut: CacheCut
    before_s: float
    after_s: float

    @property
    def gain(self) -> float:
        """Share of the exposed latency that goes away."""
        return 1.0 - self.after_s / self.before_s if self.before_s > 0 else 0.0


def configure(
    statistics: Sequence[LayerStatistics],
    times: Times,
    room: Room,
    present: CacheCut,
    *,
    zeta: float = 0.01,
    min_gain: float = 0.01,
    allocation: AllocationKind = "moepic",
    guesses: int | None = None,
) -> Configured | None:
    """The cut to change to; None if the expected gain is under `min_gain`.

    What is expected of a cut is equations 5 to 11 for whole neurons and slots, so rounding is paid for.

    Args:
        statistics: of each layer. present: the cut in use. zeta: granularity of the exchange. min_gain: share of the
            exposed latency. allocation: moepic, or dynamic programming over whole experts. guesses: experts that are
            prefetched for a layer at most; None: as many as there is time for, and with dynamic programming as many
            as a step needs.

    Raises:
        ValueError: the room is too small for any cut.
    """
    models = [LayerModel(layer, times, guesses) for layer in statistics]
    whole = allocation == "dynamic-programming"
    cut = _whole(statistics, room, guesses) if whole else _split(models, times, room, zeta)
    before_s, after_s = expected_s(models, times, present), expected_s(models, times, cut)
    found = Configured(cut, before_s, after_s)
    return found if cut != present and found.gain >= min_gain and after_s < before_s else None


def expected_s(models: Sequence[LayerModel], times: Times, cut: CacheCut) -> float:
    """Exposed latency of a token that is expected of a cut, in seconds."""
    thetas = [top / cut.neurons for top in cut.tops]
    return total_s(expected(models, cut.slots, thetas, times))


def _split(models: Sequence[LayerModel], times: Times, room: Room, zeta: float) -> CacheCut:
    """Algorithm 1 in the memory that the buffer leaves, which depends on how large its bottoms turn out to be."""
    held = room.top_k if room.buffer_experts is None else room.buffer_experts
    while True:
        cut = _cut(models, times, room, zeta, room.buffer(len(models), held))
        wanted = buffer_for(1 - cut.buffer_neurons / room.neurons, room.top_k)
        if room.buffer_experts is not None or wanted <= held:
            break
        held = wanted  # more each time, and 2 K at most
    if not cut.buffer_slots:  # no layer has a bottom: what was kept for them can be the caches'
        whole = _cut(models, times, room, zeta, 0)
        if not whole.buffer_neurons:
            return whole
    return cut


def _cut(models: Sequence[LayerModel], times: Times, room: Room, zeta: float, buffer: int) -> CacheCut:
    """Whole neurons: V_i // C_i of each top, no more than there are; where that is none, fewer slots of one neuron."""
    layers, neurons = len(models), room.neurons
    found = allocate(models, times, room.pool_neurons - buffer, neurons, zeta)
    tops, slots = [], []
    for model, budget, split in zip(models, found.budgets, found.splits, strict=True):
        size = min(split.slots, budget)
        top = min(neurons, budget // size)
        tops.append(top)
        slots.append(min(model.experts, budget // top))
    bottom, every = neurons - min(tops), layers * models[0].experts
    held = min(max(buffer // bottom, 1), every) if bottom else 0
    return CacheCut(neurons, tuple(tops), tuple(slots), held)


def _whole(statistics: Sequence[LayerStatistics], room: Room, guesses: int | None) -> CacheCut:
    """theta = 1 everywhere and no buffer: the caches have all of the pool, as those of AdapMoE."""
    layers = len(statistics)
    picked = ceil(max(layer.per_step for layer in statistics))
    costs = load_costs(statistics, picked if guesses is None else guesses)
    sizes = cache_sizes(costs, room.pool_neurons // room.neurons)
    return CacheCut(room.neurons, (room.neurons,) * layers, sizes, 0)
