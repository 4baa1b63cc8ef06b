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
    assert group.list_commands(typer.Context(group)) == ["serve", "compare"]
    done = CliRunner().invoke(bench_commands.bench_app, ["overhead"])
    assert isinstance(done.exception, ConfigError)
    assert "has no benchmark 'overhead'; give serve, compare, or a YAML file" in str(done.exception)
    assert "clone of the repository" in str(done.exception)


@pytest.mark.parametrize("in_job", [False, True])
def test_a_ray_job_brings_benchmarks_to_nodes_with_a_wheel(
    in_job: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "site").mkdir()
    (tmp_path / "job" / "benchmarks").mkdir(parents=True)
    (tmp_path / "job" / "benchmarks" / "study.py").touch()
    monkeypatch.setattr("tiermoe.__path__", [str(tmp_path / "site")])
    monkeypatch.chdir(tmp_path / "job")
    monkeypatch.delenv("RAY_JOB_CONFIG_JSON_ENV_VAR", raising=False)
    if in_job:
        monkeypatch.setenv("RAY_JOB_CONFIG_JSON_ENV_VAR", "{}")
    assert clone.benchmarks_dir() == (tmp_path / "job" / "benchmarks" if in_job else None)


_WITHOUT = """
from tiermoe.cluster.jobs.bench.experiment import load_experiment
from tiermoe.cluster.jobs.bench.run import run_experiment
from tiermoe.errors import ConfigError
for name in ("metric", "section"):
    try:
        run_experiment(load_experiment(f"{name}.yaml"))
    except ConfigError as error:
        print(error)
"""


def test_an_experiment_that_needs_a_clone_is_refused_without_one(tmp_path: Path) -> None:
    """Before a model is looked for. The package is here without `benchmarks/`, as a wheel installs it."""
    (package := tmp_path / "path" / "tiermoe").mkdir(parents=True)
    for part in ("__init__.py", "errors.py", "limits.py", "actors", "cluster", "configs", "kernels", "proto", "models"):
        (package / part).symlink_to(_ROOT / part)
    head = "name: x\ntitle: X\nsummary: X.\ngrid: {links: [1]}\nsections: [{name: s, variants: [on-demand] %s}]\n"
    (tmp_path / "metric.yaml").write_text(head % "" + "metrics: [moepic-table1]\n")
    (tmp_path / "section.yaml").write_text(head % ", executor: simulated")
    env = {"PYTHONPATH": str(tmp_path / "path"), "PATH": os.environ["PATH"], "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", _WITHOUT], cwd=tmp_path, env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    metric, simulated = done.stdout.splitlines()
    assert metric.startswith("no metric 'moepic-table1'; run it from a clone of the repository")
    assert simulated.startswith("section s is simulated; run it from a clone of the repository")


def test_a_benchmark_that_is_nowhere_is_refused_with_the_names() -> None:
    done = CliRunner().invoke(bench_commands.bench_app, ["nope"])
    assert "there is no benchmark 'nope'; give serve, compare, overhead, " in str(done.exception)
