"""Checkpoints of text with images or sound: the text part is served, with the tokens of the whole model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from serving import Tiny, greedy, prepared, reference_greedy, serving, settings
from tiny_models import COMPOSITE_TYPES, save_tiny_checkpoint, whole_class
from transformers import AutoConfig

torch.set_num_threads(1)


@pytest.mark.parametrize("model_type", COMPOSITE_TYPES)
def test_the_text_part_gives_the_tokens_of_the_whole(model_type: str, tmp_path: Path) -> None:
    checkpoint = save_tiny_checkpoint(model_type, tmp_path / "checkpoint")
    whole = whole_class(AutoConfig.from_pretrained(checkpoint)).from_pretrained(checkpoint, dtype=torch.float32).eval()
    expected = reference_greedy(whole, Tiny.PROMPTS, Tiny.TOKENS)
    store = prepared(checkpoint, tmp_path / "store")
    dense = sum(parameter.nbytes for name, parameter in whole.named_parameters() if ".experts." not in name)
    assert store.manifest.dense.nbytes < dense  # without what sees and hears
    with serving(store, settings(0.5)) as worker:
        assert greedy(worker, Tiny.PROMPTS, Tiny.TOKENS) == expected
        assert any("the text part is served, without" in note for note in worker.plan()["notes"])
