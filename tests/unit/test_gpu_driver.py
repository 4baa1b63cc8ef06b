"""A GPU that is there and cannot be used is refused: a driver's files in a folder of the test, a libcuda of its own."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import tiermoe
from tiermoe import LLM
from tiermoe.actors import gpu_driver
from tiermoe.actors.engine.cache.device import CpuDevice
from tiermoe.actors.engine.make_device import make_device
from tiermoe.actors.gpu_driver import (
    TorchBuild,
    check_gpu,
    driver_version,
    gpu_count,
    has_gpu,
    number_by_bus,
    unusable,
)
from tiermoe.actors.settings import LinkSettings
from tiermoe.cluster.cli import app
from tiermoe.cluster.config import load_run_config
from tiermoe.cluster.jobs.local_worker import start_worker
from tiermoe.cluster.jobs.options import checked_settings
from tiermoe.errors import CheckpointError, ConfigError

_PROPRIETARY = """\
NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.104.05  Sat Aug 19 01:15:15 UTC 2023
GCC version:  gcc version 11.4.0 (Ubuntu 11.4.0-1ubuntu1~22.04)
"""
_OPEN = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.86.15  Release Build  (dvs-builder@U22)\n"
_TEGRA = "NVRM version: NVIDIA UNIX Open Kernel Module for aarch64  540.4.0  Release Build  (buildbrain@mobile)\n"
_CUDA_13, _FOR_CPUS = TorchBuild("2.13.0", "13.0"), TorchBuild("2.13.0+cpu", None)
needs_cpu_torch = pytest.mark.skipif(torch.version.cuda is not None, reason="this torch is built for CUDA")


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What `gpu_driver` takes for the root of the file system; empty."""
    monkeypatch.setattr(gpu_driver, "ROOT", tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return tmp_path


def _put(root: Path, *names: str, version: str = "") -> None:
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).touch()
    if version:
        (root / "proc/driver/nvidia").mkdir(parents=True)
        (root / "proc/driver/nvidia/version").write_text(version)


@pytest.fixture
def old_gpu(root: Path) -> Path:
    _put(root, "dev/nvidia0", "dev/nvidiactl", version=_PROPRIETARY)
    return root


@pytest.mark.parametrize(
    ("files", "seen"),
    [
        ((), False),
        (("dev/null", "dev/dri/card0"), False),
        (("dev/nvidia0",), True),
        (("dev/nvidia7", "dev/nvidia-uvm"), True),
        (("dev/nvidiactl",), True),
        (("dev/nvhost-gpu",), True),
        (("dev/dxg",), False),  # WSL beside a GPU of another maker
        (("dev/dxg", "usr/lib/wsl/lib/libcuda.so.1"), True),
    ],
)
def test_gpus_are_seen_by_their_drivers_files(root: Path, files: tuple[str, ...], seen: bool) -> None:
    _put(root, *files)
    assert has_gpu() is seen
    assert not has_gpu({"CUDA_VISIBLE_DEVICES": ""})


@pytest.mark.parametrize(
    ("visible", "count"),
    [(None, 2), ("", 0), ("-1", 0), (" -1,0", 0), ("NoDevFiles", 0), ("1", 1), ("0,1", 2), ("0,1,2", 2), ("GPU-8", 1)],
)
def test_the_environment_hides_gpus(root: Path, visible: str | None, count: int) -> None:
    _put(root, "dev/nvidia0", "dev/nvidia1", "dev/nvidiactl")
    environ = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    assert gpu_count(environ) == count
    assert has_gpu(environ) is (count > 0)


@pytest.mark.parametrize(
    ("text", "version"), [(_PROPRIETARY, "535.104.05"), (_OPEN, "570.86.15"), (_TEGRA, "540.4.0"), ("strange\n", None)]
)
def test_the_drivers_version_comes_from_the_kernel(root: Path, text: str, version: str | None) -> None:
    _put(root, version=text)
    assert driver_version() == version


def test_nvidia_smi_gives_the_version_where_the_kernel_does_not(root: Path) -> None:
    assert driver_version() is None
    (root / "nvidia-smi").write_text('#!/bin/sh\necho "551.61"\necho "551.61"\n')
    (root / "nvidia-smi").chmod(0o755)
    assert driver_version() == "551.61"
    (root / "nvidia-smi").write_text("#!/bin/sh\necho 'NVIDIA-SMI has failed because ...'\nexit 9\n")
    assert driver_version() is None


def test_the_installed_torch_is_read_without_loading_it() -> None:
    assert TorchBuild.installed() == TorchBuild(str(torch.__version__), torch.version.cuda)


def _libcuda(folder: Path, version: int) -> Path:
    """A library that says which version of CUDA the driver supports, in CUDA's own form."""
    source, library = folder / "libcuda.cpp", folder / "libcuda.so"
    source.write_text(f'extern "C" int cuDriverGetVersion(int *version) {{ *version = {version}; return 0; }}\n')
    command = ["c++", "-shared", "-fPIC", "-o", str(library), str(source)]
    subprocess.run(command, check=True, env={"PATH": "/usr/local/bin:/usr/bin:/bin"})
    return library


