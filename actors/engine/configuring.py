"""The cache configurator at work: records what forwards do, and cuts the cache anew when that is expected to gain.

    forward's thread: routed, predicted, ran (appending) ... begin_forward (apply)
    own thread:       batches of steps -> statistics -> every tau tokens a configuration -> a cut to apply
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from queue import SimpleQueue
from threading import Event, Lock, Thread
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from ..policies.moepic.configure import Configured
from .cache import ExpertCache
from .configurator import Configurator, Step

_BATCH = 128  # forwards that are handed over together: what is held of their scores stays small


class Routed(Protocol):
    """What is recorded of a layer's routing (`engine.routing.Routing`)."""

    @property
    def tokens(self) -> int: ...

    @property
    def experts(self) -> list[int]: ...

    @property
    def starts(self) -> list[int]: ...


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

    def routed(self, layer: int, routing: Routed) -> None:
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
    """A configurator beside a live engine: fed by its forwards, computing in a thread, applied between forwards.

    Args:
        configurator: of the engine's cache, which nobody else uses.
        cache: of the engine. tau: tokens between configurations.
    """

    def __init__(self, configurator: Configurator, cache: ExpertCache, tau: int) -> None:
        self._configurator, self._tau = configurator, tau
        self._recorder = Recorder(cache, configurator.layers)
        self.predicted = self._recorder.predicted
        self._lock = Lock()  # of `_steps`, which are handed over by the forward's thread or by who asks
        self._steps: list[Step] = []
        self._tokens = 0  # of these
        self._found: Configured | None = None
        self._queue: SimpleQueue[list[Step] | _Ask | None] = SimpleQueue()
        self._thread = Thread(target=self._work, name="configurator", daemon=True)
        self._thread.start()

    # -- on the forward's thread ---------------------------------------------------------------------------

    def begin_forward(self) -> None:
        """Between two forwards: change to the cut that was found since."""
        found = self._found
        if found is not None:
            self._configurator.apply(found)
            self._found = None

    def routed(self, layer: int, routing: Routed) -> None:
        """A layer's routing is known, as its experts will run."""
        start_s = time.perf_counter()
        self._recorder.routed(layer, routing)
        self._configurator.stats.record_s += time.perf_counter() - start_s

    def ran(self, layer: int) -> None:
        """A layer's experts have run."""
        start_s = time.perf_counter()
        step = self._recorder.ran(layer)
        if step is not None:
            with self._lock:
                self._steps.append(step)
                self._tokens += step.tokens
                if len(self._steps) >= _BATCH or self._tokens >= self._tau:
                    self._hand_over()
        self._configurator.stats.record_s += time.perf_counter() - start_s

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
            self._steps, self._tokens = [], 0

    # -- on the own thread -------------------------------------------------------------------------------------

    def _work(self) -> None:
        configurator = self._configurator
        while (item := self._queue.get()) is not None:
            start_s = time.perf_counter()
            try:
                if not isinstance(item, _Ask):
                    configurator.add(item)
                if (isinstance(item, _Ask) or configurator.due) and self._found is None:
                    self._found = configurator.configure()
            except Exception as error:  # serving goes on with the cut that it has, and the summary says so
                configurator.stats.problem = f"{type(error).__name__}: {error}"
            configurator.stats.configure_s += time.perf_counter() - start_s
            if isinstance(item, _Ask):
                item.done.set()
