"""Published quantized checkpoints: prepared, served, and the tokens of the model of their dequantized values."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from published import RELEASES, Release, write
from serving import greedy, serving, settings
from transformers import AutoModelForCausalLM

from tiermoe.actors.store.files import ExpertStore
from tiermoe.cluster.jobs.prepare import prepare

torch.set_num_threads(1)
PROMPTS = [[3, 17, 50, 9, 81, 22, 7, 64, 90, 11, 45, 3], [99, 4, 4, 76, 31], [8, 120, 33, 60, 60, 2, 71]]
TOKENS = 10
_FAST = ("DeepSeek-V3", "gpt-oss-20b", "TheBloke/Mixtral-8x7B-v0.1-GPTQ", "w4a16", "nvidia/Qwen3-30B-A3B-NVFP4")


def reference(oracle: Path) -> list[list[int]]:
    """The greedy tokens of transformers' own model in float32."""
    model = AutoModelForCausalLM.from_pretrained(oracle, dtype=torch.float32).eval()
    out = []
    for prompt in PROMPTS:
        ids = torch.tensor([prompt])
        found = model.generate(ids, max_new_tokens=TOKENS, do_sample=False, attention_mask=torch.ones_like(ids))
        out.append(found[0, len(prompt) :].tolist())
    return out


def cases() -> list[object]:
    fast = [release.name.endswith(_FAST) for release in RELEASES]
    return [
        pytest.param(release, id=release.name, marks=() if is_fast else pytest.mark.slow)
        for release, is_fast in zip(RELEASES, fast, strict=True)
    ]


@pytest.mark.parametrize("release", cases())
def test_a_release_gives_the_tokens_of_its_dequantized_self(release: Release, tmp_path: Path) -> None:
    published, oracle = write(release, tmp_path)
    store = ExpertStore(prepare(published, tmp_path / "store", progress=False))
    expected = reference(oracle)
    for budget in (1.0, 0.25):
        with serving(store, settings(budget)) as worker:
            assert greedy(worker, PROMPTS, TOKENS) == expected
            stats = worker.stats()
            loaded = sum(layer.bytes_loaded for layer in stats.layers)
            assert loaded > 0
            assert loaded % store.manifest.expert_nbytes() == 0
