"""What the cache configurator knows and decides: steps in, a better cut out; without threads, for any executor."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median

import numpy as np
from numpy.typing import NDArray

from ..policies.moepic.configure import Configured, Room, Times, configure
from ..policies.moepic.split import LayerStatistics, Order, Picks, Priorities, observe
from ..policy_settings import SplitSettings
from .cache import ExpertCache
from .stats import ConfiguratorStats

_TIMES = 4096  # forwards whose times are remembered


@dataclass(slots=True)
class Step:
    """One forward. decode: it held no row of a prompt. head_s: from the last layer of the forward before to the first
    layer's routing of this one; None: not known, or not of two decodes. By layer: experts needed, where their pairs
    start, scores [rows, E] by which they were foreseen or None. attention_s: between layers, moe_s: in them without
    waits for copies; sums over layers, in seconds.
    """

    decode: bool
    tokens: int
    head_s: float | None
    experts: list[list[int]] = field(default_factory=list)
    starts: list[list[int]] = field(default_factory=list)
    scores: list[NDArray[np.floating] | None] = field(default_factory=list)
    attention_s: float = 0.0
    moe_s: float = 0.0


class Configurator:
    """Statistics and times of one engine's forwards, and the cut that they speak for (MoEpic section 3.4).

    Statistics are of forwards that hold no row of a prompt, each of them one step with the experts that it needs, so
    with one sequence a step is a token as in the paper; prompts count in the experts' priorities and in tau. They are
    kept for good. Times are medians over the last of these forwards.

    Args:
        cache: begins with a cut, which is the one in use. order: in which its tops leave. experts: of a layer.
        top_k: experts of a token. guesses: experts that are prefetched for a layer at most. expert_bytes: of a slot
            that holds a whole one.
    """

    def __init__(
        self,
        cache: ExpertCache,
        settings: SplitSettings,
        order: Order,
        experts: int,
        top_k: int,
        guesses: int,
        expert_bytes: int,
    ) -> None:
        assert cache.cut is not None
        self.layers = len(cache.cut.tops)
        self._cache, self._settings, self._order = cache, settings, order
        self._experts, self._guesses, self._expert_bytes = experts, guesses, expert_bytes
        self._room = Room(cache.cut.neurons, cache.pool.total_neurons, top_k, settings.buffer)
        self._statistics = [LayerStatistics.none(experts) for _ in range(self.layers)]
        self._priorities = [Priorities.none(experts) for _ in range(self.layers)]
        self._attention_s, self._moe_s, self._head_s = list[float](), list[float](), list[float]()
        self._tokens = 0  # since the last configuration
        cache.stats.configurator = ConfiguratorStats()

    @property
    def stats(self) -> ConfiguratorStats:
        """Its counters since the last reset."""
        found = self._cache.stats.configurator
        assert found is not None
        return found

    @property
    def due(self) -> bool:
        """Whether tau tokens have passed."""
        return self._tokens >= self._settings.tau

    def add(self, steps: Sequence[Step]) -> None:
        """Count these forwards."""
        counted = np.array([step.decode for step in steps])
        for layer in range(self.layers):
            picks = _picks(steps, layer, self._experts)
            found, after = observe(picks, self._order, self._priorities[layer], counted)
            self._statistics[layer] += found
            self._priorities[layer] = after
        for step in steps:
            self._tokens += step.tokens
            if step.decode:
                self._moe_s.append(step.moe_s / self.layers)
                if self.layers > 1:
                    self._attention_s.append(step.attention_s / (self.layers - 1))
                if step.head_s is not None:
                    self._head_s.append(step.head_s)
        for times in (self._moe_s, self._attention_s, self._head_s):
            del times[:-_TIMES]

    def configure(self) -> Configured | None:
        """A better cut than the present one, if enough is known; an error of it is reported and stops nothing."""
        self._tokens = 0
        times, present, split = self.times(), self._cache.cut, self._settings
        if times is None or present is None:
            return None
        stats = self.stats
        stats.attention_s, stats.moe_s = times.attention_s, times.moe_s
        stats.head_s, stats.load_s = times.head_s, times.load_s
        try:
            found = configure(
                self._statistics, times, self._room, present, zeta=split.zeta, min_gain=split.min_gain,
                allocation=split.allocation, guesses=self._guesses,
            )  # fmt: skip
        except ValueError as error:
            stats.problem = str(error)
            return None
        stats.configurations += 1
        return found

    def apply(self, found: Configured) -> None:
        """Cut the cache, between two forwards, and fill it with the experts that rank highest."""
        cache, stats = self._cache, self.stats
        cache.recut(found.cut, cache.eviction.ranked(range(len(cache.uses))))
        stats.reconfigurations += 1
        stats.expected_before_s, stats.expected_after_s = found.before_s, found.after_s

    def times(self) -> Times | None:
        """What things take, as measured so far; None while nothing was decoded or loaded."""
        layers = self._cache.stats.layers
        loaded, busy_s = sum(layer.bytes_loaded for layer in layers), sum(layer.total_io_s for layer in layers)
        if not self._moe_s or not loaded or busy_s <= 0:
            return None
        attention_s = median(self._attention_s) if self._attention_s else 0.0
        first_s = median(self._head_s) if self._head_s else attention_s
        return Times(
            attention_s, median(self._moe_s), max(0.0, first_s - attention_s), busy_s / loaded * self._expert_bytes
        )


def _picks(steps: Sequence[Step], layer: int, experts: int) -> Picks:
    counts = np.zeros((len(steps), experts), np.int64)
    scores = np.full((len(steps), experts), np.nan)
    for i, step in enumerate(steps):
        counts[i, step.experts[layer]] = np.diff(step.starts[layer])
        seen = step.scores[layer]
        if seen is not None and len(seen):
            scores[i] = seen.max(axis=0)
    return Picks(counts, np.array([step.tokens for step in steps]), scores)
