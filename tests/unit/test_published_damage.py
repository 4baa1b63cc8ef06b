"""Damaged, truncated and mislabelled checkpoints of every published form: typed errors only."""

from __future__ import annotations

import json
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from damage import drop_tensor, flip_header, relabel, rename_tensor, truncate
from gguf import GGMLQuantizationType
from published import RELEASES, SIZES, Release, all_forms, q4_k_m, write, write_gguf
from safetensors.torch import load_file, save_file
from tiny_models import save_tiny_checkpoint
from words import check_words

from tiermoe.actors.store.files import ExpertStore
from tiermoe.cluster.checkpoints.checkpoint import open_checkpoint
from tiermoe.cluster.checkpoints.gguf_header import read_gguf_header
from tiermoe.cluster.jobs.prepare import convert, prepare
from tiermoe.cluster.topology.inputs import facts_of_checkpoint
from tiermoe.errors import StoreError, TierMoeError

torch.set_num_threads(1)
EACH = 26  # mutations of a form
SMALL = {"vocab_size": 64, "num_experts": 2, "num_local_experts": 2, "n_routed_experts": 2}
NAMES = (
    "deepseek-ai/DeepSeek-V3", "deepseek-ai/DeepSeek-V4-Flash", "openai/gpt-oss-20b", "TheBloke/Mixtral-8x7B-v0.1-GPTQ",
    "casperhansen/mixtral-instruct-awq", "RedHatAI/Qwen3-30B-A3B-quantized.w4a16",
    "RedHatAI/Mixtral-8x7B-Instruct-v0.1-quantized.w4a16-asym", "RedHatAI/Mixtral-8x7B-Instruct-v0.1-quantized.w8a8",
    "RedHatAI/Qwen3-30B-A3B-FP8-dynamic", "neuralmagic/DeepSeek-Coder-V2-Lite-Instruct-FP8",
    "nvidia/Qwen3-30B-A3B-NVFP4", "nvidia/Qwen3.6-35B-A3B-NVFP4", "RedHatAI/Qwen3-30B-A3B-NVFP4",
    "RedHatAI/Qwen3-30B-A3B-MXFP4",
)  # fmt: skip


def read_all(folder: Path) -> None:
    """What a preparation does, without writing: plan, read and check every expert and dense tensor."""
    conversion = convert.plan_store(open_checkpoint(folder))
    for layer in conversion.published or ():
        for matrix in layer.form.matrices:
            for _ in layer.read(matrix):
                pass
    for _ in convert._dense_data(conversion):
        pass


def refused(folder: Path) -> bool:
    """Whether a checkpoint is refused with a typed error; any other error is raised, and one of its plan, too."""
    found = False
    for read in (facts_of_checkpoint, read_all):
        try:
            read(folder)
        except TierMoeError as error:
            if any(folder.glob("*.safetensors")):
                check_words(error)
            found = read is read_all
    return found


def poison(path: Path, rng: random.Random) -> None:
    """Scales, zero points or indices of one matrix become anything."""
    tensors = load_file(path)
    name = rng.choice([n for n in tensors if not n.endswith((".qweight", "_packed", "_blocks")) and "layers" in n])
    data = np.frombuffer(rng.randbytes(tensors[name].nbytes), np.uint8).copy()
    if rng.random() < 0.5:
        data[:] = 255
    tensors[name] = torch.from_numpy(data).view(tensors[name].dtype).view(tensors[name].shape)
    save_file(tensors, path)


def misconfigure(path: Path, rng: random.Random) -> None:
    path = path.with_name("config.json")
    config = json.loads(path.read_text())
    part: dict[str, Any] = config.get("quantization_config") or config
    while any(isinstance(value, dict) and value for value in part.values()) and rng.random() < 0.7:
        part = rng.choice([value for value in part.values() if isinstance(value, dict) and value])
    part[rng.choice(list(part))] = rng.choice((None, 3, -1, "x", [], {}, 64, 16, True))
    path.write_text(json.dumps(config))


