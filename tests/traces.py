"""Synthetic routing traces: small, random, and written by the real writer."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from tiermoe.actors.policies.moepic.split import Picks
from tiermoe.cluster.simulate.trace import Costs, TraceHeader
from tiermoe.cluster.simulate.trace_writer import Rows, TraceWriter

COSTS = Costs(forward_s=1e-3, dense_s=1e-4, dense_row_s=1e-6, expert_s=2e-4, expert_row_s=1e-5)


def picks_of(ids: NDArray[np.integer], experts: int, scores: NDArray[np.floating] | None) -> Picks:
    """Each token a step: ids [n, K], distinct in each row; scores [n, E] or None."""
    counts = np.zeros((len(ids), experts), np.int64)
    np.put_along_axis(counts, ids.astype(np.int64), 1, axis=1)
    return Picks(counts, np.ones(len(ids), np.int64), scores)


def header(layers: int = 3, experts: int = 6, top_k: int = 2, distances: int = 2, **changes: object) -> TraceHeader:
    fields = {
        "model": "synthetic", "fingerprint": "f" * 64, "layers": layers, "experts": experts, "top_k": top_k,
        "hidden": 4, "distances": distances, "slot_bytes": 1000, "expert_dtype": "float32", "costs": COSTS,
    }  # fmt: skip
    return TraceHeader.model_validate(fields | changes)


def embed(tokens: NDArray[np.int32]) -> NDArray[np.float32]:
    """Embeddings that fp16 holds exactly."""
    return np.stack([tokens / 4, tokens % 3, tokens * 0 + 1, -tokens], axis=1).astype(np.float32)


def rows_of(shape: TraceHeader, tokens: Sequence[int], rng: np.random.Generator) -> Rows:
    """Random routing in which the look-ahead is the later layers' own routing: a perfect next gate."""
    count, top = len(tokens), shape.top_k
    logits = rng.normal(size=(count, shape.layers, shape.experts))
    probabilities = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    ids = np.argsort(-probabilities, axis=-1, kind="stable")[..., :top]
    weights = np.take_along_axis(probabilities, ids, -1)
    next_ids = np.zeros((count, shape.layers, shape.distances, top), np.int64)
    next_probabilities = np.zeros(next_ids.shape)
    for d in range(1, shape.distances + 1):
        next_ids[:, : shape.layers - d, d - 1] = ids[:, d:]
        next_probabilities[:, : shape.layers - d, d - 1] = weights[:, d:]
    return Rows(np.asarray(tokens, np.int32), probabilities, ids, weights, next_ids, next_probabilities)


def write(
    out: Path, shape: TraceHeader, prompts: Sequence[Sequence[int]], decodes: int = 3, seed: int = 0,
    chunk_bytes: int = 1 << 20,
) -> list[list[Rows]]:  # fmt: skip
    """A trace of these prompts, each with so many decode iterations; what was written, by request."""
    rng, written = np.random.default_rng(seed), []
    writer = TraceWriter(out, shape, embed, chunk_bytes)
    for prompt in prompts:
        writer.begin(prompt)
        steps = [rows_of(shape, prompt, rng)]
        steps += [rows_of(shape, [int(rng.integers(50))], rng) for _ in range(decodes)]
        for i, step in enumerate(steps):
            writer.add(step, decode=i > 0)
        written.append(steps)
    writer.close(True, COSTS)
    return written
