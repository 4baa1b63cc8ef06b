"""How the memory of the caches is divided among the layers: MoEpic's exchange, and AdapMoE's dynamic programming."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .expert_split import LayerModel, LayerSplit, Times, expert_split, total_s
from .statistics import LayerStatistics


@dataclass(frozen=True)
class Allocation:
    """Memory of each layer in neurons, with the best cut of each, and the exchanges that led there."""

    budgets: tuple[int, ...]
    splits: tuple[LayerSplit, ...]
    exchanges: int


def allocate(
    models: Sequence[LayerModel], times: Times, budget_neurons: int, neurons: int, zeta: float
) -> Allocation:
    """VramAllocation of Algorithm 1 (MoEpic section 3.4.2).

    From the uniform division on, zeta * V_e moves from the layer that loses least by it to the one that gains most,
    until the total of the exposed latencies stops falling; the last exchange is undone. It falls strictly, over
    divisions in whole steps, so this ends. A layer that could not spare a step and keep a neuron gives nothing.

    Args:
        budget_neurons: V_e, of all layers together. neurons: I, of one expert. zeta: granularity, 0 to 1.

    Raises:
        ValueError: not one neuron for each layer, or zeta is not above 0 and below 1.
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


def load_costs(statistics: Sequence[LayerStatistics], guesses: int) -> NDArray[np.float64]:
    """Expected loads on demand in a token, of each layer with a cache of C = 0..E whole experts [L, E + 1].

    K (1 - H(C)) (1 - beta) (AdapMoE section 4.3), where beta is the share of the needed experts that are among the
    `guesses` first predicted ones, taken to be independent of what is cached.
    """
    rows = []
    for layer in statistics:
        found = layer.accuracy[:guesses].sum() / layer.per_step if layer.needed else 0.0
        rows.append(layer.per_step * (1.0 - layer.hit_rate) * max(0.0, 1.0 - found))
    return np.array(rows)


def cache_sizes(costs: NDArray[np.float64], slots: int) -> tuple[int, ...]:
    """Slots of each layer, at least one, so that the sum of the costs is least: dynamic programming, exact.

    O(L * slots * E). Of equal divisions the one that gives the first layers less.

    Args:
        costs: of each layer by its number of slots, 0 to E [L, E + 1]. slots: in all; those that no layer has an expert
            for stay unused.

    Raises:
        ValueError: fewer slots than layers.
    """
    layers, most = costs.shape[0], costs.shape[1] - 1
    if slots < layers:
        raise ValueError(f"{slots} slots for {layers} layers")
    total = min(slots, layers * most)
    best = np.full((layers + 1, total + 1), np.inf)  # best[l, t]: of the first l layers with t slots in all
    best[0, 0] = 0.0
    for layer in range(layers):
        for size in range(1, min(most, total) + 1):
            reached = best[layer, : total + 1 - size] + costs[layer, size]
            np.minimum(best[layer + 1, size:], reached, out=best[layer + 1, size:])
    left = int(best[layers].argmin())  # more slots never cost more, if the costs never rise
    sizes: list[int] = []
    for layer in reversed(range(layers)):
        options = range(min(most, left), 0, -1)
        size = min(options, key=lambda s: best[layer, left - s] + costs[layer, s])
        sizes.append(size)
        left -= size
    return tuple(reversed(sizes))
