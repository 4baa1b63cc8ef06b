"""Files of expert maps: what is read is what was written, and nothing else is read."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from map_contexts import SHAPE, forecasts, iteration, reference
from safetensors.numpy import save_file

from tiermoe.actors.store import artifacts as map_file
from tiermoe.actors.store.artifacts import load_maps, save_maps
from tiermoe.errors import StoreError


def _arrays() -> dict[str, np.ndarray]:
    policy = reference()
    for number in range(3):
        forecasts(policy, iteration(number))
    return policy.store.arrays()


def test_round_trip(tmp_path: Path) -> None:
    arrays, path = _arrays(), tmp_path / "new" / "maps.safetensors"
    save_maps(path, arrays, SHAPE)
    back = load_maps(path, SHAPE, SHAPE.hidden)
    assert {name: array.tobytes() for name, array in back.items()} == {n: a.tobytes() for n, a in arrays.items()}
    assert [file.name for file in path.parent.iterdir()] == ["maps.safetensors"]


def test_an_empty_store(tmp_path: Path) -> None:
    path = tmp_path / "maps"
    save_maps(path, reference().store.arrays(), SHAPE)
    assert load_maps(path, SHAPE, SHAPE.hidden)["maps"].shape == (SHAPE.layers, 0, SHAPE.experts)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"model": "other"}, "model toy, not other"),
        ({"layers": 7}, "layers 6, not 7"),
        ({"experts": 4}, "experts 8, not 4"),
        ({"hidden": 64}, "hidden 12, not 64"),
    ],
)
def test_another_model_is_refused(tmp_path: Path, change: dict[str, object], named: str) -> None:
    save_maps(tmp_path / "maps", _arrays(), SHAPE)
    with pytest.raises(StoreError, match=named):
        load_maps(tmp_path / "maps", replace(SHAPE, **change), SHAPE.hidden)  # type: ignore[arg-type]


def test_another_width_is_refused(tmp_path: Path) -> None:
    save_maps(tmp_path / "maps", _arrays(), SHAPE)
    with pytest.raises(StoreError, match="width 12, not 8"):
        load_maps(tmp_path / "maps", SHAPE, 8)


def test_another_version_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(map_file, "VERSION", "2")
    save_maps(tmp_path / "maps", _arrays(), SHAPE)
    monkeypatch.undo()
    with pytest.raises(StoreError, match="version 2, not 1"):
        load_maps(tmp_path / "maps", SHAPE, SHAPE.hidden)


@pytest.mark.parametrize("kept", [0, 5, 100, -1])
def test_a_truncated_file_is_refused(tmp_path: Path, kept: int) -> None:
    path = tmp_path / "maps"
    save_maps(path, _arrays(), SHAPE)
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(StoreError, match="cannot be read"):
        load_maps(path, SHAPE, SHAPE.hidden)


def test_no_file_and_a_foreign_file(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="cannot be read"):
        load_maps(tmp_path / "none", SHAPE, SHAPE.hidden)
    save_file({"x": np.ones(3, np.float32)}, tmp_path / "weights")
    with pytest.raises(StoreError, match="format None"):
        load_maps(tmp_path / "weights", SHAPE, SHAPE.hidden)


@pytest.mark.parametrize("name", ["embeddings", "maps"])
def test_numbers_that_are_not_finite_are_refused(tmp_path: Path, name: str) -> None:
    arrays = _arrays()
    arrays[name].flat[3] = np.nan
    save_maps(tmp_path / "maps", arrays, SHAPE)
    with pytest.raises(StoreError, match="damaged: there are numbers"):
        load_maps(tmp_path / "maps", SHAPE, SHAPE.hidden)


def test_a_file_that_cannot_be_written_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "maps").mkdir()
    (tmp_path / "maps" / "in the way").touch()
    with pytest.raises(StoreError, match="cannot be written"):
        save_maps(tmp_path / "maps", _arrays(), SHAPE)
    assert [file.name for file in tmp_path.iterdir()] == ["maps"]
