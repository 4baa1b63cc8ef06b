"""The benchmarks run on the default model and print what they promise; their figures are not judged here."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest


@pytest.mark.parametrize(("name", "bars"), [("prefetch", 1), ("overhead", 2)])
def test_prints_one_json_object(name: str, bars: int) -> None:
    code = "from tiermoe.cluster.cli import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", code, "bench", name, "--repeats", "1", "--json"],
        capture_output=True, text=True, timeout=280, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["name"] == name
    assert report["executor"] == "emulated"
    assert len(report["bars"]) == bars
    assert all(row["median"] >= 0 for row in report["rows"])
    measured = {row["measure"] for row in report["rows"]}
    assert measured >= ({"blocked_io_s", "hit_rate"} if name == "prefetch" else {"tpot_s", "host_us_per_layer"})
