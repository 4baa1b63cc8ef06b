"""Unit tests start no Ray."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tiermoe.actors.store.format import Manifest, read_manifest

if TYPE_CHECKING:
    from serving import Tiny


@pytest.fixture(autouse=True)
def _no_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    try:
        import ray
    except ImportError:  # a bare machine with a GPU, where benchmarks/gpu runs some of these
        return

    def refuse(*args: object, **kwargs: object) -> None:
        raise AssertionError("a unit test must not start Ray; tests/cluster is the place")

    monkeypatch.setattr(ray, "init", refuse)


@pytest.fixture
def copies_in_python(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread of Python carries the copies of the CPU's stand-in, by `device.copy`."""
    from tiermoe.actors.engine import make_cache

    monkeypatch.setattr(make_cache, "linkable", lambda *args: False)


@pytest.fixture
def replica_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stores pretend to have replicas of 1 to 4 bits: losses halve with each bit, expert 0 is the most popular."""
    import numpy as np

    from tiermoe.actors.store.replicas import ReplicaTables

    def tables(manifest: Manifest) -> ReplicaTables:
        shape = (len(manifest.layers), manifest.experts.num_experts)
        losses = np.broadcast_to(np.float32([8, 4, 2, 1]), (*shape, 4))
        counts = np.broadcast_to(np.arange(shape[1], 0, -1), shape)
        return ReplicaTables((1, 2, 3, 4), losses, losses, losses < 0, counts, counts.astype(np.float64))

    monkeypatch.setattr("tiermoe.actors.gpu_worker.describe_replicas", lambda path, **how: read_manifest(Path(path)))
    monkeypatch.setattr("tiermoe.actors.gpu_worker.read_tables", tables)


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model that reads bytes; tests that change it take a copy."""
    from tiny_models import VOCAB_SIZE, save_byte_tokenizer, save_tiny_checkpoint  # torch

    path = save_tiny_checkpoint("qwen3_moe", tmp_path_factory.mktemp("tiny") / "qwen3", vocab_size=VOCAB_SIZE)
    save_byte_tokenizer(path)
    return path


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Tiny]:
    """A tiny model with its store and its tokens, by type; made once. Tests that change one take a copy."""
    from serving import Tiny  # torch

    return functools.cache(lambda model_type: Tiny(model_type, tmp_path_factory.mktemp(model_type)))


@pytest.fixture(scope="session")
def mixtral(tiny: Callable[[str], Tiny]) -> Path:
    return tiny("mixtral").checkpoint


@pytest.fixture(scope="session")
def mixtral_store(tiny: Callable[[str], Tiny]) -> Any:
    return tiny("mixtral").store


@pytest.fixture(scope="session")
def calibration(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tiny_models import TEXT

    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text(TEXT)
    return path
