"""The micro-benchmarks run and print what they promise; their figures are not judged here."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tiermoe.cluster.config import default_model_dir
from tiermoe.cluster.jobs.bench import command, micro_channels

pytestmark = pytest.mark.slow

_MAIN = "from tiermoe.cluster.cli import main; main()"


def _run(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", _MAIN, "bench", *words], capture_output=True, text=True, timeout=280, check=False
    )


@pytest.mark.parametrize(
    ("name", "executor", "bars", "measures"),
    [
        ("prefetch", "emulated", 1, {"blocked_io_s", "hit_rate"}),
        ("overhead", "emulated", 2, {"tpot_s", "host_us_per_layer"}),
        pytest.param(
            "channel", "real", 3, {"p50_us", "p99_us"},
            marks=pytest.mark.skipif(sys.platform != "linux", reason="shared memory is Linux only"),
        ),
    ],
)  # fmt: skip
def test_prints_one_json_object(name: str, executor: str, bars: int, measures: set[str]) -> None:
    done = _run(name, "--repeats", "1", "--json")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert (report["name"], report["executor"], len(report["bars"])) == (name, executor, bars)
    assert all(row["median"] >= 0 for row in report["rows"])
    measured = {row["measure"] for row in report["rows"]}
    assert measured >= measures
    if name == "channel":
        ways = {f"{way} {size}" for way in ("shm", "grpc", "bare grpc", "ray") for size in ("8 KiB", "1 MiB")}
        assert {row["case"] for row in report["rows"]} == ways
        assert measured == measures
        assert all(row["median"] > 0 for row in report["rows"])


def test_a_model_without_heldout_text_is_refused_at_once(tmp_path: Path) -> None:
    """Guards against workers that were started before the prompts were read, and kept the process alive."""
    shutil.copy(default_model_dir() / "tokenizer.json", tmp_path)
    done = _run("prefetch", "--model", str(tmp_path))
    assert done.returncode == 2
    assert "held-out passages" in done.stderr


def test_matcher_prints_one_json_object(monkeypatch: pytest.MonkeyPatch) -> None:
    shapes = micro_channels.model_shapes()
    assert {name: (shape.layers, shape.experts, top_k) for name, (shape, top_k) in shapes.items()} == {
        "mixtral-8x7b": (32, 8, 2),
        "qwen1.5-moe": (24, 60, 4),
        "deepseek-v2-lite": (26, 64, 6),
        "default": (8, 32, 4),
    }
    model = "mixtral-8x7b"
    monkeypatch.setattr(micro_channels, "model_shapes", lambda: {model: shapes[model]})
    monkeypatch.setattr(micro_channels, "CAPACITIES", (1000, 2000))
    monkeypatch.setattr(micro_channels, "LARGEST", 2000)
    monkeypatch.setattr(micro_channels, "ITERATIONS", 1)
    done = CliRunner().invoke(command.bench_app, ["matcher", "--repeats", "1", "--json"])
    assert done.exit_code == 0, done.output
    report = json.loads(done.stdout)
    assert (report["name"], report["executor"]) == ("matcher", "real")
    stores = {f"{model} {capacity}" for capacity in (1000, 2000)}
    assert {row["case"] for row in report["rows"]} == stores | {f"publish {model} {way}" for way in ("shm", "grpc")}
    assert len(report["bars"]) == 3 + 1
    assert all(row["median"] > 0 for row in report["rows"] if row["measure"] != "resident_mb")
    memory = {row["case"]: row["median"] for row in report["rows"] if row["measure"] == "store_mb"}
    assert memory[f"{model} 1000"] == 1000 * 4 * (512 + 32 * 8 + 2 * 32) / 1e6
