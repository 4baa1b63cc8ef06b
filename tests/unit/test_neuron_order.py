"""`tiermoe prepare --neuron-order`: experts compute what they did, and what contributes most comes first."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import typer
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st
from numpy.typing import NDArray
from rich.console import Console
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from tiermoe.actors.engine.cache.slots import LayerWeights
from tiermoe.actors.engine.cache.sources import host_weights
from tiermoe.actors.engine.model.model import MoeBlock, build_model, find_blocks
from tiermoe.actors.store.files import ExpertStore, LayerArrays
from tiermoe.actors.store.format import MANIFEST_NAME, ExpertShape, read_manifest
from tiermoe.actors.store.replicas import REPLICAS_NAME, describe_replicas
from tiermoe.cluster.jobs.prepare import ensure_prepared, prepare
from tiermoe.cluster.jobs.prepare.calibration import read_windows
from tiermoe.cluster.jobs.prepare.neuron_order import (
    _Meter,
    first_half,
    neuron_mass,
    neuron_orders,
    order_neurons,
    reordered,
)
from tiermoe.cluster.jobs.prepare.prepare_command import prepare_command
from tiermoe.cluster.jobs.prepare.replica_options import ReplicaOptions
from tiermoe.cluster.jobs.prepare.replicas import add_replicas
from tiermoe.errors import ConfigError, StoreError
from tiermoe.kernels.expert_ffn import Operands, TorchKernel

torch.set_num_threads(1)

QUIET = Console(quiet=True)
TEXT = "".join(f"def f{i}(x):\n    return x * {i} + {i * i}\n\n" for i in range(12))
NAMES = ("gate_up", "down", "gate_up_bias", "down_bias")


def silu_times_up(pre: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.silu(pre[:, 0::2]) * pre[:, 1::2]


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text(TEXT)
    return path


@pytest.fixture(scope="module")
def plain(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store in the checkpoint's order; tests that change it take a copy."""
    return prepare(checkpoint, tmp_path_factory.mktemp("plain") / "store", progress=False)


@pytest.fixture
def store(plain: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(plain, tmp_path / "store"))


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if "verified" not in path.name}


def mass_of(store: Path, text: Path) -> NDArray[np.float64]:
    opened = ExpertStore(store)
    model = build_model(store, opened.manifest, torch.float32, torch.device("cpu"), "auto")
    windows = read_windows(text, store, QUIET)
    return neuron_mass(model, find_blocks(model, opened.manifest), host_weights(opened.layers), windows, lambda n: None)


@examples(max_examples=30, deadline=None, derandomize=True)
@given(
    experts=st.integers(1, 3), neurons=st.integers(1, 40), hidden=st.integers(1, 24), seed=st.integers(0, 1 << 16),
    bias=st.booleans(),
)  # fmt: skip
def test_an_ordered_layer_computes_the_same(experts: int, neurons: int, hidden: int, seed: int, bias: bool) -> None:
    rng = np.random.default_rng(seed)
    shape = ExpertShape(num_experts=experts, hidden=hidden, intermediate=neurons, gates=2, has_bias=bias)
    tensors = {n: (rng.standard_normal(dims) / 4).astype(np.float32) for n, dims in shape.stacked().items()}
    layer = LayerArrays(0, "m", "float32", **{name: tensors.get(name) for name in NAMES})
    mass = rng.random((experts, neurons)) * (rng.random((experts, 1)) < 0.7)  # some experts got no token
    orders = neuron_orders(mass)
    data = np.frombuffer(b"".join(reordered(layer, tuple(tensors), orders)), np.float32)
    ends = np.cumsum([array.size for array in tensors.values()])
    parts = np.split(data, ends[:-1])
    moved = {name: part.reshape(tensors[name].shape) for name, part in zip(tensors, parts, strict=True)}
    x, pairs = torch.from_numpy(rng.standard_normal((3, hidden)).astype(np.float32)), torch.arange(3)
    for expert in range(experts):
        if not mass[expert].any():
            assert all(np.array_equal(moved[name][expert], tensors[name][expert]) for name in tensors)
        assert (np.diff(mass[expert][orders[expert]]) <= 0).all()
        before, after = (run_expert(of, expert, x, pairs, neurons) for of in (tensors, moved))
        torch.testing.assert_close(after, before, rtol=0, atol=1e-5)


