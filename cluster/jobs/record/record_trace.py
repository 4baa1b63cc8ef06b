"""Records the routing and the costs of prompts in the real engine, one request at a time."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from rich.progress import Progress

from ....actors.engine.layer import MoeLayer
from ....actors.engine.model.model import RouterProbe, find_blocks
from ....actors.engine.model.published_linear import PublishedEmbedding
from ....actors.engine.serving.scoring import score_with
from ....actors.requests import Generation, GenerationRequest, SamplingParams
from ....actors.store.format import Manifest, model_fingerprint, read_manifest
from ....errors import RuntimeFailure, UnsupportedModelError
from ...config import RunConfig, engine_settings
from ...local import LocalWorker
from ...simulate.trace import Costs, TraceHeader
from ...simulate.trace_writer import CHUNK_BYTES, Rows, TraceWriter
from ..prepare.needs import prepared_store

_SAMPLES = 4096  # of each kind


@dataclass
class _Pass:
    """One forward: seconds between its layers and inside them, experts and pairs of all layers."""

    rows: int
    start_s: float
    end_s: float = 0.0
    dense_s: float = 0.0
    inside_s: float = 0.0
    experts: int = 0
    pairs: int = 0


@dataclass
class CostMeter:
    """Measures the model of `Costs` from the layers of forwards of one row, and of several."""

    layers: int
    _now: _Pass | None = None
    _decode: deque[_Pass] = field(default_factory=lambda: deque(maxlen=_SAMPLES))
    _prefill: deque[_Pass] = field(default_factory=lambda: deque(maxlen=_SAMPLES))
    _between: deque[float] = field(default_factory=lambda: deque(maxlen=_SAMPLES))

    def layer(self, index: int, rows: int, experts: int, pairs: int, start_s: float, inside_s: float) -> None:
        """A layer's experts ran for `inside_s` from `start_s` on, without waits for copies."""
        last = self._now
        if index == 0:
            if last is not None and last.rows == rows == 1:
                self._between.append(start_s - last.end_s)
            self._now = last = _Pass(rows, start_s)
        elif last is not None:
            last.dense_s += start_s - last.end_s
        if last is None:
            return
        last.inside_s += inside_s
        last.experts += experts
        last.pairs += pairs
        last.end_s = time.perf_counter()
        if index == self.layers - 1:
            (self._decode if rows == 1 else self._prefill).append(last)

    def costs(self) -> Costs | None:
        """None before a forward of one row."""
        if not self._decode:
            return None
        gaps = max(1, self.layers - 1)
        dense_s = median(p.dense_s for p in self._decode) / gaps
        expert_s = median(p.inside_s / p.experts for p in self._decode)
        dense_row, expert_row = [0.0], [0.0]
        if self._prefill:
            dense_row = [(p.dense_s / gaps - dense_s) / (p.rows - 1) for p in self._prefill]
            many = [p for p in self._prefill if p.pairs > p.experts]
            expert_row = [(p.inside_s - p.experts * expert_s) / (p.pairs - p.experts) for p in many] or [0.0]
        forward_s = median(self._between) - dense_s if self._between else 0.0
        return Costs(
            forward_s=max(0.0, forward_s), dense_s=dense_s, dense_row_s=max(0.0, median(dense_row)),
            expert_s=expert_s, expert_row_s=max(0.0, median(expert_row)),
        )  # fmt: skip


Forward = Callable[..., torch.Tensor]  # (hidden [T, H], ids [T, K], weights [T, K]) -> [T, H]


@contextmanager
def wrapped(layers: Sequence[MoeLayer], wrap: Callable[[MoeLayer, Forward], Forward]) -> Iterator[None]:
    """Run an engine's layers through `wrap` while no request is in flight; the originals return at the end."""
    for layer in layers:
        layer.forward = wrap(layer, layer.forward)  # type: ignore[method-assign]
    try:
        yield
    finally:
        for layer in layers:
            del layer.forward  # uncovers the method of the class


