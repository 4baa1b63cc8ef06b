"""`tiermoe bench matcher` runs and prints what it promises; its figures are not judged here."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from tiermoe.cluster.jobs.bench import command, matcher

pytestmark = pytest.mark.slow


def test_prints_one_json_object(monkeypatch: pytest.MonkeyPatch) -> None:
    shapes = matcher.model_shapes()
    assert {name: (shape.layers, shape.experts, top_k) for name, (shape, top_k) in shapes.items()} == {
        "mixtral-8x7b": (32, 8, 2),
        "qwen1.5-moe": (24, 60, 4),
        "deepseek-v2-lite": (26, 64, 6),
        "default": (8, 32, 4),
    }
    models = ("mixtral-8x7b",)
    monkeypatch.setattr(matcher, "model_shapes", lambda: {name: shapes[name] for name in models})
    monkeypatch.setattr(matcher, "CAPACITIES", (1000, 2000))
    monkeypatch.setattr(matcher, "LARGEST", 2000)
    monkeypatch.setattr(matcher, "ITERATIONS", 1)
    done = CliRunner().invoke(command.bench_app, ["matcher", "--repeats", "1", "--json"])
    assert done.exit_code == 0, done.output
    report = json.loads(done.stdout)
    assert (report["name"], report["executor"]) == ("matcher", "real")
    stores = {f"{model} {capacity}" for model in models for capacity in (1000, 2000)}
    leads = {f"publish {model} {transport}" for model in models for transport in ("shm", "grpc")}
    assert {row["case"] for row in report["rows"]} == stores | leads
    assert len(report["bars"]) == 3 * len(models) + 1
    assert all(row["median"] > 0 for row in report["rows"] if row["measure"] != "resident_mb")
    memory = {row["case"]: row["median"] for row in report["rows"] if row["measure"] == "store_mb"}
    assert memory["mixtral-8x7b 1000"] == 1000 * 4 * (512 + 32 * 8 + 2 * 32) / 1e6
