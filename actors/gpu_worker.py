"""The lead GPU worker: a model whose experts live in a bounded pool, behind a batching loop.

A plain class; `cluster.deploy` makes it an actor. The story of a layer is in `engine/layer.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..errors import RuntimeFailure, UnsupportedModelError
from .expert_store import StoreView, open_views
from .requests import GenerationRequest, TokenEvent
from .settings import EngineSettings, KvSettings


class GpuWorker:
    """Owns the dense layers, the KV cache, continuous batching and the expert cache of one device.

    Args:
        settings: what to run and within which budget.
        view: the expert store, as described by an `ExpertStore` of the same node.

    Construction is cheap; `start` loads.
    """

    def __init__(self, settings: EngineSettings, view: StoreView) -> None:
        self._settings, self._view = settings, view
        self._engine: Any = None
        self._batcher: Any = None
        self._plan: dict[str, Any] = {}

    def start(self) -> dict[str, Any]:
        """Load everything and begin to serve; the effective plan, in bytes and names.

        Raises:
            TierMoeError: the budget, the policy or the store does not fit.
        """
        import torch

        from .engine.device import make_device
        from .engine.engine import ExpertEngine, host_weights
        from .engine.model import DTYPES, build_model, find_blocks

        settings, manifest = self._settings, self._view.manifest
        torch.set_num_threads(settings.threads)
        device = make_device(settings.device, settings.link)
        name = settings.dtype
        if name == "auto":
            name = "float32" if device.torch_device.type == "cpu" else "bfloat16"
        dtype = DTYPES[name]
        weights = host_weights(open_views(self._view))
        model = build_model(Path(self._view.path), manifest, dtype, device.torch_device, settings.attention)
        blocks = find_blocks(model, manifest)
        pinned = all([device.pin_host(layer.tensors) for layer in weights]) if device.executor == "real" else None
        top_k = experts_per_token(model.config)
        self._engine = ExpertEngine(settings, manifest.experts, weights, blocks, top_k, device, dtype)
        self._batcher = make_batcher(model, settings.kv)
        self._model = model
        self._plan = self._describe(model, name, pinned, top_k)
        return self._plan

    def _describe(self, model: Any, dtype: str, pinned: bool | None, top_k: int) -> dict[str, Any]:
        settings, manifest, engine = self._settings, self._view.manifest, self._engine
        stats, policy = engine.stats(), settings.policy
        dense = {p.data_ptr(): p.nbytes for p in model.parameters() if not p.is_meta}
        notes = list(engine.notes)
        if self._batcher.serial_because is not None:
            notes.append(f"requests run one after another: {self._batcher.serial_because}")
        if pinned is False:
            notes.append("host memory could not be pinned: copies are slower and not asynchronous")
        if stats.slots < top_k:
            notes.append(f"{stats.slots} slots are fewer than one token's {top_k} experts: layers run in waves")
        limit = getattr(model.config.get_text_config(), "max_position_embeddings", None)
        emulated = engine.device.executor == "emulated"
        return {
            "model": manifest.model,
            "architecture": manifest.architecture,
            "policy": policy.name,
            "lossless": policy.lossless,
            "executor": engine.device.executor,
            "device": str(engine.device.torch_device),
            "dtype": dtype,
            "threads": settings.threads,
            "moe_layers": len(manifest.layers),
            "experts_per_layer": manifest.experts.num_experts,
            "top_k": top_k,
            "experts": stats.experts,
            "slots": stats.slots,
            "slot_bytes": engine.slot_bytes,
            "expert_bytes_total": stats.experts * engine.slot_bytes,
            "expert_budget_bytes": stats.expert_budget_bytes,
            "expert_bytes_allocated": stats.expert_bytes_peak,
            "dense_bytes": sum(dense.values()),
            "store_path": self._view.path,
            "store_bytes": sum(record.nbytes for record in manifest.files()),
            "link": settings.link.model_dump() if emulated else {"gbps": None, "latency_us": None},
            "pinned": pinned,
            "prefetch": policy.prefetch.kind,
            "eviction": policy.eviction,
            "batching": "continuous" if self._batcher.serial_because is None else "serial",
            "kv_tokens": self._batcher.streams.capacity_tokens,
            "max_prompt_tokens": min(self._batcher.streams.capacity_tokens, limit or self._batcher.streams.capacity_tokens),
            "notes": notes,
        }

    def health(self) -> dict[str, Any]:
        """Whether the worker serves; raises RuntimeFailure when its loop died."""
        if self._batcher is None:
            return {"state": "created"}
        if self._batcher.failure is not None:
            raise RuntimeFailure(f"the generation loop died ({self._batcher.failure})", "restart the worker")
        return {"state": "serving", "running": len(self._batcher.streams)}

    def submit(self, request: GenerationRequest) -> Iterator[TokenEvent]:
        """Queue a request now; its tokens as they come.

        Raises:
            RequestError: malformed request. RuntimeFailure: not started, or the loop died.
        """
        if self._batcher is None:
            raise RuntimeFailure("the worker is not started", "call start first")
        return self._batcher.submit(request)

    def generate(self, request: GenerationRequest) -> Iterator[TokenEvent]:
        """Like `submit`, but the request is queued at the first step and cancelled when its consumer goes away."""
        events = self.submit(request)
        try:
            yield from events
        finally:
            self._batcher.cancel(request.request_id)

    def cancel(self, request_id: str) -> bool:
        """End a request now; False if it had ended."""
        return self._batcher is not None and self._batcher.cancel(request_id)

    def stats(self) -> Any:
        """Counters since the last reset (`EngineStats`)."""
        return self._engine.stats()

    def reset_stats(self) -> None:
        """Zero the counters; residency stays."""
        self._engine.reset_stats()

    def trace_events(self) -> list[dict[str, Any]]:
        """The timeline as Chrome trace events; empty unless `settings.trace`."""
        return self._engine.timeline.events()

    def close(self) -> None:
        """Stop serving and free the pool. Safe to call twice."""
        if self._batcher is not None:
            self._batcher.close()
        if self._engine is not None:
            self._engine.close()


def make_batcher(model: Any, kv: KvSettings) -> Any:
    """Continuous batching where the model allows it, else one request after another.

    Raises:
        UnsupportedModelError: `kv.batching` insists on continuous and the model does not allow it.
    """
    from .engine.batcher import ContinuousBatcher
    from .engine.serial import SerialBatcher

    if kv.batching == "serial":
        return SerialBatcher(model, kv, "asked for")
    try:
        return ContinuousBatcher(model, kv)
    except UnsupportedModelError as error:
        if kv.batching == "continuous":
            raise
        return SerialBatcher(model, kv, error.what)


def experts_per_token(config: Any) -> int:
    """The router's top-k, under whichever name the architecture has for it."""
    text = config.get_text_config()
    for name in ("num_experts_per_tok", "moe_top_k", "moe_k", "num_selected_experts", "top_k_experts", "moe_topk"):
        value = getattr(text, name, None)
        if isinstance(value, list):
            value = max(value)
        if isinstance(value, int) and value > 0:
            return value
    raise RuntimeFailure(f"{type(text).__name__} does not say how many experts a token uses", "report the model")
