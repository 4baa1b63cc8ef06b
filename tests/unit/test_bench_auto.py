"""`bench auto`: cells, the machine of a cell, the journal, and a quick run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tiermoe.benchmarks import auto_cells
from tiermoe.benchmarks.auto import auto
from tiermoe.benchmarks.auto_cells import PUBLISHED, RECORDED, RULES, SHAPES, Cell, chosen, draw, grid, replayed
from tiermoe.benchmarks.cases import Auto
from tiermoe.cluster.simulate.peers import start_costs
from tiermoe.cluster.simulate.shapes import shape_named
from tiermoe.cluster.simulate.synthetic import FAMILIES
from tiermoe.errors import ConfigError

CELL = Cell("qwen3-30b-a3b", "sticky", 0.5, 25.0, 100.0, 1)


def test_cells_are_drawn_beforehand_and_a_larger_share_adds_to_them() -> None:
    assert len(grid()) == len(set(grid())) == len(chosen(1.0)) == 4320
    assert chosen(0.25) == chosen(0.25)
    assert set(chosen(0.25)) < set(chosen(0.5))
    assert {(c.shape, c.family, c.batch) for c in chosen(0.001)} == {(c.shape, c.family, c.batch) for c in grid()}


@pytest.mark.parametrize("shape", SHAPES)
def test_a_cells_machine_copies_and_computes_the_published_bytes(shape: str) -> None:
    """Experts of 4 and 8 bits, too: the simulator's have 16, on a machine that is as much faster."""
    cell, of = Cell(shape, "flat", 0.25, 25.0, 100.0, 1), shape_named(shape)
    header = auto_cells.header_of(shape, 2, of.experts, of.top_k, 1)
    costs = start_costs(header, cell.machine(), of.intermediate)
    assert costs.copy_s == pytest.approx(10e-6 + of.expert_bytes / 25e9, rel=1e-6)
    assert costs.near_s == pytest.approx(of.expert_bytes / 85e9, rel=1e-6)
    assert costs.near_busy_s == pytest.approx(of.expert_bytes / 60e9, rel=1e-6)
    assert costs.gpu_s == pytest.approx(5e-6 + of.expert_bytes / 1.5e12, rel=1e-6)
    told = start_costs(header, cell.machine(link=1.4, near=0.7, contention=False), of.intermediate)
    assert told.copy_s == pytest.approx(1.4 * costs.copy_s)
    assert told.near_s == told.near_busy_s == pytest.approx(0.7 * costs.near_s)


def test_rules_do_what_their_presets_say() -> None:
    drawn = draw("mixtral-8x7b", "hot", 1, 2, 4, 8)
    found = {rule: replayed(drawn, CELL, rule) for rule in RULES}
    assert all(one["hits"] + one["loads"] + one["near"] == pytest.approx(1.0) for one in found.values())
    assert [rule for rule in RULES if not found[rule]["near"]] == ["on-demand", "next-gate"]
    assert found["ktransformers"]["loads"] == found["llama-cpp-cache"]["loads"] == 0.0
    assert all(one["request_s"] == pytest.approx(one["prompt_s"] + 8 * one["token_s"]) for one in found.values())
    # wrong costs that nobody corrects change what is done; what it is charged for is still this machine
    wrong = replayed(drawn, CELL, "auto", belief=(0.1, 10.0), without="CORRECTION")
    assert wrong["near"] < found["auto"]["near"]
    assert wrong["token_s"] > found["auto"]["token_s"]


def test_a_quick_run_reports_and_resumes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = Auto(share=0.01, jobs=1, quick=True, journal=tmp_path / "journal")
    first = auto(options, None).as_dict()
    assert [row["family"] for row in first["rows"]] == [*FAMILIES, RECORDED]  # a cell of each
    assert all(set(row["over_best"]) == set(RULES) for row in first["rows"])
    assert {row["best"] for row in first["rows"]} <= set(PUBLISHED)
    assert [len(one["variants"]) for one in first["variants"]] == [len(auto_cells.VARIANTS)] * 2
    assert len(first["bars"]) == 4
    monkeypatch.setattr(auto_cells, "draw", lambda *_: pytest.fail("it is finished"))
    again = auto(options, None).as_dict()
    assert (again["rows"], again["bars"]) == (first["rows"], first["bars"])
    with pytest.raises(ConfigError, match="with other seeds"):
        auto(options.model_copy(update={"seeds": 4}), None)


def test_what_is_no_journal_is_refused(tmp_path: Path) -> None:
    (tmp_path / "journal.partial.json").write_text(json.dumps([1]), encoding="utf-8")
    with pytest.raises(ConfigError, match="holds no part of an experiment"):
        auto(Auto(quick=True, journal=tmp_path / "journal"), None)