@pytest.mark.parametrize(
    ("supported", "what"),
    [
        (12020, "needs driver 580 or newer, and the driver is 535.104.05 (the driver supports CUDA 12.2); update"),
        (None, "and the driver is 535.104.05 (no-libcuda.so cannot be loaded); "),
        (13000, None),
        (13020, None),  # also of cuda-compat, which brings a newer library to an older driver
        (14000, None),
    ],
)
def test_a_driver_that_is_too_old(
    old_gpu: Path, supported: int | None, what: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = "no-libcuda.so" if supported is None else str(_libcuda(old_gpu, supported))
    monkeypatch.setattr(gpu_driver, "_LIBRARY", library)
    check_gpu("cpu", _CUDA_13)
    if what is None:
        check_gpu("auto", _CUDA_13)
        check_gpu("cuda", _CUDA_13)
        return
    for device in ("auto", "cuda"):
        with pytest.raises(ConfigError) as refused:
            check_gpu(device, _CUDA_13)
        assert what in str(refused.value)
        assert "torch 2.13.0 is built for CUDA 13.0" in refused.value.what
        assert "--device cpu" in refused.value.remedy
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    check_gpu("auto", _CUDA_13)


def test_what_the_refusal_says(root: Path) -> None:
    _put(root, "dev/nvidia0", version=_OPEN)
    with pytest.raises(ConfigError) as cpus:
        check_gpu("auto", _FOR_CPUS)
    assert "torch 2.13.0+cpu is built for CPUs, and the driver is 570.86.15; " in str(cpus.value)
    assert "CUDA 12 needs driver 525 or newer, CUDA 13 needs driver 580 or newer" in cpus.value.remedy
    # a driver that is new enough: updating it would not help
    assert unusable(TorchBuild("2.11.0+cu128", "12.8"), "CUDA unknown error").remedy.startswith("see what nvidia-smi")
    assert "needs a driver that supports it" in unusable(TorchBuild("2.20", "14.1")).what


@needs_cpu_torch
@pytest.mark.parametrize("device", ["auto", "cuda"])
def test_every_way_in_refuses_it(old_gpu: Path, device: str) -> None:
    """Guards: the CPU stood in for the GPU with `device: auto`, and nothing said so."""
    del old_gpu
    with pytest.raises(ConfigError, match=r"driver is 535\.104\.05"):
        make_device(device, LinkSettings())
    # before the model is looked for
    config = load_run_config(None, {"model": "/nowhere", "device": device})
    with pytest.raises(ConfigError, match=r"driver is 535\.104\.05"):
        checked_settings(config)
    with pytest.raises(ConfigError, match=r"driver is 535\.104\.05"):
        LLM("/nowhere", device=device)
    with pytest.raises(ConfigError, match=r"driver is 535\.104\.05"):
        start_worker(config)  # of a benchmark
    # a cluster that is joined may have a GPU elsewhere: its worker looks
    config = load_run_config(None, {"model": "/nowhere", "device": device, "ray": {"address": "10.0.0.5:6379"}})
    with pytest.raises(CheckpointError, match="/nowhere"):
        checked_settings(config)


@needs_cpu_torch
@pytest.mark.parametrize("command", ["run x", "up", "serve", "eval --policy on-demand", "record x x"])
def test_every_command_refuses_it(old_gpu: Path, command: str) -> None:
    del old_gpu
    done = CliRunner().invoke(app, [*command.split(), "--model", "/nowhere"])
    assert isinstance(done.exception, ConfigError), done.output
    assert "driver is 535.104.05" in str(done.exception)


@needs_cpu_torch
def test_a_plan_says_that_it_would_be_refused(old_gpu: Path) -> None:
    del old_gpu
    plan = tiermoe.plan()
    assert plan["spec"]["gpu"] is True
    assert any("driver is 535.104.05" in note for note in plan["notes"])
    assert not any("535" in note for note in tiermoe.plan(device="cpu")["notes"])


@needs_cpu_torch
def test_the_stand_in_on_purpose(old_gpu: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    del old_gpu
    assert isinstance(make_device("cpu", LinkSettings()), CpuDevice)
    config, settings = checked_settings(load_run_config(None, {"device": "cpu"}))
    assert settings.device == "cpu"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")
    assert isinstance(make_device("auto", LinkSettings()), CpuDevice)
    config, settings = checked_settings(load_run_config(None, {"device": "auto"}))
    assert (config.device, settings.device) == ("cpu", "cpu")  # Ray would count "-1" as a GPU
    with pytest.raises(ConfigError, match="CUDA_VISIBLE_DEVICES hides every GPU"):
        checked_settings(load_run_config(None, {"device": "cuda"}))
    with pytest.raises(ConfigError, match="CUDA_VISIBLE_DEVICES hides every GPU"):
        make_device("cuda", LinkSettings())


@needs_cpu_torch
def test_the_doctor_shows_the_rest_and_refuses(old_gpu: Path) -> None:
    del old_gpu
    done = CliRunner().invoke(app, ["doctor", "--json"])
    assert isinstance(done.exception, ConfigError)
    assert "535.104.05" in str(done.exception)
    report = json.loads(done.stdout)
    assert report["devices"] == []
    assert report["unusable_gpu"] == str(done.exception)


def test_gpus_are_numbered_as_nvidia_smi_numbers_them() -> None:
    environ: dict[str, str] = {}
    number_by_bus(environ)
    assert environ == {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    environ = {"CUDA_DEVICE_ORDER": "FASTEST_FIRST"}
    number_by_bus(environ)
    assert environ == {"CUDA_DEVICE_ORDER": "FASTEST_FIRST"}
