"""Keys and values in 8 bits: what a row becomes, and that requests see the same rows however they are run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from serving import greedy, serving, settings
from tiny_models import tiny_config
from transformers import AutoModelForCausalLM

from tiermoe.actors.budget import coded_row_bytes
from tiermoe.actors.engine.serving.batching import ContinuousBatcher
from tiermoe.actors.engine.serving.kv_rows import CodedCache, decode, encode, mark, rounded
from tiermoe.actors.gpu_worker import make_batcher
from tiermoe.actors.requests import GenerationRequest, SamplingParams
from tiermoe.actors.settings import KvSettings
from tiermoe.cluster.jobs.evaluate.eval_command import evaluate
from tiermoe.cluster.jobs.evaluate.quality import EvaluationOptions
from tiermoe.cluster.jobs.options import RUNTIME
from tiermoe.cluster.yaml_file import option_name
from tiermoe.errors import UnsupportedModelError

KINDS: Any = ("int8", "fp8")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("width", [1, 30, 64])
@pytest.mark.parametrize("kind", KINDS)
def test_a_row_differs_by_its_form_only(kind: Any, width: int, dtype: torch.dtype) -> None:
    """int8: half a step of 1/127 of the row's largest number. fp8: 1/16 of the number, or half the least step."""
    torch.manual_seed(0)
    rows = (torch.randn(40, 3, width) * torch.logspace(-6, 4, 40)[:, None, None]).to(dtype)
    rows[0], rows[1, :, -1] = 0.0, 1e4
    stored = encode(rows, kind)
    assert (stored.dtype, stored.shape) == (torch.int8, (40, 3, coded_row_bytes(width)))
    exact, most = rows.double(), rows.double().abs().amax(-1, keepdim=True)
    found = decode(stored, width, kind, torch.float32)
    bound = most / 254 if kind == "int8" else torch.maximum(exact.abs() / 16, most / 448 / 1024)
    assert bool(((found.double() - exact).abs() <= bound * 1.0001).all())
    assert torch.equal(rounded(rows, kind), found.to(dtype))
    assert not rounded(rows[:1], kind).any()
    scale = stored[..., -4:].contiguous().view(torch.float32)
    torch.testing.assert_close(scale.double(), most / (127 if kind == "int8" else 448))


def model_of(kind: str, **options: Any) -> Any:
    torch.manual_seed(0)
    config = tiny_config(kind)
    for name, value in options.items():
        setattr(config, name, value)
    return AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").eval()


def generated(batcher: ContinuousBatcher, *prompts: Sequence[int], **more: Any) -> list[list[int]]:
    sampling = SamplingParams(max_tokens=12, ignore_eos=True)
    streams = [batcher.submit(GenerationRequest(f"r{i}", tuple(p), sampling, **more)) for i, p in enumerate(prompts)]
    events = [list(stream) for stream in streams]
    assert all(event.error is None for some in events for event in some)
    return [[token for event in some for token in event.token_ids] for some in events]


PROMPTS = [[i * 7 % 50 + 3 for i in range(37)], [5, 6], [9, 8, 7, 11, 40, 41, 42, 43, 44, 45, 46, 47]]