Mutation = Callable[[Path, random.Random], None]
MUTATIONS: tuple[Mutation, ...] = (truncate, flip_header, relabel, rename_tensor, drop_tensor, poison, misconfigure)


def mutate(whole: Path, folder: Path, seed: int, mutations: tuple[Mutation, ...]) -> bool:
    copied = Path(shutil.copytree(whole, folder))
    weights = next(path for path in sorted(copied.iterdir()) if path.suffix in (".safetensors", ".gguf"))
    mutations[seed % len(mutations)](weights, random.Random(seed))
    found = refused(copied)
    shutil.rmtree(copied)
    return found


@pytest.mark.parametrize("release", [r for r in RELEASES if r.name in NAMES], ids=lambda r: r.name)
def test_damaged_checkpoints_are_refused(release: Release, tmp_path: Path) -> None:
    small = Release(**{**vars(release), "sizes": {**release.sizes, **SMALL, "first_k_dense_replace": 0}})
    whole = write(small, tmp_path)[0]
    assert not refused(whole)
    count = sum(mutate(whole, tmp_path / "mutated", seed, MUTATIONS) for seed in range(EACH))
    assert count >= EACH // 3  # codes may be anything, so not every mutation can be seen


@pytest.mark.parametrize(
    ("model_type", "architecture", "kinds", "layers"),
    [("qwen3_moe", "qwen3moe", q4_k_m, 2), ("olmoe", "olmoe", all_forms, 3)],
    ids=["Q4_K_M", "every type"],
)
def test_damaged_ggufs_are_refused(
    model_type: str, architecture: str, kinds: Callable[[str], str], layers: int, tmp_path: Path
) -> None:
    sizes = {**SIZES, **SMALL, "head_dim": 64, "num_hidden_layers": layers}
    plain = save_tiny_checkpoint(model_type, tmp_path / "plain", **sizes)
    file, _ = write_gguf(plain, tmp_path / "whole", architecture, kinds)
    shutil.copy(plain / "config.json", file.parent)
    assert not refused(file.parent)
    mutations = (truncate, flip_header, relabel_gguf, poison_gguf)
    count = sum(mutate(file.parent, tmp_path / "mutated", seed, mutations) for seed in range(EACH))
    assert count >= EACH // 3


def relabel_gguf(path: Path, rng: random.Random) -> None:
    """Another type for one tensor of the experts."""
    tensors = read_gguf_header(path).tensors
    name = rng.choice([name for name in tensors if "_exps" in name]).encode()
    data = bytearray(path.read_bytes())
    at = data.index(name) + len(name) + 4 + 3 * 8  # after the number of dimensions, and those
    other = rng.choice([int(kind) for kind in GGMLQuantizationType if int(kind) != data[at]])
    data[at : at + 4] = other.to_bytes(4, "little")
    path.write_bytes(data)


def poison_gguf(path: Path, rng: random.Random) -> None:
    data = bytearray(path.read_bytes())
    first = rng.randrange(4000, len(data) - 4096)
    data[first : first + 4096] = b"\xff" * 4096
    path.write_bytes(data)


@pytest.mark.parametrize("change", ["touch", "grow", "remove", "replace"])
def test_a_store_notices_that_the_mapped_checkpoint_changed(change: str, tmp_path: Path) -> None:
    published, _ = write(next(r for r in RELEASES if r.name == "openai/gpt-oss-20b"), tmp_path)
    store = prepare(published, tmp_path / "store", progress=False)
    weights = published / "model.safetensors"
    assert sum(path.stat().st_size for path in store.glob("layer-*")) < 5000  # no expert is there twice
    ExpertStore(store)
    if change == "touch":
        weights.touch()
    elif change == "grow":
        weights.write_bytes(weights.read_bytes() + b"x")
    elif change == "remove":
        weights.unlink()
    else:
        status = weights.stat()
        data = weights.read_bytes()
        weights.write_bytes(data[:20] + b"?" + data[21:])
        os.utime(weights, ns=(status.st_atime_ns, status.st_mtime_ns))
    with pytest.raises(StoreError, match=r"model\.safetensors"):
        ExpertStore(store, "stamp")
