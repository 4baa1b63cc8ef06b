"""The cache configurator at work: records what forwards do, and cuts the cache anew when another cut is expected to gain.

    forward's thread: routed, predicted, ran (appending) ... begin_forward (apply)
    own thread:       batches of steps -> statistics -> every tau tokens: configure -> a cut to apply
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from queue import SimpleQueue
from statistics import median
from threading import Event, Lock, Thread

import numpy as np
from numpy.typing import NDArray

from ..policies.split.configure import Configured, Room, configure
from ..policies.split.expert_split import Times
from ..policies.split.statistics import LayerStatistics, Order, Picks, Priorities, observe
from ..settings import SplitSettings
from .cache import ExpertCache
from .routing import Routing
from .stats import ConfiguratorStats

_BATCH = 128  # forwards that are handed over together: what is held of their scores stays small
_TIMES = 4096  # forwards whose times are remembered


@dataclass(slots=True)
class _Step:
    """One forward. decode: it held no row of a prompt. By layer: experts needed, where their pairs start, scores."""

    decode: bool
    tokens: int
    head_s: float | None  # from the last layer of the forward before to the first layer's routing of this one
    experts: list[list[int]] = field(default_factory=list)
    starts: list[list[int]] = field(default_factory=list)
    scores: list[NDArray[np.floating] | None] = field(default_factory=list)
    attention_s: float = 0.0
    moe_s: float = 0.0


@dataclass(frozen=True, slots=True)
class _Ask:
    """Configure now, whatever tau says."""

    done: Event


class Configuring:
    """Records one engine's forwards, and re-cuts its cache between two of them (MoEpic section 3.4).

    Statistics are of forwards that hold no row of a prompt, each of them one step with the experts that it needs, so
    with one sequence a step is a token as in the paper; prompts count in the experts' priorities and in tau. Times are
    medians over the same forwards, by the host's clock, of the experts' part without waits for copies.

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
        self._cache, self._settings, self._order = cache, settings, order
        self._experts, self._guesses, self._expert_bytes = experts, guesses, expert_bytes
        self._room = Room(cache.cut.neurons, cache.pool.total_neurons, top_k, settings.buffer)
        self._cut = cache.cut
        self._last = len(cache.cut.tops) - 1
        cache.stats.configurator = ConfiguratorStats()
        self._scores: list[NDArray[np.floating] | None] = [None] * (self._last + 1)
        self._step: _Step | None = None
        self._entered_s, self._left_s, self._blocked_s = 0.0, 0.0, 0.0
        self._before: _Step | None = None
        self._lock = Lock()  # of `_steps`, which are handed over by the forward's thread or by who asks
        self._steps: list[_Step] = []
        self._found: Configured | None = None
        # Of the own thread:
        self._layers = [LayerStatistics.none(experts) for _ in self._scores]
        self._priorities = [Priorities.none(experts) for _ in self._scores]
        self._attention_s, self._moe_s, self._head_s = list[float](), list[float](), list[float]()
        self._tokens = 0  # since the last configuration
        self._queue: SimpleQueue[list[_Step] | _Ask | None] = SimpleQueue()
        self._thread = Thread(target=self._work, name="configurator", daemon=True)
        self._thread.start()

    @property
    def stats(self) -> ConfiguratorStats:
        """Its counters since the last reset."""
        found = self._cache.stats.configurator
        assert found is not None
        return found

    # -- on the forward's thread ---------------------------------------------------------------------------

    def begin_forward(self) -> None:
        """Between two forwards: change to the cut that was found since, and fill it with what ranks highest."""
        if self._found is None:
            return
        found, self._found = self._found, None
        cache, stats = self._cache, self.stats
        cache.recut(found.cut, cache.eviction.ranked(range(len(cache.uses))))
        stats.reconfigurations += 1
        stats.expected_before_s, stats.expected_after_s = found.before_s, found.after_s

    def routed(self, layer: int, routing: Routing) -> None:
        """A layer's routing is known, as its experts will run."""
        now_s = self._entered_s = time.perf_counter()
        if layer == 0:
            self._begin(routing.tokens, now_s)
        step = self._step
        if step is None or len(step.experts) != layer:
            return
        if layer:
            step.attention_s += now_s - self._left_s
        step.experts.append(routing.experts)
        step.starts.append(routing.starts)
        step.scores.append(self._scores[layer])
        self._scores[layer] = None
        self._blocked_s = self._cache.stats.layers[layer].blocked_io_s
        self.stats.record_s += time.perf_counter() - now_s

    def predicted(self, layer: int, scores: NDArray[np.floating]) -> None:
        """What was foreseen of a layer, of this forward or (the first one's) of the next: scores [rows, E]."""
        self._scores[layer] = scores

    def ran(self, layer: int) -> None:
        """A layer's experts have run."""
        now_s = self._left_s = time.perf_counter()
        step = self._step
        if step is None or len(step.experts) != layer + 1:
            return
        waited_s = max(0.0, self._cache.stats.layers[layer].blocked_io_s - self._blocked_s)
        step.moe_s += max(0.0, now_s - self._entered_s - waited_s)
        if layer == self._last:
            self._before, self._step = step, None
            with self._lock:
                self._steps.append(step)
                steps = self._steps
                if len(steps) >= _BATCH or sum(s.tokens for s in steps) >= self._settings.tau:
                    self._hand_over()
        self.stats.record_s += time.perf_counter() - now_s

    def _begin(self, tokens: int, now_s: float) -> None:
        before, self._before = self._before, None
        decode = self._cache.decode_only
        self._step = _Step(decode, tokens, now_s - self._left_s if before is not None and before.decode else None)

    # -- from any thread -------------------------------------------------------------------------------------

    def ask(self) -> Event:
        """Configure as soon as possible with what was recorded so far; the event is set when it is decided.

        A cut that gains is applied when the next forward begins.
        """
        asked = _Ask(Event())
        with self._lock:
            self._hand_over()
            self._queue.put(asked)
        return asked.done

    def close(self) -> None:
        """Stop. Safe to call twice."""
        self._queue.put(None)
        self._thread.join()

    def _hand_over(self) -> None:
        if self._steps:
            self._queue.put(self._steps)
            self._steps = []

    # -- on the own thread -------------------------------------------------------------------------------------

    def _work(self) -> None:
        while (item := self._queue.get()) is not None:
            start_s = time.perf_counter()
            if isinstance(item, _Ask):
                self._configure()
                self.stats.configure_s += time.perf_counter() - start_s
                item.done.set()
                continue
            self._add(item)
            if self._tokens >= self._settings.tau:
                self._configure()
            self.stats.configure_s += time.perf_counter() - start_s

    def _add(self, steps: Sequence[_Step]) -> None:
        counted = np.array([step.decode for step in steps])
        for layer in range(self._last + 1):
            picks = _picks(steps, layer, self._experts)
            found, after = observe(picks, self._order, self._priorities[layer], counted)
            self._layers[layer] += found
            self._priorities[layer] = after
        for step in steps:
            self._tokens += step.tokens
            if step.decode:
                self._moe_s.append(step.moe_s / (self._last + 1))
                if self._last:
                    self._attention_s.append(step.attention_s / self._last)
                if step.head_s is not None:
                    self._head_s.append(step.head_s)
        for times in (self._moe_s, self._attention_s, self._head_s):
            del times[:-_TIMES]

    def _configure(self) -> None:
        """Look for a better cut, if enough is known; an error of it is reported and stops nothing."""
        self._tokens = 0
        times = self._times()
        if times is None or self._found is not None:
            return
        split = self._settings
        try:
            found = configure(
                self._layers, times, self._room, self._cut, zeta=split.zeta, min_gain=split.min_gain,
                allocation=split.allocation, guesses=self._guesses,
            )  # fmt: skip
        except ValueError as error:
            self.stats.problem = str(error)
            return
        self.stats.configurations += 1
        self.stats.attention_s, self.stats.moe_s = times.attention_s, times.moe_s
        self.stats.head_s, self.stats.load_s = times.head_s, times.load_s
        if found is not None:
            self._cut, self._found = found.cut, found

    def _times(self) -> Times | None:
        """None while nothing was decoded or loaded."""
        layers = self._cache.stats.layers
        loaded, link_s = sum(layer.bytes_loaded for layer in layers), sum(layer.link_s for layer in layers)
        if not self._moe_s or not loaded or link_s <= 0:
            return None
        attention_s = median(self._attention_s) if self._attention_s else 0.0
        first_s = median(self._head_s) if self._head_s else attention_s
        return Times(
            attention_s, median(self._moe_s), max(0.0, first_s - attention_s), link_s / loaded * self._expert_bytes
        )


def _picks(steps: Sequence[_Step], layer: int, experts: int) -> Picks:
    counts = np.zeros((len(steps), experts), np.int64)
    scores = np.full((len(steps), experts), np.nan)
    for i, step in enumerate(steps):
        counts[i, step.experts[layer]] = np.diff(step.starts[layer])
        seen = step.scores[layer]
        if seen is not None and len(seen):
            scores[i] = seen.max(axis=0)
    return Picks(counts, np.array([step.tokens for step in steps]), scores)
