"""Matrices of the dense part in their published forms: modules, stores, what is held and counted."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from form_cases import FORMS, OF_INTEGERS, form, random_parts
from kernel_cases import assert_near
from published import RELEASES, SIZES, write, write_gguf
from safetensors.torch import load_file
from tiny_models import edit_config, save_tiny_checkpoint, tiny_model
from torch import nn

from tiermoe.actors.engine.dense.native import _lowered
from tiermoe.actors.engine.model.model import build_model
from tiermoe.actors.engine.model.published_linear import (
    DeviceMatrix,
    PublishedEmbedding,
    PublishedLinear,
    PublishedMatrix,
    bytes_of,
    exchange,
    held_parameters,
    keeps_form,
    published_bytes,
    published_notes,
)
from tiermoe.actors.store import published as store_published
from tiermoe.actors.store.format import Manifest, read_manifest
from tiermoe.cluster.checkpoints.hub import locate
from tiermoe.cluster.jobs.prepare import prepare
from tiermoe.cluster.topology.inputs import facts_of_checkpoint, facts_of_store
from tiermoe.kernels.expert_ffn import DECODE_ROWS, SHORT_ROWS
from tiermoe.kernels.forms import BLOCKS, FLOATS

SMALL = {"vocab_size": 64, "num_experts": 2, "num_hidden_layers": 2}
_RELEASES = ["RedHatAI/Qwen3-30B-A3B-FP8-dynamic", "QuantTrio/Qwen3-30B-A3B-AWQ"]
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
PUBLISHED = [name for name in FORMS if name not in FLOATS]


class Tied(nn.Module):
    """An embedding and a layer on the same matrix, and a layer with a bias."""

    def __init__(self, outputs: int, inputs: int) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(outputs, inputs), nn.Linear(inputs, outputs, bias=False)
        self.biased = nn.Linear(inputs, outputs)


@pytest.mark.parametrize("name", PUBLISHED)
def test_modules_compute_what_those_on_the_dequantized_matrix_do(name: str) -> None:
    of, torch_of = form(name, 40, 512), torch.from_numpy
    matrix = PublishedMatrix(of, random_parts(of, np.random.default_rng(1)))
    values = torch_of(of.dequantize(matrix.parts))
    model = Tied(40, 512)
    bias = model.biased.bias.detach()
    assert keeps_form(model.head, "head", of)
    assert keeps_form(model.embed, "embed", of) == (of.kind in BLOCKS)
    names = ["head.weight", "biased.weight", *(["embed.weight"] if of.kind in BLOCKS else [])]
    exchange(model, dict.fromkeys(names, matrix))
    assert published_bytes(model) == of.nbytes()
    assert {id(p) for p in held_parameters(model)} == {
        id(p) for p in model.parameters() if not torch.isnan(p.flatten()[0])
    }
    for rows in (0, 1, 3, 70):
        x = torch.randn(rows, 512, generator=torch.Generator().manual_seed(rows))
        wanted = x @ values.t()
        worst = OF_INTEGERS * float(wanted.abs().max()) if rows else 0.0
        torch.testing.assert_close(model.head(x), wanted, rtol=0, atol=worst)
        torch.testing.assert_close(model.biased(x[None]), (wanted + bias)[None], rtol=0, atol=worst)
    if of.kind in BLOCKS:
        ids = torch.tensor([[3, 39], [0, 3]])
        assert torch.equal(model.embed(ids), values[ids])
        assert model.embed(ids[:0]).shape == (0, 2, 512)
        with pytest.raises((IndexError, RuntimeError), match="out of"):
            model.embed(torch.tensor([40]))


@pytest.mark.parametrize("name", ["q4_k", "q8_0", "fp8_block", "int, 4 bits, order", "iq3_s", "mxfp4"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_modules_of_a_gpu(name: str, dtype: torch.dtype) -> None:
    """Interpreted where there is none: few rows by the kernel, many on a decoded matrix of the reference's weights."""
    pytest.importorskip("triton")
    of = form(name, 40, 512)
    parts = random_parts(of, np.random.default_rng(1))
    on_device = {
        part: bytes_of(torch.from_numpy(array), of.parts()[part][0]).to(DEVICE) for part, array in parts.items()
    }
    matrix = DeviceMatrix(of, on_device, dtype)
    assert matrix.note == ""
    values = torch.from_numpy(of.dequantize(parts)).to(DEVICE, dtype)
    found, unit = matrix.rows(torch.arange(40, device=DEVICE).view(2, 20)), 0 if dtype == torch.float32 else 2.0**-7
    torch.testing.assert_close(found, values.view(2, 20, 512), rtol=unit, atol=0)  # the interpreter cuts off
    model = Tied(40, 512).to(DEVICE, dtype)
    exchange(model, {"head.weight": matrix, "biased.weight": matrix})
    assert model.head(torch.empty(0, 512, dtype=dtype, device=DEVICE)).shape == (0, 40)
    for rows in (1, 3, DECODE_ROWS + 1, SHORT_ROWS + 6):
        x = torch.randn(rows, 512, generator=torch.Generator().manual_seed(rows)).to(DEVICE, dtype)
        wanted = x.double() @ values.double().t()
        assert_near(model.head(x), wanted.cpu())
        assert_near(model.biased(x[None])[0], (wanted + model.biased.bias.detach().double()).cpu())


