"""Which threads and cores an NDP worker has: what is said, and beside a GPU what its worker leaves."""

from __future__ import annotations

import os
import pickle
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from tiermoe.actors import ndp_worker
from tiermoe.actors.settings import NdpSettings
from tiermoe.cluster import config as config_module
from tiermoe.cluster import host as cores_module
from tiermoe.cluster.config import engine_settings, load_run_config
from tiermoe.cluster.worker_process import Role
from tiermoe.errors import ConfigError, TierMoeError


def _threads(monkeypatch: pytest.MonkeyPatch, gpu: bool, **given: Any) -> tuple[int, int]:
    """Of the GPU worker and of each NDP worker, on a machine of 16 cores."""
    monkeypatch.setattr(config_module, "usable_cores", lambda: 16)
    monkeypatch.setattr(config_module, "has_gpu", lambda: gpu)
    settings = engine_settings(load_run_config(None, {"policy": "context-ndp-full"} | given))
    return settings.threads, settings.ndp.threads


@pytest.mark.parametrize(
    ("gpu", "given", "threads"),
    [
        (False, {}, (15, 1)),  # the CPU stands in for the GPU and has all but one
        (True, {}, (4, 11)),  # one is the store's
        (True, {"device": "cpu"}, (15, 1)),
        (False, {"device": "cuda"}, (4, 11)),
        (True, {"threads": 6}, (6, 9)),
        (True, {"threads": 16}, (16, 1)),
        (True, {"ndp": {"threads": 3}}, (4, 3)),
        (True, {"cluster": {"ndp_workers": 2}}, (4, 5)),
        (True, {"cluster": {"shards": 2}}, (4, 7)),
        (True, {"ray": {"address": "10.0.0.5:6379"}}, (15, 1)),  # of the nodes of a cluster nothing is known here
    ],
)
def test_beside_a_gpu_the_ndp_worker_has_what_is_left(
    gpu: bool, given: dict[str, Any], threads: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert _threads(monkeypatch, gpu, **given) == threads


def test_workers_take_cores_in_turn() -> None:
    settings = NdpSettings(threads=2, cores=(4, 5, 6, 7, 9))
    assert [settings.cores_of(i) for i in range(3)] == [(4, 5), (6, 7), (4, 5)]
    assert NdpSettings(threads=2).cores_of(3) == ()
    assert pickle.loads(pickle.dumps(Role.ndp(settings).arguments))["settings"] == settings  # as a child gets them
    config = load_run_config(None, {"policy": "context-ndp-full", "ndp": {"threads": 2, "cores": [1, 0]}})
    assert engine_settings(config).ndp.cores_of(0) == (1, 0)


@pytest.mark.parametrize("cores", [(1,), (1, 1), (1, 2, 1)])
def test_too_few_cores_are_refused(cores: tuple[int, ...]) -> None:
    with pytest.raises(ConfigError, match="name at least 2 cores, each once"):
        NdpSettings(threads=2, cores=cores).cores_of(0)
    config = load_run_config(None, {"policy": "context-ndp-full", "ndp": {"threads": 2, "cores": list(cores)}})
    with pytest.raises(ConfigError, match="name at least 2 cores, each once"):
        engine_settings(config)


def test_a_core_that_is_no_core_is_refused_by_the_configuration() -> None:
    with pytest.raises(TierMoeError, match="cores"):
        load_run_config(None, {"ndp": {"cores": [-1]}})


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="threads are bound on Linux only")
def test_the_worker_binds_its_threads() -> None:
    here = min(os.sched_getaffinity(0))
    assert ndp_worker._threads(NdpSettings(cores=(here,)), 0).count == 1
    with pytest.raises(ConfigError, match="NDP worker 0 cannot have 1 threads on cores"):
        ndp_worker._threads(NdpSettings(cores=(1023,), hardware=asdict(config_module.load_hardware("paper-ndp"))), 0)


@pytest.mark.parametrize(
    ("quota", "cores"),
    [("max 100000", 8), ("400000 100000", 4), ("1200000 100000", 8), ("50000 100000", 1), ("nonsense", 8), (None, 8)],
)
def test_a_quota_of_the_control_group_bounds_the_cores(
    quota: str | None, cores: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Guards against as many threads as the host has cores in a container that may keep few of them busy."""
    if quota is not None:
        (tmp_path / "cpu.max").write_text(f"{quota}\n")
    monkeypatch.setattr(cores_module, "_QUOTA", tmp_path / "cpu.max")
    monkeypatch.setattr(cores_module.os, "sched_getaffinity", lambda _: set(range(8)), raising=False)
    assert cores_module.usable_cores() == cores
