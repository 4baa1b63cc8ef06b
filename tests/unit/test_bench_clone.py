"""`benchmarks/` is in a clone only: what the installed package says without it, and where a Ray job finds it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from tiermoe.cluster.config import configs_dir
from tiermoe.cluster.jobs.bench import bench_commands, clone
from tiermoe.errors import ConfigError

_ROOT = configs_dir().parent


def test_a_clone_s_benchmarks_are_found() -> None:
    assert clone.benchmarks_dir() == _ROOT / "benchmarks"
    module = clone.load("clone_commands")
    assert module is not None
    assert module.__name__ == "tiermoe.benchmarks.clone_commands"


def test_the_installed_package_says_where_the_others_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clone, "benchmarks_dir", lambda: None)
    monkeypatch.setattr(bench_commands, "_of_clone", lambda: None)
    group = typer.main.get_command(bench_commands.bench_app)
    assert group.list_commands(typer.Context(group)) == ["serve", "sweep", "compare"]
    done = CliRunner().invoke(bench_commands.bench_app, ["overhead"])
    assert isinstance(done.exception, ConfigError)
    assert "has no benchmark 'overhead'; give serve, sweep, compare; others run" in str(done.exception)
    assert "clone of the repository" in str(done.exception)


@pytest.mark.parametrize("in_job", [False, True])
def test_a_ray_job_brings_benchmarks_to_nodes_with_a_wheel(
    in_job: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "site").mkdir()
    (tmp_path / "job" / "benchmarks").mkdir(parents=True)
    (tmp_path / "job" / "benchmarks" / "clone_commands.py").touch()
    monkeypatch.setattr("tiermoe.__path__", [str(tmp_path / "site")])
    monkeypatch.chdir(tmp_path / "job")
    monkeypatch.delenv("RAY_JOB_CONFIG_JSON_ENV_VAR", raising=False)
    if in_job:
        monkeypatch.setenv("RAY_JOB_CONFIG_JSON_ENV_VAR", "{}")
    assert clone.benchmarks_dir() == (tmp_path / "job" / "benchmarks" if in_job else None)


def test_the_installed_package_compares_policies_without_a_clone(tmp_path: Path) -> None:
    """The package is here without `benchmarks/`, as a wheel installs it; the command ends before a model is loaded."""
    (package := tmp_path / "path" / "tiermoe").mkdir(parents=True)
    for part in ("__init__.py", "errors.py", "limits.py", "actors", "cluster", "configs", "kernels", "proto", "models"):
        (package / part).symlink_to(_ROOT / part)
    env = {"PYTHONPATH": str(tmp_path / "path"), "PATH": os.environ["PATH"], "OMP_NUM_THREADS": "1"}
    program = [sys.executable, "-c", "from tiermoe.cluster.cli import main; main()", "bench", "compare"]
    words = ["--policies", "on-demand", "--prompts", "none.txt"]
    done = subprocess.run([*program, *words], cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "none.txt" in done.stderr


def test_a_benchmark_that_is_nowhere_is_refused_with_the_names() -> None:
    done = CliRunner().invoke(bench_commands.bench_app, ["nope"])
    assert "there is no benchmark 'nope'; give serve, sweep, compare, overhead, " in str(done.exception)
