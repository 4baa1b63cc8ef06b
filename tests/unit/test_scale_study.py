"""The scale study on a slice: what more GPUs and dearer messages change."""

from __future__ import annotations

from pathlib import Path

import pytest

from tiermoe.benchmarks.cases import ScaleStudy
from tiermoe.benchmarks.scale_study import scale_study
from tiermoe.errors import ConfigError


def test_more_gpus_load_less_and_cost_the_lead_messages(tmp_path: Path) -> None:
    options = ScaleStudy(
        shape="deepseek-v2-lite", policy=("on-demand",), gpus=(1, 4), ndp=(2,), message_us=(5.0, 500.0), batch=(4, 1),
        gpu_bytes=3_000_000_000, prompt_tokens=4, decode_tokens=3,
    )  # fmt: skip
    report = scale_study(options, None)
    row = {(r["part"], r["gpus"], r["batch"], r["message_us"]): r for r in report.rows}
    one, four = row["gpus", 1, 4, 5.0], row["gpus", 4, 4, 5.0]
    assert one["messages"] == 0
    assert 0 < four["messages"] <= 6
    assert four["hit_rate"] > one["hit_rate"]
    assert four["link"] < one["link"]
    dear = row["messages", 4, 4, 500.0]
    assert dear["messages"] == four["messages"]
    assert dear["hit_rate"] == pytest.approx(four["hit_rate"])
    more_ms = 26 * four["messages"] * (500 - 5) * 1e-3  # 26 layers
    assert 0.5 * more_ms < dear["tpot_ms"] - four["tpot_ms"] <= 1.001 * more_ms  # copies hide a part
    assert row["batch", 4, 1, 5.0]["messages"] < four["messages"]
    [near] = [r for r in report.rows if r["part"] == "ndp"]
    assert near["ndp_busy"] > 0
    assert near["policy"] == "context-ndp-3bit"


def test_an_unknown_shape_is_refused() -> None:
    with pytest.raises(ConfigError, match="deepseek-v9"):
        scale_study(ScaleStudy(shape="deepseek-v9"), None)
