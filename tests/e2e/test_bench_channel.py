"""`tiermoe bench channel` runs and prints what it promises; its figures are not judged here."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

pytestmark = pytest.mark.slow

_MAIN = "from tiermoe.cluster.cli import main; main()"


@pytest.mark.skipif(sys.platform != "linux", reason="shared memory is Linux only")
def test_prints_one_json_object() -> None:
    done = subprocess.run(
        [sys.executable, "-c", _MAIN, "bench", "channel", "--repeats", "1", "--json"],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["name"] == "channel"
    assert report["executor"] == "real"
    assert len(report["bars"]) == 3
    ways = {f"{way} {size}" for way in ("shm", "grpc", "bare grpc", "ray") for size in ("8 KiB", "1 MiB")}
    assert {row["case"] for row in report["rows"]} == ways
    assert {row["measure"] for row in report["rows"]} == {"p50_us", "p99_us"}
    assert all(row["median"] > 0 for row in report["rows"])
