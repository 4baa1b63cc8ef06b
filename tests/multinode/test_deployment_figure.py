"""`bench deployment` in small: sweeps on two and on four namespaces, a killed worker, and the virtual clock beside."""

from __future__ import annotations

from pathlib import Path

import pytest

from tiermoe.benchmarks.cases import Deployment
from tiermoe.benchmarks.machines import why_not_isolated
from tiermoe.cluster.config import default_model_dir

NOT_ISOLATED = why_not_isolated()

pytestmark = [
    pytest.mark.nodes,
    pytest.mark.skipif(not default_model_dir().is_dir(), reason="the default model is not there"),
    pytest.mark.skipif(NOT_ISOLATED is not None, reason=f"namespaces are needed: {NOT_ISOLATED}"),
    pytest.mark.timeout(1800),
]


def test_two_and_four_nodes(tmp_path: Path) -> None:
    from tiermoe.benchmarks.deployment import deployment

    options = Deployment(repeats=1, layers=0, quick=True, work=tmp_path)
    report = deployment(options, None)
    assert report.refused == []
    points = [(row["nodes"], row["shards"], row["ndp"]) for row in report.rows]
    assert points == [(2, 2, 1), (4, 1, 0), (4, 4, 0), (4, 4, 1)]
    for row in report.rows:
        assert row["tokens_per_s"] > 0
        assert row["simulated_ms"] > 0
        assert row["loaded_mb"] > 0
        assert (row["network_mb"] > 0) == (row["shards"] > 1 or row["ndp"] > 0)
        assert (row["gpus_ms"] > 0) == (row["shards"] > 1)
    (killed,) = report.figures["killed"]["rows"]
    assert killed["failed"] == 0
    assert killed["requests"] == 64
    assert any(entry["worker"].startswith("ndp/") for entry in killed["visits"][0]["lost"]), killed["visits"]
    # nothing is measured twice: finished sweeps are read again
    again = deployment(options, None)
    assert [row["tokens_per_s"] for row in again.rows] == [row["tokens_per_s"] for row in report.rows]