def router_probes(model: Any, manifest: Manifest, use: str) -> list[RouterProbe]:
    """The router of each MoE layer; `use` is the verb of the remedy.

    Raises:
        UnsupportedModelError: a layer exposes no router.
    """
    routers = []
    for layer, block in enumerate(find_blocks(model, manifest)):
        if block.router is None:
            what = f"MoE layer {layer} exposes no router logits"
            raise UnsupportedModelError(what, f"{use} a model whose routers can be asked")
        routers.append(block.router)
    return routers


class Capture:
    """Writes every forward of a model that serves one request at a time, on the forward's thread.

    Probabilities are the softmax of the router's linear part on the input of the layer's experts, as in next-gate
    prefetch. Where an architecture scores experts otherwise (sigmoids, groups, biases), `ids` are still its choice, and
    may not be the most probable ones.

    rows: forward rows of the newest request. error: raised on the forward's thread, which failed its request.
    """

    def __init__(
        self, model: Any, layers: Sequence[MoeLayer], routers: Sequence[RouterProbe], top_k: int, writer: TraceWriter
    ) -> None:
        self._layers, self._routers, self._top_k, self._writer = layers, routers, top_k, writer
        self._distances = writer.header.distances
        self._embedding = model.get_input_embeddings()
        self._parts: list[tuple[NDArray[Any], ...]] = []
        self._tokens = np.empty(0, np.int32)
        self._prompt_tokens = 0
        self.rows = 0
        self.error: BaseException | None = None
        self.costs = CostMeter(len(layers))

    def begin(self, prompt: Sequence[int]) -> None:
        """Start the next request, before it is submitted."""
        self._prompt_tokens, self.rows = len(prompt), 0
        self._writer.begin(prompt)

    @contextmanager
    def running(self) -> Iterator[None]:
        """Record forwards; enter and leave while no request is in flight."""
        with wrapped(self._layers, self._watched), self._embedding.register_forward_pre_hook(self._see_tokens):
            yield

    def _see_tokens(self, module: Any, args: tuple[Any, ...]) -> None:
        self._tokens, self._parts = args[0].detach().cpu().numpy().ravel().astype(np.int32), []

    def _watched(self, layer: MoeLayer, forward: Forward) -> Forward:
        def run(hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
            blocked_s, start_s = layer.stats.blocked_io_s, time.perf_counter()
            out = forward(hidden, ids, weights)
            end_s = time.perf_counter()
            spent_s = end_s - start_s - (layer.stats.blocked_io_s - blocked_s)
            try:
                experts = self._record(layer.index, hidden, ids, weights)
            except BaseException as error:
                self.error = error
                raise
            self.costs.layer(layer.index, hidden.shape[0], experts, ids.numel(), start_s, spent_s)
            return out

        return run

    @torch.no_grad()
    def _record(self, index: int, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> int:
        """Collect one layer, and write the forward after the last one; the number of distinct experts."""
        rows, experts = hidden.shape[0], self._writer.header.experts
        next_ids = np.zeros((rows, self._distances, self._top_k), np.int64)
        next_probabilities = np.zeros((rows, self._distances, self._top_k), np.float32)
        for d in range(1, self._distances + 1):
            later = self._probabilities((index + d) % len(self._layers), hidden)  # past the last: the next forward's
            picked = np.argsort(-later, axis=1, kind="stable")[:, : self._top_k]
            next_ids[:, d - 1], next_probabilities[:, d - 1] = picked, np.take_along_axis(later, picked, axis=1)
        chosen = ids.cpu().numpy()
        self._parts.append(
            (self._probabilities(index, hidden), chosen, weights.float().cpu().numpy(), next_ids, next_probabilities)
        )
        if index == len(self._layers) - 1:
            self._write()
        return int(np.count_nonzero(np.bincount(chosen.ravel(), minlength=experts)))

    def _write(self) -> None:
        if any(len(part[0]) != len(self._tokens) for part in self._parts) or len(self._parts) != len(self._layers):
            raise RuntimeError(f"a forward of {len(self._tokens)} tokens had other rows in a layer")
        stacked = [np.stack(arrays, axis=1) for arrays in zip(*self._parts, strict=True)]
        self._writer.add(Rows(self._tokens, *stacked), decode=self.rows >= self._prompt_tokens)
        self.rows += len(self._tokens)

    def _probabilities(self, layer: int, hidden: torch.Tensor) -> NDArray[np.float32]:
        found: NDArray[np.float32] = torch.softmax(self._routers[layer](hidden).float(), dim=-1).cpu().numpy()
        return found


@dataclass(frozen=True)
class Texts:
    """Prompts in tokens. continuations: tokens after each, which are decoded one by one (teacher-forced); None: sampled
    ones.
    """

    prompts: Sequence[Sequence[int]]
    continuations: Sequence[Sequence[int]] | None = None


def record(
    config: RunConfig, texts: Texts, out: Path, sampling: SamplingParams, distances: int = 4,
    progress: Progress | None = None,
) -> TraceHeader:  # fmt: skip
    """`record_with` on a worker that is started for it. config: its policy must load on demand."""
    settings = engine_settings(config)
    store = prepared_store(config, settings)
    with closing(LocalWorker(settings, store)) as worker:
        worker.start()
        return record_with(worker, read_manifest(store), texts, out, sampling, distances, progress)


def record_with(
    worker: Any,
    manifest: Manifest,
    texts: Texts,
    out: Path,
    sampling: SamplingParams,
    distances: int = 4,
    progress: Progress | None = None,
    chunk_bytes: int = CHUNK_BYTES,
) -> TraceHeader:
    """Record the routing of each prompt and of what comes after it, on a started, idle `GpuWorker`.

    After any error or Ctrl-C, `out` holds a valid trace of the finished forwards.

    Args:
        distances: D, layers ahead for which next-gate predictions are recorded.

    Raises:
        UnsupportedModelError: a layer exposes no router. ConfigError: `out` is not empty.
        RuntimeFailure: a request failed.
    """
    model, engine, continuations = worker.model, worker.engine, texts.continuations
    routers = router_probes(model, manifest, "record")
    embedding = model.get_input_embeddings()

    @torch.no_grad()
    def embed(tokens: NDArray[np.int32]) -> NDArray[np.float32]:
        ids = torch.from_numpy(tokens.astype(np.int64)).to(embedding.weight.device)
        rows = embedding.forward(ids) if isinstance(embedding, PublishedEmbedding) else embedding.weight[ids]
        found: NDArray[np.float32] = rows.float().cpu().numpy()
        return found

    header = TraceHeader(
        model=manifest.model,
        fingerprint=model_fingerprint(manifest),
        layers=len(engine.layers),
        experts=engine.experts,
        top_k=engine.top_k,
        hidden=embedding.weight.shape[1],
        distances=distances,
        slot_bytes=engine.slot_bytes,
        expert_dtype=str(engine.cache.pool.dtype).removeprefix("torch."),
        origin=f"sampled at {sampling.temperature:g}" if continuations is None else "text, teacher-forced",
    )
    writer = TraceWriter(out, header, embed, chunk_bytes)
    capture = Capture(model, engine.layers, routers, engine.top_k, writer)
    complete = False
    try:
        with capture.running():
            prompts = texts.prompts
            shown = prompts if progress is None else progress.track(prompts, description="recording requests")
            for number, prompt in enumerate(shown):
                capture.begin(prompt)
                if continuations is None:
                    _run(worker, capture, GenerationRequest(f"record-{number}", tuple(prompt), sampling))
                else:
                    score_with(worker, [*prompt, *continuations[number]], len(prompt), rows=1)
        complete = True
    finally:
        if not complete:
            worker.close()  # ends the forward's thread
        header = writer.close(complete, capture.costs.costs())
    return header


def _run(worker: Any, capture: Capture, request: GenerationRequest) -> None:
    generation = Generation(request.request_id)
    for event in worker.submit(request):
        generation.add(event)
    if capture.error is not None:
        raise capture.error
    if generation.failure is not None:
        raise generation.failure
    if generation.finish not in ("length", "stop"):
        what = f"request {request.request_id} ended with {generation.finish}: {generation.error}"
        raise RuntimeFailure(what, "run again, and report it if it stays")
    expected = len(request.prompt_ids) + len(generation.token_ids) - 1
    if capture.rows != expected:
        raise RuntimeFailure(f"{capture.rows} rows ran where {expected} were expected", "report this as a bug")
