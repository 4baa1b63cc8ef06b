"""Log-probabilities and minimal lengths: equal to the unmodified model's, however requests are batched or cut up."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from serving import prepared, serving, serving_both, settings
from tiny_models import save_tiny_checkpoint
from transformers import AutoModelForCausalLM

from tiermoe.actors.gpu_worker import GpuWorker
from tiermoe.actors.requests import GenerationRequest, SamplingParams, TokenEvent, TokenLogprob
from tiermoe.actors.settings import KvSettings

PROMPT = tuple(range(20, 43))
BOTH = pytest.mark.parametrize("batching", ["continuous", "serial"])


@pytest.fixture(scope="module")
def workers(mixtral_store: Any) -> Iterator[dict[str, GpuWorker]]:
    """Eight rows a forward: the prompt is prefilled in three parts."""
    with serving_both(mixtral_store, {"num_blocks": 16, "max_batch_tokens": 8}) as both:
        yield both


@pytest.fixture(scope="module")
def model(mixtral: Path) -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(mixtral, dtype=torch.float32).eval()


def expected(model: torch.nn.Module, ids: tuple[int, ...]) -> torch.Tensor:
    """Log-probabilities [len(ids) - 1, V] of what follows each token but the last."""
    with torch.no_grad():
        return torch.log_softmax(model(torch.tensor([ids])).logits[0, :-1], -1)


def events_of(worker: GpuWorker, *asked: SamplingParams) -> list[list[TokenEvent]]:
    """One request each, all in flight together."""
    streams = [worker.submit(GenerationRequest(f"r{i}", PROMPT, params)) for i, params in enumerate(asked)]
    return [list(stream) for stream in streams]


def tokens_of(worker: GpuWorker, params: SamplingParams) -> list[int]:
    (events,) = events_of(worker, params)
    return [token for event in events for token in event.token_ids]


def check(found: list[TokenLogprob], ids: tuple[int, ...], reference: torch.Tensor, top: int) -> None:
    assert [entry.token_id for entry in found] == list(ids)
    for entry, row in zip(found, reference, strict=True):
        assert entry.logprob == pytest.approx(float(row[entry.token_id]), abs=1e-4)
        assert len(entry.top) == top
        values = [value for _, value in entry.top]
        assert values == sorted(values, reverse=True)
        assert values == pytest.approx(row.topk(top).values.tolist(), abs=1e-4)


@BOTH
def test_of_prompt_and_generated_tokens(workers: dict[str, GpuWorker], model: torch.nn.Module, batching: str) -> None:
    plain = SamplingParams(6, ignore_eos=True)
    asked = [
        plain,
        SamplingParams(6, ignore_eos=True, logprobs=3, prompt_logprobs=2),
        SamplingParams(6, ignore_eos=True, logprobs=0, prompt_logprobs=0, temperature=1.1, seed=5),
    ]
    quiet, greedy, drawn = events_of(workers[batching], *asked)
    assert not any(event.logprobs or event.prompt_logprobs for event in quiet)
    tokens = [token for event in quiet for token in event.token_ids]
    assert [token for event in greedy for token in event.token_ids] == tokens
    for events, top, prompt_top in ((greedy, 3, 2), (drawn, 0, 0)):
        ids = PROMPT + tuple(token for event in events for token in event.token_ids)
        reference = expected(model, ids)
        check(list(events[0].prompt_logprobs), PROMPT[1:], reference[: len(PROMPT) - 1], prompt_top)
        assert not any(event.prompt_logprobs for event in events[1:])
        assert all(len(event.logprobs) == len(event.token_ids) for event in events)
        generated = [entry for event in events for entry in event.logprobs]
        check(generated, ids[len(PROMPT) :], reference[len(PROMPT) - 1 :], top)
    assert all(events[-1].queue_s is not None and events[-1].queue_s >= 0 for events in (quiet, greedy, drawn))


@BOTH
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_no_stop_token_before_min_tokens(
    workers: dict[str, GpuWorker], tmp_path: Path, batching: str, temperature: float
) -> None:
    """The same weights twice, once with a stop token that comes by itself."""
    params = SamplingParams(12, temperature=temperature, seed=1)
    free = tokens_of(workers[batching], replace(params, ignore_eos=True))
    checkpoint = save_tiny_checkpoint("mixtral", tmp_path / "checkpoint", eos_token_id=free[3])
    stops_at = free.index(free[3])
    with serving(prepared(checkpoint, tmp_path / "store"), settings(0.5, kv=KvSettings(batching=batching))) as worker:
        assert tokens_of(worker, params) == free[: stops_at + 1]
        longer = tokens_of(worker, replace(params, min_tokens=8))
        if not temperature:  # else masking the stop token moves the draws of the others
            assert tokens_of(worker, replace(params, min_tokens=stops_at)) == free[: stops_at + 1]
            assert longer[:stops_at] == free[:stops_at]
        assert free[3] not in longer[:8]
        assert len(longer) >= 8
