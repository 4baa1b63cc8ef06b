"""`bench exact`: what two kernels' rounding does to log-probabilities, and its limits."""

from __future__ import annotations

import pytest
import torch

from tiermoe.benchmarks.cases import Exact
from tiermoe.benchmarks.exact import differences, exact


def test_differences_of_log_probabilities() -> None:
    reference = torch.tensor([[0.5, 0.3, 0.2], [0.4, 0.35, 0.25]]).log()
    found = torch.tensor([[0.5, 0.2, 0.3], [0.35, 0.4, 0.25]]).log()
    measures = differences(found, reference)
    assert measures["same"] == 0.5
    assert measures["gap"] == pytest.approx(float(torch.tensor(0.4 / 0.35).log()))
    assert measures["most"] == pytest.approx(float(torch.tensor(1.5).log()))
    assert measures["kl"] > 0


@pytest.mark.slow
def test_experts_near_data_are_exact_within_the_stated_bound() -> None:
    """Of docs/auto.md, on held-out text of the default model: every expert near data, in float32 and in bfloat16."""
    report = exact(Exact(policy=("monde",), passages=1, tokens=12), None)
    assert [(row["policy"], row["dtype"]) for row in report.rows] == [
        ("monde", "float32"), ("all-resident", "bfloat16"), ("monde", "bfloat16"),
    ]  # fmt: skip
    assert [bar.name for bar in report.bars if not bar.ok] == []
    single, _, half = report.rows
    assert (single["near"], half["near"]) == (1.0, 1.0)
    assert single["same"] == 1.0
    assert 0 < single["most"] < half["most"]
