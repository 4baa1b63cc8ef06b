"""The best cut of one layer, given its memory and the time there is to prefetch (MoEpic, equations 5 to 11)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .statistics import LayerStatistics

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Times:
    """What things take, in seconds.

    attention_s: T_att, from the end of a layer's experts to the next layer's routing. moe_s: T_moe, a layer's experts
    when all are resident. head_s: T_head, from the last layer's experts to the first layer's attention of the next
    token. load_s: T_load, one whole expert over the link.

    Raises:
        ValueError: one is negative, or loading takes no time.
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
        """T_wind of the first layer: the head of the token before, and its own attention."""
        return self.head_s + self.attention_s


@dataclass(frozen=True)
class LayerSplit:
    """A cut of one layer and what it is expected to cost.

    slots: C. theta: share of an expert that is its top. loaded: m, of the needed experts, how many are in memory when
    the routing is known. hide_s: T_hide (equation 5). miss_s: T_miss. exposed_s: what loading adds (equation 6).
    next_window_s: what the next layer has to prefetch in (equation 7).
    """

    slots: int
    theta: float
    loaded: float
    hide_s: float
    miss_s: float
    exposed_s: float
    next_window_s: float


class LayerModel:
    """One layer's statistics, made ready for many questions.

    Args:
        times: what things take. guesses: experts prefetched for a layer at most; None: as many as the window allows.
    """

    def __init__(self, statistics: LayerStatistics, times: Times, guesses: int | None = None) -> None:
        self.experts, self.needed, self._times = statistics.experts, statistics.per_step, times
        most = self.experts if guesses is None else min(guesses, self.experts)
        self._hit_rate = statistics.hit_rate  # [E + 1]
        self._accuracy = statistics.accuracy[:most] if statistics.guessed else np.zeros(0)  # [Y]
        self._guess_hit_rate = statistics.guess_hit_rate[: len(self._accuracy)].T.copy()  # [E + 1, Y]

    def best(self, budget: float, window_s: float) -> LayerSplit:
        """The cut with the most in memory in time (equation 11), over all C; the least C of equal ones.

        Args:
            budget: V, in experts; theta = min(1, V / C). window_s: T_wind.
        """
        sizes = np.arange(1, self.experts + 1)
        thetas = np.minimum(1.0, budget / sizes)
        loaded = self._loaded(sizes, thetas, window_s)
        at = int(loaded.argmax())
        return self._costs(int(sizes[at]), float(thetas[at]), float(loaded[at]))

    def of(self, slots: int, theta: float, window_s: float) -> LayerSplit:
        """The same of a given cut; slots = 0: nothing is cached."""
        loaded = self._loaded(np.array([slots]), np.array([theta]), window_s)
        return self._costs(slots, theta, float(loaded[0]))

    def _loaded(self, sizes: NDArray[np.int64], thetas: Floats, window_s: float) -> Floats:
        """m (equation 11) for each pair of C and theta [n]."""
        missing = 1.0 - self._guess_hit_rate[sizes] * thetas[:, None]  # [n, Y]: of the y-th guess, what is to be loaded
        in_time = np.cumsum(missing * self._times.load_s, axis=1) <= window_s  # equation 9
        prefetched = (missing * self._accuracy * in_time).sum(axis=1)  # equation 10
        cached = self.needed * self._hit_rate[sizes] * thetas
        return np.minimum(self.needed, cached + prefetched)

    def _costs(self, slots: int, theta: float, loaded: float) -> LayerSplit:
        times = self._times
        hide_s = loaded * times.moe_s / self.needed if self.needed else 0.0
        miss_s = (self.needed - loaded) * times.load_s
        return LayerSplit(
            slots, theta, loaded, hide_s, miss_s, max(0.0, miss_s - hide_s),
            (times.moe_s - min(hide_s, miss_s)) + times.attention_s,
        )  # fmt: skip


def expert_split(models: Sequence[LayerModel], budgets: Sequence[float], times: Times) -> list[LayerSplit]:
    """ExpertSplit of Algorithm 1: each layer's best cut in turn, in the window that the one before it leaves.

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
    """What a given cut is expected to cost, layer by layer."""
    window_s, out = times.first_window_s, []
    for model, size, theta in zip(models, slots, thetas, strict=True):
        split = model.of(size, theta, window_s)
        out.append(split)
        window_s = split.next_window_s
    return out


def total_s(splits: Sequence[LayerSplit]) -> float:
    """Exposed latency of a token: the sum over layers, in seconds."""
    return sum(split.exposed_s for split in splits)
