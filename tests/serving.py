"""Helpers that serve a checkpoint in this process, for tests that compare with transformers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from tiermoe.actors.expert_store import ExpertStore
from tiermoe.actors.gpu_worker import GpuWorker
from tiermoe.actors.requests import Generation, GenerationRequest, SamplingParams
from tiermoe.actors.settings import EngineSettings, KvSettings, LinkSettings, PolicySettings, PrefetchSettings
from tiermoe.cluster.jobs.prepare import prepare


def policy(prefetch: str = "none", preload: str = "none", **kwargs: Any) -> PolicySettings:
    return PolicySettings(
        name="test", lossless=True, prefetch=PrefetchSettings(kind=prefetch, **kwargs), preload=preload
    )


def settings(budget: float | int, prefetch: str = "none", **kwargs: Any) -> EngineSettings:
    kwargs.setdefault("kv", KvSettings(page_size=16, num_blocks=64))
    kwargs.setdefault("link", LinkSettings(gbps=None))
    kwargs.setdefault("policy", policy(prefetch))
    return EngineSettings(budget=budget, device="cpu", dtype="float32", integrity_checks=True, **kwargs)


def prepared(checkpoint: Path, out: Path) -> ExpertStore:
    prepare(checkpoint, out, progress=False)
    return ExpertStore(str(out))


@contextmanager
def serving(store: ExpertStore, config: EngineSettings) -> Iterator[GpuWorker]:
    worker = GpuWorker(config, store.describe())
    try:
        worker.start()
        yield worker
    finally:
        worker.close()


def greedy(worker: GpuWorker, prompts: Sequence[Sequence[int]], max_tokens: int) -> list[list[int]]:
    """All prompts in flight together; the generated tokens of each."""
    sampling = SamplingParams(max_tokens=max_tokens)
    streams = [
        worker.submit(GenerationRequest(f"r{i}", tuple(prompt), sampling)) for i, prompt in enumerate(prompts)
    ]
    results = []
    for i, stream in enumerate(streams):
        generation = Generation(f"r{i}")
        for event in stream:
            generation.add(event)
        assert generation.error is None, generation.error
        results.append(generation.token_ids)
    return results


def logits(worker: GpuWorker, prompt: Sequence[int], attention: str) -> torch.Tensor:
    """Logits [1, T, V] of one plain forward, while no request is in flight."""
    model: Any = worker._model
    batching = model.config._attn_implementation
    model.set_attn_implementation(attention)  # the manager's paged variant needs a paged cache
    try:
        with torch.no_grad():
            return model(torch.tensor([list(prompt)])).logits
    finally:
        model.set_attn_implementation(batching)


def reference_greedy(model: Any, prompts: Sequence[Sequence[int]], max_tokens: int) -> list[list[int]]:
    """What transformers' `generate` gives for each prompt alone."""
    out = []
    for prompt in prompts:
        ids = torch.tensor([list(prompt)])
        tokens = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=max_tokens, do_sample=False, pad_token_id=0
        )
        out.append(tokens[0, len(prompt) :].tolist())
    return out