def test_a_matrix_that_triton_cannot_run_is_dequantized_and_said(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")

    def fails(*_: Any) -> None:
        raise RuntimeError("out of resource")

    monkeypatch.setattr("tiermoe.kernels.triton.form_linear.TritonMatrix.product", fails)
    of = form("q8_0", 40, 64)
    parts = random_parts(of, np.random.default_rng(1))
    model, values = Tied(40, 64), torch.from_numpy(of.dequantize(parts))
    matrix = DeviceMatrix(of, {"weight": torch.from_numpy(parts["weight"])}, torch.float32)
    exchange(model, {"head.weight": matrix})
    (note,) = published_notes(model)
    assert note == "the dense part is dequantized in each step, slowly: RuntimeError: out of resource"
    x = torch.randn(3, 64)
    assert torch.equal(model.head(x), x @ values.t())
    assert torch.equal(matrix.rows(torch.tensor([3])), values[3:4])


@pytest.mark.parametrize("name", ["q4_k", "fp8_block"])
def test_a_trace_has_a_step_for_them(name: str) -> None:
    of = form(name, 40, 512)
    matrix = PublishedMatrix(of, random_parts(of, np.random.default_rng(1)))
    model = Tied(40, 512)
    exchange(model, {"biased.weight": matrix})
    x = torch.randn(3, 512)
    program = _lowered(lambda x: model.biased(x), 13, torch.randn(1, 13, 512)).builder.build(16, 0, {}, 1)
    program.begin(3, torch.tensor([0, 3], dtype=torch.int32), [])
    found = torch.empty(3, 40)
    program.run(0, x, found)
    assert torch.equal(found, model.biased(x))


def test_other_modules_are_dequantized() -> None:
    of = form("q8_0", 8, 64)

    class Router(nn.Linear):
        pass

    assert not keeps_form(Router(64, 8), "gate", of)
    assert not keeps_form(nn.Linear(64, 8), "mixer.dt_proj", of)  # its weight is multiplied directly
    assert not keeps_form(nn.Linear(64, 8), "q_proj", form("bfloat16", 8, 64))


def gguf_store(model_type: str, architecture: str, folder: Path, **sizes: Any) -> tuple[Path, Path]:
    """A store, and the checkpoint of the dequantized values."""
    plain = save_tiny_checkpoint(model_type, folder / "plain", **{**SIZES, "head_dim": 64, **sizes})
    kinds = lambda name: "F32" if "ffn_gate_inp" in name else "Q6_K" if "attn_q" in name else "Q8_0"  # noqa: E731
    file, oracle = write_gguf(plain, folder / "gguf", architecture, kinds)
    shutil.copy(plain / "config.json", file.parent)
    return prepare(locate(str(file.parent)), folder / "store", progress=False), oracle


def released(name: str, folder: Path) -> tuple[Path, Path]:
    release = next(r for r in RELEASES if r.name == name)
    published, oracle = write(replace(release, sizes={**release.sizes, **SMALL}), folder)
    return prepare(published, folder / "store", progress=False), oracle


@pytest.mark.parametrize("case", ["gguf", "permuted rows", "tied", *_RELEASES])
def test_a_store_keeps_them(case: str, tmp_path: Path) -> None:
    """Float32 on a CPU runs on the parts; other dtypes get the dequantized matrix; both have the oracle's values."""
    if case in _RELEASES:
        store, oracle = released(case, tmp_path)
    elif case == "permuted rows":
        store, oracle = gguf_store("mixtral", "llama", tmp_path)
    else:
        store, oracle = gguf_store("qwen3_moe", "qwen3moe", tmp_path, tie_word_embeddings=case == "tied")
    manifest = read_manifest(store)
    forms = manifest.dense.forms
    assert "model.layers.1.self_attn.q_proj.weight" in forms
    assert ("model.embed_tokens.weight" in forms) == (case not in _RELEASES)
    model = build_model(store, manifest, torch.float32, torch.device("cpu"), "auto")
    wide = build_model(store, manifest, torch.bfloat16, torch.device("cpu"), "auto")
    modules = dict(model.named_modules())
    values = {n: t for file in sorted(oracle.glob("*.safetensors")) for n, t in load_file(file).items()}
    for name, of in forms.items():
        module = modules[name.removesuffix(".weight")]
        assert isinstance(module, PublishedLinear | PublishedEmbedding)
        found = torch.from_numpy(of.dequantize(module.matrix.parts))
        torch.testing.assert_close(found, values[name].float(), rtol=2**-8, atol=0)  # compressed-tensors rounds
        assert torch.equal(wide.state_dict()[name], found.to(torch.bfloat16))
    assert published_bytes(wide) == 0
    assert published_bytes(model) == sum(of.nbytes() for of in forms.values())
    if case == "tied":
        assert "lm_head.weight" not in forms
        assert model.lm_head.matrix is model.model.embed_tokens.matrix


def test_the_manifest_of_a_store_without_them_is_as_before(tmp_path: Path) -> None:
    store = prepare(save_tiny_checkpoint("qwen3_moe", tmp_path / "plain"), tmp_path / "store", progress=False)
    data = (store / "manifest.json").read_bytes()
    assert "forms" not in json.loads(data)["dense"]
    assert Manifest.decode(data, "here").dense.forms == {}


@pytest.mark.parametrize("case", ["plain", "scaled", "tied"])
def test_a_large_embedding_is_a_table(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its rows are read from the mapped file in the numbers that the checkpoint has; a tied one is read whole."""
    monkeypatch.setattr(store_published, "TABLE_BYTES", 1 << 12)
    kind, sizes = "qwen3_moe", {"tie_word_embeddings": case == "tied"}
    if case == "scaled":
        kind, sizes = "gemma4", {"hidden_size_per_layer_input": 8}
    model = tiny_model(kind, **sizes).to(torch.bfloat16)
    model.save_pretrained(tmp_path / "plain")
    edit_config(tmp_path / "plain", dtype="bfloat16")
    store = prepare(tmp_path / "plain", tmp_path / "store", progress=False)
    manifest = read_manifest(store)
    forms, built = manifest.dense.forms, build_model(store, manifest, torch.float32, torch.device("cpu"), "auto")
    tables = {name: module for name, module in built.named_modules() if isinstance(module, PublishedEmbedding)}
    facts = facts_of_store(store, tmp_path / "plain")
    if case == "tied":
        assert not forms
        assert not tables
        assert facts.table_bytes == 0
        return
    assert {form.kind for form in forms.values()} == {"bfloat16"}
    assert published_bytes(built) == 0
    assert facts.table_bytes == facts.published_bytes == sum(form.nbytes() for form in forms.values()) > 0
    assert facts.dense_bytes(4, gpu=False) == 4 * (facts.dense_elements - facts.published_elements)
    ids, own = torch.tensor([[3, 100], [0, 3]]), dict(model.named_modules())
    for name, module in tables.items():
        whole = next(of for path, of in own.items() if path.endswith(name.removeprefix("model.")))
        wanted = nn.functional.embedding(ids, whole.weight.float()) * getattr(whole, "scalar_embed_scale", 1.0)
        torch.testing.assert_close(module(ids), wanted, rtol=0, atol=0)
    assert facts_of_checkpoint(tmp_path / "plain").table_bytes == facts.table_bytes
