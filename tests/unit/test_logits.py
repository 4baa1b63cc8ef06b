"""Penalties, biases and stop tokens: as transformers' logits processors have them, alone and in a batch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from serving import serving_both
from tiny_models import VOCAB
from transformers import (
    AutoModelForCausalLM,
    LogitsProcessor,
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
)

from tiermoe.actors.engine.serving.logits import processor_of
from tiermoe.actors.engine.serving.sampling import draw
from tiermoe.actors.gpu_worker import GpuWorker
from tiermoe.actors.requests import GenerationRequest, SamplingParams, TokenEvent

PROMPT = tuple(range(20, 43))
TOKENS = 10
BOTH = pytest.mark.parametrize("batching", ["continuous", "serial"])


@pytest.fixture(scope="module")
def workers(mixtral_store: Any) -> Iterator[dict[str, GpuWorker]]:
    with serving_both(mixtral_store, {"num_blocks": 24, "max_batch_tokens": 16}) as both:
        yield both


@pytest.fixture(scope="module")
def model(mixtral: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(mixtral, dtype=torch.float32).eval()


class _Openai(LogitsProcessor):
    """OpenAI's formula in NumPy: mu[j] - c[j] * frequency - float(c[j] > 0) * presence, c of generated tokens."""

    def __init__(self, presence: float, frequency: float) -> None:
        self.presence, self.frequency = presence, frequency

    def __call__(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        counts = np.bincount(ids[0, len(PROMPT) :].numpy(), minlength=scores.shape[1])
        return scores - torch.tensor(counts * self.frequency + (counts > 0) * self.presence, dtype=scores.dtype)


# parameters, and transformers' processors that do the same
CASES: dict[str, tuple[dict[str, Any], list[Any]]] = {
    "plain": ({}, []),
    "repetition": ({"repetition_penalty": 1.7}, [RepetitionPenaltyLogitsProcessor(1.7)]),
    "encouraged": ({"repetition_penalty": 0.6}, [RepetitionPenaltyLogitsProcessor(0.6)]),
    "presence": ({"presence_penalty": 1.5}, [_Openai(1.5, 0.0)]),
    "frequency": ({"frequency_penalty": 1.2}, [_Openai(0.0, 1.2)]),
    "bias": ({"logit_bias": ((7, 3.0), (90, -100.0))}, [SequenceBiasLogitsProcessor([[[7], 3.0], [[90], -100.0]])]),
    "all": (
        {"logit_bias": ((7, 1.0),), "repetition_penalty": 1.3, "presence_penalty": 0.4, "frequency_penalty": 0.3},
        [SequenceBiasLogitsProcessor([[[7], 1.0]]), RepetitionPenaltyLogitsProcessor(1.3), _Openai(0.4, 0.3)],
    ),
}


def ours(worker: GpuWorker, *asked: SamplingParams) -> list[list[TokenEvent]]:
    """One request each, all in flight together."""
    streams = [worker.submit(GenerationRequest(f"r{i}", PROMPT, params)) for i, params in enumerate(asked)]
    found = [list(stream) for stream in streams]
    assert all(events[-1].error is None for events in found)
    return found


def tokens_of(events: Sequence[TokenEvent]) -> list[int]:
    return [token for event in events for token in event.token_ids]


def theirs(model: Any, processors: list[Any], **options: Any) -> list[int]:
    ids = torch.tensor([PROMPT])
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, pad_token_id=0, max_new_tokens=TOKENS,
        logits_processor=LogitsProcessorList(processors), **{"eos_token_id": None, **options},
    )  # fmt: skip
    return out[0, len(PROMPT) :].tolist()


@BOTH
def test_greedy_tokens_are_transformers_in_one_batch(workers: dict[str, GpuWorker], model: Any, batching: str) -> None:
    """All cases in flight together: none disturbs another."""
    asked = [SamplingParams(TOKENS, ignore_eos=True, **params) for params, _ in CASES.values()]
    found = {name: tokens_of(events) for name, events in zip(CASES, ours(workers[batching], *asked), strict=True)}
    assert found == {name: theirs(model, processors) for name, (_, processors) in CASES.items()}
    assert len({tuple(tokens) for tokens in found.values()}) >= 5  # the parameters do something here


