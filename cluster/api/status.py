"""What `/ready` and `/status` say of the server and its runtime."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from ...actors.engine.stats import count_needed, hit_rate, needed_shares
from ...errors import TierMoeError
from ...proto.peers import shard_name
from ..host import versions
from ..report.status_tables import merged_residency
from ..report.steps import left_s
from .lead import LeadState
from .metrics import Metrics
from .model import ServedModel
from .refusals import NotReady
from .runs import Runs

_EVERY_S = 1.0
_ANSWER_S = 3.0  # a lead that hangs must not make the answer hang
_RECENT_S = 300.0
_UNKNOWN = NotReady("the runtime has not answered yet")


def not_ready(runs: Runs) -> NotReady | None:
    """Why requests would not be answered now; None: they would. Waits for nothing."""
    states = runs.backend.states()
    if not any(state.serves and state.age_s is not None for state in states):
        return next((_waits_for(state, runs) for state in states if state.problem), _UNKNOWN)
    running = sum(state.load.get("running", 0) for state in states if state.serves)
    silent_s = time.monotonic() - runs.backend.last_event_s
    if running and runs.admission.inside and silent_s > runs.limits.stalled_s:
        return NotReady(f"{running:g} requests run and no token has come for {silent_s:.0f} s")
    return None


def _waits_for(state: LeadState, runs: Runs) -> NotReady:
    since_s = state.health.get("since_s", 0.0) + (state.age_s or 0.0)
    steps = runs.backend.plan.get("start_s", {})
    return NotReady(str(state.problem), left_s(steps, str(state.health.get("state")), since_s))


class StatusReader:
    """What is known of the server and its runtime, read at most once a second, however many clients ask.

    Args:
        model, runs: whose.
    """

    def __init__(self, model: ServedModel, runs: Runs) -> None:
        self._model, self._runs, self._begun_s = model, runs, time.monotonic()
        self._lock = asyncio.Lock()
        self._read_s: float | None = None
        self._text = b""

    async def text(self) -> bytes:
        """It as a JSON object."""
        async with self._lock:
            if self._read_s is None or time.monotonic() - self._read_s >= _EVERY_S:
                self._text = json.dumps(await self._read()).encode()
                self._read_s = time.monotonic()
            return self._text

    async def _read(self) -> dict[str, Any]:
        runs, metrics = self._runs, self._runs.metrics
        waits = not_ready(runs)
        fresh, residency = await asyncio.gather(self._refreshed(), self._residency())
        plan, runtime = runs.backend.plan, metrics.runtime
        stats, load = runtime.stats or {}, runtime.load or {}
        return {
            "model": self._model.name, "policy": plan.get("policy"), "lossless": plan.get("lossless"),
            "version": versions()["tiermoe"], "uptime_s": round(time.monotonic() - self._begun_s, 1),
            "now_s": time.monotonic(), "not_ready": None if waits is None else str(waits), "fresh": fresh,
            "executor": stats.get("executor"),
            "queue": {
                "running": load.get("running"), "waiting": load.get("waiting", 0) + runs.admission.waiting,
                "kv_usage": load.get("kv_usage"),
            },
            "tokens": metrics.token_counts(), "latency": recent_latency(metrics, time.perf_counter()),
            "experts": {
                "hits": stats.get("hits", 0), "misses": stats.get("misses", 0), "needed": count_needed(stats),
                "hit_rate": hit_rate(stats), "shares": needed_shares(stats), "bytes_loaded": stats.get("bytes_loaded"),
                "bytes_wasted": stats.get("bytes_wasted"), "slots": stats.get("slots"), "count": stats.get("experts"),
            },
            "links": [{"gpu": gpu, "busy_s": seconds} for gpu, seconds in runtime.links.items()],
            "residency": residency,
        }  # fmt: skip

    async def _refreshed(self) -> bool:
        """Bring the runtime's counters up to date; False: it does not answer, and they are those of before."""
        try:
            async with asyncio.timeout(_ANSWER_S):
                await self._runs.metrics.refresh(self._runs.admission.waiting)
        except (TierMoeError, TimeoutError):
            return False
        return True

    async def _residency(self) -> list[dict[str, Any]] | None:
        """Of every layer, over all GPUs that answer; None: none does."""
        others = (self._runs.backend.plan.get("shards") or ())[1:]  # the lead's part is the first
        roles = [None, *(shard_name(part["shard"]) for part in others)]
        return merged_residency(await asyncio.gather(*map(self._residency_of, roles)))

    async def _residency_of(self, role: str | None) -> list[dict[str, Any]] | None:
        try:
            async with asyncio.timeout(_ANSWER_S):
                found = await self._runs.backend.ask("residency", role)
        except (TierMoeError, TimeoutError):
            return None
        return [asdict(layer) for layer in found]


def recent_latency(metrics: Metrics, now_s: float) -> dict[str, Any]:
    """Median and 99th percentile of the choices that ended within the last five minutes.

    Args:
        now_s: of `time.perf_counter`.
    """
    recent = [times for times in metrics.recent if times.ended_s is not None and now_s - times.ended_s < _RECENT_S]
    ttft_s = sorted(times.ttft_s for times in recent if times.ttft_s is not None)
    tpot_s = sorted(times.tpot_s for times in recent if times.tpot_s is not None)
    return {"requests": len(recent), "within_s": _RECENT_S, "ttft_s": _spread(ttft_s), "tpot_s": _spread(tpot_s)}


def _spread(values: Sequence[float]) -> dict[str, float] | None:
    """By nearest rank."""
    if not values:
        return None
    return {f"p{q}": values[max(0, -(-len(values) * q // 100) - 1)] for q in (50, 99)}
