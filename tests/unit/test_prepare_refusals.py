"""Checkpoints that cannot be served are refused, and the message says which tensor or setting is to blame."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import save_tiny_checkpoint

from tiermoe.cluster.jobs.prepare import prepare
from tiermoe.errors import CheckpointError, UnsupportedModelError

torch.set_num_threads(1)


def edit_config(checkpoint: Path, **changes: object) -> Path:
    path = checkpoint / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    return checkpoint


def edit_tensors(checkpoint: Path, **changes: torch.Tensor | None) -> Path:
    """Replace, add, or (None) drop tensors; `__` stands for a dot."""
    tensors = load_file(checkpoint / "model.safetensors")
    for name, tensor in changes.items():
        key = name.replace("__", ".")
        if tensor is None:
            del tensors[key]
        else:
            tensors[key] = tensor
    save_file(tensors, checkpoint / "model.safetensors", metadata={"format": "pt"})
    return checkpoint


EXPERT = "model__layers__1__mlp__experts__3__up_proj__weight"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({EXPERT: None}, "not numbered|do not fit|is \\["),
        ({EXPERT: torch.zeros(24, 31)}, "do not fit"),
        ({EXPERT: torch.full((24, 32), torch.nan)}, "NaN or infinity"),
        ({EXPERT: torch.full((24, 32), torch.inf)}, "NaN or infinity"),
        ({EXPERT: torch.zeros(24, 32, dtype=torch.int32)}, "not floating point"),
        ({EXPERT: None, EXPERT.replace("__3__", "__8__"): torch.zeros(24, 32)}, "not numbered"),
        ({EXPERT.replace("__3__", "__8__"): torch.zeros(24, 32)}, "up_proj|do not fit|is \\["),
        ({"model__layers__1__mlp__experts__3__scale": torch.zeros(2)}, "the model lacks"),
        ({"model__norm__weight": None}, "lacks model.norm.weight"),
        ({"model__norm__weight": torch.zeros(31)}, r"model.norm.weight is \[31\], not \[32\]"),
        ({"model__norm__weight": torch.full((32,), -torch.inf)}, "NaN or infinity"),
        ({"norm__weight": torch.zeros(32)}, "both make parameter"),
    ],
)
def test_bad_tensors_are_refused(tmp_path: Path, changes: dict[str, torch.Tensor | None], message: str) -> None:
    checkpoint = edit_tensors(save_tiny_checkpoint("qwen3_moe", tmp_path / "checkpoint"), **changes)
    with pytest.raises(CheckpointError, match=message):
        prepare(checkpoint, tmp_path / "store", progress=False)
    assert not (tmp_path / "store").exists()


def test_numbers_beyond_the_type_that_they_are_cast_to_are_refused(tmp_path: Path) -> None:
    checkpoint = save_tiny_checkpoint("qwen3_moe", tmp_path / "checkpoint")
    edit_tensors(checkpoint, **{EXPERT: torch.full((24, 32), 1e6)})
    edit_config(checkpoint, dtype="float16")
    with pytest.raises(CheckpointError, match="NaN or infinity"):
        prepare(checkpoint, tmp_path / "store", progress=False)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"quantization_config": {"quant_method": "fp8"}}, r"quantized \(fp8\)"),
        ({"model_type": "no-such-model"}, "not usable"),
        ({"model_type": "vit"}, "cannot build|not usable|no routed experts"),
        ({"num_hidden_layers": 10**6}, "layers"),
        ({"num_local_experts": 7}, "not"),
        ({"moe_intermediate_size": "many"}, "not usable|cannot build"),
        ({"hidden_size": 64}, "not"),
    ],
)
def test_bad_configurations_are_refused(tmp_path: Path, changes: dict[str, object], message: str) -> None:
    checkpoint = edit_config(save_tiny_checkpoint("qwen3_moe", tmp_path / "checkpoint"), **changes)
    with pytest.raises(CheckpointError, match=message):
        prepare(checkpoint, tmp_path / "store", progress=False)


def test_a_dense_model_is_refused(tmp_path: Path) -> None:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(vocab_size=32, hidden_size=8, intermediate_size=8, num_hidden_layers=1, head_dim=4)
    Qwen3ForCausalLM(config).save_pretrained(tmp_path / "checkpoint")
    with pytest.raises(UnsupportedModelError, match="has no routed experts"):
        prepare(tmp_path / "checkpoint", tmp_path / "store", progress=False)


def test_folders_without_safetensors_are_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="not a folder"):
        prepare(tmp_path / "absent", tmp_path / "store", progress=False)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(CheckpointError, match="no weights"):
        prepare(tmp_path, tmp_path / "store", progress=False)
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"only pytorch_model.bin.*save_pretrained"):
        prepare(tmp_path, tmp_path / "store", progress=False)
