"""Where the time of a recorded decode step goes on the device, by events before and behind each of its graphs.

    graph 0 | experts of layer 0 | graph 1 | .. | experts of the last layer | graph L
     dense          experts                                                    head

Between two graphs the device reads the routing, waits for the host, and runs the experts' kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any, Protocol

import torch

from tiermoe.actors.engine.serving.recorded import Graph


class Event(Protocol):
    """`torch.cuda.Event`, or a test's."""

    def record(self) -> None: ...
    def elapsed_time(self, end_event: Any) -> float: ...


@dataclass(frozen=True)
class LayerTimes:
    """Microseconds of the device, medians over the steps: dense part and experts of each layer, and what follows."""

    dense_us: Sequence[float]
    experts_us: Sequence[float]
    head_us: float


@dataclass
class Timeline:
    """Makes graphs that are timed while it is `on`; events cost the host some microseconds a graph."""

    new_event: Callable[[], Event] = lambda: torch.cuda.Event(enable_timing=True)
    new_graph: Callable[[], Graph] = torch.cuda.CUDAGraph
    on: bool = False
    spans: list[tuple[Event, Event]] = field(default_factory=list)

    def graph(self) -> Graph:
        return _TimedGraph(self, self.new_graph())

    def by_layer(self, layers: int) -> LayerTimes | None:
        """The times of whole steps of so many layers, which the device has ended; None: there is none."""
        count = layers + 1
        steps = [self.spans[at : at + count] for at in range(0, len(self.spans) - layers, count)]
        if not steps:
            return None
        graphs = [median(_us(*step[i]) for step in steps) for i in range(count)]
        between = [median(_us(step[i][1], step[i + 1][0]) for step in steps) for i in range(layers)]
        return LayerTimes(graphs[:-1], between, graphs[-1])


class _TimedGraph:
    def __init__(self, timeline: Timeline, graph: Graph) -> None:
        self._timeline, self._graph = timeline, graph
        self.capture_begin, self.capture_end = graph.capture_begin, graph.capture_end

    def replay(self) -> None:
        if not self._timeline.on:
            self._graph.replay()
            return
        begin, end = self._timeline.new_event(), self._timeline.new_event()
        begin.record()
        self._graph.replay()
        end.record()
        self._timeline.spans.append((begin, end))


def _us(begin: Event, end: Event) -> float:
    return begin.elapsed_time(end) * 1e3
