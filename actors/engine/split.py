"""The cache configurator (MoEpic): records forwards and changes the split when a better one is found.

    forward's thread: routed, predicted, ran (appending) ... begin_forward (apply)
    own thread:       batches of steps -> statistics -> every tau tokens a configuration -> a split to apply

In the simulator everything runs on the forward's thread and takes no virtual time (`threaded=False`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import isnan
from queue import SimpleQueue
from statistics import median
from threading import Event, Lock, Thread
from typing import cast

import numpy as np
from numpy.typing import NDArray

from ..policies.eviction import CacheOrder
from ..policies.moepic.configure import Configured, Room, Times, configure
from ..policies.moepic.split import LayerStatistics, Picks, Priorities, SplitOptions, observe
from ..policy_settings import PolicySettings
from .cache.cache import ExpertCache
from .hooks import Passed
from .prefetching import Prefetching
from .stats import ConfiguratorStats

_TIMES = 4096  # forwards whose times are stored


@dataclass(slots=True)
class Step:
    """One forward, as it was recorded."""

    decode: bool  # it carried no row of a prompt
    tokens: int
    head_s: float | None  # from the last layer of the forward before to the first routing; None: not of two decodes
    predicted: list[tuple[int, NDArray[np.floating]]] = field(default_factory=list)  # layer, scores [rows, E]
    passes: list[Passed] = field(default_factory=list)
    layers: int = 0  # recorded so far
    attention_s: float = 0.0  # between layers, summed
    moe_s: float = 0.0  # in layers without waits for copies, summed

    def tables(self, layers: int, experts: int) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
        """Rows of each expert, and the highest score of any row that was predicted, or NaN: both [L, E]."""
        counts, scores = np.zeros((layers, experts), np.int64), np.full((layers, experts), np.nan)
        for layer, seen in self.predicted:
            scores[layer] = seen[0] if len(seen) == 1 else seen.max(axis=0)
        for found in self.passes:
            stop = found.layer + len(found.counts)
            counts[found.layer : stop] = found.counts
            if found.scores is not None:
                ahead = found.scores[:-1]
                np.copyto(scores[found.layer + 1 : stop], ahead, where=~np.isnan(ahead[:, :1]))
        return counts, scores


class Configurator:
    """Statistics and times of one engine's forwards, and the best split by them (MoEpic section 3.4).

    Statistics count forwards without rows of a prompt, each as one step with the experts that it needs; with one
    sequence a step is a token, as in the paper. Prompts count in the experts' priorities and in tau. Statistics cover
    all forwards, times are medians of the latest.

    Args:
        cache: is split; `cache.split` is the present split. order: eviction order of its tops. experts: of a layer.
        top_k: experts of a token. prefetched: experts prefetched for a layer at most. expert_bytes: of a whole slot.
    """

    def __init__(
        self,
        cache: ExpertCache,
        settings: SplitOptions,
        order: CacheOrder,
        experts: int,
        top_k: int,
        prefetched: int,
        expert_bytes: int,
    ) -> None:
        assert cache.split is not None
        self.layers = len(cache.split.tops)
        self._cache, self._settings, self._order = cache, settings, order
        self._experts, self._prefetched, self._expert_bytes = experts, prefetched, expert_bytes
        self._room = Room(cache.split.neurons, cache.pool.total_neurons, top_k, settings.buffer)
        self._statistics = LayerStatistics.none(self.layers, experts)
        self._priorities = Priorities.none(self.layers, experts)
        self._attention_s, self._moe_s, self._head_s = list[float](), list[float](), list[float]()
        self._tokens = 0  # since the last configuration
        cache.stats.configurator = ConfiguratorStats()

    @property
    def stats(self) -> ConfiguratorStats:
        """The counters since the last reset."""
        found = self._cache.stats.configurator
        assert found is not None
        return found

    @property
    def due(self) -> bool:
        """Whether tau tokens have passed since the last configuration."""
        return self._tokens >= self._settings.tau

    def add(self, steps: Sequence[Step]) -> None:
        """Count these forwards."""
        counts, scores = zip(*[step.tables(self.layers, self._experts) for step in steps], strict=True)
        picks = Picks(np.stack(counts), np.array([step.tokens for step in steps]), np.stack(scores))
        counted = np.array([step.decode for step in steps])
        found, self._priorities = observe(picks, self._order, self._priorities, counted)
        self._statistics += found
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
        """A better split than the present one; None: there is none yet. An error only sets `stats.problem`."""
        self._tokens = 0
        times, present, split = self.times(), self._cache.split, self._settings
        if times is None or present is None:
            return None
        stats = self.stats
        stats.attention_s, stats.moe_s = times.attention_s, times.moe_s
        stats.head_s, stats.load_s = times.head_s, times.load_s
        try:
            found = configure(
                self._statistics.by_layer(), times, self._room, present, zeta=split.zeta, min_gain=split.min_gain,
                allocation=split.allocation, prefetched=self._prefetched,
            )  # fmt: skip
        except ValueError as error:
            stats.problem = str(error)
            return None
        stats.configurations += 1
        return found

    def apply(self, found: Configured) -> None:
        """Change the cache's split between two forwards, and load the highest-ranked experts."""
        cache, stats = self._cache, self.stats
        cache.set_split(found.layout, cache.eviction.ranked(range(len(cache.uses))))
        stats.reconfigurations += 1
        stats.expected_before_s, stats.expected_after_s = found.before_s, found.after_s

    def times(self) -> Times | None:
        """The measured times; None before the first decode and load."""
        sums = self._cache.core.summed
        loaded, busy_s = self._cache.bytes_loaded, sums.total_io_s
        if not self._moe_s or not loaded or busy_s <= 0:
            return None
        attention_s = median(self._attention_s) if self._attention_s else 0.0
        first_s = median(self._head_s) if self._head_s else attention_s
        return Times(
            attention_s, median(self._moe_s), max(0.0, first_s - attention_s), busy_s / loaded * self._expert_bytes
        )


