"""Cores and memory of this process: by its affinity, and by all control groups above it, in folders of the test."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
from commands import Command
from control_groups import PATHS, PLACES, VERSIONS, make_groups
from typer.testing import CliRunner

from tiermoe import LLM, limits
from tiermoe.cluster.cli import app
from tiermoe.cluster.config import engine_settings, load_run_config, on_this_machine
from tiermoe.cluster.host import cpu
from tiermoe.cluster.jobs import devices, doctor
from tiermoe.cluster.topology.inputs import local_ray, this_machine
from tiermoe.errors import ConfigError

MIB, GIB = 1 << 20, 1 << 30
_MACHINE = limits.Memory(24 * GIB, limits.MACHINE, 21 * GIB, limits.MACHINE)
_FILES = {"v1": ("cpu.cfs_quota_us", "memory.limit_in_bytes"), "v2": ("cpu.max", "memory.max")}


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine of 8 cores and 24 GiB whose files are here."""
    memory = SimpleNamespace(total=_MACHINE.total, available=_MACHINE.free)
    monkeypatch.setattr(limits, "_ROOT", tmp_path)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory)
    _affinity(monkeypatch, 8)
    return tmp_path


def _affinity(monkeypatch: pytest.MonkeyPatch, cores: int) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)), raising=False)


