"""The script that fits a head for drafts to the default model (models/train_mtp.py)."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from tiny_models import VOCAB, save_tiny_checkpoint
from transformers import AutoModelForCausalLM

from tiermoe.actors.engine.model.mtp import FILE, build_head
from tiermoe.cluster.jobs.prepare import prepare
from train import Optimizer, rows_of
from train_mtp import export, losses, new_head


def test_a_head_learns_and_is_read_from_the_checkpoint(tmp_path: Path) -> None:
    checkpoint = save_tiny_checkpoint("qwen3_moe", tmp_path / "model")
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval().requires_grad_(False)
    drawn = np.random.default_rng(0)
    text = [np.tile(drawn.integers(3, VOCAB, 5), 100).astype(np.uint16) for _ in range(3)]
    head = new_head(model, 0)
    optimizer, first, last = Optimizer(dict(head.layers[0].named_parameters())), 0.0, 0.0
    for step in range(1, 41):
        loss, hits = losses(model, head, rows_of(text, 0, step, 4, 32)[:, :-1])
        loss.backward()
        optimizer.step(step, 1.0)
        first, last = first or loss.item(), loss.item()
    assert last < first - 1
    assert hits[0] > 0.4
    export(head, checkpoint)
    assert (checkpoint / FILE).is_file()
    prepare(checkpoint, tmp_path / "store", progress=False)
    read = build_head(tmp_path / "store", model, torch.device("cpu")).state_dict()
    own = {name: one for name, one in head.state_dict().items() if name.startswith("layers.")}
    assert all(torch.equal(read[name], one.to(torch.bfloat16).float()) for name, one in own.items())
