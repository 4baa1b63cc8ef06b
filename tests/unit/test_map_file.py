"""Files of expert maps: what is read is what was written, and nothing else is read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from map_contexts import SHAPE, forecasts, iteration, reference
from safetensors.numpy import save_file

from tiermoe.actors.store import artifacts
from tiermoe.actors.store.artifacts import load_maps, save_maps
from tiermoe.errors import StoreError

Damage = Callable[[Path], object]


def _arrays() -> dict[str, np.ndarray]:
    policy = reference()
    for number in range(3):
        forecasts(policy, iteration(number))
    return policy.store.arrays()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A whole file, and nothing beside it."""
    save_maps(tmp_path / "new" / "maps", _arrays(), SHAPE)
    assert [file.name for file in (tmp_path / "new").iterdir()] == ["maps"]
    return tmp_path / "new" / "maps"


def test_round_trip(path: Path) -> None:
    back = load_maps(path, SHAPE, SHAPE.hidden)
    assert {name: array.tobytes() for name, array in back.items()} == {n: a.tobytes() for n, a in _arrays().items()}
    save_maps(path, reference().store.arrays(), SHAPE)  # empty, in place of the other
    assert load_maps(path, SHAPE, SHAPE.hidden)["maps"].shape == (SHAPE.layers, 0, SHAPE.experts)


@pytest.mark.parametrize(
    ("change", "width", "named"),
    [
        ({"model": "other"}, 12, "model toy, not other"),
        ({"layers": 7}, 12, "layers 6, not 7"),
        ({"experts": 4}, 12, "experts 8, not 4"),
        ({"hidden": 64}, 12, "hidden 12, not 64"),
        ({}, 8, "width 12, not 8"),
    ],
)
def test_another_model_or_width_is_refused(path: Path, change: dict[str, object], width: int, named: str) -> None:
    with pytest.raises(StoreError, match=named):
        load_maps(path, replace(SHAPE, **change), width)  # type: ignore[arg-type]


def test_another_version_is_refused(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(artifacts, "VERSION", "2")
    save_maps(path, _arrays(), SHAPE)
    monkeypatch.undo()
    with pytest.raises(StoreError, match="version 2, not 1"):
        load_maps(path, SHAPE, SHAPE.hidden)


def _truncated(size: int) -> Damage:
    return lambda path: path.write_bytes(path.read_bytes()[:size])


def _not_finite(name: str) -> Damage:
    arrays = _arrays()
    arrays[name].flat[3] = np.nan
    return lambda path: save_maps(path, arrays, SHAPE)


@pytest.mark.parametrize(
    ("damage", "named"),
    [
        *((_truncated(size), "cannot be read") for size in (0, 5, 100, -1)),
        (Path.unlink, "cannot be read"),
        (lambda path: save_file({"x": np.ones(3, np.float32)}, path), "format None"),
        *((_not_finite(name), "damaged: there are numbers") for name in ("embeddings", "maps")),
    ],
)
def test_damaged_and_foreign_files_are_refused(path: Path, damage: Damage, named: str) -> None:
    damage(path)
    with pytest.raises(StoreError, match=named):
        load_maps(path, SHAPE, SHAPE.hidden)


def test_a_file_that_cannot_be_written_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "maps").mkdir()
    (tmp_path / "maps" / "in the way").touch()
    with pytest.raises(StoreError, match="cannot be written"):
        save_maps(tmp_path / "maps", _arrays(), SHAPE)
    assert [file.name for file in tmp_path.iterdir()] == ["maps"]