def run_expert(
    tensors: dict[str, NDArray[Any]], expert: int, x: torch.Tensor, pairs: torch.Tensor, neurons: int
) -> torch.Tensor:
    copies = {name: torch.from_numpy(array.copy()) for name, array in tensors.items()}
    y = torch.empty(len(pairs), x.shape[1])
    operands = Operands(copies["gate_up"], copies["down"], copies.get("gate_up_bias"), copies.get("down_bias"))
    kernel = TorchKernel(operands, silu_times_up)
    kernel.run(x, pairs, [(0, len(pairs), expert * neurons, neurons, False)], 1, y)
    return y


@pytest.mark.parametrize("bias", [False, True])
def test_mass_is_what_each_neuron_adds(bias: bool) -> None:
    """Against a loop over tokens, picks and neurons; an expert that nobody picks has none."""
    rng = np.random.default_rng(3)
    experts, neurons, hidden, tokens = 4, 5, 6, 9
    gate_up, down = rng.standard_normal((experts, neurons, 2, hidden)), rng.standard_normal((experts, neurons, hidden))
    up_bias, down_bias = rng.standard_normal((experts, neurons, 2)), rng.standard_normal((experts, hidden))
    x = rng.standard_normal((tokens, hidden))
    ids = np.stack([rng.permutation(3)[:2] for _ in range(tokens)])  # never expert 3
    weights = rng.random((tokens, 2))
    tensors = (gate_up, down, up_bias, down_bias) if bias else (gate_up, down)
    meter = _Meter(
        MoeBlock(torch.nn.Identity(), silu_times_up, "silu", None, None),
        LayerWeights(tuple(torch.from_numpy(t.astype(np.float32)) for t in tensors)),
    )
    given_ = [torch.from_numpy(a) for a in (x.astype(np.float32), ids, weights.astype(np.float32))]
    y = meter.forward(*given_)
    mass, out = np.zeros((experts, neurons)), np.zeros((tokens, hidden))
    for t in range(tokens):
        for k, e in enumerate(ids[t]):
            for j in range(neurons):
                gate, up = gate_up[e, j] @ x[t] + (up_bias[e, j] if bias else 0)
                added = gate / (1 + np.exp(-gate)) * up * down[e, j]
                mass[e, j] += np.linalg.norm(added)
                out[t] += weights[t, k] * added
            out[t] += weights[t, k] * down_bias[e] if bias else 0
    np.testing.assert_allclose(meter.mass(), mass, rtol=1e-5)
    np.testing.assert_allclose(y.numpy(), out, rtol=0, atol=1e-4)


def test_the_store_is_ordered_by_what_the_text_shows(store: Path, plain: Path, text: Path) -> None:
    before = mass_of(plain, text)
    assert order_neurons(store, store, text, QUIET) == store
    old, new = ExpertStore(plain), ExpertStore(store)
    orders = neuron_orders(before)
    for layer, (a, b) in enumerate(zip(old.layers, new.layers, strict=True)):
        assert a.module == b.module
        for expert, order in enumerate(orders[layer]):
            assert np.array_equal(b.gate_up[expert], a.gate_up[expert][order])
            assert np.array_equal(b.down[expert], a.down[expert][order])
    after = mass_of(store, text)
    np.testing.assert_allclose(after, np.take_along_axis(before, orders, -1), rtol=1e-3, atol=1e-4)
    assert first_half(after) > first_half(before)
    order = new.manifest.neuron_order
    assert order is not None
    assert (order.sha256, order.tokens) == (lambda r: (r.sha256, r.tokens))(read_windows(text, store, QUIET).record())
    assert set(files(store)) - set(files(plain)) == {layer.file for layer in new.manifest.layers}
    assert sorted(p.name for p in store.parent.iterdir()) == ["store"]