@pytest.mark.parametrize(("name", "options"), [("mixtral", {}), ("mixtral", {"sliding_window": 6}), ("qwen3_moe", {})])
@pytest.mark.parametrize("kind", KINDS)
def test_tokens_do_not_depend_on_chunks_batches_and_shared_prefixes(
    kind: Any, name: str, options: dict[str, Any]
) -> None:
    """Those of transformers' own `generate` on a cache that rounds each row."""
    model = model_of(name, **options)
    expected = []
    for prompt in PROMPTS:
        ids = torch.tensor([prompt])
        found = model.generate(
            ids, attention_mask=torch.ones_like(ids), past_key_values=CodedCache(model, kind), max_new_tokens=12,
            do_sample=False, eos_token_id=None, pad_token_id=0,
        )  # fmt: skip
        expected.append(found[0, len(prompt) :].tolist())
    for rows in (64, 8):
        kv = KvSettings(page_size=4, num_blocks=64, max_batch_tokens=rows, dtype=kind)
        batcher = ContinuousBatcher(model, kv)
        try:
            assert [generated(batcher, prompt)[0] for prompt in PROMPTS] == expected
            assert generated(batcher, *PROMPTS) == expected  # by now of prefixes, where they can be shared
            assert generated(batcher, *PROMPTS, read_prefix_cache=False) == expected
            cache = batcher._manager.batch_processor.cache
            (part,) = cache.cache_allocators.values()
            assert part.num_blocks >= 64
            least = 64 * 4 * len(part.layer_indices) * 2 * part.num_key_value_heads * coded_row_bytes(part.width)
            held = cache.cache_tensor.nbytes - 2 * cache.bytes_per_sector
            assert least <= held <= least + 4 * cache.bytes_per_sector
        finally:
            batcher.close()
    mark(model, None)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("compile", ["off", "native"])
def test_every_way_to_run_the_dense_part_stores_and_reads_the_same(tiny: Any, kind: Any, compile: Any) -> None:
    """The native program reads rows of 8 bits in place; transformers' modules get what is gathered."""
    one = tiny("qwen3_moe")
    kv = KvSettings(page_size=4, num_blocks=64, max_batch_tokens=8, dtype=kind)
    model = AutoModelForCausalLM.from_pretrained(one.checkpoint, dtype=torch.float32).eval()
    expected = []
    for prompt in one.PROMPTS:
        ids = torch.tensor([prompt])
        found = model.generate(
            ids, attention_mask=torch.ones_like(ids), past_key_values=CodedCache(model, kind), max_new_tokens=12,
            do_sample=False, pad_token_id=0,
        )  # fmt: skip
        expected.append(found[0, len(prompt) :].tolist())
    with serving(one.store, settings(0.5, kv=kv, compile=compile)) as worker:
        for _ in range(2):
            assert greedy(worker, one.PROMPTS, 12) == expected
        assert not worker.plan()["lossless"]
        assert worker.plan()["kv_dtype"] == kind


@pytest.mark.parametrize(
    ("name", "why"), [("deepseek_v2", r"latent attention \(MLA\)"), ("qwen3_next", "running state")]
)
def test_a_cache_of_another_kind_is_refused_by_name(name: str, why: str) -> None:
    kv = KvSettings(page_size=4, num_blocks=64, dtype="int8")
    with pytest.raises(UnsupportedModelError, match=f"kv.dtype int8 is of the paged KV cache.*{why}"):
        make_batcher(model_of(name), kv)
    with pytest.raises(ValueError, match="dtype int8 is of the paged KV cache"):
        KvSettings(dtype="int8", batching="serial")


def test_another_batcher_has_numbers_again() -> None:
    """The form belongs to a batcher, not to the model."""
    model = model_of("mixtral")
    plain = KvSettings(page_size=4, num_blocks=64)
    batcher = ContinuousBatcher(model, plain)
    expected = generated(batcher, *PROMPTS)
    batcher.close()
    for dtype in ("int8", "auto"):
        batcher = ContinuousBatcher(model, plain.model_copy(update={"dtype": dtype}))
        found = generated(batcher, *PROMPTS)
        batcher.close()
    assert found == expected


def test_the_option_is_one_of_its_own() -> None:
    """Guards an option that took the place of `--dtype`."""
    assert len({option_name(*key.split(".")) for key in RUNTIME}) == len(RUNTIME)
    assert option_name("kv", "dtype") == "--kv-dtype"


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_the_default_model_says_nearly_the_same(kind: Any) -> None:
    sizes = EvaluationOptions(documents=12)
    record, quality = evaluate(None, "on-demand", "1.0", 1, sizes, None, kv={"dtype": kind})
    assert record["kv_dtype"] == kind
    assert not quality.lossless
    assert abs(quality["perplexity_ratio"].value - 1) < 0.01
    assert quality["top1_agreement"].value > 0.95  # fp8 0.971, int8 0.995 on 20 documents
