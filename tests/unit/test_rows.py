"""Continuous batching on a model's own cache: whatever else runs, a request has the tokens of `generate` alone."""

from __future__ import annotations

from contextlib import closing
from typing import Any

import pytest
import torch
from serving import gathered, reference_greedy
from tiny_models import tiny_config
from transformers import AutoModelForCausalLM

from tiermoe.actors.gpu_worker import make_batcher
from tiermoe.actors.requests import GenerationRequest, SamplingParams
from tiermoe.actors.settings import KvSettings
from tiermoe.errors import NotServing

torch.set_num_threads(1)
_PROMPTS = [[5, 9, 2, 7, 1, 3], [8, 8, 4, 6, 2, 9, 11, 30, 2], [3 + i % 90 for i in range(41)], [17], [40, 41, 7] * 8]
_TOKENS = [14, 30, 9, 20, 12]
# what a paged cache does not hold, by what it is; and whether its requests share forward passes
_MODELS = {
    "deepseek_v2": True,  # latent attention
    "qwen3_next": True,  # linear attention
    "lfm2_moe": True,  # convolutions
    "jamba": True,  # state spaces
    "nemotron_h": True,
    "mimo_v2_flash": True,  # a sliding window, sinks in some layers
    "minimax": False,  # a cache class of its own
    "hy_v4": False,  # keys that an index chooses
    "deepseek_v4": False,  # compressed keys
}


class Rows:
    """Counts the rows of decode steps."""

    def __init__(self) -> None:
        self.most = 0
        self.ended: list[str] = []

    def begin_forward(self, sequences: Any) -> None:
        self.most = max(self.most, sum(s.decode for s in sequences))

    def end_sequence(self, name: str) -> None:
        self.ended.append(name.partition("#")[0])


def _asked(i: int) -> GenerationRequest:
    return GenerationRequest(f"r{i}", tuple(_PROMPTS[i]), SamplingParams(_TOKENS[i], ignore_eos=True))


@pytest.mark.parametrize("name", _MODELS)
def test_requests_that_come_and_go_have_the_tokens_of_generate(name: str) -> None:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(tiny_config(name), dtype=torch.float32).eval()
    expected = [
        reference_greedy(model, [prompt], tokens, ignore_eos=True)[0]
        for prompt, tokens in zip(_PROMPTS, _TOKENS, strict=True)
    ]
    watcher, kv = Rows(), KvSettings(page_size=16, num_blocks=32)
    with closing(make_batcher(model, kv, watcher)) as batcher:
        watcher.ended.clear()
        assert batcher.shares == _MODELS[name]
        streams = [batcher.submit(_asked(i)) for i in range(5)]
        left = batcher.submit(GenerationRequest("left", (4, 5, 6, 7) * 12, SamplingParams(200, ignore_eos=True)))
        assert next(iter(left)).token_ids  # it is a row by now
        batcher.cancel(left)
        assert [gathered(stream).token_ids for stream in streams] == expected
        again = batcher.submit(_asked(3))
        assert gathered(again).token_ids == expected[3]
    assert (watcher.most > 1) == _MODELS[name]
    assert sorted(watcher.ended) == ["left", "r0", "r1", "r2", "r3", "r3", "r4"]


def test_the_youngest_request_waits_where_the_cache_is_full() -> None:
    """All rows are as long as the longest. A chat without `max_tokens` asks for all the room; others run beside it."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(tiny_config("lfm2_moe"), dtype=torch.float32).eval()
    prompts, tokens = [(5, 6, 7 + i) for i in range(4)], [125, 60, 40, 50]
    expected = [
        reference_greedy(model, [prompt], count, ignore_eos=True)[0]
        for prompt, count in zip(prompts, tokens, strict=True)
    ]
    watcher = Rows()
    with closing(make_batcher(model, KvSettings(page_size=8, num_blocks=16), watcher)) as batcher:  # 128 tokens
        streams = [
            batcher.submit(GenerationRequest(f"r{i}", prompt, SamplingParams(count, ignore_eos=True)))
            for i, (prompt, count) in enumerate(zip(prompts, tokens, strict=True))
        ]
        assert [gathered(stream).token_ids for stream in streams] == expected
        assert batcher.kv_usage == 0
    assert watcher.most == 3


@pytest.mark.parametrize("part", ["join", "leave", "next_tokens"])
def test_a_failure_ends_the_loop_and_no_stream_waits(part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards a loop that ended in silence: the worker said that it serves, and its streams waited for ever."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(tiny_config("lfm2_moe"), dtype=torch.float32).eval()
    with closing(make_batcher(model, KvSettings(page_size=16, num_blocks=32))) as batcher:
        memory: list[BaseException] = []
        batcher.streams.out_of_memory = memory.append

        def fail(*args: Any) -> None:
            raise torch.OutOfMemoryError("no room")

        monkeypatch.setattr(f"tiermoe.actors.engine.serving.rows.{part}", fail)
        streams = [batcher.submit(_asked(i)) for i in range(3)]
        ends = [list(stream)[-1] for stream in streams]
        failed = [end.error_type for end in ends if end.finish != "length"]  # one may end before a row leaves
        assert failed
        assert set(failed) <= {"LoopDied", "NotServing"}
        assert memory
        with pytest.raises(NotServing, match="the generation loop died"):
            batcher.submit(_asked(4))
