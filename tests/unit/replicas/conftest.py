"""A tiny store with replicas."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tiermoe.cluster.jobs.prepare import prepare
from tiermoe.cluster.jobs.prepare.replica_options import ReplicaOptions
from tiermoe.cluster.jobs.prepare.replicas import add_replicas


@pytest.fixture(scope="session")
def made(checkpoint: Path, calibration: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with replicas of 2 and 4 bits; tests that change it take a copy."""
    store = prepare(checkpoint, tmp_path_factory.mktemp("made") / "store", progress=False)
    return add_replicas(store, checkpoint, ReplicaOptions((4, 2), 32), calibration, progress=False)


@pytest.fixture
def store(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made, tmp_path / "store"))
