"""Split experts in the simulated executor: the cut that a preset begins with, and how it adapts on a virtual clock."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

import numpy as np
from numpy.typing import NDArray

from ...actors.engine.cache import ExpertCache
from ...actors.engine.configurator import Configurator, Step
from ...actors.engine.configuring import Recorder
from ...actors.policies.moepic.configure import Configured
from ...actors.policies.moepic.split import CacheCut, Order, buffer_for
from ...actors.policy_settings import PolicySettings
from ...actors.settings import budget_bytes
from ...errors import BudgetError, TraceError
from .trace_format import TraceHeader

_BATCH = 64  # forwards that are counted together


@dataclass(frozen=True, slots=True)
class Routed:
    """A layer's routing: see `engine.routing.Routing`."""

    tokens: int
    experts: list[int]
    starts: list[int]


def neurons_of(header: TraceHeader) -> int:
    """I of a trace's experts: a slot holds three numbers for each neuron and hidden dimension.

    Raises:
        TraceError: the slot's bytes are no such experts'.
    """
    of_one = 3 * header.hidden * (4 if header.expert_dtype == "float32" else 2)
    neurons, rest = divmod(header.slot_bytes, of_one)
    if rest or not neurons:
        raise TraceError(
            f"experts of {header.slot_bytes} bytes are not of gated neurons without biases", "replay it without a split"
        )
    return neurons


def first_cut(header: TraceHeader, policy: PolicySettings, budget: float | int) -> CacheCut:
    """The cut that a preset begins with.

    Raises:
        BudgetError: the budget does not hold it. TraceError: the experts cannot be cut.
    """
    split, neurons, keys = policy.split, neurons_of(header), header.layers * header.experts
    slots = min(budget_bytes(budget, header.slot_bytes, keys) // header.slot_bytes, keys)
    buffer = buffer_for(split.theta, header.top_k) if split.buffer is None else split.buffer
    try:
        return CacheCut.uniform(header.layers, header.experts, neurons, slots * neurons, split.theta, buffer)
    except ValueError as error:
        raise BudgetError(f"the budget of {slots} experts cannot be split: {error}", "give more") from error


class SimulatedConfiguring:
    """`engine.configuring.Configuring` without a thread: deciding takes no time, the next forward has the new cut."""

    def __init__(
        self, header: TraceHeader, policy: PolicySettings, cache: ExpertCache, clock: Callable[[], float]
    ) -> None:
        ahead = policy.prefetch
        guesses = 0 if ahead.kind == "none" else header.top_k if ahead.top is None else ahead.top
        order = cast(Order, policy.eviction)
        self._configurator = Configurator(
            cache, policy.split, order, header.experts, header.top_k, guesses, header.slot_bytes
        )
        self._recorder = Recorder(cache, header.layers, clock)
        self._layers, self._tau = header.layers, policy.split.tau
        self._steps: list[Step] = []
        self._found: Configured | None = None

    def begin_forward(self) -> None:
        """Change to the cut that was found since."""
        found, self._found = self._found, None
        if found is not None:
            self._configurator.apply(found)

    def routed(self, layer: int, routing: Routed) -> None:
        """A layer's routing is known."""
        self._recorder.routed(layer, routing)

    def observed(self, layer: int, scores: NDArray[np.floating] | None) -> None:
        """The prefetch policy has seen a layer, and foreseen the next one by these scores."""
        if scores is not None:
            self._recorder.predicted((layer + 1) % self._layers, scores)

    def ran(self, layer: int) -> None:
        """A layer's experts have run."""
        step = self._recorder.ran(layer)
        if step is None:
            return
        self._steps.append(step)
        if len(self._steps) >= _BATCH or sum(s.tokens for s in self._steps) >= self._tau:
            self._configurator.add(self._steps)
            self._steps = []
            if self._configurator.due:
                self._found = self._configurator.configure()
