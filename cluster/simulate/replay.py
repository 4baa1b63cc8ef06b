"""Serve a trace's requests on a simulated engine: continuous batching of whole iterations, TTFT and TPOT."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from statistics import mean
from typing import Any

from .executor import SimulatedEngine
from .trace import Iteration, Request


@dataclass(frozen=True)
class Served:
    """What a replay took, on the virtual clock. tokens: rows served; those of a prompt count.

    ttft_s, tpot_s: means over requests, of tpot_s over those with two tokens or more; zero where there is none.
    """

    requests: int
    forwards: int
    tokens: int
    generated: int
    wall_s: float
    ttft_s: float
    tpot_s: float


@dataclass(eq=False)
class _Running:
    name: str
    left: Iterator[Iteration]
    next: Iteration | None
    begun_s: float
    first_s: float | None = None
    tokens: int = 0  # generated


def serve(
    engine: SimulatedEngine, requests: Iterable[Request], at_once: int = 1, advanced: Callable[[], None] | None = None
) -> Served:
    """Run requests as recorded, so many in each forward; the next one begins as soon as one ends.

    Args:
        advanced: called after each request.
    """
    waiting, running = iter(requests), list[_Running]()
    ttft_s, tpot_s = [], []
    start_s, forwards, tokens, generated, done = engine.clock.now_s, 0, 0, 0, 0
    while True:
        while len(running) < at_once and (request := next(waiting, None)) is not None:
            left = iter(request.iterations)
            running.append(_Running(f"trace-{request.number}", left, next(left, None), engine.clock.now_s))
        if not running:
            break
        parts = [(r.name, r.next) for r in running if r.next is not None]
        engine.forward(parts)
        now_s = engine.clock.now_s
        forwards += 1
        tokens += sum(len(part.tokens) for _, part in parts)
        for r in list(running):
            r.next = next(r.left, None)
            if r.next is None or r.next.decode:  # the forward that ended the prefill, or a decode's
                r.tokens += 1
                r.first_s = now_s if r.first_s is None else r.first_s
            if r.next is None:
                running.remove(r)
                engine.end_sequence(r.name)
                ttft_s.append((r.first_s or now_s) - r.begun_s)
                if r.tokens > 1 and r.first_s is not None:
                    tpot_s.append((now_s - r.first_s) / (r.tokens - 1))
                generated += r.tokens
                done += 1
                if advanced is not None:
                    advanced()
    wall_s = engine.clock.now_s - start_s
    return Served(
        done, forwards, tokens, generated, wall_s, mean(ttft_s) if ttft_s else 0.0, mean(tpot_s) if tpot_s else 0.0
    )


def result(engine: SimulatedEngine, served: Served) -> dict[str, Any]:
    """The engine's counters (as of a real engine) and what the replay took, flat."""
    engine.stats.loads_in_flight = engine.cache.loads_in_flight
    engine.stats.prefetch_resting = engine.cache.governor.resting
    return engine.stats.as_dict() | {
        "requests": served.requests, "forwards_run": served.forwards, "tokens": served.tokens,
        "generated_tokens": served.generated, "virtual_s": served.wall_s, "ttft_s": served.ttft_s,
        "tpot_s": served.tpot_s,
    }  # fmt: skip
