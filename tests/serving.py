"""Helpers that serve a checkpoint in this process, for tests that compare with transformers."""

from __future__ import annotations

import functools
import itertools
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tiermoe.actors.budget import AutoBudget, Budget
from tiermoe.actors.gpu_worker import GpuWorker
from tiermoe.actors.policies.buddymoe.buddies import BINS, TEMPERATURES, ExpertProfile, Outputs
from tiermoe.actors.policies.routing import SequenceRows
from tiermoe.actors.policy_settings import PolicySettings
from tiermoe.actors.requests import Generation, GenerationRequest, SamplingParams
from tiermoe.actors.settings import EngineSettings, KvSettings, LinkSettings
from tiermoe.actors.shard_worker import ShardWorker
from tiermoe.actors.store.artifacts import PROFILE_NAME, ProfileManifest, ProfileSource, encode_arrays
from tiermoe.actors.store.files import ExpertStore
from tiermoe.actors.store.format import model_fingerprint, read_manifest
from tiermoe.cluster.config import default_model_dir
from tiermoe.cluster.jobs.prepare import prepare
from tiermoe.cluster.local import LocalWorker
from tiermoe.proto.peers import LocalDirectory, PeerLink, shard_name


def policy(prefetch: str = "none", preload: str = "none", **kwargs: Any) -> PolicySettings:
    return PolicySettings(
        name="test", lossless=True, prefetch=dict(kind=prefetch, **kwargs), preload=preload
    )


def settings(budget: float | int | AutoBudget | Budget, prefetch: str = "none", **kwargs: Any) -> EngineSettings:
    kwargs.setdefault("kv", KvSettings(page_size=16, num_blocks=64))
    kwargs.setdefault("link", LinkSettings(gbps=None))
    kwargs.setdefault("policy", policy(prefetch))
    if isinstance(budget, Budget):
        given = budget
    elif isinstance(budget, AutoBudget):
        given = Budget(auto=budget)
    else:
        given = Budget(share=budget) if isinstance(budget, float) else Budget(nbytes=budget)
    return EngineSettings(budget=given, device="cpu", dtype="float32", integrity_checks=True, **kwargs)


def prepared(checkpoint: Path, out: Path) -> ExpertStore:
    prepare(checkpoint, out, progress=False)
    return ExpertStore(str(out))


@contextmanager
def serving_locally(store: ExpertStore, config: EngineSettings, ndp_workers: int = 1) -> Iterator[LocalWorker]:
    """A worker, and processes for the NDP workers, shards and matcher that its settings ask for."""
    with closing(LocalWorker(config, Path(store.describe().path), ndp_workers)) as worker:
        worker.start()
        yield worker


@contextmanager
def serving(store: ExpertStore, config: EngineSettings) -> Iterator[GpuWorker]:
    worker = GpuWorker(config, store.describe())
    try:
        worker.start()
        yield worker
    finally:
        worker.close()


@contextmanager
def serving_both(
    store: ExpertStore, kv: dict[str, Any], prefetch: str = "none"
) -> Iterator[dict[str, GpuWorker]]:
    """A worker for each way of batching, with half of the experts resident."""
    with ExitStack() as stack:
        yield {
            batching: stack.enter_context(
                serving(store, settings(0.5, prefetch, kv=KvSettings(batching=batching, page_size=16, **kv)))
            )
            for batching in ("continuous", "serial")
        }


def greedy(worker: GpuWorker, prompts: Sequence[Sequence[int]], max_tokens: int) -> list[list[int]]:
    """All prompts in flight together; the generated tokens of each."""
    sampling, before_s = SamplingParams(max_tokens=max_tokens), sys.getswitchinterval()
    sys.setswitchinterval(10.0)  # else, on a busy machine, the first step may not have all of them, and counters differ
    try:
        streams = [
            worker.submit(GenerationRequest(f"r{i}", tuple(prompt), sampling)) for i, prompt in enumerate(prompts)
        ]
    finally:
        sys.setswitchinterval(before_s)
    return [gathered(stream).token_ids for stream in streams]


