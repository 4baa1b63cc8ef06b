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
    draw,
    grid,
    recorded,
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


def test_a_token_takes_what_its_machine_says() -> None:
    """on-demand that always hits: the dense part and one expert; ktransformers: message and one expert of the CPU."""
    costs = HALF.costs()
    assert _run(_drawn(TWICE), "on-demand", HALF)["token_s"] == pytest.approx(costs.dense_s + costs.gpu_s)
    near_s = costs.dense_s + costs.message_s + costs.near_s
    assert _run(_drawn(TWICE), "ktransformers", HALF)["token_s"] == pytest.approx(near_s)


def test_llama_cpp_fills_behind_the_cpu_and_that_slows_it() -> None:
    """0, 1, 0, 1 .. of one slot: each miss runs on the CPU while its copy, and the one before, hold the link."""
    drawn = _drawn([([3], [0, 1] * 8), ([3], [0, 1] * 8)], popular=(3,))
    found = _run(drawn, "llama-cpp-cache")
    costs = CELL.costs()
    assert found["fills"] > 0
    assert found["token_s"] > costs.dense_s + costs.message_s + costs.near_s * (found["near"] - 0.01)


def test_prompts_are_timed_and_leave_only_what_they_loaded() -> None:
    """on-demand loads each expert of the prompt; after it, context+cpu holds those it streamed."""
    drawn = _drawn([([0, 1], [0, 1])] * 2, popular=(2, 3))
    costs = HALF.costs()
    assert _run(drawn, "context+cpu", HALF)["hits"] == 1.0
    first = together(_drawn([([0, 1], [0, 1])] * 4, popular=(2, 3)), 1)
    found = replayed(drawn, first, HALF, "context+cpu", 0.0)
    assert found["prompt_s"] == pytest.approx(costs.dense_s + 2 * costs.gpu_s)  # they stayed from the request before


def test_the_planners_own_time_is_charged_to_it_alone() -> None:
    drawn = draw("mixtral-8x7b", "flat", 0, 2, 2, 8, (RECALL,))
    cell, steps = Cell("mixtral-8x7b", "flat", 0.5, 25.0, 100.0, 1), together(drawn, 1)
    without, charged = (replayed(drawn, steps, cell, "auto", own)["token_s"] for own in (0.0, 1e-5))
    assert charged - without >= 1.9e-5
    assert len({replayed(drawn, steps, cell, "freetoken", own)["token_s"] for own in (0.0, 1e-5)}) == 1


def test_the_recorded_routing_is_the_default_models() -> None:
    """Its next router is right for 0.7 to 0.9 of the experts, at the layer before and not at another."""
    drawn = recorded()
    assert drawn.ids.shape[2:] == (16, 4)
    top = np.sort(np.argsort(drawn.ranks, axis=-1)[..., :4], axis=-1)
    assert (top == np.sort(drawn.ids, axis=-1)).mean() > 0.95  # ties apart
    right = (drawn.predicted[RECALL][..., :, None] == drawn.ids[..., None, :]).any(-1)[:, :, 1:].mean()
    assert 0.7 < right < 0.95


def test_cells_are_drawn_beforehand_and_a_larger_share_adds_to_them() -> None:
    assert len(grid()) == len(set(grid())) == len(chosen(1.0)) == 1296
    assert chosen(0.25) == chosen(0.25)
    assert set(chosen(0.25)) < set(chosen(0.5))
    assert {(c.shape, c.family, c.batch) for c in chosen(0.001)} == {(c.shape, c.family, c.batch) for c in grid()}


def test_a_quick_run_reports_and_resumes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = Auto(share=0.01, jobs=1, quick=True, journal=tmp_path / "journal")
    first = auto(options, None).as_dict()
    assert [row["family"] for row in first["rows"]] == [*FAMILIES, RECORDED]  # a cell of each
    assert all(set(row["over_best"]) == {*RULES, *STARTED} for row in first["rows"])
    assert {row["best"] for row in first["rows"]} <= set(PUBLISHED)
    assert len(first["bars"]) == 7
    monkeypatch.setattr(auto_cells, "draw", lambda *_: pytest.fail("it is finished"))
    again = auto(options, None).as_dict()
    assert (again["rows"], again["bars"]) == (first["rows"], first["bars"])
    with pytest.raises(ConfigError, match="with other seeds"):
        auto(options.model_copy(update={"seeds": 4}), None)


def test_what_is_no_journal_is_refused(tmp_path: Path) -> None:
    (tmp_path / "journal.partial.json").write_text(json.dumps([1]), encoding="utf-8")
    with pytest.raises(ConfigError, match="holds no part of an experiment"):
        auto(Auto(quick=True, journal=tmp_path / "journal"), None)
