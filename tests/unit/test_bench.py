"""The benchmarks' common ground: order of runs, spread, bars that can fail, one JSON form, exit codes."""

from __future__ import annotations

import inspect
import json
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from tiermoe.benchmarks import cases, serving
from tiermoe.benchmarks.clone_commands import app
from tiermoe.cluster.jobs.bench import bench_commands
from tiermoe.cluster.jobs.bench.finish import JsonCommand
from tiermoe.cluster.jobs.bench.metrics import (
    Bar,
    Case,
    Measures,
    Report,
    Spread,
    interleaved,
)
from tiermoe.cluster.jobs.bench.serving import overridden
from tiermoe.cluster.jobs.local_worker import run_config
from tiermoe.errors import ConfigError


def test_cases_take_turns_and_warm_up_rounds_do_not_count() -> None:
    order: list[str] = []

    def case(name: str) -> Case:
        def run() -> Measures:
            order.append(name)
            return {"n": float(order.count(name))}

        return Case(name, run)

    results = interleaved([case("a"), case("b")], repeats=3, warmup=1)
    assert order == ["a", "b"] * 4
    assert results["a"]["n"] == Spread(median=3.0, minimum=2.0, maximum=4.0, values=(2.0, 3.0, 4.0))


@pytest.mark.parametrize(("arguments", "code"), [(["--json"], 0), (["--json", "--check"], 1)])
def test_only_check_turns_a_missed_bar_into_an_exit_code(
    arguments: list[str], code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    missed = Report("ttft", "emulated", [], [Bar("b", 2.0, "<=", 1.0)])
    monkeypatch.setattr(serving, "ttft", lambda *_: missed)
    done = CliRunner().invoke(bench_commands.bench_app, ["ttft", *arguments])
    assert done.exit_code == code
    assert json.loads(done.stdout)["bars"][0]["ok"] is False


@pytest.mark.parametrize("words", [["--json", "extra"], ["--json", "a.json", "b.json"], ["--jsn", "a.json"]])
def test_words_that_mean_nothing_are_refused(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "ttft", lambda *a: pytest.fail("measured"))
    assert CliRunner().invoke(bench_commands.bench_app, ["ttft", *words]).exit_code == 2


SERVING = {
    "overhead", "host", "prefetch", "ttft", "turns", "scale", "ndp", "default", "compare", "fmoe", "moepic",
    "activeevict", "buddymoe", "auto-emulated", "quality", "drafts", "serve",
}  # fmt: skip


def test_every_benchmark_takes_the_common_options() -> None:
    """Guards `bench channel --json FILE.json`, which its help offers and which was an error."""
    infos = [*bench_commands.bench_app.registered_commands, *app.registered_commands]
    commands = {info.name or info.callback.__name__: info for info in infos}
    del commands["gpu"]  # writes its JSON into the folder of its page, and always judges
    del commands["redraw"]  # measures nothing
    for name, info in commands.items():
        options = set(inspect.signature(info.callback).parameters)
        assert {"out", "as_json", "check"} <= options, name
        assert ("config" in options) == (name in SERVING), name
        assert info.cls is JsonCommand, name


def test_keys_that_a_benchmark_sets_itself_are_named(tmp_path: Path) -> None:
    file = tmp_path / "job.yaml"
    file.write_text("policy: on-demand\nthreads: 1\nkv:\n  page_size: 32\ncluster:\n  ndp_workers: 2\n")
    assert overridden(str(file), cases.Ttft.own_keys) == ["policy"]
    config = run_config(None, str(file), policy="next-gate")
    assert (config.policy, config.threads, config.kv.page_size, config.cluster.ndp_workers) == ("next-gate", 1, 32, 2)


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("threads: 2", "threads"), ("request_deadline_s: 5", "request_deadline_s"),
        ("ray: {address: '127.0.0.1:1'}", "ray.address"), ("cluster: {shards: 4}", "cluster.shards"),
        ("cluster: {store: {nodes: marked}}", "cluster.store"),
        ("cluster: {ndp_workers: per-node}", "cluster.ndp_workers"),
    ],
)  # fmt: skip
def test_keys_that_only_a_deployment_has_are_refused(text: str, key: str, tmp_path: Path) -> None:
    """Guards against a file for a cluster whose shards a benchmark said that it did not start, and was measured."""
    file = tmp_path / "job.yaml"
    file.write_text(f"{text}\n")
    with pytest.raises(ConfigError, match=f"key '{key}'.*bench serve --config"):
        overridden(str(file), cases.Ttft.own_keys)


def test_the_help_lists_the_commands_of_all_files_in_one_order() -> None:
    """They are written in several files; the help begins with the system as a whole."""
    group = typer.main.get_command(bench_commands.bench_app)
    names = group.list_commands(typer.Context(group))
    assert names == [
        "serve", "sweep", "compare", "overhead", "host", "ttft", "turns", "scale", "streams", "activeevict",
        "auto-emulated", "buddymoe", "default", "fmoe", "moepic", "ndp", "prefetch", "presets", "papers", "redraw",
        "gpu", "deployment", "drafts", "draft-table", "disk", "core", "validation", "auto", "channel", "kernel",
        "resident", "gpu-estimates",
    ]  # fmt: skip
    for name in names:
        done = CliRunner().invoke(bench_commands.bench_app, [name, "--help"])
        assert done.exit_code == 0
        assert "--out" in done.output or name == "redraw"
