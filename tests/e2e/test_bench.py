"""The benchmarks run on the default model and print what they promise; their figures are not judged here."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tiermoe.cluster.config import default_model_dir

pytestmark = pytest.mark.slow

_MAIN = "from tiermoe.cluster.cli import main; main()"


@pytest.mark.parametrize(("name", "bars"), [("prefetch", 1), ("overhead", 2)])
def test_prints_one_json_object(name: str, bars: int) -> None:
    done = subprocess.run(
        [sys.executable, "-c", _MAIN, "bench", name, "--repeats", "1", "--json"],
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


def test_a_model_without_heldout_text_is_refused_at_once(tmp_path: Path) -> None:
    """Guards against workers that were started before the prompts were read, and kept the process alive."""
    shutil.copy(default_model_dir() / "tokenizer.json", tmp_path)
    done = subprocess.run(
        [sys.executable, "-c", _MAIN, "bench", "prefetch", "--model", str(tmp_path)],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 2
    assert "held-out passages" in done.stderr
