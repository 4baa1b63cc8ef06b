"""The papers' experiments on synthetic routing: a slice of each file, and the comparison with published figures."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from tiermoe.benchmarks.papers import changed, compared, load_paper, paper_names, run_papers
from tiermoe.cluster.config import load_policy
from tiermoe.cluster.jobs.bench.synthetic_settings import Comparison
from tiermoe.errors import ConfigError

_FAST = "buddymoe"  # the others take eight to eleven seconds each


@pytest.mark.parametrize(
    "name", [name if name == _FAST else pytest.param(name, marks=pytest.mark.slow) for name in paper_names()]
)
def test_a_slice_of_each_paper_fills_its_page(name: str, tmp_path: Path) -> None:
    report = run_papers([name], True, tmp_path, 1)
    experiment = load_paper(name, quick=True)
    assert report.rows
    assert all(row["published"] is not None for row in report.rows)
    compared_sections = {comparison.section for comparison in experiment.comparisons}
    assert compared_sections <= {section.name for section in experiment.sections}
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
    stated = Comparison(title="t", section="a", measure="tpot_s", of="own", published={"old": 0.5, "none": 2.0})
    (line, absent) = compared(stated, _rows())
    assert (line["ours"], line["cells"], line["direction"], line["within"]) == (0.625, 2, True, True)
    assert math.isclose(line["ratio"], 1.25)
    assert (absent["ours"], absent["direction"], absent["ratio"]) == (None, None, None)


def test_a_comparison_of_single_values_goes_by_any_key_of_the_rows() -> None:
    stated = Comparison(
        title="t", section="a", measure="tpot_s", of="own", by="budget", published={"1": 2.0, "2": 6.0}
    )  # fmt: skip
    lines = list(compared(stated, _rows()))
    assert [(line["budget"], line["ours"], line["within"]) for line in lines] == [("1", 2.0, True), ("2", 3.0, False)]
    assert all(line["direction"] is None for line in lines)


def test_a_direction_is_compared_where_the_text_states_no_figure() -> None:
    stated = Comparison(title="t", section="a", measure="tpot_s", of="own", published={"old": "higher"})
    (line,) = compared(stated, _rows())
    assert (line["direction"], line["ratio"], line["within"]) == (False, None, None)


def test_a_sweep_changes_only_what_a_preset_has() -> None:
    point = {"split.theta": 0.75, "batch": 4, "machine.matcher_s": 1e-3}
    assert changed(load_policy("moepic"), point).split.theta == 0.75
    assert changed(load_policy("on-demand"), {"prefetch.unknown": 1, "batch": 4}) == load_policy("on-demand")


def test_an_unknown_paper_is_refused() -> None:
    with pytest.raises(ConfigError, match="no paper 'none'"):
        run_papers(["none"], True, None, 1)
