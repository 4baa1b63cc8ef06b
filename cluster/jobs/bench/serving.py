"""Serving in this process for benchmarks: our worker and the unmodified model, fed alike."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

from ....actors.requests import Generation, GenerationRequest, SamplingParams, TokenEvent
from ....actors.settings import EngineSettings
from ....errors import CheckpointError, RuntimeFailure
from ...config import RunConfig, engine_settings, load_run_config
from ...prompt import load_tokenizer
from ..prepare import ensure_prepared, ensure_replicas
from .metrics import Measures

Submit = Callable[[GenerationRequest], Any]
_ids = itertools.count()


def run_config(model: str | None, file: str | None = None, **options: Any) -> RunConfig:
    """The configuration of a file (none: the defaults) with these options on top, on one thread and one GPU."""
    return load_run_config(file, {"model": model, "threads": 1, "cluster": {"shards": 1}, **options})


def overridden(file: str, fixed: Collection[str]) -> list[str]:
    """Keys that a configuration file sets and a benchmark, which runs in its own process, does not take from it.

    Args:
        file: YAML file, or a name in configs/clusters.
        fixed: what the benchmark sets itself.
    """
    unused = {"threads", "ray", "cluster", "hardware", "request_deadline_s", *fixed}
    return sorted(load_run_config(file).model_fields_set & unused)


def start_worker(config: RunConfig) -> Any:
    """A started `LocalWorker` on the prepared store of the configured model, with NDP workers if it needs them."""
    from ...local import LocalWorker

    settings = engine_settings(config)
    workers = config.cluster.ndp_workers
    worker = LocalWorker(settings, prepared_store(config, settings), 1 if workers == "per-node" else workers)
    worker.start()
    return worker


def prepared_store(config: RunConfig, settings: EngineSettings) -> Path:
    """The store of the configured model, with the replicas that the policy needs."""
    store = ensure_prepared(config.model_dir, store_dir(config), progress=False)
    if widths := settings.policy.replica_widths:
        ensure_replicas(store, config.model_dir, widths, config.ndp.group_size, progress=False)
    return store


def store_dir(config: RunConfig) -> Path | None:
    """Where a configuration wants the store; None: in the cache folder."""
    return Path(config.store).expanduser() if config.store is not None else None


def start_reference(config: RunConfig, experts: str) -> Any:
    """The unmodified model under transformers' continuous batching with one of its experts implementations."""
    import torch
    from transformers import AutoModelForCausalLM

    from ....actors.engine.serving.batching import ContinuousBatcher

    torch.set_num_threads(config.worker_threads)
    model = AutoModelForCausalLM.from_pretrained(config.model_dir, dtype=torch.float32, attn_implementation="sdpa")
    model.set_experts_implementation(experts)
    return ContinuousBatcher(model.eval(), config.kv)


def heldout_prompts(
    model_dir: Path, count: int, tokens: int, at_least: int | None = None
) -> list[tuple[int, ...]]:
    """The first `tokens` tokens of `count` held-out passages, taking the kinds of text in turn.

    Args:
        at_least: fewer than `count` will do where there are no more, but not fewer than this; None: `count`.

    Raises:
        CheckpointError: the model ships no (or too little) held-out text.
    """
    least = count if at_least is None else at_least
    tokenizer = load_tokenizer(model_dir)
    kinds = [
        [json.loads(line)["text"] for line in path.read_text(encoding="utf-8").splitlines()]
        for path in sorted((model_dir / "heldout").glob("*.jsonl"))
    ]
    texts = [text for group in itertools.zip_longest(*kinds) for text in group if text is not None]
    prompts = [tuple(tokenizer.encode(text).ids[:tokens]) for text in texts]
    prompts = [prompt for prompt in prompts if len(prompt) == tokens][:count]
    if len(prompts) < least:
        raise CheckpointError(f"'{model_dir}' has no {least} held-out passages", "use the default model")
    return prompts


def serve(submit: Submit, prompts: Sequence[tuple[int, ...]], max_tokens: int) -> tuple[Measures, list[list[int]]]:
    """All prompts in flight together, greedy, past any stop token.

    Returns:
        Mean `ttft_s` and `tpot_s` over the requests, and each one's tokens.

    Raises:
        RuntimeFailure: a request failed.
    """
    sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    streams = [submit(GenerationRequest(f"bench-{next(_ids)}", prompt, sampling)) for prompt in prompts]
    done = [_gather(stream) for stream in streams]
    measures = {
        "ttft_s": sum(g.ttft_s or 0.0 for g in done) / len(done),
        "tpot_s": sum(g.tpot_s or 0.0 for g in done) / len(done),
    }
    return measures, [g.token_ids for g in done]


def _gather(events: Sequence[TokenEvent]) -> Generation:
    generation = Generation("")
    for event in events:
        generation.add(event)
    if generation.finish != "length":
        what = f"a request ended with {generation.finish}: {generation.error}"
        raise RuntimeFailure(what, "run again; report it if it stays")
    return generation
