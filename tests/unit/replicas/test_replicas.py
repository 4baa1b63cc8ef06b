"""Replicas of a store: what is written, and opened again."""

from __future__ import annotations

import pickle
import shutil
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from packed_reference import unpack_expert
from rich.console import Console
from tiny_models import TEXT, contents

from tiermoe.actors.settings import StoreSettings
from tiermoe.actors.store.dense import fetch_dense
from tiermoe.actors.store.files import ExpertStore
from tiermoe.actors.store.pages import check_files
from tiermoe.actors.store.replicas import REPLICAS_NAME, describe_replicas, open_replicas, read_tables
from tiermoe.actors.store.server import StoreWorker
from tiermoe.cluster.jobs.prepare import ensure_replicas, is_store, prepare
from tiermoe.cluster.jobs.prepare.calibration import WINDOW_TOKENS, read_windows
from tiermoe.cluster.jobs.prepare.quantize import Matrices
from tiermoe.cluster.jobs.prepare.replica_options import ReplicaOptions
from tiermoe.cluster.jobs.prepare.replicas import add_replicas
from tiermoe.errors import StoreError
from tiermoe.kernels.pack import PackedShape
from tiermoe.proto.peers import LocalDirectory, PeerLink, StoreLink


def unpacked(arrays: Mapping[str, NDArray[Any]], shape: PackedShape) -> Matrices:
    """A layer's packed experts [E, ...] as matrices."""
    experts = len(arrays["down"])
    parts = [unpack_expert({name: array[e] for name, array in arrays.items()}, shape) for e in range(experts)]
    gate_up = [np.concatenate([gate.dequantized(), up.dequantized()]) for gate, up, _ in parts]
    down = [matrix.dequantized() for _, _, matrix in parts]
    return Matrices(torch.from_numpy(np.stack(gate_up)), torch.from_numpy(np.stack(down)))


def test_replicas_reopen_as_the_experts_they_were(made: Path) -> None:
    view = describe_replicas(made)
    assert view is not None
    view = pickle.loads(pickle.dumps(view))
    assert view.widths == (2, 4)
    tables, arrays = read_tables(view), open_replicas(view)
    layers = ExpertStore(made).layers
    error = {}
    for bits in view.widths:
        assert len(arrays[bits]) == len(layers) == 2
        for layer, packed in enumerate(arrays[bits]):
            assert all(not array.flags.writeable and array.ctypes.data % 64 == 0 for array in packed.values())
            lossy = unpacked(packed, view.shapes[bits])
            exact = torch.from_numpy(layers[layer].gate_up.copy()).transpose(1, 2).flatten(1, 2)
            error[bits, layer] = float((lossy.gate_up - exact).square().mean() / exact.square().mean())
    assert all(error[4, layer] < 0.03 < error[2, layer] < 0.3 for layer in (0, 1)), error
    assert tables.losses.shape == tables.rtn_losses.shape == tables.fallback.shape == (2, 8, 2)
    assert not tables.losses.flags.writeable
    assert tables.widths == (2, 4)
    assert bool((tables.losses[..., 1] < tables.losses[..., 0]).all())
    assert [p.keys() for p in open_replicas(view, [1])[2]] == [arrays[2][1].keys()]
    assert np.array_equal(open_replicas(view, [1])[2][0]["down"], arrays[2][1]["down"])


def test_tables_count_what_the_router_chose(made: Path, checkpoint: Path, calibration: Path) -> None:
    """Against transformers' own model, its router hooked."""
    from transformers import AutoModelForCausalLM

    tables = read_tables(describe_replicas(made))  # type: ignore[arg-type]
    windows = read_windows(calibration, checkpoint, Console(quiet=True))
    assert windows.ids.shape[1] == 256  # the model's longest, below WINDOW_TOKENS
    assert WINDOW_TOKENS > 256
    model = AutoModelForCausalLM.from_pretrained(checkpoint)
    counts, scores = np.zeros((2, 8), dtype=np.int64), np.zeros((2, 8))

    def count(layer: int) -> Any:
        def hook(_module: Any, args: tuple[torch.Tensor, ...]) -> None:
            ids, weights = args[1].flatten(), args[2].flatten()
            counts[layer] += np.bincount(ids, minlength=8)
            scores[layer] += np.bincount(ids, weights=weights.detach(), minlength=8)

        return hook

    for layer in range(2):
        model.model.layers[layer].mlp.experts.register_forward_pre_hook(count(layer))
    with torch.no_grad():
        for row in windows.ids:
            model(torch.from_numpy(row[None]))
    assert counts.sum() == windows.tokens * 2 * 2
    assert np.abs(tables.counts - counts).sum() <= 4  # a near tie may fall the other way
    assert tables.scores == pytest.approx(scores, abs=1.0)