def gathered(stream: Any) -> Generation:
    """All that a request gave, which has not failed."""
    generation = Generation(stream.request.request_id)
    for event in stream:
        generation.add(event)
    assert generation.error is None, generation.error
    return generation


@dataclass(frozen=True)
class Reference:
    """Prompts and the tokens that the unmodified model gives for them."""

    prompts: Sequence[Sequence[int]]
    tokens: Sequence[Sequence[int]]

    def check(self, worker: GpuWorker, count: int, max_tokens: int = 24, first: int = 0) -> None:
        """These prompts together give the unmodified model's tokens."""
        chosen = slice(first, first + count)
        assert greedy(worker, self.prompts[chosen], max_tokens) == [t[:max_tokens] for t in self.tokens[chosen]]

    def check_struck(
        self, worker: GpuWorker, number: int, strike: Callable[[], object], max_tokens: int = 32
    ) -> float:
        """One prompt alone gives them although `strike` is called meanwhile; `struck_greedy`'s seconds."""
        tokens, longest_s = struck_greedy(worker, self.prompts[number], max_tokens, strike)
        assert tokens == self.tokens[number][:max_tokens]
        return longest_s


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
    worker: GpuWorker, prompt: Sequence[int], max_tokens: int, strike: Callable[[], object]
) -> tuple[list[int], float]:
    """One request during which `strike` is called, once it has eight tokens; the worker waits for it.

    Returns:
        The generated tokens, and the longest seconds between two events after the strike.
    """
    engine, struck, decoding = worker.engine, threading.Event(), itertools.count(2)
    begin = engine.begin_forward

    def begin_struck(sequences: Sequence[SequenceRows]) -> None:
        if any(s.decode for s in sequences) and next(decoding) > 8:  # the number of the token that comes of it
            struck.wait(60)
        begin(sequences)

    engine.begin_forward = begin_struck  # type: ignore[method-assign]
    try:
        stream = worker.submit(GenerationRequest("r", tuple(prompt), SamplingParams(max_tokens=max_tokens)))
        generation, longest_s, last_s = Generation("r"), 0.0, time.monotonic()
        for event in stream:
            generation.add(event)
            now_s = time.monotonic()
            if struck.is_set():
                longest_s = max(longest_s, now_s - last_s)
            last_s = now_s
            if len(generation.token_ids) >= 8 and not struck.is_set():
                strike()
                struck.set()
    finally:
        struck.set()
        del engine.begin_forward
    return generation.token_ids, longest_s


def default_model_greedy(
    prompts: Sequence[Sequence[int]], max_tokens: int, ignore_eos: bool = False
) -> list[list[int]]:
    """What transformers' `generate` gives for each prompt with the model that ships with the project, in fp32.

    Prompts of one length go together, which takes a third of the time and gives the same tokens.
    """
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(default_model_dir(), dtype=torch.float32).eval()
    end, found = model.generation_config.eos_token_id, dict[int, list[int]]()
    for length in {len(prompt) for prompt in prompts}:
        numbers = [number for number, prompt in enumerate(prompts) if len(prompt) == length]
        together = _generated(model, [prompts[number] for number in numbers], max_tokens, ignore_eos)
        for number, tokens in zip(numbers, together, strict=True):
            ends = end in tokens and not ignore_eos
            found[number] = tokens[: tokens.index(end) + 1] if ends else tokens
    return [found[number] for number in range(len(prompts))]


def reference_greedy(
    model: Any, prompts: Sequence[Sequence[int]], max_tokens: int, ignore_eos: bool = False
) -> list[list[int]]:
    """What transformers' `generate` gives for each prompt alone."""
    return [_generated(model, [prompt], max_tokens, ignore_eos)[0] for prompt in prompts]


