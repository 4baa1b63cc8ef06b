"""Serve a trace's requests on a simulated engine, and hit rates of eviction policies without prefetch.

`serve` batches whole iterations continuously and measures TTFT and TPOT. `hit_rates` replays routing on caches of
single layers, as in MoEpic's Table 1, with Belady's optimum.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import mean
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...actors.policies.eviction import Belady, EvictionPolicy
from ...actors.policies.registry import PolicyContext, make, options
from .arrivals import Arrival, all_at_once, arriving, percentile
from .executor import SimulatedEngine
from .trace import Iteration, Request


@dataclass(frozen=True)
class Served:
    """Results of a replay, in seconds of the virtual clock."""

    requests: int
    forwards: int
    tokens: int  # rows served, prompts included
    generated: int
    wall_s: float
    ttft_s: float  # mean over requests; 0: none
    tpot_s: float  # mean over requests with two tokens or more; 0: none
    step_s: float  # mean decode step, without those that are a request's first: placements migrate there; 0: none
    queue_s: float  # mean from a request's arrival to its first forward
    latency_s: tuple[float, float]  # median and 99th percentile from arrival to the last token


@dataclass(eq=False)
class _Running:
    name: str
    left: Iterator[Iteration]
    next: Iteration | None
    arrived_s: float
    first_s: float | None = None
    tokens: int = 0  # generated


def serve(
    engine: SimulatedEngine,
    requests: Iterable[Request],
    at_once: int = 1,
    advanced: Callable[[], None] | None = None,
    arrivals: Iterable[Arrival] | None = None,
) -> Served:
    """Run recorded requests, up to `at_once` in each forward.

    A request joins at the first forward after its arrival at which there is room, in order of arrival; TTFT and latency
    include its time in the queue. With nothing to run, the clock advances to the next arrival.

    Args:
        advanced: called after each request.
        arrivals: in seconds from now; requests without one are not run. None: a request arrives when there is room.
    """
    closed = arrivals is None
    waiting = all_at_once(requests) if arrivals is None else arriving(requests, arrivals)
    upcoming, running = next(waiting, None), list[_Running]()
    ttft_s, tpot_s, queue_s, latency_s, step_s = [], [], list[float](), list[float](), list[float]()
    start_s, forwards, tokens, generated, done = engine.clock.now_s, 0, 0, 0, 0
    while upcoming is not None or running:
        if not closed and not running and upcoming is not None:
            engine.clock.now_s = max(engine.clock.now_s, start_s + upcoming[0])
        now_s = engine.clock.now_s
        while upcoming is not None and len(running) < at_once and (closed or start_s + upcoming[0] <= now_s):
            arrived_s, request = now_s if closed else start_s + upcoming[0], upcoming[1]
            left = iter(request.iterations)
            running.append(_Running(f"trace-{request.number}", left, next(left, None), arrived_s))
            queue_s.append(now_s - arrived_s)
            upcoming = next(waiting, None)
        parts = [(r.name, r.next) for r in running if r.next is not None]
        begin_s = engine.clock.now_s
        engine.forward(parts)
        now_s = engine.clock.now_s
        if all(r.tokens > 1 for r in running):
            step_s.append(now_s - begin_s)
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
                ttft_s.append((r.first_s or now_s) - r.arrived_s)
                latency_s.append(now_s - r.arrived_s)
                if r.tokens > 1 and r.first_s is not None:
                    tpot_s.append((now_s - r.first_s) / (r.tokens - 1))
                generated += r.tokens
                done += 1
                if advanced is not None:
                    advanced()
    wall_s = engine.clock.now_s - start_s
    return Served(
        done, forwards, tokens, generated, wall_s, mean(ttft_s) if ttft_s else 0.0, mean(tpot_s) if tpot_s else 0.0,
        mean(step_s) if step_s else 0.0, mean(queue_s) if queue_s else 0.0,
        (percentile(latency_s, 0.5), percentile(latency_s, 0.99)),
    )  # fmt: skip


def result(engine: SimulatedEngine, served: Served) -> dict[str, Any]:
    """The engine's counters, as of a real engine, and the replay's results, flat."""
    stats = engine.live_stats()
    return stats.as_dict() | {
        "requests": served.requests, "forwards_run": served.forwards, "tokens": served.tokens,
        "generated_tokens": served.generated, "virtual_s": served.wall_s, "ttft_s": served.ttft_s,
        "queue_s": served.queue_s, "latency_p50_s": served.latency_s[0], "latency_p99_s": served.latency_s[1],
        "tpot_s": served.tpot_s, "step_s": served.step_s,
        "prefill_hit_rate": stats.prefill_hit_rate, "decode_hit_rate": stats.decode_hit_rate,
    }  # fmt: skip


Ids = NDArray[np.integer]
Make = Callable[[Ids], EvictionPolicy]  # ids [n, K] of one layer, all of them -> a policy for it
POLICIES = ("random", "lfu", "lru", "lcp", "belady")


@dataclass(frozen=True, eq=False)
class HitRates:
    """Hit rates of one policy at one cache size."""

    policy: str
    size: int  # slots of each layer
    overall: float  # mean over layers
    per_layer: tuple[float, ...]  # share of counted needs that were resident when the routing became known [L]


def policies(names: Sequence[str] = POLICIES) -> dict[str, Make]:
    """Makers of the engine's own policies, and of `belady`.

    Raises:
        ValueError: there is no such policy.
    """
    return {name: Belady if name == "belady" else _maker(name) for name in names}


def hit_rates(
    ids: Ids,
    sizes: Sequence[int],
    makers: Mapping[str, Make],
    counted: NDArray[np.bool_] | None = None,
    advanced: Callable[[], None] | None = None,
) -> list[HitRates]:
    """Replay each layer's tokens one by one on a cache of its own, for each policy and size, with demand loads.

    Args:
        ids: experts of each token [L, n, K]. sizes: slots of each layer.
        counted: tokens that count [n]; None: all. advanced: called after each policy and size.
    """
    mask = np.ones(ids.shape[1], bool) if counted is None else counted
    needs = int(mask.sum()) * ids.shape[2]
    table = []
    for name, maker in makers.items():
        for size in sizes:
            hits = [_hits(layer, size, maker(layer), mask) for layer in ids]
            rates = tuple(h / needs if needs else 0.0 for h in hits)
            table.append(HitRates(name, size, sum(rates) / len(rates) if rates else 0.0, rates))
            if advanced is not None:
                advanced()
    return table


def _maker(kind: str) -> Make:
    chosen = options("eviction", kind)
    return lambda ids: make("eviction", chosen, PolicyContext(1, int(ids.max(initial=0)) + 1, one_layer=True))


def _hits(ids: Ids, size: int, policy: EvictionPolicy, counted: NDArray[np.bool_]) -> int:
    resident: set[int] = set()
    hits, ones = 0, [1] * ids.shape[1]
    for keys, counts in zip(ids.tolist(), counted.tolist(), strict=True):
        missing = [key for key in keys if key not in resident]
        hits += (len(keys) - len(missing)) if counts else 0
        policy.routed(keys, ones, 1)
        for i, key in enumerate(missing):
            if len(resident) == size:
                victims = policy.victims(1, partial(_is_other, keys))
                done = missing[:i] + [k for k in keys if k in resident]
                victim = victims[0] if victims else next(k for k in done if k in resident)
                policy.removed(victim)
                resident.remove(victim)
            policy.admitted(key)
            resident.add(key)
        policy.used([key for key in keys if key in resident])
    return hits


def _is_other(keys: Sequence[int], key: int) -> bool:
    return key not in keys