def test_the_tables_travel_to_a_node_without_the_store(made: Path, tmp_path: Path) -> None:
    with closing(StoreWorker(str(made), verify="stamp", directory=(board := LocalDirectory()))):
        link = StoreLink("store/0", (), PeerLink(board, name="store/0"))
        fetch_dense([link], tmp_path, StoreSettings())
    view = describe_replicas(tmp_path, tables_only=True)
    assert view is not None
    assert view.layers == {}
    here, there = read_tables(view), read_tables(describe_replicas(made))  # type: ignore[arg-type]
    assert here.widths == there.widths
    assert np.array_equal(here.losses, there.losses)
    assert np.array_equal(here.counts, there.counts)
    with pytest.raises(StoreError, match="missing from the replicas"):
        describe_replicas(tmp_path)


def test_a_store_without_replicas(checkpoint: Path, tmp_path: Path) -> None:
    assert describe_replicas(prepare(checkpoint, tmp_path / "store", progress=False)) is None


def test_the_store_itself_is_not_affected(store: Path, checkpoint: Path) -> None:
    before = (store / "manifest.json").read_bytes()
    ExpertStore(store)
    ExpertStore(store, verify="stamp")
    assert is_store(store)
    assert prepare(checkpoint, store, progress=False) == store
    assert (store / REPLICAS_NAME).exists()
    assert (store / "manifest.json").read_bytes() == before
    prepare(checkpoint, store, progress=False, force=True)
    assert contents(store) == {}
    assert describe_replicas(store) is None


def test_fallbacks_are_reported(checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store = prepare(checkpoint, tmp_path / "store", progress=False)
    text = tmp_path / "short.txt"
    text.write_text(TEXT[:90])
    add_replicas(store, checkpoint, ReplicaOptions((4,), 32), text)
    tables = read_tables(describe_replicas(store))  # type: ignore[arg-type]
    few = tables.counts < 32
    assert few.any()
    assert np.array_equal(tables.fallback[..., 0], few)
    assert np.array_equal(tables.losses[few], tables.rtn_losses[few])
    said = " ".join(capsys.readouterr().err.split())
    assert f"{few.sum()} of 16 experts got fewer than 32 calibration rows" in said


def test_replicas_without_a_text(checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What `run` makes by itself: every width at once; and more widths, in the same way."""
    store = prepare(checkpoint, tmp_path / "store", progress=False)
    ensure_replicas(store, checkpoint, (4, 2), 32)
    assert "quantizing to 2, 4 bits" in capsys.readouterr().err
    kept = contents(store)
    ensure_replicas(store, checkpoint, (3,), 32, progress=False)
    view = describe_replicas(store)
    assert view is not None
    assert (view.widths, view.manifest.method, view.manifest.calibration) == ((2, 3, 4), "data-free", None)
    assert all(contents(store)[name] == data for name, data in kept.items() if name.startswith("replicas-b"))
    tables = read_tables(view)
    assert not tables.counts.any()
    assert tables.fallback.all()
    assert bool((np.diff(tables.losses, axis=2) < 0).all())
    exact = ExpertStore(store).layers[0]
    lossy = unpacked(open_replicas(view, [0])[4][0], view.shapes[4])
    full = Matrices.of(torch.from_numpy(exact.gate_up.copy()), torch.from_numpy(exact.down.copy()))
    assert float((lossy.down - full.down).square().mean() / full.down.square().mean()) < 0.02


def test_what_is_fitted_to_a_text_is_so_when_a_policy_needs_popularity(
    checkpoint: Path, calibration: Path, tmp_path: Path
) -> None:
    """A process that serves the ones that this replaces goes on with them."""
    store = prepare(checkpoint, tmp_path / "store", progress=False)
    ensure_replicas(store, checkpoint, (2,), 32, progress=False)
    older = describe_replicas(store)
    assert older is not None
    served = open_replicas(older, [0])[2][0]
    copies = {name: array.copy() for name, array in served.items()}
    ships = Path(shutil.copytree(checkpoint, tmp_path / "ships"))
    (ships / "calibration").mkdir()
    shutil.copy(calibration, ships / "calibration" / "text.txt")
    ensure_replicas(store, ships, (4,), 32, calibrated=True, progress=False)
    check_files()
    assert all(np.array_equal(array, copies[name]) for name, array in served.items())
    view = describe_replicas(store)
    assert view is not None
    assert any(not np.array_equal(array, copies[name]) for name, array in open_replicas(view, [0])[2][0].items())
    assert (view.widths, view.manifest.method) == ((2, 4), "gptq")
    assert read_tables(view).counts.any()
    before = contents(store)
    ensure_replicas(store, checkpoint, (4,), 32, progress=False)  # GPTQ's are as good to any policy
    assert contents(store) == before
