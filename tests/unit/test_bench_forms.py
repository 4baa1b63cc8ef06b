"""Random checkpoints in each form."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from tiermoe.actors.store.files import ExpertStore
from tiermoe.benchmarks import random_model
from tiermoe.benchmarks.random_model import NamedModel, save_published
from tiermoe.cluster.jobs.bench.random_model import Form, MoeShape
from tiermoe.cluster.jobs.prepare import prepare
from tiermoe.cluster.prompt import load_tokenizer
from tiermoe.cluster.simulate.shapes import ModelShape
from tiermoe.cluster.topology.inputs import facts_of_checkpoint
from tiermoe.errors import ConfigError, StoreError

SHAPE = MoeShape(layers=2, experts=3, top_k=2, hidden=256, intermediate=128, vocabulary=64)
FORMS = {Form.GGUF: "q8_0", Form.Q4_0: "q4_0"}


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> ExpertStore:
    folder = tmp_path_factory.mktemp("plain")
    return ExpertStore(prepare(save_published(Form.BF16, SHAPE, folder / "model"), folder / "store", progress=False))


@pytest.mark.parametrize("form", FORMS)
def test_the_same_model_in_each_form(form: Form, plain: ExpertStore, tmp_path: Path) -> None:
    """Every expert has its own weights, and those are the bfloat16 model's but for rounding."""
    model = save_published(form, SHAPE, tmp_path / "model")
    facts = facts_of_checkpoint(model)
    store = ExpertStore(prepare(model, tmp_path / "store", progress=False))
    assert store.manifest.expert_form == FORMS[form]
    assert store.manifest.expert_nbytes() == facts.expert_bytes
    for layer in range(SHAPE.layers):
        arrays, expected = store.mapped[layer], plain.layers[layer]
        for number in range(SHAPE.experts):
            found = arrays.form.dequantize(arrays.typed(number))
            down = (expected.down[number].astype(np.uint32) << 16).view(np.float32)  # [I, H]
            error = np.abs(found.down.T - down).mean() / np.abs(down).mean()
            assert error < (0.02 if form is Form.GGUF else 0.2)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """qwen3-30b-a3b is a model of three experts of 256 x 128."""
    shape = ModelShape(layers=4, dense_layers=0, experts=3, top_k=2, hidden=256, intermediate=128, bits=16)
    monkeypatch.setattr(random_model, "shape_named", lambda name: shape)


@pytest.mark.usefixtures("small")
def test_a_random_model_by_name_is_made_once(tmp_path: Path) -> None:
    named = NamedModel("qwen3-30b-a3b", Form.Q4_0, layers=2)
    folder = named.made(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [folder.name]  # nothing of its making is left
    stamp = (folder / "model.gguf").stat()
    assert named.made(tmp_path) == folder
    assert (folder / "model.gguf").stat().st_ino == stamp.st_ino
    assert named.expert_bytes == 2 * 3 * 3 * 256 * 128 * 4.5 / 8 < stamp.st_size
    assert json.loads((folder / "config.json").read_text())["head_dim"] == 128
    tokenizer = load_tokenizer(folder)  # of the default model, whose text the prompts are
    assert tokenizer.get_vocab_size() <= named.shape.vocabulary


def test_a_random_model_that_does_not_fit_is_refused_with_the_numbers(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    bf16 = NamedModel("qwen3-30b-a3b", Form.BF16)
    assert bf16.expert_bytes == 4 * 128 * 3 * 2048 * 768 * 2
    monkeypatch.setattr(random_model, "host_free_bytes", lambda: 20 << 30)
    bf16.require_memory(5, 0.25)
    with pytest.raises(ConfigError, match=r"4 layers has 4\.50 GiB.*5 policies take 22\.50 GiB.*18\.00 GiB.*is free"):
        bf16.require_memory(5, 0.5)
    disk = shutil.disk_usage(tmp_path)._replace(free=5 << 30)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: disk)
    with pytest.raises(StoreError, match=r"needs 9\.00 GiB .* has 5\.00 GiB free"):
        bf16.made(tmp_path / "models")
    assert list((tmp_path / "models").iterdir()) == []
