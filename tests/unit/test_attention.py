"""Attention by name: what a name means on which machine, and our kernel on transformers' own paged cache."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from tiny_models import tiny_config
from transformers import AutoModelForCausalLM

from tiermoe.actors.engine.model import attention
from tiermoe.actors.engine.model.attention import attention_for, plain_attention_of, use_paged
from tiermoe.actors.engine.serving.batching import ContinuousBatcher
from tiermoe.actors.requests import GenerationRequest, SamplingParams
from tiermoe.actors.settings import KvSettings
from tiermoe.errors import ConfigError

KV = KvSettings(page_size=4, num_blocks=64, max_batch_tokens=16)


def model_of(kind: str, **options: Any) -> Any:
    torch.manual_seed(0)
    config = tiny_config(kind)
    for name, value in options.items():
        setattr(config, name, value)
    return AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").eval()


def generated(model: Any, name: str, prompts: Sequence[Sequence[int]]) -> list[list[int]]:
    batcher = ContinuousBatcher(model, KV, attention=name)  # type: ignore[arg-type]
    try:
        sampling = SamplingParams(max_tokens=12, ignore_eos=True)
        streams = [batcher.submit(GenerationRequest(f"r{i}", tuple(p), sampling)) for i, p in enumerate(prompts)]
        events = [list(stream) for stream in streams]
        assert all(event.error is None for some in events for event in some)
        return [[token for event in some for token in event.token_ids] for some in events]
    finally:
        batcher.close()


@pytest.mark.skipif(torch.cuda.is_available(), reason="nothing is interpreted where there is a GPU")
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        pytest.param("mixtral", {}, marks=pytest.mark.slow), ("mixtral", {"sliding_window": 6}),
        pytest.param("qwen3_moe", {}, marks=pytest.mark.slow),
    ],
    ids=["plain", "window", "qwen3"],
)  # fmt: skip
def test_our_kernel_gives_sdpas_tokens_on_the_paged_cache(kind: str, options: dict[str, Any]) -> None:
    """Several sequences, prompts in chunks, contexts over several pages and longer than the window."""
    pytest.importorskip("triton")
    model = model_of(kind, **options)
    prompts = [[i * 7 % 50 + 3 for i in range(21)], [5, 6], [9, 8, 7, 11]]
    expected = generated(model, "sdpa", prompts)
    calls: list[int] = []
    ours = attention.paged_attention
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, "paged_attention", lambda *a, **k: (calls.append(1), ours(*a, **k))[1])
        assert generated(model, "triton", prompts) == expected
    assert calls
    assert model.config._attn_implementation == "sdpa"  # as before


def test_a_name_means_the_same_everywhere_or_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """`auto` is never what happens to be installed."""
    config, cpu, gpu = tiny_config("mixtral"), torch.device("cpu"), torch.device("cuda")
    for installed in (True, False):
        monkeypatch.setattr("transformers.utils.is_flash_attn_2_available", lambda installed=installed: installed)
        assert [attention_for(config, name, cpu) for name in ("auto", "sdpa", "eager")] == ["sdpa", "sdpa", "eager"]
        assert attention_for(config, "triton", gpu) == "sdpa"  # with an ordinary cache
        if installed:
            assert attention_for(config, "flash", gpu) == "flash_attention_2"
    with pytest.raises(ConfigError, match="needs the package flash-attn"):
        attention_for(config, "flash", gpu)
    with pytest.raises(ConfigError, match="triton needs a GPU"):
        attention_for(config, "triton", cpu)


def test_our_name_on_the_paged_cache() -> None:
    class Model:
        class config:
            _attn_implementation = "sdpa"

        def set_attn_implementation(self, name: str) -> None:
            self.config._attn_implementation = name

    for plain, without in (("sdpa", "sdpa"), ("eager", "eager"), ("paged|eager", "eager")):
        model = Model()
        model.config._attn_implementation = plain
        assert plain_attention_of(model) == without
        use_paged(model)
        assert (model.config._attn_implementation, plain_attention_of(model)) == ("tiermoe-paged", without)


def test_it_needs_a_paged_cache() -> None:
    with pytest.raises(ValueError, match="paged cache"):
        attention.paged_attention(None, *(torch.zeros(1, 1, 1, 16),) * 3, None)
