"""Rotary embeddings that depend on a sequence's length: the tokens of a request alone, whatever else runs or ran."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from quick import quick
from serving import gathered, greedy, prepared, reference_greedy, serving, settings
from tiny_models import VOCAB, save_tiny_checkpoint
from transformers import AutoModelForCausalLM

from tiermoe.actors.engine.model.lengths import SequenceLengths, lengths_of
from tiermoe.actors.engine.serving.scoring import score
from tiermoe.actors.gpu_worker import make_batcher
from tiermoe.actors.requests import GenerationRequest, SamplingParams
from tiermoe.actors.settings import KvSettings

BORDER, TOKENS = 24, 14
LONGROPE = {
    "rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": BORDER,
    "short_factor": [1.0, 1.1, 1.2, 1.3], "long_factor": [4.0, 5.0, 6.0, 7.0],
}  # fmt: skip
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}
MODELS: dict[str, dict[str, Any]] = {
    # `generate` feeds the whole sequence again when it passes the border
    "phimoe": {"rope_parameters": {**LONGROPE, "short_mscale": 1.1, "long_mscale": 1.6}},
    "qwen3_moe": {"rope_parameters": LONGROPE},
    "gpt_oss": {"rope_parameters": LONGROPE},  # windows
    "laguna": {  # an embedding for each kind of layer
        "rope_parameters": {
            "full_attention": LONGROPE, "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0}
        }
    },
    "olmoe": {"rope_parameters": DYNAMIC, "max_position_embeddings": BORDER},
}  # fmt: skip
KV = {
    "together": KvSettings(page_size=8, num_blocks=64, batching="continuous"),
    "in pieces": KvSettings(page_size=8, num_blocks=64, max_batch_tokens=16, prefill_chunk=8, batching="continuous"),
    "giving way": KvSettings(page_size=8, num_blocks=12, batching="continuous"),
    "serial": KvSettings(page_size=8, num_blocks=64, batching="serial"),
}


def prompts() -> list[list[int]]:
    """Each begins as the others do: they share the prefix cache where they may."""
    text = torch.randint(3, VOCAB, (60,), generator=torch.Generator().manual_seed(7)).tolist()
    return [text[:length] for length in (5, 11, 23, 24, 25, 60)]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("lengths")
    return {name: save_tiny_checkpoint(name, folder / name, **options) for name, options in MODELS.items()}


def fresh(checkpoint: Path) -> Any:
    """A model that has run nothing."""
    return AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def alone(checkpoints: dict[str, Path]) -> dict[str, list[list[int]]]:
    """What transformers generates for each prompt with a model of its own."""

    class Made(dict[str, list[list[int]]]):
        def __missing__(self, name: str) -> list[list[int]]:
            path = checkpoints[name]
            self[name] = [reference_greedy(fresh(path), [prompt], TOKENS, ignore_eos=True)[0] for prompt in prompts()]
            return self[name]

    return Made()


@contextmanager
def batcher_of(model: Any, kv: KvSettings) -> Iterator[Any]:
    batcher = make_batcher(model, kv)
    try:
        yield batcher
    finally:
        batcher.close()


def generated(batcher: Any, *requests: GenerationRequest) -> list[list[int]]:
    """All in flight together."""
    return [gathered(stream).token_ids for stream in [batcher.submit(request) for request in requests]]


def asked(prompt: Sequence[int], generated: Sequence[int] = ()) -> GenerationRequest:
    sampling = SamplingParams(max_tokens=TOKENS, ignore_eos=True)
    return GenerationRequest(f"{len(prompt)}", tuple(prompt), sampling, tuple(generated))


FAST = [("phimoe", "together"), ("qwen3_moe", "giving way"), ("laguna", "in pieces"), ("olmoe", "serial")]


@pytest.mark.parametrize(
    ("name", "way"),
    quick(
        [
            *FAST, ("phimoe", "giving way"), ("phimoe", "serial"), ("qwen3_moe", "in pieces"), ("gpt_oss", "together"),
            ("gpt_oss", "giving way"), ("laguna", "serial"), ("olmoe", "together"), ("olmoe", "in pieces"),
        ],
        FAST,
    ),
)  # fmt: skip
def test_tokens_are_those_of_a_request_alone(name: str, way: str, checkpoints: Any, alone: Any) -> None:
    requests = [asked(prompt) for prompt in prompts()]
    with batcher_of(fresh(checkpoints[name]), KV[way]) as batcher:
        assert generated(batcher, *requests) == alone[name]
        assert generated(batcher, *requests) == alone[name]  # on what the prefix cache holds now
        assert generated(batcher, *requests[::-1]) == alone[name][::-1]
        assert [generated(batcher, request)[0] for request in requests] == alone[name]


@pytest.mark.parametrize(("name", "way"), [("phimoe", "in pieces"), ("qwen3_moe", "serial"), ("olmoe", "in pieces")])
def test_a_request_of_another_lead_resumes(name: str, way: str, checkpoints: Any, alone: Any) -> None:
    """Its generated tokens are fed in one forward, and have the embeddings of tokens that were generated."""
    with batcher_of(fresh(checkpoints[name]), KV[way]) as batcher:
        for prompt, tokens in zip(prompts(), alone[name], strict=True):
            for done in (1, 2, 5, TOKENS - 1):
                assert generated(batcher, asked(prompt, tokens[:done])) == [tokens[done:]]


@pytest.mark.parametrize("name", ["phimoe", "qwen3_moe", "olmoe"])
def test_scores_are_of_the_tokens_as_generated(name: str, checkpoints: Any, alone: Any) -> None:
    class Nobody:
        def begin_forward(self, sequences: Any) -> None: ...
        def end_sequence(self, name: str) -> None: ...

    model = fresh(checkpoints[name])
    for prompt, tokens in zip(prompts(), alone[name], strict=True):
        for chunk in (7, 64):
            found = score(model, Nobody(), [*prompt, *tokens], len(prompt), model.config._attn_implementation, chunk)
            assert found.argmax(-1).tolist() == tokens


def test_keys_of_the_prefix_cache_carry_the_regime(checkpoints: Any) -> None:
    tokens = list(range(3, 33))
    longrope = lengths_of(fresh(checkpoints["qwen3_moe"]))
    assert longrope.keys(tokens, 10) == tokens[:BORDER] + [token + VOCAB for token in tokens[BORDER:]]
    assert longrope.keys(tokens, 30) == [token + VOCAB for token in tokens]
    dynamic = lengths_of(fresh(checkpoints["olmoe"]))
    assert dynamic.keys(tokens, 10) == tokens[:BORDER]
    assert dynamic.keys(tokens, 30) == []


def test_a_module_keeps_nothing_of_a_forward(checkpoints: Any) -> None:
    model = fresh(checkpoints["olmoe"])
    lengths_of(model)
    states, short, long = torch.zeros(1, 1, 32), torch.tensor([[5]]), torch.tensor([[90]])
    before = model.model.rotary_emb(states, short)[0]
    model.model.rotary_emb(states, long)
    assert torch.equal(model.model.rotary_emb(states, short)[0], before)
    assert model.model.rotary_emb.max_seq_len_cached == BORDER


def test_a_model_whose_embeddings_depend_on_positions_only_is_left_alone(checkpoint: Path) -> None:
    model = fresh(checkpoint)
    lengths: SequenceLengths = lengths_of(model)
    assert not lengths.any
    assert "forward" not in vars(model.model.rotary_emb)
    assert lengths.keys([5, 6], 2) == [5, 6]


def test_dynamic_embeddings_go_on_by_their_factor(checkpoints: Any) -> None:
    assert lengths_of(fresh(checkpoints["olmoe"])).positions == 4 * BORDER
    assert lengths_of(fresh(checkpoints["qwen3_moe"])).positions == 256


def test_a_worker_serves_it_by_default(checkpoints: Any, alone: Any, tmp_path: Path) -> None:
    """`compile: auto` traces the model, which left a tensor of the trace in it: every request failed."""
    store = prepared(checkpoints["phimoe"], tmp_path / "store")
    with serving(store, settings(0.5, "next-gate")) as worker:
        assert worker.batcher.unpaged_because is None
        found = greedy(worker, prompts(), TOKENS)
    stop = 2
    assert found == [t[: t.index(stop) + 1] if stop in t else t for t in alone["phimoe"]]