@pytest.mark.parametrize("name", list(CASES))
def test_scores_are_transformers(name: str) -> None:
    """Of three steps with one processor, and of the last step with a fresh one: the state is the tokens' alone."""
    params, processors = CASES[name]
    request = GenerationRequest("r", PROMPT, SamplingParams(TOKENS, **params))
    scores = torch.randn(3, VOCAB, generator=torch.Generator().manual_seed(3)) * 4
    generated: list[int] = []
    kept = processor_of(request)
    assert (kept is None) == (name == "plain")
    for step, row in enumerate(scores):
        before = row.clone()
        expected = LogitsProcessorList(processors)(torch.tensor([[*PROMPT, *generated]]), row[None])[0]
        for processor in (kept, processor_of(request)):
            found = row if processor is None else processor(row, generated)
            torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
        assert torch.equal(row, before)
        generated += [30, 7, 7][: step + 1]


@pytest.mark.parametrize("min_p", [0.02, 0.2, 0.9])
@pytest.mark.parametrize("temperature", [0.7, 1.5])
def test_min_p_permits_what_transformers_warper_does(min_p: float, temperature: float) -> None:
    scores = torch.randn(12, generator=torch.Generator().manual_seed(1))
    kept = MinPLogitsWarper(min_p)(torch.zeros(1, 0), scores[None] / temperature)[0]
    params = SamplingParams(temperature=temperature, min_p=min_p)
    assert {draw(scores, params, 5, n) for n in range(1500)} == set(torch.isfinite(kept).nonzero()[:, 0].tolist())


@BOTH
def test_stop_tokens_of_a_request(workers: dict[str, GpuWorker], model: Any, batching: str) -> None:
    """They end it, also where the model's own are ignored; not before min_tokens; the others go on."""
    free = theirs(model, [])
    stop = next(token for i, token in enumerate(free) if i >= 2 and token not in free[:i])
    at = free.index(stop)
    asked = [
        SamplingParams(TOKENS, ignore_eos=True, stop_token_ids=(stop, 3)),
        SamplingParams(TOKENS, stop_token_ids=(stop,), min_tokens=at + 3),
        SamplingParams(TOKENS, ignore_eos=True),
    ]
    stopped, later, whole = ours(workers[batching], *asked)
    assert (tokens_of(stopped), stopped[-1].finish, stopped[-1].token_ids) == (free[: at + 1], "stop", (stop,))
    assert (tokens_of(whole), whole[-1].finish) == (free, "length")
    masked = [MinNewTokensLengthLogitsProcessor(len(PROMPT), at + 3, torch.tensor([stop]))]
    eos = workers[batching].batcher.streams.eos
    masked += [MinNewTokensLengthLogitsProcessor(len(PROMPT), at + 3, torch.tensor(eos))] if eos else []
    assert tokens_of(later) == theirs(model, masked, eos_token_id=[stop, *eos])


@BOTH
def test_penalties_with_a_seed_are_the_same_alone_and_in_a_batch(workers: dict[str, GpuWorker], batching: str) -> None:
    asked = [
        SamplingParams(TOKENS, temperature=0.9, seed=4, ignore_eos=True, frequency_penalty=0.5, min_p=0.05),
        SamplingParams(TOKENS, temperature=0.9, seed=4, ignore_eos=True),
        SamplingParams(TOKENS, temperature=1.2, seed=9, ignore_eos=True, logit_bias=((5, 4.0),), logprobs=1),
    ]
    together = [tokens_of(events) for events in ours(workers[batching], *asked)]
    assert [tokens_of(ours(workers[batching], params)[0]) for params in asked] == together
    assert together[0] != together[1]
