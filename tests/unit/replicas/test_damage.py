"""Replicas of a store that were altered, or are of another one, are refused or made again."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_models import VOCAB_SIZE, contents, save_tiny_checkpoint

from tiermoe.actors.store.replicas import REPLICAS_NAME, ReplicaManifest, describe_replicas, open_replicas, replica_name
from tiermoe.cluster.jobs.prepare import prepare
from tiermoe.cluster.jobs.prepare.replica_options import ReplicaOptions
from tiermoe.cluster.jobs.prepare.replicas import add_replicas
from tiermoe.errors import StoreError


@pytest.mark.parametrize("verify", ["full", "stamp"])
@pytest.mark.parametrize("seed", range(12))
def test_any_altered_byte_is_refused(store: Path, seed: int, verify: Any) -> None:
    describe_replicas(store)  # leaves stamps
    rng = np.random.default_rng(seed)
    path = store / sorted(contents(store))[seed % len(contents(store))]
    data = bytearray(path.read_bytes())
    data[rng.integers(len(data))] ^= 1 << int(rng.integers(8))
    path.unlink()
    path.write_bytes(data)
    with pytest.raises(StoreError):
        describe_replicas(store, verify=verify)


def test_missing_longer_and_foreign_files_are_refused(store: Path, made: Path) -> None:
    victim = store / replica_name(4, 32, 1)
    data = victim.read_bytes()
    victim.unlink()
    with pytest.raises(StoreError, match="missing"):
        describe_replicas(store)
    victim.write_bytes(data + b"\0")
    with pytest.raises(StoreError, match="bytes"):
        describe_replicas(store)
    victim.unlink()
    victim.mkdir()
    with pytest.raises(StoreError):
        describe_replicas(store)
    victim.rmdir()
    victim.write_bytes(data)
    assert describe_replicas(store) is not None
    manifest = json.loads((store / "manifest.json").read_bytes())
    assert manifest["format_version"] == 1


def test_a_file_that_changes_after_verification_is_refused(store: Path) -> None:
    view = describe_replicas(store)
    assert view is not None
    path = store / replica_name(2, 32, 0)
    data = path.read_bytes()
    path.unlink()
    path.write_bytes(data)
    with pytest.raises(StoreError, match="changed since"):
        open_replicas(view)


def test_replicas_of_another_store_are_refused(store: Path, tmp_path: Path) -> None:
    other = save_tiny_checkpoint("qwen3_moe", tmp_path / "other", seed=1, vocab_size=VOCAB_SIZE)
    foreign = prepare(other, tmp_path / "foreign", progress=False)
    for name in contents(store):
        shutil.copy(store / name, foreign / name)
    with pytest.raises(StoreError, match="another store"):
        describe_replicas(foreign)


def rewrite(store: Path, layer_file: str, change: Any) -> None:
    """A file with other tensors under a manifest that vouches for it."""
    from safetensors.numpy import load_file

    from tiermoe.cluster.jobs.prepare.writer import write_tensors

    path = store / layer_file
    tensors = load_file(path)
    change(tensors)
    codes = {"u": "U8", "e": "F16", "f": "F32", "d": "F64", "q": "I64", "l": "I64", "B": "U8"}
    header = {name: (codes[array.dtype.char], array.shape) for name, array in tensors.items()}
    record = write_tensors(path, header, [array.tobytes() for array in tensors.values()])
    manifest = ReplicaManifest.decode((store / REPLICAS_NAME).read_bytes(), "")

    def fixed(old: Any) -> Any:
        return old.model_copy(update=record.model_dump()) if old.file == layer_file else old

    files = tuple(fixed(file) for file in manifest.files)
    manifest = manifest.model_copy(update={"files": files, "losses": fixed(manifest.losses)})
    (store / REPLICAS_NAME).write_bytes(manifest.encode())


def spoil(name: str, index: int, value: float) -> Any:
    return lambda tensors: tensors[name].flat.__setitem__(index, value)


LAYER = replica_name(2, 32, 0)


@pytest.mark.parametrize(
    ("file", "change", "why"),
    [
        (LAYER, spoil("down_scales", 3, np.inf), "not finite"),
        (LAYER, lambda tensors: tensors.pop("gate_up"), "does not hold"),
        (LAYER, lambda tensors: tensors.update(more=np.zeros(3, np.uint8)), "does not hold"),
        (LAYER, lambda tensors: tensors.update(down=tensors["down"].reshape(-1)), "does not hold"),
        ("losses-b24-g32.safetensors", spoil("losses", 0, np.nan), "not finite"),
    ],
    ids=["infinite scale", "missing", "surplus", "shape", "infinite loss"],
)
def test_wrong_tensors_with_right_digests_are_refused(store: Path, file: str, change: Any, why: str) -> None:
    rewrite(store, file, change)
    with pytest.raises(StoreError, match=why):
        describe_replicas(store)


def test_damaged_replicas_are_made_again(store: Path, checkpoint: Path, calibration: Path) -> None:
    (store / replica_name(2, 32, 0)).write_bytes(b"")
    add_replicas(store, checkpoint, ReplicaOptions((2, 4), 32), calibration, progress=False)
    view = describe_replicas(store)
    assert view is not None
    assert view.widths == (2, 4)
