"""One layer's turn on an expert cache, as `MoeLayer` takes it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tiermoe.actors.engine.cache.cache import ExpertCache
from tiermoe.actors.policies.plan import LoadOnMiss


def run_layer(
    cache: ExpertCache, layer: int, segments: Sequence[int], run: Callable[[int], object], guesses: Sequence[int] = ()
) -> None:
    """Load what is missing and give each segment to `run` at its turn, which awaits it; guesses come behind demand."""
    cache.poll()
    cache.drop_stale(layer, segments)
    plan = LoadOnMiss().plan(segments, cache.residency, cache.eviction)
    cache.begin(layer, plan)
    cache.issue([load for load in plan.loads if not load.after])
    cache.prefetch(guesses)
    for i, segment in enumerate(plan.run, start=1):
        run(segment)
        cache.ran([segment])
        cache.issue([load for load in plan.loads if load.after == i])