class Recorder:
    """Records each forward's layers as a `Step`; stores what it gets and computes nothing.

    Args:
        layers: L. ended: called with each step of which all layers were recorded. clock: of the time of recording.

    Attributes:
        spent_s: time of recording.
    """

    def __init__(
        self, cache: ExpertCache, layers: int, ended: Callable[[Step], None],
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:  # fmt: skip
        self._cache, self._ended, self._clock, self._layers = cache, ended, clock, layers
        self.spent_s = 0.0
        self._scores: list[NDArray[np.floating] | None] = [None] * layers  # predicted for layers to come
        self._step: Step | None = None
        self._follows, self._left_s = False, 0.0  # the forward before was a decode; when its last layer ended

    def predicted(self, layer: int, scores: NDArray[np.floating]) -> None:
        """A layer's predicted scores [rows, E], of this forward or (layer 0) of the next."""
        self._scores[layer] = scores if len(scores) else None

    def passed(self, found: Passed) -> None:
        """Layers have run."""
        now_s, layer, stop = self._clock(), found.layer, found.layer + len(found.counts)
        if layer == 0:
            head_s = found.began_s[0] - self._left_s if self._follows else None
            self._step, self._follows = Step(self._cache.core.decode_only, found.tokens, head_s), False
        step = self._step
        if step is not None and step.layers == layer:  # else layers before were not recorded
            self._add(step, found, stop)
        if found.scores is not None and not isnan(found.scores[-1, 0]):
            self._scores[stop % self._layers] = found.scores[-1:]
        self._left_s = found.ended_s[-1]
        if step is not None and step.layers == stop == self._layers:
            self._step, self._follows = None, step.decode
            self._ended(step)
        self.spent_s += self._clock() - now_s

    def _add(self, step: Step, found: Passed, stop: int) -> None:
        step.passes.append(found)
        step.layers = stop
        for at in range(found.layer, stop):
            if (scores := self._scores[at]) is not None:
                step.predicted.append((at, scores))
                self._scores[at] = None
        before_s = self._left_s if found.layer else found.began_s[0]
        for began, ended, waited in zip(found.began_s, found.ended_s, found.waited_s, strict=True):
            step.attention_s += began - before_s
            step.moe_s += max(0.0, ended - began - waited)
            before_s = ended


class Configuring:
    """Runs a configurator beside an engine: recorded by the forwards, applied between them.

    Args:
        tau: tokens between configurations.
        clock: in seconds; times the layers.
        threaded: compute in a thread; False: on the forward's thread.
        batch: forwards handed over together, which bounds the memory for scores.
    """

    def __init__(
        self, configurator: Configurator, cache: ExpertCache, tau: int,
        clock: Callable[[], float] = time.perf_counter, threaded: bool = True, batch: int = 128,
    ) -> None:  # fmt: skip
        self._configurator, self._tau, self._batch = configurator, tau, batch
        self._recorder = recorder = Recorder(cache, configurator.layers, self._add, clock)
        self.predicted, self.passed = recorder.predicted, recorder.passed
        self._lock = Lock()  # of `_steps`: handed over by the forward's thread or by `ask`
        self._steps: list[Step] = []
        self._tokens = 0  # of `_steps`
        self._found: Configured | None = None
        self._queue: SimpleQueue[list[Step] | Event | None] = SimpleQueue()  # an event: configure now, then set it
        self._thread: Thread | None = None
        if threaded:
            self._thread = Thread(target=self._work, name="configurator", daemon=True)
            self._thread.start()

    # -- on the forward's thread ---------------------------------------------------------------------------

    def begin_forward(self) -> None:
        """Apply a split that was found since the last forward."""
        found = self._found
        if found is not None:
            self._configurator.apply(found)
            self._found = None

    def _add(self, step: Step) -> None:
        """A forward has ended, all of whose layers were recorded."""
        self._configurator.stats.record_s += self._recorder.spent_s
        self._recorder.spent_s = 0.0
        with self._lock:
            self._steps.append(step)
            self._tokens += step.tokens
            if len(self._steps) >= self._batch or self._tokens >= self._tau:
                self._hand_over()

    # -- from any thread -------------------------------------------------------------------------------------

    def ask(self) -> Event:
        """Configure with the steps recorded so far; the event is set afterwards.

        A better split is applied when the next forward begins.
        """
        done = Event()
        with self._lock:
            self._hand_over()
            self._queue.put(done)
        return done

    def close(self) -> None:
        """Stop the thread. Safe to call twice."""
        self._queue.put(None)
        if self._thread is not None:
            self._thread.join()

    def _hand_over(self) -> None:
        steps, self._steps, self._tokens = self._steps, [], 0
        if self._thread is None:
            self._decide(steps, asked=False)
        elif steps:
            self._queue.put(steps)

    def _decide(self, steps: Sequence[Step], asked: bool) -> None:
        """Count these forwards; configure if tau tokens have passed or on request."""
        if steps:
            self._configurator.add(steps)
        if (asked or self._configurator.due) and self._found is None:
            self._found = self._configurator.configure()

    # -- on the own thread -------------------------------------------------------------------------------------

    def _work(self) -> None:
        while (item := self._queue.get()) is not None:
            start_s = time.perf_counter()
            try:
                self._decide(() if isinstance(item, Event) else item, isinstance(item, Event))
            except Exception as error:  # serving continues with the present split; the summary shows the problem
                self._configurator.stats.problem = f"{type(error).__name__}: {error}"
            self._configurator.stats.configure_s += time.perf_counter() - start_s
            if isinstance(item, Event):
                item.set()


def make_configuring(
    policy: PolicySettings,
    cache: ExpertCache,
    experts: int,
    top_k: int,
    expert_bytes: int,
    prefetching: Prefetching | None,
    clock: Callable[[], float] = time.perf_counter,
    threaded: bool = True,
    batch: int = 128,
) -> Configuring | None:
    """The configurator of a policy with an adaptive split, connected to the prefetch scores; None: another policy.

    experts: of a layer. top_k: of a token. expert_bytes: of a whole slot. clock, threaded, batch: as `Configuring`.
    """
    if policy.split.kind != "adaptive":
        return None
    ahead = policy.prefetch
    most = 0 if ahead.kind == "none" else top_k if ahead.top is None else ahead.top
    order = cast(CacheOrder, policy.cache_order)
    configurator = Configurator(cache, policy.split, order, experts, top_k, most, expert_bytes)
    found = Configuring(configurator, cache, policy.split.tau, clock, threaded, batch)
    if prefetching is not None:
        prefetching.on_predicted = found.predicted
    return found