@pytest.mark.parametrize("affinity", [8, 2])
@pytest.mark.parametrize("given", ["cpu", "memory", "both", "none"])
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("version", VERSIONS)
def test_every_level_of_control_groups_bounds_cores_and_memory(
    version: str, place: str, given: str, affinity: int, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against all cores and all memory of the machine below a unit, slice or pod that may use a part."""
    has_cpu, has_memory = given in ("cpu", "both"), given in ("memory", "both")
    make_groups(
        root, version, place, cores=3.0 if has_cpu else None, memory=512 * MIB if has_memory else None,
        used=200 * MIB, cached=60 * MIB,
    )  # fmt: skip
    _affinity(monkeypatch, affinity)
    quota, limit = (f"{file} of {PATHS[place]}" for file in _FILES["v2" if version == "v2" else "v1"])
    if affinity == 2:
        assert limits.cores() == (2, limits.AFFINITY)
    else:
        assert limits.cores() == ((3, quota) if has_cpu else (8, limits.MACHINE))
    bounded = limits.Memory(512 * MIB, limit, (512 - 140) * MIB, limit)
    assert limits.memory() == (bounded if has_memory else _MACHINE)
    # all who ask
    cores = min(affinity, 3 if has_cpu else 8)
    assert limits.usable_cores() == cpu()["cores"] == cores
    assert limits.cores_with_peers() == (3 if has_cpu else 8)
    config = load_run_config(None, {"device": "cpu", "policy": "next-gate"})
    settings = engine_settings(config)
    assert settings.threads == cores - 1
    (node,) = this_machine(local_ray(config, settings))
    assert node.amount("memory") == limits.memory().free == limits.host_free_bytes()
    assert node.amount("CPU") == cores


@pytest.mark.parametrize("version", VERSIONS)
def test_the_least_of_all_levels_holds(version: str, root: Path) -> None:
    """The file of each level is made by another call, which writes "no limit" to the others of the same path."""
    make_groups(root, version, "own", cores=4, memory=2 * GIB, used=GIB)
    base = root / "sys/fs/cgroup"
    if version == "v2":
        (base / "system.slice/cpu.max").write_text("250000 100000\n")
        (base / "system.slice/memory.max").write_text(f"{3 * GIB}\n")
        (base / "system.slice/memory.current").write_text(f"{3 * GIB - 1000}\n")
        names = ("cpu.max", "memory.max")
    else:
        (base / "cpu,cpuacct/system.slice/cpu.cfs_quota_us").write_text("250000\n")
        (base / "memory/system.slice/memory.limit_in_bytes").write_text(f"{3 * GIB}\n")
        (base / "memory/system.slice/memory.usage_in_bytes").write_text(f"{3 * GIB - 1000}\n")
        names = ("cpu.cfs_quota_us", "memory.limit_in_bytes")
    assert limits.cores() == (2, f"{names[0]} of /system.slice, 2.50 cores")
    own, above = (f"{names[1]} of {path}" for path in ("/system.slice/x.service", "/system.slice"))
    assert limits.memory() == limits.Memory(2 * GIB, own, 1000, above)
    assert limits.memory_words(limits.memory()) == f"1000 B free ({above}) of 2.00 GiB ({own})"


def test_what_is_unusual_is_no_limit_and_no_error(root: Path) -> None:
    assert limits.cores() == (8, limits.MACHINE)  # no files: another system
    assert limits.memory() == _MACHINE
    make_groups(root, "v2", "own")
    group = root / "sys/fs/cgroup/system.slice/x.service"
    for text in ("nonsense", "", "max", "0 0", "5 0", "-1 100000", "1 2 3"):
        (group / "cpu.max").write_text(text)
        (group / "memory.max").write_text(text[:1])
    assert limits.cores() == (8, limits.MACHINE)
    (root / "proc/self/cgroup").write_text("0::/gone/far (deleted)\nnonsense\n")
    (root / "sys/fs/cgroup/cpu.max").write_text("200000 100000\n")
    assert limits.cores() == (2, "cpu.max of /")  # a group that is gone: those above it
    (root / "proc/self/cgroup").write_text("0::/../other\n")
    assert limits.usable_cores() == 2


def test_the_soft_limit_counts_and_one_above_the_mount_too(root: Path) -> None:
    """A group above memory.high is slowed down. Version 1 says the least limit of those above, mounted or not."""
    make_groups(root, "v2", "slice", high=300 * MIB, used=100 * MIB)
    assert limits.memory()[:3] == (300 * MIB, "memory.high of /system.slice", 200 * MIB)
    make_groups(root, "v1", "mounted elsewhere", used=100 * MIB)
    stat = root / "sys/fs/cgroup/memory/job/memory.stat"
    stat.write_text(f"hierarchical_memory_limit {400 * MIB}\ntotal_inactive_file 0\n")
    assert limits.memory()[:3] == (400 * MIB, "hierarchical_memory_limit of /docker/abc/job", 300 * MIB)


def test_doctor_and_plan_say_what_bounds_them(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_groups(root, "v2", "own", cores=1, memory=512 * MIB, used=112 * MIB)
    for module in (doctor, devices):
        monkeypatch.setattr(module, "host_copy_gbps", lambda: 10.0)
    said = CliRunner().invoke(app, ["doctor"]).output
    assert "1 core (cpu.max of /system.slice/x.service)" in said
    assert "400.00 MiB free of 512.00 MiB (memory.max of /system.slice/x.service)" in said
    record = json.loads(CliRunner().invoke(app, ["doctor", "--json"]).output)
    assert (record["cpu"]["cores"], record["cpu"]["cores_from"]) == (1, "cpu.max of /system.slice/x.service")
    assert record["memory"]["free_bytes"] == record["devices"][0]["free_bytes"] == 400 * MIB
    assert record["memory"]["total_bytes"] == record["devices"][0]["memory_bytes"] == 512 * MIB
    planned = CliRunner().invoke(app, ["plan", "--device", "cpu", "--policy", "next-gate"]).output
    assert "1 core (cpu.max of /system.slice/x.service), 400.00 MiB free of 512.00 MiB (memory.max of" in planned
    refused = CliRunner().invoke(app, ["plan", "--device", "cpu", "--budget", "auto"])
    assert "400.00 MiB free" in str(refused.exception)


@pytest.mark.parametrize("key", ["threads", "ndp.threads"])
@pytest.mark.parametrize("name", ["run", "serve", "up", "a file", "a file of serve"])
def test_more_threads_than_usable_cores_are_refused(
    key: str, name: str, root: Path, tmp_path: Path, command: Command
) -> None:
    """`--threads 999` was taken."""
    make_groups(root, "v2", "own", cores=3)
    prompt = ("hello",) if name in ("run", "a file") else ()
    if name.startswith("a file"):
        file = tmp_path / "run.yaml"
        file.write_text("threads: 999\n" if key == "threads" else "ndp:\n  threads: 999\n")
        given = ("serve" if "serve" in name else "run", *prompt, "--config", str(file))
    else:
        given = (name, *prompt, f"--{key.replace('.', '-')}", "999")
    code, out, err = command(*given)
    assert (code, out) == (2, "")
    assert err == (
        f"error: {key} is 999, and 3 cores (cpu.max of /system.slice/x.service) can be used here; give at most 3, or "
        "leave it out\n"
    )


def test_threads_of_other_commands_and_of_python(root: Path, command: Command, tmp_path: Path) -> None:
    make_groups(root, "v1", "own", cores=1)
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "hello"}\n')
    for given in (
        ("eval", "--policy", "on-demand", "--threads", "2"), ("record", prompts, tmp_path / "t", "--threads", "2"),
        ("bench", "kernel", "--threads", "2"),
    ):  # fmt: skip
        code, _, err = command(*given)
        assert code == 2
        assert "threads is 2, and 1 core (cpu.cfs_quota_us of /system.slice/x.service) can be used here" in err, err
    for options in ({"threads": 2}, {"ndp": {"threads": 2}}):
        with pytest.raises(ConfigError, match=r"threads is 2, and 1 core \(.*give at most 1"):
            LLM(**options)
    record = command.json("plan", "--policy", "on-demand")  # of what would fit
    assert record["spec"]["threads"] == 1
    joined = {"threads": 999, "ray": {"address": "head:6379"}}  # the nodes have other cores
    assert on_this_machine(load_run_config(None, joined)).threads == 999


def test_doctor_says_which_port_another_ray_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    """`ray job submit` itself says "No available agent" only."""
    with socket.socket() as agent:
        agent.bind(("127.0.0.1", 0))
        port = agent.getsockname()[1]
        assert not doctor.job_agent_port_taken(port)
        agent.listen()
        assert doctor.job_agent_port_taken(port)
    monkeypatch.setattr(doctor, "job_agent_port_taken", lambda: True)
    assert "Ray jobs" in (said := CliRunner().invoke(app, ["doctor"]).output)
    assert "--dashboard-agent-listen-port=PORT" in said
