"""The measures of drafts: the simulated table, and which texts are measured."""

from __future__ import annotations

import pytest

from tiermoe.benchmarks import draft_table, drafts
from tiermoe.benchmarks.cases import DraftKind, Drafts, DraftTable
from tiermoe.cluster.config import default_model_dir


def test_the_table_says_what_drafts_give_by_acceptance(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where all experts are resident, likely drafts pay; unlikely ones are left alone."""
    monkeypatch.setattr(draft_table, "_WARM_UP", 40)
    case = DraftTable(
        shape="mixtral-8x7b", bits=16, budgets=(1.0,), link_gbps=(25.0,), accepted=(0.1, 0.95), max_tokens=60
    )
    report = draft_table.draft_table(case, None)
    (row,) = report.rows
    assert report.executor == "simulated"
    assert row["ratio_0.95"] > 1.2 > row["ratio_0.1"] >= 0.98
    assert row["drafts_0.95"] > 2 > row["drafts_0.1"]
    assert report.rows == draft_table.draft_table(case, None).rows


@pytest.mark.parametrize(
    ("kind", "answers", "temperatures"),
    [
        (DraftKind.NGRAM, {"code edits": True, "prose": False}, {"code edits": 0.0, "prose": 1.0}),
        (DraftKind.MTP, {"code": False, "prose": False}, {"code": 0.6, "prose": 1.0}),
    ],
)
def test_texts_by_kind(kind: DraftKind, answers: dict[str, bool], temperatures: dict[str, float]) -> None:
    found = drafts.texts(default_model_dir(), Drafts(kind=kind, repeats=1, prompts=1))
    assert {name: texts[0].answer is not None for name, texts in found.items()} == answers
    assert {name: texts[0].temperature for name, texts in found.items()} == temperatures
    assert set(drafts.BARS[kind]) == set(found)


def test_trials_that_cannot_pay_cost_less_than_2_percent(monkeypatch: pytest.MonkeyPatch) -> None:
    """A slow link and few slots, where a wrong draft costs several steps."""
    monkeypatch.setattr(draft_table, "_WARM_UP", 100)
    case = DraftTable(shape="mixtral-8x7b", bits=4.5, budgets=(0.3,), link_gbps=(8.0,), accepted=(0.3, 0.6, 0.9))
    (row,) = draft_table.draft_table(case, None).rows
    assert all(row[f"ratio_{chance}"] >= 0.98 for chance in case.accepted)
