"""The cache configurator: divides the slot pool by counted and measured statistics (MoEpic section 3.4).

The best split of one layer for its memory and prefetch window (equations 5 to 11); the memory of each layer (Algorithm
1, or AdapMoE's dynamic programming); and both together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from ..adapmoe import cache_sizes, load_costs
from .split import LayerStatistics, SplitLayout, buffer_for

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Times:
    """Measured durations in seconds. Raises ValueError: one is negative, or loading takes no time.

    attention_s: T_att, from the end of a layer's experts to the next layer's routing. moe_s: T_moe, a layer's experts
    when all are resident. head_s: T_head, from the last layer's experts to the first layer's attention of the next
    token. load_s: T_load, one whole expert over the link.
    """

    attention_s: float
    moe_s: float
    head_s: float
    load_s: float

    def __post_init__(self) -> None:
        if min(self.attention_s, self.moe_s, self.head_s) < 0 or self.load_s <= 0:
            raise ValueError(f"these cannot be times: {self}")

    @property
    def first_window_s(self) -> float:
        """T_wind of the first layer: the previous token's head and the layer's own attention."""
        return self.head_s + self.attention_s


@dataclass(frozen=True)
class LayerSplit:
    """A split of one layer and its expected cost.

    slots: C. theta: share of an expert in its top. loaded: m, needed experts in memory when the routing is known.
    hide_s: T_hide (equation 5). miss_s: T_miss. exposed_s: what loading adds (equation 6). next_window_s: the next
    layer's prefetch window (equation 7).
    """

    slots: int
    theta: float
    loaded: float
    hide_s: float
    miss_s: float
    exposed_s: float
    next_window_s: float


class LayerModel:
    """One layer's statistics, prepared for many evaluations.

    Args:
        prefetched: experts prefetched for a layer at most; None: as many as the window allows.
    """

    def __init__(self, statistics: LayerStatistics, times: Times, prefetched: int | None = None) -> None:
        self.experts, self.needed, self._times = statistics.experts, statistics.per_step, times
        most = self.experts if prefetched is None else min(prefetched, self.experts)
        self._hit_rate = statistics.hit_rate  # [E + 1]
        self._accuracy = statistics.accuracy[:most] if statistics.predicted else np.zeros(0)  # [Y]
        self._predicted_hit_rate = statistics.predicted_hit_rate[: len(self._accuracy)].T.copy()  # [E + 1, Y]

    def best(self, budget: float, window_s: float) -> LayerSplit:
        """The split with the most in memory in time (equation 11) over all C; ties to the least C.

        Args:
            budget: V, in experts; theta = min(1, V / C). window_s: T_wind.
        """
        sizes = np.arange(1, self.experts + 1)
        thetas = np.minimum(1.0, budget / sizes)
        loaded = self._loaded(sizes, thetas, window_s)
        at = int(loaded.argmax())
        return self._costs(int(sizes[at]), float(thetas[at]), float(loaded[at]))

    def of(self, slots: int, theta: float, window_s: float) -> LayerSplit:
        """The expected cost of a given split; slots = 0: nothing is cached."""
        loaded = self._loaded(np.array([slots]), np.array([theta]), window_s)
        return self._costs(slots, theta, float(loaded[0]))

    def _loaded(self, sizes: NDArray[np.int64], thetas: Floats, window_s: float) -> Floats:
        """m (equation 11) for each pair of C and theta [n]."""
        missing = 1.0 - self._predicted_hit_rate[sizes] * thetas[:, None]  # [n, Y]: absent part of the y-th prediction
        in_time = np.cumsum(missing * self._times.load_s, axis=1) <= window_s  # equation 9
        in_window = (missing * self._accuracy * in_time).sum(axis=1)  # equation 10
        cached = self.needed * self._hit_rate[sizes] * thetas
        return np.minimum(self.needed, cached + in_window)

    def _costs(self, slots: int, theta: float, loaded: float) -> LayerSplit:
        times = self._times
        hide_s = loaded * times.moe_s / self.needed if self.needed else 0.0
        miss_s = (self.needed - loaded) * times.load_s
        return LayerSplit(
            slots, theta, loaded, hide_s, miss_s, max(0.0, miss_s - hide_s),
            (times.moe_s - min(hide_s, miss_s)) + times.attention_s,
        )  # fmt: skip


def expert_split(models: Sequence[LayerModel], budgets: Sequence[float], times: Times) -> list[LayerSplit]:
    """ExpertSplit of Algorithm 1: each layer's best split in turn, in the window that the previous layer leaves.

    Args:
        budgets: V of each layer, in experts.
    """
    window_s, out = times.first_window_s, []
    for model, budget in zip(models, budgets, strict=True):
        split = model.best(budget, window_s)
        out.append(split)
        window_s = split.next_window_s
    return out


def expected(
    models: Sequence[LayerModel], slots: Sequence[int], thetas: Sequence[float], times: Times
) -> list[LayerSplit]:
    """The expected cost of given splits, layer by layer."""
    window_s, out = times.first_window_s, []
    for model, size, theta in zip(models, slots, thetas, strict=True):
        split = model.of(size, theta, window_s)
        out.append(split)
        window_s = split.next_window_s
    return out


def total_s(splits: Sequence[LayerSplit]) -> float:
    """Exposed latency of a token: the sum over layers, in seconds."""
    return sum(split.exposed_s for split in splits)


@dataclass(frozen=True)
class Allocation:
    """Memory of each layer in neurons, the best split of each, and the number of exchanges."""

    budgets: tuple[int, ...]
    splits: tuple[LayerSplit, ...]
    exchanges: int


def allocate(models: Sequence[LayerModel], times: Times, budget_neurons: int, neurons: int, zeta: float) -> Allocation:
    """VramAllocation of Algorithm 1 (MoEpic section 3.4.2).

    From the uniform division on, zeta * V_e moves from the layer that loses least to the one that gains most, until the
    total exposed latency stops falling; the last exchange is undone. The total falls strictly over finitely many
    divisions, so this ends. A layer that would have no neuron left gives nothing.

    Args:
        budget_neurons: V_e, of all layers together. neurons: I, of one expert. zeta: granularity, 0 to 1.

    Raises:
        ValueError: less than one neuron for each layer, or zeta is not above 0 and below 1.
    """
    layers = len(models)
    if budget_neurons < layers or not 0 < zeta < 1:
        raise ValueError(f"{budget_neurons} neurons for {layers} layers, in steps of {zeta} of them")

    def solve(budgets: NDArray[np.int64]) -> list[LayerSplit]:
        return expert_split(models, [float(b) / neurons for b in budgets], times)

    each, over = divmod(budget_neurons, layers)
    budgets = np.array([each + (layer < over) for layer in range(layers)])
    step = max(1, round(zeta * budget_neurons))
    now, exchanges = solve(budgets), 0
    while layers > 1:
        exposed = _exposed(now)
        gains = exposed - _exposed(solve(budgets + step))
        able = budgets > step
        losses = np.where(able, _exposed(solve(np.maximum(budgets - step, 1))) - exposed, np.inf)
        to = int(gains.argmax())
        losses[to] = np.inf
        giver = int(losses.argmin())
        if not np.isfinite(losses[giver]):
            break
        moved = budgets.copy()
        moved[to] += step
        moved[giver] -= step
        after = solve(moved)
        if total_s(after) >= total_s(now):
            break
        budgets, now, exchanges = moved, after, exchanges + 1
    return Allocation(tuple(budgets.tolist()), tuple(now), exchanges)


def _exposed(splits: Sequence[LayerSplit]) -> NDArray[np.float64]:
    return np.array([split.exposed_s for split in splits])


AllocationKind = Literal["moepic", "dynamic-programming"]


@dataclass(frozen=True)
class Room:
    """The memory to divide.

    neurons: I, of one expert. pool_neurons: of all slots together. top_k: experts of a token. buffer_experts: size of
    the buffer in whole experts, less in a small pool; None: by `buffer_for`.

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
        """Neurons of a buffer of this many whole experts, or fewer, beside `layers` caches of at least one neuron.

        Raises:
            ValueError: one whole expert leaves no neuron for each layer.
        """
        kept = min(experts, (self.pool_neurons - layers) // self.neurons)
        if kept < 1:
            raise ValueError(f"{self.pool_neurons} neurons hold no buffer and a cache for each of {layers} layers")
        return kept * self.neurons


@dataclass(frozen=True)
class Configured:
    """A better layout, and the expected exposed latency of a token before and after, in seconds."""

    layout: SplitLayout
    before_s: float
    after_s: float

    @property
    def gain(self) -> float:
        """Share of the exposed latency that disappears."""
        return 1.0 - self.after_s / self.before_s if self.before_s > 0 else 0.0


def configure(
    statistics: Sequence[LayerStatistics],
    times: Times,
    room: Room,
    present: SplitLayout,
    *,
    zeta: float = 0.01,
    min_gain: float = 0.01,
    allocation: AllocationKind = "moepic",
    prefetched: int | None = None,
) -> Configured | None:
    """The layout to change to; None if the expected gain is under `min_gain`.

    Expectations (equations 5 to 11) are of whole neurons and slots, so they include the cost of rounding.

    Args:
        statistics: of each layer. present: the current layout. zeta: granularity of the exchange.
        min_gain: share of the exposed latency.
        allocation: moepic, or dynamic programming over whole experts.
        prefetched: experts prefetched for a layer at most; None: as many as there is time for, or with dynamic
            programming as many as a step needs.

    Raises:
        ValueError: the room is too small for any layout.
    """
    models = [LayerModel(layer, times, prefetched) for layer in statistics]
    whole = allocation == "dynamic-programming"
    layout = _whole(statistics, room, prefetched) if whole else _split(models, times, room, zeta)
    before_s, after_s = expected_s(models, times, present), expected_s(models, times, layout)
    found = Configured(layout, before_s, after_s)
    return found if layout != present and found.gain >= min_gain and after_s < before_s else None


def expected_s(models: Sequence[LayerModel], times: Times, layout: SplitLayout) -> float:
    """Expected exposed latency of a token, in seconds."""
    thetas = [top / layout.neurons for top in layout.tops]
    return total_s(expected(models, layout.slots, thetas, times))


def _split(models: Sequence[LayerModel], times: Times, room: Room, zeta: float) -> SplitLayout:
    """Algorithm 1 in the memory that the buffer leaves, which depends on the size of the resulting bottoms."""
    held = room.top_k if room.buffer_experts is None else room.buffer_experts
    while True:
        layout = _whole_neurons(models, times, room, zeta, room.buffer(len(models), held))
        wanted = buffer_for(1 - layout.buffer_neurons / room.neurons, room.top_k)
        if room.buffer_experts is not None or wanted <= held:
            break
        held = wanted  # more each time, and 2 K at most
    if not layout.buffer_slots:  # no layer has a bottom: what was kept for them can be the caches'
        whole = _whole_neurons(models, times, room, zeta, 0)
        if not whole.buffer_neurons:
            return whole
    return layout


def _whole_neurons(models: Sequence[LayerModel], times: Times, room: Room, zeta: float, buffer: int) -> SplitLayout:
    """In whole neurons: tops of V_i // C_i, at most I; where that is 0, fewer slots of one neuron."""
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
    return SplitLayout(neurons, tuple(tops), tuple(slots), held)


def _whole(statistics: Sequence[LayerStatistics], room: Room, prefetched: int | None) -> SplitLayout:
    """theta = 1 everywhere and no buffer: the caches have the whole pool, as in AdapMoE."""
    layers = len(statistics)
    picked = ceil(max(layer.per_step for layer in statistics))
    costs = load_costs(statistics, picked if prefetched is None else prefetched)
    sizes = cache_sizes(costs, room.pool_neurons // room.neurons)
    return SplitLayout(room.neurons, (room.neurons,) * layers, sizes, 0)
