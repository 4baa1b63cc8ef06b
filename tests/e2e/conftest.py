"""Stores of the default model, held-out prompts, and the tokens that the unmodified model gives for them."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from fake_gpu import FakeGpu
from serving import Reference, add_random_profile, default_model_greedy, prepared

from tiermoe.actors.engine import make_device as devices
from tiermoe.actors.engine.cuda.device import CudaDevice
from tiermoe.actors.engine.split import Configurator
from tiermoe.actors.policies.moepic.configure import Times
from tiermoe.actors.store.files import ExpertStore
from tiermoe.cluster.config import default_model_dir
from tiermoe.cluster.jobs.bench.serving import heldout_prompts
from tiermoe.cluster.jobs.prepare.measures import add_gates
from tiermoe.cluster.jobs.prepare.replica_options import ReplicaOptions
from tiermoe.cluster.jobs.prepare.replicas import add_replicas

LENGTHS = (48, 12, 33, 5, 24)


@pytest.fixture(scope="session")
def bare_store(tmp_path_factory: pytest.TempPathFactory) -> ExpertStore:
    """Without anything that is measured."""
    return prepared(default_model_dir(), tmp_path_factory.mktemp("bare") / "store")


@pytest.fixture(scope="session")
def store(bare_store: ExpertStore, tmp_path_factory: pytest.TempPathFactory) -> ExpertStore:
    """With a random profile."""
    path = tmp_path_factory.mktemp("default") / "store"
    shutil.copytree(bare_store.describe().path, path)
    add_random_profile(path, 4)
    return ExpertStore(str(path))


@pytest.fixture(scope="session")
def gated_store(store: ExpertStore, tmp_path_factory: pytest.TempPathFactory) -> ExpertStore:
    """The same with gates that were trained on a little text."""
    path, text = Path(store.describe().path), tmp_path_factory.mktemp("gates") / "text.jsonl"
    lines = (default_model_dir() / "calibration" / "prose.jsonl").read_text(encoding="utf-8").splitlines()
    text.write_text("\n".join(lines[:4]), encoding="utf-8")
    add_gates(path, default_model_dir(), text)
    assert not [beside for beside in path.parent.iterdir() if beside.name.startswith(".store.")]
    return store


@pytest.fixture(scope="session")
def packed_store(store: ExpertStore, tmp_path_factory: pytest.TempPathFactory) -> ExpertStore:
    """The same with replicas of four bits."""
    text = tmp_path_factory.mktemp("replicas") / "text.txt"  # few experts see enough rows for more than rounding
    text.write_text("".join(f"def f{i}(x):\n    return x * {i} + {i * i}\n\n" for i in range(60)))
    options = ReplicaOptions((4,), 64)
    add_replicas(Path(store.describe().path), default_model_dir(), options, text, progress=False)
    return store


@pytest.fixture(scope="session")
def reference() -> Reference:
    """Twelve prompts of several lengths, and 48 tokens for each."""
    whole = heldout_prompts(default_model_dir(), 12, max(LENGTHS))
    prompts = [tuple(prompt[: LENGTHS[i % len(LENGTHS)]]) for i, prompt in enumerate(whole)]
    return Reference(prompts, default_model_greedy(prompts, 48))


@pytest.fixture
def fake_gpu(monkeypatch: pytest.MonkeyPatch) -> FakeGpu:
    """Workers of the test copy through its streams."""
    gpu = FakeGpu(pin_all=False)
    gpu.eager = True
    monkeypatch.setattr(devices, "make_device", lambda *_: CudaDevice(gpu, staging_bytes=1 << 16))
    return gpu


@pytest.fixture
def slow_link(monkeypatch: pytest.MonkeyPatch) -> list[Times | None]:
    """Whatever this machine is busy with, the configurator is told that loading takes longest; what was measured."""
    measured: list[Times | None] = []
    original = Configurator.times

    def times(self: Configurator) -> Times | None:
        measured.append(original(self))
        return Times(attention_s=1e-3, moe_s=1e-3, head_s=1e-3, load_s=3e-3)

    monkeypatch.setattr(Configurator, "times", times)
    return measured
