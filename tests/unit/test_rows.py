"""Continuous batching on a model's own cache: whatever else runs, a request has the tokens of `generate` alone."""

from __future__ import annotations

from contextlib import closing
from typing import Any

import pytest
import torch
from channel_peer import wait_until
from matrix import Rows
from serving import gathered, reference_greedy
from tiny_models import tiny_model

from tiermoe.actors.gpu_worker import make_batcher
from tiermoe.actors.requests import GenerationRequest, SamplingParams
from tiermoe.actors.settings import KvSettings
from tiermoe.errors import NotServing

torch.set_num_threads(1)
_PROMPTS = [[5, 9, 2, 7, 1, 3], [8, 8, 4, 6, 2, 9, 11, 30, 2], [3 + i % 90 for i in range(41)], [17], [40, 41, 7] * 8]
_TOKENS = [14, 30, 9, 20, 12]
_SHORT = KvSettings(page_size=16, num_blocks=32, max_batch_tokens=24)


def _asked(i: int) -> GenerationRequest:
    return GenerationRequest(f"r{i}", tuple(_PROMPTS[i]), SamplingParams(_TOKENS[i], ignore_eos=True))


def _model(name: str) -> Any:
    return tiny_model(name)


def test_a_long_prompt_lets_the_others_go_on() -> None:
    """Between two of its chunks each other request gets a token; a chunk beside others has its own bound."""
    model = _model("lfm2_moe")
    prompts = [(5, 9, 2), tuple(3 + i * 7 % 90 for i in range(90))]
    expected = reference_greedy(model, prompts, 40, ignore_eos=True)
    forwards: list[list[tuple[int, bool]]] = []

    class Watcher(Rows):
        def begin_forward(self, sequences: Any) -> None:
            forwards.append([(s.stop - s.start, s.decode) for s in sequences])

    kv = KvSettings(page_size=16, num_blocks=32, max_batch_tokens=24, prefill_chunk=8)
    with closing(make_batcher(model, kv, Watcher())) as batcher:
        streams = [batcher.submit(GenerationRequest("short", prompts[0], SamplingParams(40, ignore_eos=True)))]
        next(iter(streams[0]))
        del forwards[:]
        streams.append(batcher.submit(GenerationRequest("long", prompts[1], SamplingParams(40, ignore_eos=True))))
        gathered(streams[1])
    chunks = [i for i, rows in enumerate(forwards) if not rows[0][1]]
    assert [forwards[i] for i in chunks] == [[(8, False)]] * 11 + [[(2, False)]]
    assert all(forwards[i + 1] == [(1, True)] for i in chunks[:-1])
    assert forwards[chunks[-1] + 1] == [(1, True), (1, True)]
    assert expected[1]


@pytest.mark.parametrize("name", ["deepseek_v4", "minimax", "minimax_m3_vl"])
def test_rows_of_several_lengths_have_the_tokens_of_each_alone(name: str) -> None:
    """Where padding would shift blocks of keys or the cycle of compressed ones; requests come and end at any place."""
    model = _model(name)
    expected = [
        reference_greedy(model, [prompt], tokens, ignore_eos=True)[0]
        for prompt, tokens in zip(_PROMPTS, _TOKENS, strict=True)
    ]
    rows = Rows()
    with closing(make_batcher(model, _SHORT, rows)) as batcher:
        for order in ([0, 1, 2, 3, 4], [4, 2, 0, 3, 1], [3]):
            streams = [(i, batcher.submit(_asked(i))) for i in order]
            assert all(gathered(stream).token_ids == expected[i] for i, stream in streams)
        assert batcher.shares
        assert rows.most > 3


@pytest.mark.parametrize(
    "name",
    ["lfm2_moe", "qwen3_next", "mimo_v2_flash", "deepseek_v2", "hy_v4", "deepseek_v4", "minimax", "minimax_m3_vl"],
)
def test_a_prompt_goes_on_from_what_an_earlier_one_left(name: str) -> None:
    """From an answer, from where two prompts parted, from the end of a prompt; never across salts."""
    model = _model(name)
    first, common = [7 + i * 11 % 97 for i in range(20)], [3 + i * 37 % 101 for i in range(40)]
    answer = reference_greedy(model, [first], 10, ignore_eos=True)[0]
    asked = [
        (first, "", 0),
        ([*first, *answer, 4, 9, 21], "", 29),
        ([*first, *answer, 4, 9, 21], "other", 0),
        ([*common, 5, 6, 8], "", 0),
        ([*common, 9, 1], "", 0),  # makes a checkpoint where it parts from the one before
        ([*common, 60], "", 32),
        ([*common, 5, 6, 8, 30], "", 43),
    ]
    expected = [reference_greedy(model, [prompt], 10, ignore_eos=True)[0] for prompt, _, _ in asked]
    with closing(make_batcher(model, _SHORT)) as batcher:
        for i, (prompt, salt, cached) in enumerate(asked):
            request = GenerationRequest(f"r{i}", tuple(prompt), SamplingParams(10, ignore_eos=True), cache_salt=salt)
            found = gathered(batcher.submit(request))
            assert (found.token_ids, found.cached_tokens) == (expected[i], cached)


def test_log_probabilities_of_a_prompt_in_chunks() -> None:
    model, prompt = _model("qwen3_next"), [3 + i * 37 % 101 for i in range(60)]
    with torch.no_grad():
        rows = torch.log_softmax(model(torch.tensor([prompt])).logits[0], -1)
    with closing(make_batcher(model, _SHORT)) as batcher:
        for name in ("first", "again"):  # it does not go on from the first's end
            request = GenerationRequest(name, tuple(prompt), SamplingParams(2, ignore_eos=True, prompt_logprobs=0))
            found = next(iter(batcher.submit(request))).prompt_logprobs
            assert [one.token_id for one in found] == prompt[1:]
            values = [float(rows[i, token]) for i, token in enumerate(prompt[1:])]
            assert [one.logprob for one in found] == pytest.approx(values, abs=1e-4)


def test_a_request_of_one_token_leaves_the_others_together() -> None:
    """Guards a batcher that took the cache of a request that had ended for one that it does not know."""
    with closing(make_batcher(_model("lfm2_moe"), _SHORT)) as batcher:
        gathered(batcher.submit(GenerationRequest("one", (5, 6, 7), SamplingParams(1, ignore_eos=True))))
        assert batcher.shares


@pytest.mark.parametrize("kv", [{"checkpoint_mib": 0}, {"prefix_cache": False}, {"batching": "serial"}])
def test_nothing_is_kept_where_it_is_not_asked_for(kv: dict[str, Any]) -> None:
    model = _model("lfm2_moe")
    with closing(make_batcher(model, KvSettings(page_size=16, num_blocks=32, **kv))) as batcher:
        request = GenerationRequest("a", tuple(range(3, 43)), SamplingParams(4, ignore_eos=True))
        gathered(batcher.submit(request))
        assert (len(batcher.checkpoints), batcher.divides) == (0, "batching" not in kv)


def test_the_youngest_request_waits_where_the_cache_is_full() -> None:
    """All rows are as long as the longest. A chat without `max_tokens` asks for all the room; others run beside it."""
    model = _model("lfm2_moe")
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
        wait_until(lambda: batcher.kv_usage == 0)  # the last token is delivered before its row leaves
    assert watcher.most == 3


@pytest.mark.parametrize("part", ["join", "leave", "verified_tokens"])
def test_a_failure_ends_the_loop_and_no_stream_waits(part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards a loop that ended in silence: the worker said that it serves, and its streams waited for ever."""
    model = _model("lfm2_moe")
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