def test_once_ordered_it_stays(store: Path, plain: Path, checkpoint: Path, text: Path, tmp_path: Path) -> None:
    assert b"neuron_order" not in read_manifest(plain).encode()  # as in older stores
    order_neurons(store, checkpoint, text, QUIET)
    before = files(store)
    order_neurons(store, store, text, QUIET)
    assert ensure_prepared(checkpoint, store, progress=False) == store  # what `tiermoe run` asks for
    prepare(checkpoint, store, progress=False)
    assert files(store) == before
    shutil.copytree(store, tmp_path / "forced")
    assert read_manifest(prepare(checkpoint, tmp_path / "forced", force=True, progress=False)).neuron_order is None
    other = tmp_path / "other.txt"
    other.write_text(TEXT[::-1])
    with pytest.raises(ConfigError, match=r"by another text already.*--force --neuron-order"):
        order_neurons(store, store, other, QUIET)
    assert files(store) == before
    (store / MANIFEST_NAME).unlink()  # damaged, and still known as a store: made anew
    prepare(checkpoint, store, progress=False)
    assert read_manifest(store).neuron_order is None
    assert set(files(store)) == set(files(plain))


def test_replicas_come_after_the_order(store: Path, checkpoint: Path, text: Path) -> None:
    add_replicas(store, checkpoint, ReplicaOptions((2,), 32), text, progress=False)
    before = files(store)
    with pytest.raises(ConfigError, match=r"has quantized replicas.*--force --neuron-order TEXT --bits"):
        order_neurons(store, checkpoint, text, QUIET)
    assert files(store) == before
    app = typer.Typer()
    app.command()(prepare_command)
    options = ["--force", "--neuron-order", str(text), "--bits", "2", "--group-size", "32", "--calibration", str(text)]
    result = CliRunner().invoke(app, [str(checkpoint), str(store), *options])
    assert result.exit_code == 0, result.output
    assert read_manifest(store).neuron_order is not None
    view = describe_replicas(store)
    assert view.widths == (2,)
    again = files(store)
    assert again[REPLICAS_NAME] != before[REPLICAS_NAME]
    result = CliRunner().invoke(app, [str(store), *options[1:]])  # of the store itself: all is there
    assert result.exit_code == 0, result.output
    assert files(store) == again


def test_refused_before_anything_changes(store: Path, text: Path, tmp_path: Path) -> None:
    before = files(store)
    with pytest.raises(ConfigError, match="calibration file"):
        order_neurons(store, store, tmp_path / "none.txt", QUIET)
    with pytest.raises(StoreError, match="is not an expert store"):
        order_neurons(tmp_path, store, text, QUIET)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("shutil.disk_usage", lambda _path: type("Usage", (), {"free": 1000})())
        with pytest.raises(StoreError, match="ordering neurons needs"):
            order_neurons(store, store, text, QUIET)
    assert files(store) == before
    order_neurons(store, store, text, QUIET)  # resumes


def test_logits_are_those_of_the_model(store: Path, checkpoint: Path, text: Path) -> None:
    """The whole model with its neurons in another order, through transformers' own experts."""
    order_neurons(store, store, text, QUIET)
    model = AutoModelForCausalLM.from_pretrained(checkpoint).eval()
    ids = torch.from_numpy(read_windows(text, store, QUIET).ids[:1])
    with torch.no_grad():
        expected = model(input_ids=ids).logits
        for layer in ExpertStore(store).layers:
            experts: Any = model.get_submodule(layer.module)
            gate_up = torch.from_numpy(layer.gate_up.copy())  # [E, I, 2, H]
            experts.gate_up_proj.copy_(gate_up.transpose(1, 2).flatten(1, 2))
            experts.down_proj.copy_(torch.from_numpy(layer.down.copy()).transpose(1, 2))
        torch.testing.assert_close(model(input_ids=ids).logits, expected, rtol=0, atol=1e-3)
