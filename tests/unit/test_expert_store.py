"""Opening, mapping and sharing a store. The store is written by hand: no torch here."""

from __future__ import annotations

import hashlib
import os
import pickle
from io import BufferedReader
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from handmade_store import LAYERS, layer_values, write_store

from tiermoe.actors.store import pages
from tiermoe.actors.store.files import ExpertStore, open_views, renewed
from tiermoe.actors.store.format import MANIFEST_NAME, layer_name
from tiermoe.errors import StoreError


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return write_store(tmp_path / "store")


def flip(path: Path, place: int) -> None:
    """Flip a bit and leave the modification time as it was."""
    status = path.stat()
    data = bytearray(path.read_bytes())
    data[place] ^= 4
    with open(path, "r+b") as file:
        file.write(data)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def test_arrays_are_what_was_written(store: Path) -> None:
    opened = ExpertStore(store)
    for index, layer in enumerate(opened.layers):
        assert (layer.index, layer.module, layer.dtype) == (index, f"m.{index}", "float32")
        for name, values in layer_values(index).items():
            array = getattr(layer, name)
            np.testing.assert_array_equal(array, values)
            assert not array.flags.writeable
        assert layer.gate_up.ctypes.data % 64 == 0
        assert layer.gate_up[1, :2].flags.c_contiguous  # a prefix of neurons is one run


def test_a_view_survives_pickling_and_maps_the_same_pages(store: Path) -> None:
    opened = ExpertStore(store)
    view = pickle.loads(pickle.dumps(opened.describe()))
    assert view == opened.describe()
    assert view.dense.path == str(store / "dense.safetensors")
    for mine, theirs in zip(opened.layers, open_views(view), strict=True):
        np.testing.assert_array_equal(mine.gate_up, theirs.gate_up)
        np.testing.assert_array_equal(mine.down_bias, theirs.down_bias)


@pytest.mark.parametrize("name", [layer_name(0), layer_name(1), "dense.safetensors", "config.json", MANIFEST_NAME])
def test_an_altered_or_missing_file_is_refused(store: Path, name: str) -> None:
    ExpertStore(store)
    flip(store / name, -1)
    with pytest.raises(StoreError, match="manifest.json" if name == MANIFEST_NAME else "SHA-256"):
        ExpertStore(store)
    (store / name).unlink()
    with pytest.raises(StoreError, match="tiermoe prepare"):
        ExpertStore(store)


def test_stamp_skips_hashing_what_is_unchanged(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hashed: list[str] = []
    real = hashlib.file_digest

    def spy(file: BufferedReader, name: str) -> Any:
        hashed.append(Path(file.name).name)
        return real(file, name)

    monkeypatch.setattr(hashlib, "file_digest", spy)
    ExpertStore(store, verify="stamp")  # nothing is known yet: everything is hashed
    assert layer_name(0) in hashed
    hashed.clear()
    ExpertStore(store, verify="stamp")
    assert set(hashed) <= {MANIFEST_NAME}
    os.utime(store / layer_name(1))
    hashed.clear()
    ExpertStore(store, verify="stamp")
    assert set(hashed) - {MANIFEST_NAME} == {layer_name(1)}


@pytest.mark.parametrize("stamps", [None, b"", b"[]", b"null", b'{"manifest_sha256": 1}', b'{"files": 3}', b"\xff"])
@pytest.mark.parametrize("touched", [True, False])
def test_stamp_notices_a_write_and_damaged_stamps_verify_all(store: Path, stamps: bytes | None, touched: bool) -> None:
    """Also a write behind a restored modification time."""
    ExpertStore(store)
    flip(store / layer_name(0), -1)
    if touched:
        os.utime(store / layer_name(0))
    if stamps is not None:
        (store / "verified.json").write_bytes(stamps)
    with pytest.raises(StoreError, match="SHA-256"):
        ExpertStore(store, verify="stamp")


def test_views_notice_a_change(store: Path) -> None:
    opened = ExpertStore(store)
    pages.check_files()
    assert len(opened.layers) == LAYERS
    os.utime(store / layer_name(1))
    with pytest.raises(StoreError, match=f"{layer_name(1)} changed while"):
        pages.check_files()
    with pytest.raises(StoreError, match="changed since"):
        open_views(opened.describe())
    (store / layer_name(1)).unlink()
    with pytest.raises(StoreError, match="was removed or replaced"):
        pages.check_files()
    with pytest.raises(StoreError):
        open_views(opened.describe())
    opened.close()
    pages.check_files()  # of what is mapped no more


def test_a_view_is_renewed_where_the_bytes_are_the_same(store: Path) -> None:
    """Guards: a lead that was started again with its first view refused a file that had been put back."""
    view = ExpertStore(store).describe()
    data = (store / layer_name(1)).read_bytes()
    (store / layer_name(1)).unlink()
    (store / layer_name(1)).write_bytes(data)
    assert renewed(view) != view
    assert len(open_views(renewed(view))) == LAYERS
    flip(store / layer_name(1), -1)
    with pytest.raises(StoreError, match=f"{layer_name(1)} does not match its SHA-256"):
        renewed(view)


def test_not_a_store(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "absent"):
        with pytest.raises(StoreError, match="not an expert store"):
            ExpertStore(path)


def test_a_store_on_read_only_storage_opens(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_args: object) -> None:
        raise PermissionError("read-only")

    monkeypatch.setattr(Path, "write_text", refuse)
    assert len(ExpertStore(store).layers) == LAYERS


def test_a_slice_needs_only_its_own_layers(store: Path) -> None:
    (store / layer_name(0)).unlink()
    opened = ExpertStore(store, layers=[1])
    (layer,) = opened.layers
    assert layer.index == 1
    np.testing.assert_array_equal(layer.down, layer_values(1)["down"])
    view = opened.describe()
    assert [found.index for found in view.layers] == [1]
    assert len(view.manifest.layers) == LAYERS
    assert [arrays.index for arrays in open_views(view)] == [1]
    assert len(opened.layers) == 1
    assert opened.nbytes == sum(record.nbytes for record in view.manifest.files() if record.file != layer_name(0))
    with pytest.raises(StoreError, match="missing"):
        ExpertStore(store, "stamp")
    with pytest.raises(StoreError, match=layer_name(0)):
        ExpertStore(store, "stamp", layers=[0])


def test_a_slice_of_nothing_has_the_dense_weights_and_one_beyond_the_layers_is_refused(store: Path) -> None:
    with pytest.raises(StoreError, match="0 to 1, not 2"):
        ExpertStore(store, layers=[0, 2])
    for index in range(LAYERS):
        (store / layer_name(index)).unlink()
    assert ExpertStore(store, layers=[]).describe().layers == ()
    (store / "config.json").write_bytes(b"[]")
    with pytest.raises(StoreError, match=r"config\.json"):
        ExpertStore(store, layers=[])
