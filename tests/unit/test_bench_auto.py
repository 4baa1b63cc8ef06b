"""`bench auto`: the rules' decisions on tiny routings, the journal, and a quick run."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from tiermoe.benchmarks import auto_cells
from tiermoe.benchmarks.auto import auto
from tiermoe.benchmarks.auto_cells import (
    PUBLISHED,
    RECALL,
    RECORDED,
    RULES,
    STARTED,
    Cell,
    Drawn,
    chosen,
    grid,
    replayed,
    together,
)
from tiermoe.benchmarks.cases import Auto
from tiermoe.cluster.simulate.synthetic import FAMILIES
from tiermoe.errors import ConfigError

CELL = Cell("qwen3-30b-a3b", "sticky", 0.25, 25.0, 100.0, 1)


def _drawn(requests: list[list[list[int]]], experts: int = 4, popular: tuple[int, ...] = (0, 1)) -> Drawn:
    """Requests of one layer and top-1: each the experts of its prompt, then of its decode."""
    prompts = np.stack([[np.bincount(prompt, minlength=experts)] for prompt, _ in requests]).astype(np.int64)
    ids = np.array([decode for _, decode in requests], np.int32)[:, :, None, None]
    ranks = np.where(np.arange(experts) == ids, 0, 9).astype(np.uint8)
    counts = np.zeros((1, experts), np.int64)
    counts[0, list(popular)] = 50
    return Drawn(1, experts, 1, ids, ranks, {RECALL: np.repeat(ids, 2, -1)}, prompts, counts, 100)


def _run(drawn: Drawn, rule: str, cell: Cell = CELL) -> dict[str, float]:
    return replayed(drawn, together(drawn, cell.batch), cell, rule, 0.0)


HALF = Cell("qwen3-30b-a3b", "sticky", 0.5, 25.0, 100.0, 1)  # of 4 experts: 2 slots
TWICE = [([2, 2, 2], [2, 2, 3, 3]), ([2, 2, 2], [2, 2, 3, 3])]  # the second is counted


@pytest.mark.parametrize(
    ("rule", "hits", "loads", "near"),
    [
        ("on-demand", 1.0, 0.0, 0.0),  # 2 and 3 came in the first request
        ("ktransformers", 0.0, 0.0, 1.0),  # 0 and 1 stay
        ("context+cpu", 0.5, 0.0, 0.5),  # 2 by the prompt, 0 by popularity; 3 never
    ],
)
def test_rules_keep_what_they_say(rule: str, hits: float, loads: float, near: float) -> None:
    found = _run(_drawn(TWICE), rule, HALF)
    assert (found["hits"], found["loads"], found["near"]) == (hits, loads, near)


def test_cells_are_drawn_beforehand_and_a_larger_share_adds_to_them() -> None:
    assert len(grid()) == len(set(grid())) == len(chosen(1.0)) == 4320
    assert chosen(0.25) == chosen(0.25)
    assert set(chosen(0.25)) < set(chosen(0.5))
    assert {(c.shape, c.family, c.batch) for c in chosen(0.001)} == {(c.shape, c.family, c.batch) for c in grid()}


def test_a_quick_run_reports_and_resumes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = Auto(share=0.01, jobs=1, quick=True, journal=tmp_path / "journal")
    first = auto(options, None).as_dict()
    assert [row["family"] for row in first["rows"]] == [*FAMILIES, RECORDED]  # a cell of each
    assert all(set(row["over_best"]) == {*RULES, *STARTED} for row in first["rows"])
    assert {row["best"] for row in first["rows"]} <= set(PUBLISHED)
    assert len(first["bars"]) == 10
    monkeypatch.setattr(auto_cells, "draw", lambda *_: pytest.fail("it is finished"))
    again = auto(options, None).as_dict()
    assert (again["rows"], again["bars"]) == (first["rows"], first["bars"])
    with pytest.raises(ConfigError, match="with other seeds"):
        auto(options.model_copy(update={"seeds": 4}), None)


def test_what_is_no_journal_is_refused(tmp_path: Path) -> None:
    (tmp_path / "journal.partial.json").write_text(json.dumps([1]), encoding="utf-8")
    with pytest.raises(ConfigError, match="holds no part of an experiment"):
        auto(Auto(quick=True, journal=tmp_path / "journal"), None)