def _generated(model: Any, prompts: Sequence[Sequence[int]], max_tokens: int, ignore_eos: bool) -> list[list[int]]:
    """The new tokens of prompts of one length; what follows the end of one is padding."""
    ids = torch.tensor([list(prompt) for prompt in prompts], device=model.device)
    tokens = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=max_tokens, do_sample=False, pad_token_id=0,
        **({"eos_token_id": None} if ignore_eos else {}),
    )  # fmt: skip
    return tokens[:, ids.shape[1] :].tolist()


class Tiny:
    """A tiny model, its store, and what it gives for a few prompts."""

    PROMPTS = ([5, 9, 2, 7, 1, 3], [8, 8, 4, 6, 2, 9, 11, 30, 2])
    TOKENS = 12

    def __init__(self, model_type: str, folder: Path) -> None:
        from tiny_models import save_tiny_checkpoint

        self.checkpoint = save_tiny_checkpoint(model_type, folder / "checkpoint")
        self.store = prepared(self.checkpoint, folder / "store")

    @functools.cached_property
    def expected(self) -> list[list[int]]:
        """The tokens that the unmodified model gives for `PROMPTS`."""
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(self.checkpoint, dtype=torch.float32).eval()
        return reference_greedy(model, self.PROMPTS, self.TOKENS)


@dataclass
class Group:
    """The GPUs of one replica; `shards` are those besides the lead."""

    settings: EngineSettings
    store: str
    board: LocalDirectory = field(default_factory=LocalDirectory)
    shards: list[ShardWorker] = field(default_factory=list)
    lead: GpuWorker = field(init=False)

    def start_shard(self, index: int) -> ShardWorker:
        """A shard, in place of one that may have been closed."""
        return ShardWorker(self.settings, index, self.store, self.board)


@contextmanager
def serving_group(store: ExpertStore, config: EngineSettings, ndp: Sequence[Any] = ()) -> Iterator[Group]:
    """All shards of `config.shards` and a started lead.

    Args:
        ndp: links to NDP workers.
    """
    view = store.describe()
    group = Group(config, view.path)
    with ExitStack() as stack:
        for i in range(1, config.shards.count):
            group.shards.append(stack.enter_context(closing(group.start_shard(i))))
        links = [PeerLink(group.board, name=shard_name(i)) for i in range(1, config.shards.count)]
        group.lead = stack.enter_context(closing(GpuWorker(config, view, ndp, links)))
        group.lead.start()
        yield group


def add_random_profile(folder: Path, top_k: int, *, outputs: bool = False) -> None:
    """Put it into the store's folder; with random products of outputs where a ranking needs them."""
    manifest = read_manifest(folder)
    layers, experts = len(manifest.layers), manifest.experts.num_experts
    rng = np.random.default_rng(0)
    counts = rng.integers(1, 100, (layers, experts, experts)).astype(np.float64)
    counts = (counts + counts.transpose(0, 2, 1)) * ~np.eye(experts, dtype=bool)
    entropies = np.ones((layers, len(TEMPERATURES), BINS))
    norms = rng.uniform(1.0, 2.0, counts.shape)
    products = Outputs(norms * rng.uniform(0.0, 1.0, counts.shape), norms) if outputs else None
    data, record = encode_arrays(ExpertProfile(counts.sum(axis=2), counts, counts, entropies, products))
    source = ProfileSource(
        kind="text" if outputs else "trace", sha256="0" * 64, tokens=100, output_tokens=100 if outputs else 0,
        warmup_steps=0, warmup_weight=0.0,
    )  # fmt: skip
    (folder / record.file).write_bytes(data)
    profile = ProfileManifest(
        profile_version=1, fingerprint=model_fingerprint(manifest), layers=layers, experts=experts, top_k=top_k,
        source=source, arrays=record,
    )  # fmt: skip
    (folder / PROFILE_NAME).write_bytes(profile.encode())
