"""The papers' experiments on synthetic routing: a slice of each file, and the comparison with published figures."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import pytest

from tiermoe.benchmarks.papers import (
    Comparison,
    changed,
    compared,
    judged_again,
    module_of,
    paper_names,
    run_papers,
    verdict,
)
from tiermoe.cluster.config import configs_dir, load_policy
from tiermoe.cluster.jobs.bench.metrics import fill_tables
from tiermoe.cluster.jobs.bench.page import small, table_of

_RESULTS = configs_dir().parent / "docs" / "results"

_FAST = "buddymoe"  # the others take eight to eleven seconds each


@pytest.mark.parametrize(
    "name", [name if name == _FAST else pytest.param(name, marks=pytest.mark.slow) for name in paper_names()]
)
def test_a_slice_of_each_paper_fills_its_page(name: str, tmp_path: Path) -> None:
    report = run_papers([name], True, tmp_path, 1)
    experiment = module_of(f"paper-{name}").experiment()
    assert report.rows
    assert all(row["published"] is not None for row in report.rows)
    page = (tmp_path / f"{experiment.name}.md").read_text(encoding="utf-8")
    for section in experiment.sections:
        assert f"| {section.name} |" in page  # of the table of traces
    assert not list(tmp_path.glob("*.partial.json"))


def _rows() -> list[dict[str, object]]:
    return [
        {"section": "a", "cell": cell, "budget": cell, "policy": policy, "tpot_s": value}
        for cell, policy, value in (("1", "own", 2.0), ("1", "old", 4.0), ("2", "own", 3.0), ("2", "old", 4.0))
    ]


def test_a_comparison_pairs_the_cells_of_two_variants() -> None:
    stated = Comparison("t", "", "a", "tpot_s", {"old": 0.5, "none": 2.0}, of="own")
    (line, absent) = compared(stated, _rows())
    assert (line["ours"], line["cells"], line["direction"], line["within"]) == (0.625, 2, True, True)
    assert math.isclose(line["ratio"], 1.25)
    assert (absent["ours"], absent["direction"], absent["ratio"]) == (None, None, None)


@pytest.mark.parametrize(
    ("published", "ours", "said"),
    [
        (0.5, (0.8, 0.7, 0.9), "holds"),  # a third of the effect
        (0.5, (0.88, 0.8, 0.95), "does not hold"),  # less than a quarter
        (0.5, (0.8, 0.5, 1.1), "does not hold"),  # one cell is opposite; a mean alone once counted as right
        (0.5, (1.3, 1.2, 1.4), "does not hold"),
        (0.5, (0.985, 0.9, 1.1), "tie"),
        (0.5, (0.96, 0.9, 1.1), "tie"),
        (2.0, (1.3, 1.2, 1.4), "holds"),
        ("higher", (1.03, 1.025, 1.04), "holds"),
        ("lower", (0.96, 0.95, 0.97), "holds"),
        ("lower", (1.04, 1.03, 1.05), "does not hold"),
        ("higher", (0.99, 0.98, 0.995), "tie"),
    ],
)
def test_a_verdict_needs_every_cell_and_a_quarter_of_the_effect(
    published: float | str, ours: tuple[float, float, float], said: str
) -> None:
    assert verdict(published, *ours) == said


_PAGES = ("fmoe", "moepic", "activeevict", *(f"paper-{name}" for name in paper_names()))


@pytest.mark.parametrize("name", _PAGES)
def test_the_claims_of_a_page_are_those_of_its_data_and_counted_in_the_readme(name: str) -> None:
    """`tiermoe bench redraw docs/results/NAME.json` writes them again; the README's counts are by hand."""
    module = module_of(name)
    record = json.loads((_RESULTS / f"{name}.json").read_text(encoding="utf-8"))
    assert small(judged_again(module, record)) == record
    page = (_RESULTS / f"{name}.md").read_text(encoding="utf-8")
    assert fill_tables(page, lambda block: table_of(module.experiment(), block, record)) == page
    claims = [line["verdict"] for line in record["comparisons"] if line["headline"]]
    counts = [len(claims), *(claims.count(said) for said in ("holds", "tie", "does not hold"))]
    readme = (_RESULTS / "README.md").read_text(encoding="utf-8")
    row = re.search(rf"^\| \[{name}\].*?\| (.*) \|$", readme, re.MULTILINE)
    assert row is not None
    assert row[1] == " | ".join(map(str, counts))


def test_a_sweep_changes_only_what_a_preset_has() -> None:
    point = {"split.theta": 0.75, "batch": 4, "machine.matcher_s": 1e-3}
    assert changed(load_policy("moepic"), point).split.theta == 0.75
    assert changed(load_policy("on-demand"), {"prefetch.unknown": 1, "batch": 4}) == load_policy("on-demand")
