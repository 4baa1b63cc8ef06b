"""Stand-ins for the actors: the same methods, canned tokens, no torch."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from typing import Any

from ray import cloudpickle

from tiermoe.actors.engine.stats import EngineStats, LayerResidency, LayerStats
from tiermoe.actors.requests import GenerationRequest, TokenEvent
from tiermoe.actors.settings import EngineSettings
from tiermoe.cluster.topology.spec import ModelFacts
from tiermoe.errors import BudgetError, StoreError

FAKE_FACTS = ModelFacts(
    name="fake", layers=2, experts=8, top_k=2, hidden=8, intermediate=16, gates=2, expert_elements=384,
    dense_elements=512, kv_elements=4, item_bytes=4, source="the tests",
)  # fmt: skip

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # Ray's workers cannot import the tests


class FakeStore:
    def __init__(self, path: str, index: int) -> None:
        if path == "broken":
            raise StoreError("the store 'broken' is incomplete; twice", "prepare it again")
        self.path = path

    def health(self) -> dict[str, Any]:
        return {"state": "serving"}

    def describe(self) -> dict[str, Any]:
        return {"path": self.path}


class FakeWorker:
    """Yields the tokens 0, 1, 2, ...; the prompt's first id picks what happens.

    7: the process dies after the second token. 8: no token ever comes (until cancelled).
    """

    def __init__(self, settings: EngineSettings, view: Any, ndp: Any = None) -> None:
        self._settings, self._view = settings, view
        self._cancelled: dict[str, threading.Event] = {}

    def start(self) -> dict[str, Any]:
        return fake_plan(self._settings, str(self._view["path"]))

    def health(self) -> dict[str, Any]:
        return {
            "state": "serving",
            "pid": os.getpid(),
            "omp": os.environ.get("OMP_NUM_THREADS"),
            "waiting": sum(not event.is_set() for event in self._cancelled.values()),
        }

    def generate(self, request: GenerationRequest) -> Iterator[TokenEvent]:
        behaviour, name = request.prompt_ids[0], request.request_id
        cancelled = self._cancelled.setdefault(name, threading.Event())
        for token in range(request.sampling.max_tokens):
            if behaviour == 8:
                cancelled.wait()
            if cancelled.is_set():
                yield TokenEvent(name, (), "cancelled")
                return
            if behaviour == 7 and token == 2:
                os._exit(3)
            yield TokenEvent(name, (token,))
        cancelled.set()
        yield TokenEvent(name, (), "length", ttft_s=0.01, tpot_s=0.002)

    def cancel(self, request_id: str) -> None:
        self._cancelled.setdefault(request_id, threading.Event()).set()

    def stats(self) -> EngineStats:
        layer = LayerStats(hits=6, misses=2, bytes_loaded_demand=2048, blocked_io_s=0.5, total_io_s=0.75, forwards=4)
        return EngineStats(
            layers=[layer, LayerStats()], expert_budget_bytes=4096, expert_bytes_peak=4096, slots=4, experts=16,
            executor="emulated",
        )  # fmt: skip

    def reset_stats(self) -> None: ...

    def plan(self) -> dict[str, Any]:
        return self.start()

    def residency(self) -> list[LayerResidency]:
        return [LayerResidency((2, 2, 1, 0, 0, 0, 0, 0), (4, 2, 0, 0, 0, 0, 0, 0)), LayerResidency((0,) * 8, (0,) * 8)]

    def trace_events(self) -> list[dict[str, Any]]:
        return [{"name": "forward", "ph": "X", "ts": 0, "dur": 10, "pid": 1, "tid": 1}]


class RefusingWorker(FakeWorker):
    """Refuses to start, as a worker whose budget is too small does."""

    def start(self) -> dict[str, Any]:
        raise BudgetError("budget 1 is less than one expert", "give at least 1024 bytes")


class StuckWorker(FakeWorker):
    """Never becomes ready."""

    def start(self) -> dict[str, Any]:
        threading.Event().wait()
        raise AssertionError


def fake_plan(settings: EngineSettings, store_path: str) -> dict[str, Any]:
    return {
        "model": "fake", "architecture": "FakeForCausalLM", "policy": settings.policy.name,
        "lossless": settings.policy.lossless, "executor": "emulated", "device": "cpu", "dtype": "float32",
        "threads": settings.threads, "moe_layers": 2, "experts_per_layer": 8, "top_k": 2, "experts": 16, "slots": 4,
        "slot_bytes": 1024, "expert_bytes_total": 16384, "expert_budget_bytes": 4096, "dense_bytes": 2048,
        "store_path": store_path, "store_bytes": 20000, "link": settings.link.model_dump(), "pinned": None,
        "prefetch": settings.policy.prefetch.kind, "eviction": settings.policy.eviction, "batching": "continuous",
        "kv_tokens": 8192,
        "max_prompt_tokens": 128, "notes": ["a fake"],
    }  # fmt: skip
