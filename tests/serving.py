"""Helpers that serve a checkpoint in this process, for tests that compare with transformers."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from tiermoe.actors.gpu_worker import GpuWorker
from tiermoe.actors.policy_settings import PolicySettings
from tiermoe.actors.requests import Generation, GenerationRequest, SamplingParams
from tiermoe.actors.settings import EngineSettings, KvSettings, LinkSettings
from tiermoe.actors.store.files import ExpertStore
from tiermoe.cluster.config import default_model_dir
from tiermoe.cluster.jobs.prepare import prepare


def policy(prefetch: str = "none", preload: str = "none", **kwargs: Any) -> PolicySettings:
    return PolicySettings(
        name="test", lossless=True, prefetch=dict(kind=prefetch, **kwargs), preload=preload
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
            return model(torch.tensor([list(prompt)], device=model.device)).logits
    finally:
        model.set_attn_implementation(batching)


def struck_greedy(
    worker: GpuWorker, prompt: Sequence[int], max_tokens: int, strike: Callable[[], None]
) -> tuple[list[int], float]:
    """One request during which `strike` is called, once it has eight tokens.

    Returns:
        The generated tokens, and the longest seconds between two events after the strike.
    """
    stream = worker.submit(GenerationRequest("r", tuple(prompt), SamplingParams(max_tokens=max_tokens)))
    generation, longest_s, last_s = Generation("r"), 0.0, time.monotonic()
    struck = False
    for event in stream:
        generation.add(event)
        now_s = time.monotonic()
        if struck:
            longest_s = max(longest_s, now_s - last_s)
        last_s = now_s
        if len(generation.token_ids) >= 8 and not struck:
            struck = True
            strike()
    return generation.token_ids, longest_s


def default_model_greedy(
    prompts: Sequence[Sequence[int]], max_tokens: int, ignore_eos: bool = False
) -> list[list[int]]:
    """`reference_greedy` of the model that ships with the project, unmodified and in fp32."""
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(default_model_dir(), dtype=torch.float32).eval()
    return reference_greedy(model, prompts, max_tokens, ignore_eos)


def reference_greedy(
    model: Any, prompts: Sequence[Sequence[int]], max_tokens: int, ignore_eos: bool = False
) -> list[list[int]]:
    """What transformers' `generate` gives for each prompt alone."""
    out = []
    for prompt in prompts:
        ids = torch.tensor([list(prompt)], device=model.device)
        tokens = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=max_tokens, do_sample=False, pad_token_id=0,
            **({"eos_token_id": None} if ignore_eos else {}),
        )  # fmt: skip
        out.append(tokens[0, len(prompt) :].tolist())
    return out
