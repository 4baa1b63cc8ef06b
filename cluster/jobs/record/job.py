"""Run prompts through the real engine, one request at a time, and write what its routers said."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from rich.progress import Progress

from ....actors.engine.model import RouterProbe, find_blocks
from ....actors.requests import Generation, GenerationRequest, SamplingParams
from ....actors.store_format import Manifest, model_fingerprint, read_manifest
from ....errors import RuntimeFailure, UnsupportedModelError
from ...config import RunConfig, engine_settings
from ...local import LocalWorker
from ...simulate.trace_format import TraceHeader
from ...simulate.trace_writer import CHUNK_BYTES, TraceWriter
from ..bench.serving import prepared_store
from .capture import Capture


def record(
    config: RunConfig,
    prompts: Sequence[Sequence[int]],
    out: Path,
    sampling: SamplingParams,
    distances: int = 4,
    progress: Progress | None = None,
    chunk_bytes: int = CHUNK_BYTES,
) -> TraceHeader:
    """Record the routing of each prompt and of what is generated after it.

    Whatever is raised, also by Ctrl-C, `out` holds a valid trace of the forwards that ran.

    Args:
        config: the model and how it runs; its policy must load on demand.
        distances: D, layers ahead for which next-gate predictions are recorded.

    Raises:
        UnsupportedModelError: a layer exposes no router. ConfigError: `out` is not empty.
        RuntimeFailure: a request failed.
    """
    settings = engine_settings(config)
    store = prepared_store(config, settings)
    with closing(LocalWorker(settings, store)) as worker:
        worker.start()
        return record_with(worker, read_manifest(store), prompts, out, sampling, distances, progress, chunk_bytes)


def record_with(
    worker: Any,
    manifest: Manifest,
    prompts: Sequence[Sequence[int]],
    out: Path,
    sampling: SamplingParams,
    distances: int = 4,
    progress: Progress | None = None,
    chunk_bytes: int = CHUNK_BYTES,
) -> TraceHeader:
    """`record` on a started `GpuWorker` with no request in flight. Raises like `record`."""
    model, engine = worker.model, worker.engine
    routers: list[RouterProbe] = []
    for layer, block in enumerate(find_blocks(model, manifest)):
        if block.router is None:
            what = f"MoE layer {layer} exposes no router logits"
            raise UnsupportedModelError(what, "record a model whose routers can be asked")
        routers.append(block.router)
    embedding = model.get_input_embeddings()

    @torch.no_grad()
    def embed(tokens: NDArray[np.int32]) -> NDArray[np.float32]:
        rows = embedding.weight[torch.from_numpy(tokens.astype(np.int64)).to(embedding.weight.device)]
        found: NDArray[np.float32] = rows.float().cpu().numpy()
        return found

    writer = TraceWriter(out, _header(worker, manifest, distances, embedding.weight.shape[1]), embed, chunk_bytes)
    capture = Capture(model, engine.layers, routers, engine.top_k, writer)
    complete = False
    try:
        with capture:
            shown = prompts if progress is None else progress.track(prompts, description="recording requests")
            for number, prompt in enumerate(shown):
                capture.begin(prompt)
                _run(worker, capture, GenerationRequest(f"record-{number}", tuple(prompt), sampling))
        complete = True
    finally:
        if not complete:
            worker.close()  # ends the thread that writes
        header = writer.close(complete, capture.costs.costs())
    return header


def _run(worker: Any, capture: Capture, request: GenerationRequest) -> None:
    generation = Generation(request.request_id)
    for event in worker.submit(request):
        generation.add(event)
    if capture.error is not None:
        raise capture.error
    if generation.finish not in ("length", "stop"):
        what = f"request {request.request_id} ended with {generation.finish}: {generation.error}"
        raise RuntimeFailure(what, "run again; report it if it stays")
    expected = len(request.prompt_ids) + len(generation.token_ids) - 1
    if capture.rows != expected:
        raise RuntimeFailure(f"{capture.rows} rows ran where {expected} were expected", "report this as a bug")


def _header(worker: Any, manifest: Manifest, distances: int, hidden: int) -> TraceHeader:
    engine = worker.engine
    return TraceHeader(
        model=manifest.model,
        fingerprint=model_fingerprint(manifest),
        layers=len(engine.layers),
        experts=engine.experts,
        top_k=engine.top_k,
        hidden=hidden,
        distances=distances,
        slot_bytes=engine.slot_bytes,
        expert_dtype=str(engine.cache.pool.gate_up.dtype).removeprefix("torch."),
    )
