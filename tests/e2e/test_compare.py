"""`tiermoe bench compare` on the default model: two policies, one budget, one repetition."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

_MAIN = "from tiermoe.cluster.cli import main; main()"


def test_two_policies_side_by_side(tmp_path: Path) -> None:
    prompts, out = tmp_path / "prompts.txt", tmp_path / "out.json"
    prompts.write_text("The quick brown fox\ndef main(arguments):\n")
    done = subprocess.run(
        [
            sys.executable, "-c", _MAIN, "bench", "compare", "--policies", "on-demand,next-gate", "--budgets", "0.25",
            "--links", "2", "--prompts", str(prompts), "--repeat", "1", "--max-tokens", "4", "--json", str(out),
        ],
        capture_output=True, text=True, timeout=280, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    report = json.loads(out.read_text())
    assert (report["name"], report["executor"]) == ("compare", "emulated")
    on_demand, next_gate = report["rows"]
    assert (on_demand["policy"], next_gate["policy"]) == ("on-demand", "next-gate")
    asked = [sum(row["spread"][name]["median"] for name in ("hits", "misses")) for row in report["rows"]]
    assert asked[0] == asked[1] > 0  # the same tokens, so the same experts
    assert next_gate["spread"]["prefetched_hits"]["median"] > 0
    assert "prefetched_hits" in on_demand["spread"]
    assert len(on_demand["layers"]) == 8
    assert not (tmp_path / "out.partial.json").exists()
