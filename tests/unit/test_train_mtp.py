"""The script that fits a head for drafts to the default model (models/train_mtp.py)."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from tiny_models import VOCAB, save_tiny_checkpoint
from transformers import AutoModelForCausalLM

import train_mtp
from tiermoe.actors.engine.model.mtp import FILE, build_head
from tiermoe.cluster.jobs.prepare import prepare
from train import Optimizer, rows_of
from train_mtp import export, losses, new_head, read, rows_and_states


def test_a_head_learns_and_is_read_from_the_checkpoint(tmp_path: Path) -> None:
    checkpoint = save_tiny_checkpoint("qwen3_moe", tmp_path / "model")
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval().requires_grad_(False)
    drawn = np.random.default_rng(0)
    text = [np.tile(drawn.integers(3, VOCAB, 5), 100).astype(np.uint16) for _ in range(3)]
    head = new_head(model, 0)
    optimizer, first, last = Optimizer(dict(head.layers[0].named_parameters())), 0.0, 0.0
    for step in range(1, 41):
        rows = rows_of(text, 0, step, 4, 32)[:, :-1]
        with torch.no_grad():
            states = model.model(rows, use_cache=False).last_hidden_state
        loss, hits = losses(model, head, rows, states)
        loss.backward()
        optimizer.step(step, 1.0)
        first, last = first or loss.item(), loss.item()
    assert last < first - 1
    assert hits[0] > 0.4
    export(head, checkpoint)
    assert (checkpoint / FILE).is_file()
    again = new_head(model, 1)
    read(again, checkpoint)
    assert all(
        torch.equal(one, own.to(torch.bfloat16).float())
        for one, own in zip(again.layers[0].parameters(), head.layers[0].parameters(), strict=True)
    )
    prepare(checkpoint, tmp_path / "store", progress=False)
    stored = build_head(tmp_path / "store", model, torch.device("cpu")).state_dict()
    own = {name: one for name, one in head.state_dict().items() if name.startswith("layers.")}
    assert all(torch.equal(stored[name], one.to(torch.bfloat16).float()) for name, one in own.items())


def test_every_other_part_goes_on_as_the_model_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train_mtp, "TOGETHER", 2)
    monkeypatch.setattr(train_mtp, "PROMPT", 6)
    checkpoint = save_tiny_checkpoint("qwen3_moe", tmp_path / "model")
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    text = [np.arange(3, 103).astype(np.uint16)] * 3
    own, gone_on = rows_and_states(model, text, 4, 12, 0)
    for rows, states in (own, gone_on):
        assert rows.shape == (2, 12)
        expected = model.model(rows).last_hidden_state
        assert torch.allclose(states.float(), expected, atol=0.02)
    assert all(bool((row[:, 1:] == row[:, :-1] + 1).all()) for row in (own[0], gone_on[0][:, :6]))
    assert not bool((gone_on[0][:, 6:] == gone_on[0][:, 5:-1] + 1).all())
