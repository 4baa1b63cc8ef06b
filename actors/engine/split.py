"""The cache configurator: records what forwards do, and splits the cache anew when that is expected to gain (MoEpic).

    forward's thread: routed, predicted, ran (appending) ... begin_forward (apply)
    own thread:       batches of steps -> statistics -> every tau tokens a configuration -> a cut to apply

The simulator decides on the forward's thread, where it takes no time (`threaded=False`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
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
from .host_view import Routing
from .prefetching import Prefetching
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
        top_k: experts of a token. prefetched: experts that are prefetched for a layer at most. expert_bytes: of a slot
            that holds a whole one.
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
        assert cache.cut is not None
        self.layers = len(cache.cut.tops)
        self._cache, self._settings, self._order = cache, settings, order
        self._experts, self._prefetched, self._expert_bytes = experts, prefetched, expert_bytes
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
                allocation=split.allocation, prefetched=self._prefetched,
            )  # fmt: skip
        except ValueError as error:
            stats.problem = str(error)
            return None
        stats.configurations += 1
        return found

    def apply(self, found: Configured) -> None:
        """Cut the cache, between two forwards, and fill it with the experts that rank highest."""
        cache, stats = self._cache, self.stats
        cache.recut(found.layout, cache.eviction.ranked(range(len(cache.uses))))
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


class Recorder:
    """Makes steps of what a forward's layers tell: lists are kept as they come, nothing is computed.

    Args:
        layers: of the model. clock: seconds.
    """

    def __init__(self, cache: ExpertCache, layers: int, clock: Callable[[], float] = time.perf_counter) -> None:
        self._cache, self._clock, self._last = cache, clock, layers - 1
        self._scores: list[NDArray[np.floating] | None] = [None] * layers
        self._step: Step | None = None
        self._follows = False  # on a decode that ended
        self._entered_s, self._left_s, self._blocked_s = 0.0, 0.0, 0.0

    def routed(self, layer: int, routing: Routing) -> None:
        """A layer's routing is known, as its experts will run."""
        now_s = self._entered_s = self._clock()
        if layer == 0:
            self._step = Step(self._cache.decode_only, routing.tokens, now_s - self._left_s if self._follows else None)
            self._follows = False
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

    def predicted(self, layer: int, scores: NDArray[np.floating]) -> None:
        """What was foreseen of a layer, of this forward or (the first one's) of the next: scores [rows, E]."""
        self._scores[layer] = scores

    def ran(self, layer: int) -> Step | None:
        """A layer's experts have run; the forward, if it was the last one and every layer of it was seen."""
        now_s = self._left_s = self._clock()
        step = self._step
        if step is None or len(step.experts) != layer + 1:
            return None
        waited_s = max(0.0, self._cache.stats.layers[layer].blocked_io_s - self._blocked_s)
        step.moe_s += max(0.0, now_s - self._entered_s - waited_s)
        if layer != self._last:
            return None
        self._step, self._follows = None, step.decode
        return step


@dataclass(frozen=True, slots=True)
class _Ask:
    """Configure now, whatever tau says."""

    done: Event


class Configuring:
    """A configurator beside an engine: fed by its forwards, applied between them.

    Args:
        configurator: of the engine's cache, which has no other user.
        cache: of the engine. tau: tokens between configurations.
        clock: seconds, by which layers are timed.
        threaded: compute in a thread; False: on the forward's, at once.
        batch: forwards that are handed over together: what is kept of their scores stays small.
    """

    def __init__(
        self, configurator: Configurator, cache: ExpertCache, tau: int,
        clock: Callable[[], float] = time.perf_counter, threaded: bool = True, batch: int = 128,
    ) -> None:  # fmt: skip
        self._configurator, self._tau, self._batch = configurator, tau, batch
        self._clock, self._recorder = clock, Recorder(cache, configurator.layers, clock)
        self.predicted = self._recorder.predicted
        self._lock = Lock()  # of `_steps`, which are handed over by the forward's thread or by who asks
        self._steps: list[Step] = []
        self._tokens = 0  # of these
        self._found: Configured | None = None
        self._queue: SimpleQueue[list[Step] | _Ask | None] = SimpleQueue()
        self._thread: Thread | None = None
        if threaded:
            self._thread = Thread(target=self._work, name="configurator", daemon=True)
            self._thread.start()

    # -- on the forward's thread ---------------------------------------------------------------------------

    def begin_forward(self) -> None:
        """Between two forwards: change to the cut that was found since."""
        found = self._found
        if found is not None:
            self._configurator.apply(found)
            self._found = None

    def routed(self, layer: int, routing: Routing) -> None:
        """A layer's routing is known, as its experts will run."""
        start_s = self._clock()
        self._recorder.routed(layer, routing)
        self._configurator.stats.record_s += self._clock() - start_s

    def ran(self, layer: int) -> None:
        """A layer's experts have run."""
        start_s = self._clock()
        step = self._recorder.ran(layer)
        if step is not None:
            with self._lock:
                self._steps.append(step)
                self._tokens += step.tokens
                if len(self._steps) >= self._batch or self._tokens >= self._tau:
                    self._hand_over()
        self._configurator.stats.record_s += self._clock() - start_s

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
        if self._thread is not None:
            self._thread.join()

    def _hand_over(self) -> None:
        steps, self._steps, self._tokens = self._steps, [], 0
        if self._thread is None:
            self._decide(steps, asked=False)
        elif steps:
            self._queue.put(steps)

    def _decide(self, steps: Sequence[Step], asked: bool) -> None:
        """Count these forwards, and configure if it is time or asked for."""
        if steps:
            self._configurator.add(steps)
        if (asked or self._configurator.due) and self._found is None:
            self._found = self._configurator.configure()

    # -- on the own thread -------------------------------------------------------------------------------------

    def _work(self) -> None:
        while (item := self._queue.get()) is not None:
            start_s = time.perf_counter()
            try:
                self._decide(() if isinstance(item, _Ask) else item, isinstance(item, _Ask))
            except Exception as error:  # serving goes on with the cut that it has, and the summary says so
                self._configurator.stats.problem = f"{type(error).__name__}: {error}"
            self._configurator.stats.configure_s += time.perf_counter() - start_s
            if isinstance(item, _Ask):
                item.done.set()


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
    """The configurator of a policy whose split adapts, which learns what is prefetched; None for any other policy.

    Args:
        experts: of a layer. top_k: of a token. expert_bytes: of a slot that holds a whole one. clock, threaded, batch:
            as `Configuring`.
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
