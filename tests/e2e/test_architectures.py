"""Every architecture: the logits and the greedy tokens of the unmodified model, at any budget."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from serving import greedy, logits, prepared, reference_greedy, serving, settings
from tiny_models import VOCAB, save_tiny_checkpoint
from transformers import AutoModelForCausalLM

ARCHITECTURES = [
    "mixtral",
    "qwen2_moe",
    "qwen3_moe",
    "olmoe",
    "flex_olmo",
    "deepseek_v2",
    "deepseek_v3",
    "phimoe",
    "granitemoe",
    "gpt_oss",
    "glm4_moe",
    "ernie4_5_moe",
    "dots1",
    "minimax_m2",
    "hunyuan_v1_moe",
    "afmoe",
    "cohere2_moe",
    "lfm2_moe",  # convolution layers: on its own cache
    "minimax",  # linear attention: likewise
    "deepseek_v4",  # compressed keys: likewise
    "hy_v4",  # chosen keys: likewise
]
# In every run: a common one, shared experts with latent attention, biases, a cache of its own. The others are slow.
ALWAYS = frozenset(("qwen3_moe", "deepseek_v3", "gpt_oss", "lfm2_moe"))
TOKENS = 16


@pytest.mark.parametrize(
    "architecture",
    [pytest.param(name, marks=() if name in ALWAYS else pytest.mark.slow) for name in ARCHITECTURES],
)
def test_serves_what_transformers_computes(architecture: str, tmp_path: Path) -> None:
    checkpoint = save_tiny_checkpoint(architecture, tmp_path / "checkpoint")
    reference = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(7)
    prompts = [torch.randint(3, VOCAB, (n,), generator=generator).tolist() for n in (5, 11, 17, 30)]
    expected = reference_greedy(reference, prompts, TOKENS)
    with torch.no_grad():
        expected_logits = reference(torch.tensor([prompts[3]])).logits

    store = prepared(checkpoint, tmp_path / "store")
    slot_bytes = store.manifest.experts.nbytes(4)
    for budget in (1.0, 0.5, slot_bytes) if architecture in ALWAYS else (0.5, slot_bytes):
        with serving(store, settings(budget, "next-gate")) as worker:
            found = logits(worker, prompts[3], reference.config._attn_implementation)
            assert (found - expected_logits).abs().max() <= 1e-4
            assert greedy(worker, prompts[:1], TOKENS) == expected[:1]
            assert greedy(worker, prompts, TOKENS) == expected
            stats = worker.stats()
            assert stats.expert_bytes_peak <= stats.expert_budget_bytes
            assert stats.total().hits + stats.total().misses > 0
