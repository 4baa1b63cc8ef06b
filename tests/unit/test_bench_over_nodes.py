"""Benchmarks whose parts other nodes measure: what is called there, and one report of all parts."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tiermoe.benchmarks import cases, papers
from tiermoe.cluster.jobs.bench import clone, nodes
from tiermoe.cluster.jobs.bench.cases import measure_over_nodes
from tiermoe.cluster.jobs.bench.metrics import Bar, Report
from tiermoe.errors import ConfigError

CLUSTER = "10.0.0.1:6379"


@pytest.fixture
def joined(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A cluster of two nodes that is this process, and gives the last thing's result first; what was joined."""
    found: list[str] = []

    @contextlib.contextmanager
    def join(address: str) -> Iterator[None]:
        found.append(address)
        yield

    def over_nodes(run: Any, things: Sequence[Any], **limits: Any) -> Iterator[tuple[int, Any, str]]:
        for number in reversed(range(len(things))):
            yield number, run(things[number]), f"node {number % 2}"

    for module in (nodes, papers):
        monkeypatch.setattr(module, "joined", join)
        monkeypatch.setattr(module, "over_nodes", over_nodes)
    monkeypatch.delenv("RAY_JOB_CONFIG_JSON_ENV_VAR", raising=False)
    return found


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """In place of `scale`; the batches of each call."""
    found: list[tuple[int, ...]] = []

    def scale(options: cases.Scale, progress: Any = None) -> Report:
        found.append(options.batch)
        rows = [{"batch": batch} for batch in options.batch]
        return Report("scale", "emulated", rows, [Bar(f"batch {b}", b, ">=", 2) for b in options.batch],
                      options.settings(rounds={str(b): 4 for b in options.batch}))  # fmt: skip

    monkeypatch.setattr(cases, "measure", scale)
    monkeypatch.setattr("tiermoe.cluster.jobs.bench.cases.measure", scale)
    return found


@pytest.mark.parametrize(
    ("batch", "address", "in_job", "where"),
    [
        ((1, 8), None, False, None),
        ((1, 8), CLUSTER, False, CLUSTER),
        ((1, 8), None, True, "auto"),
        ((1,), None, True, None),
        ((1,), CLUSTER, False, CLUSTER),
    ],
)
def test_each_value_is_a_part(
    batch: tuple[int, ...], address: str | None, in_job: bool, where: str | None, joined: list[str],
    measured: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    if in_job:
        monkeypatch.setenv("RAY_JOB_CONFIG_JSON_ENV_VAR", "{}")
    report = measure_over_nodes("scale", cases.Scale(batch=batch), address)
    assert joined == ([] if where is None else [where])
    assert measured == ([batch] if where is None else [(b,) for b in reversed(batch)])
    assert [row["batch"] for row in report.rows] == list(batch)
    assert [bar.name for bar in report.bars] == [f"batch {b}" for b in batch]
    assert tuple(report.settings["batch"]) == batch
    assert report.settings["rounds"] == {str(b): 4 for b in batch}
    ran_on = [None, None] if where is None else ["node 0", "node 1"]
    assert [row.get("node") for row in report.rows] == ran_on[: len(batch)]


def test_papers_of_other_nodes_are_written_here(
    joined: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    ran: list[tuple[str, Path | None]] = []

    def run_paper(name: str, quick: bool, folder: Path | None) -> Report:
        ran.append((name, folder))
        return Report(f"paper-{name}", "simulated", bars=[Bar(name, 1, ">=", 1)],
                      figures={"comparisons": [{"title": name}]})  # fmt: skip

    written: list[str] = []
    monkeypatch.setattr(papers, "run_paper", run_paper)
    monkeypatch.setattr(papers, "write_folder", lambda experiment, record, folder: written.append(record["name"]))
    report = papers.run_papers(["fmoe", "ndp"], True, tmp_path, 2, address=CLUSTER)
    assert joined == [CLUSTER]
    assert ran == [("ndp", None), ("fmoe", None)]
    assert written == ["paper-ndp", "paper-fmoe"]
    assert [row["paper"] for row in report.rows] == ["fmoe", "ndp"]
    assert [bar.name for bar in report.bars] == ["fmoe", "ndp"]


def test_a_node_without_the_clone_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clone, "benchmarks_dir", lambda in_job: None)
    with pytest.raises(ConfigError, match="no benchmarks/"):
        clone.called(clone.CloneCall("cases", "measured", ("scale", {})))
