"""`bench sweep`: cells of a file, their order over repetitions, journal, failures, ratios to a baseline."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from tiermoe.cluster.attach import Sample
from tiermoe.cluster.config import RunConfig
from tiermoe.cluster.jobs.bench import sweep as sweep_module
from tiermoe.cluster.jobs.bench.cases import Serve
from tiermoe.cluster.jobs.bench.cells import Journal, journal_file
from tiermoe.cluster.jobs.bench.sweep import (
    Sweep,
    baseline_of,
    cells_of,
    counted,
    fingerprint,
    read_sweep,
    run_sweep,
)
from tiermoe.errors import ConfigError, RequestError, RuntimeFailure

TWO = {"cells": [{"cluster.shards": [1, 2], "load.streams": [1, 8]}], "baseline": {"cluster.shards": 1}, "repeats": 2}


def _sweep(**changes: Any) -> Sweep:
    return Sweep(**{**TWO, **changes})


class Cluster:
    """In place of deployments: what was visited, in order. A shard count in `failing` raises its error."""

    def __init__(self, failing: dict[int, Exception] | None = None, stops_after: int | None = None) -> None:
        self.visits: list[tuple[int, tuple[int, ...], int]] = []
        self._failing, self._stops_after = failing or {}, stops_after

    def __call__(self, config: RunConfig, loads: Sequence[Serve], repetition: int) -> Iterator[dict[str, Any]]:
        if len(self.visits) == self._stops_after:
            raise KeyboardInterrupt
        shards, streams = config.cluster.shards, [load.streams[0] for load in loads]
        self.visits.append((shards, tuple(streams), repetition))
        for each in streams:
            if shards in self._failing:
                raise self._failing[shards]
            rate = 10.0 * shards * each + repetition
            yield {"tokens_per_s": rate, "executor": "emulated", "lost": [] if repetition else ["ndp/0"]}


def test_a_product_of_each_group_is_the_cells() -> None:
    cells = cells_of(_sweep(
        config={"policy": "on-demand", "budget": "0.5"},
        load={"requests": 3},
        cells=[
            {"cluster.shards": [1, 2], "budget": "0.25", "load.rate": [0.5, 4]},
            {"cluster.ndp_workers": [None, 2], "policy": "auto", "load.streams": 8},
        ],
    ))  # fmt: skip
    assert [
        (c.config.cluster.shards, c.config.policy, c.config.budget, c.load.rate, c.load.streams, c.load.requests)
        for c in cells
    ] == [
        (1, "on-demand", "0.25", (0.5,), (), 3),
        (1, "on-demand", "0.25", (4.0,), (), 3),
        (2, "on-demand", "0.25", (0.5,), (), 3),
        (2, "on-demand", "0.25", (4.0,), (), 3),
        (1, "auto", "0.5", (), (8,), 3),
        (1, "auto", "0.5", (), (8,), 3),
    ]
    assert [cell.config.asks_for_auto for cell in cells[-2:]] == [False, True]
    assert cells[-1].name == "cluster.ndp_workers 2, policy auto, load.streams 8"


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ({"cells": []}, "cells"),
        ({"cells": [{}], "grid": {}}, "unknown key 'grid'"),
        ({"cells": [{"cluster.shard": 1}]}, "cluster.shard"),
        ({"cells": [{"cluster.shards": "many"}]}, "shards"),
        ({"cells": [{"load.stream": 1}]}, "a load has no 'stream'"),
        ({"cells": [{"load.policy": "auto"}]}, "a load has no 'policy'"),
        ({"cells": [{"load.streams": 0}]}, "streams"),
        ({"cells": [{"load.streams": 1, "load.rate": 2}]}, "--streams and --rate"),
        ({"cells": [{"budget": ["0.5", "0.5"], "load.streams": 1}]}, "has the cell 'budget 0.5, load.streams 1' twice"),
        ({"cells": [{"load.streams": 1, "load.store": "there"}]}, "a load has no 'store'"),
        ({"cells": [{"budget": "0.5"}]}, "does not say when requests come"),
        ({"cells": [{"load.streams": 1, "budget": []}]}, "'budget' has no value"),
        ({"cells": [{"load.streams": 1}], "baseline": {"budget": "0.5"}}, "no cell is the baseline 'budget 0.5'"),
        ({"cells": [{"load.streams": 1, "load.prompts": "nowhere"}]}, "'nowhere' cannot be read"),
        ({"cells": [{"load.schedule": "nowhere"}]}, "'nowhere' cannot be read"),
        ({"cells": [{}], "repeats": 0}, "repeats"),
        ({"cells": [{}], "config": "nowhere.yaml"}, "nowhere.yaml"),
    ],
)
def test_what_is_malformed_is_refused_before_anything_runs(content: dict[str, Any], said: str, tmp_path: Path) -> None:
    (file := tmp_path / "sweep.yaml").write_text(yaml.safe_dump(content))
    with pytest.raises((ConfigError, RequestError), match=said):
        cells_of(read_sweep(file))


def test_a_deployment_is_visited_with_all_its_loads_and_repetitions_take_turns() -> None:
    sweep, cluster = _sweep(), Cluster()
    report = run_sweep(sweep, cells_of(sweep), cluster, Journal(None, {}))
    assert cluster.visits == [(1, (1, 8), 0), (2, (1, 8), 0), (1, (1, 8), 1), (2, (1, 8), 1)]
    assert [row["tokens_per_s"] for row in report.rows] == [10.5, 80.5, 20.5, 160.5]
    assert [row["ratio"] for row in report.rows] == [1, 1, (2 + 21 / 11) / 2, (2 + 161 / 81) / 2]
    assert report.rows[0]["visits"][0]["lost"] == ["ndp/0"]
    assert report.executor == "emulated"
    assert report.shown == ("cluster.shards", "load.streams", "tokens_per_s", "ratio")


def test_a_failed_cell_is_a_row_with_its_reason_and_is_left_out() -> None:
    sweep, cluster = _sweep(), Cluster({2: ConfigError("too few CPUs", "add some")})
    report = run_sweep(sweep, cells_of(sweep), cluster, Journal(None, {}))
    assert [visit[0] for visit in cluster.visits] == [1, 2, 1]
    assert [row["cluster.shards"] for row in report.rows] == [1, 1]
    assert [(row["cluster.shards"], row["load.streams"]) for row in report.refused] == [(2, 1), (2, 8)]
    assert all("too few CPUs" in json.dumps(row) for row in report.refused)


def test_a_baseline_that_failed_leaves_no_ratio() -> None:
    sweep = _sweep(repeats=1)
    report = run_sweep(sweep, cells_of(sweep), Cluster({1: RuntimeFailure("lost", "again")}), Journal(None, {}))
    assert [row.get("ratio") for row in report.rows] == [None, None]


def test_it_resumes_behind_the_last_finished_visit(tmp_path: Path) -> None:
    sweep, out = _sweep(), tmp_path / "sweep.json"
    whole = run_sweep(sweep, cells_of(sweep), Cluster(), Journal(None, {}))
    with pytest.raises(KeyboardInterrupt):
        run_sweep(sweep, cells_of(sweep), Cluster(stops_after=3), Journal(out, {"repeats": 2}))
    assert journal_file(out).exists()
    rest = Cluster()
    report = run_sweep(sweep, cells_of(sweep), rest, Journal(out, {"repeats": 2}))
    assert rest.visits == [(2, (1, 8), 1)]
    assert report.rows == whole.rows
    with pytest.raises(ConfigError, match="other repeats"):
        Journal(out, {"repeats": 3})


def test_a_journal_is_of_what_the_named_files_hold(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("words.txt").write_text("one\ntwo\n")
    sweep = _sweep(load={"prompts": "words.txt"})
    before = fingerprint(sweep, cells_of(sweep))
    Path("elsewhere.txt").write_text("one\n")
    assert fingerprint(sweep, cells_of(sweep)) == before
    Path("words.txt").write_text("one\nthree\n")
    after = fingerprint(sweep, cells_of(sweep))
    assert [name for name in before if before[name] != after[name]] == ["files"]


def test_a_folder_gets_object_and_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: Any) -> None:
    """Of a sweep that was ended midway, and began again."""
    (file := tmp_path / "my sweep.yaml").write_text(yaml.safe_dump(TWO))
    words = "bench", "sweep", file, "--out", tmp_path / "to be made"
    monkeypatch.setattr(sweep_module, "visited", Cluster(stops_after=1))
    assert command(*words)[0] == 130
    monkeypatch.setattr(sweep_module, "visited", Cluster({2: ConfigError("too few | CPUs", "add some")}))
    code, said, _ = command(*words)
    assert (code, said.count("refused: ")) == (2, 2)
    page = tmp_path / "to be made" / "my sweep.md"
    text = page.read_text()
    assert "| 1 | 8 | 80.5 | 1 |" in text
    assert "- refused: cluster.shards 2, load.streams 8: too few | CPUs; add some" in text
    assert sorted(found.name for found in page.parent.iterdir()) == [
        "my sweep.json", "my sweep.md", "my sweep.partial.json",
    ]  # fmt: skip
    page.write_text(text.replace("# my sweep\n", "# Ours\n\nwhat it means\n"))
    monkeypatch.setattr(sweep_module, "visited", Cluster())
    assert command(*words)[0] == 0
    assert not (page.parent / "my sweep.partial.json").exists()
    assert "what it means" in page.read_text()
    assert "refused: " not in page.read_text()


def test_a_failed_cell_is_tried_again_by_a_run_that_resumes(tmp_path: Path) -> None:
    sweep, out = _sweep(repeats=1), tmp_path / "sweep.json"
    run_sweep(sweep, cells_of(sweep), Cluster({1: RuntimeFailure("lost", "again")}), Journal(out, {}))
    rest = Cluster()
    report = run_sweep(sweep, cells_of(sweep), rest, Journal(out, {}))
    assert [visit[0] for visit in rest.visits] == [1]
    assert (len(report.rows), report.refused) == (4, [])


def test_the_baseline_agrees_in_every_other_value() -> None:
    sweep = _sweep(
        cells=[
            {"policy": "on-demand", "budget": ["0.25", "0.5"], "load.streams": [1, 8]},
            {"policy": "auto", "budget": "0.5", "cluster.ndp_workers": [1, 2], "load.streams": 8},
            {"policy": "auto", "budget": "0.1", "load.streams": 8},
        ],
        baseline={"policy": "on-demand"},
    )
    cells = cells_of(sweep)
    found = [baseline_of(cell, cells, sweep.baseline) for cell in cells]
    assert [None if base is None else cells.index(base) for base in found] == [0, 1, 2, 3, 3, 3, None]
    assert baseline_of(cells[0], cells, {}) is None


def _process(worker: str, node: str, cpu_s: float, pid: int = 1, **rest: Any) -> Sample:
    return Sample("d", worker, worker.partition("/")[0], "host", node, 0, pid, cpu_s=cpu_s, **rest)


def test_counters_are_what_rose_and_bytes_are_those_between_nodes() -> None:
    def sent(there: float, back: float) -> dict[str, float]:
        return {"bytes_sent": there, "bytes_received": back}

    before = [
        _process("lead", "a", 1.0, counters={"steps": 2, "bytes_loaded_demand": 10},
                 peers={"shard/1": sent(5, 7), "ndp/0": sent(1, 1)}),
        _process("shard/1", "b", 2.0, counters={"bytes_loaded_prefetch": 4}, peers={"store/0": sent(0, 100)}),
        _process("ndp/0", "a", 3.0),
    ]  # fmt: skip
    after = [
        _process("lead", "a", 1.5, counters={"steps": 6, "bytes_loaded_demand": 30, "shard_wait_s": 0.5},
                 peers={"shard/1": sent(6, 9), "ndp/0": sent(50, 50)}),
        _process("shard/1", "b", 0.25, pid=9, counters={"bytes_loaded_prefetch": 3}, peers={"store/0": sent(1, 40)}),
        _process("store/0", "c", 4.0),
        _process("ndp/0", "a", 3.5),
    ]  # fmt: skip
    assert counted(before, after) == {
        "lead.steps": 4, "lead.bytes_loaded_demand": 20, "lead.shard_wait_s": 0.5, "bytes_loaded": 23,
        "bytes_between": (1 + 2) + (1 + 40), "cpu_s.lead": 0.5, "cpu_s.shard": 0.25, "cpu_s.store": 4.0,
        "cpu_s.ndp": 0.5,
    }  # fmt: skip
