"""`tiermoe prepare` killed by SIGKILL, as the kernel does when memory runs out: the same command finishes it."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tiermoe.actors.store.files import ExpertStore
from tiermoe.actors.store.replicas import describe_replicas
from tiermoe.benchmarks.prepare import measure_form
from tiermoe.cluster.jobs.bench.random_model import Form, MoeShape
from tiermoe.cluster.jobs.prepare import prepare
from tiermoe.cluster.jobs.prepare.replicas import ReplicaOptions, add_replicas

# The command line, which kills itself before the n-th change of a file whose path starts so; n = 0: never.
_PROGRAM = """
import os, signal, sys
start, left = sys.argv.pop(1), int(sys.argv.pop(1))

def count(event, args):
    global left
    change = event in ("os.rename", "os.mkdir", "os.rmdir", "os.remove") or (event == "open" and args[2] & os.O_ACCMODE)
    if change and str(args[0]).startswith(start):
        left -= 1
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)

sys.addaudithook(count)
from tiermoe.cluster.cli import main
main()
"""
_TIMEOUT_S = 120
# A random one among the changes of a whole run: 24 in the unfinished store, 40 in the unfinished replicas until all are
# in the store, 20 without calibration.
_RANDOM = random.Random(7)
_KILLS = {
    calibrated: ((".partial", _RANDOM.randint(1, 24)), (".replicas", _RANDOM.randint(1, most)))
    for calibrated, most in ((True, 40), (False, 20))
}


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if "verified" not in path.name}


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="SIGKILL and the audit of opened files as on Linux")
@pytest.mark.parametrize("calibrated", [False, True])
def test_a_killed_preparation_with_replicas_finishes(
    checkpoint: Path, calibration: Path, tmp_path: Path, calibrated: bool
) -> None:
    out = tmp_path / "made" / "store"

    def run(start: str, changes: int) -> int:
        command = [sys.executable, "-c", _PROGRAM, f"{out}{start}", str(changes), "prepare", str(checkpoint), str(out)]
        options = ["--bits", "2", "--group-size", "32", *(("--calibration", str(calibration)) if calibrated else ())]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        return subprocess.run([*command, *options], timeout=_TIMEOUT_S, env=environment, capture_output=True).returncode

    for start, changes in _KILLS[calibrated]:
        assert run(start, changes) == -signal.SIGKILL, (start, changes)
        assert out.with_name(f"store{start}").exists()
        assert out.exists() == (start == ".replicas")
    ExpertStore(out)  # whole, while its replicas are not
    assert describe_replicas(out) is None
    assert run("", 0) == 0
    assert [path.name for path in out.parent.iterdir()] == ["store"]
    ExpertStore(out, verify="full")
    view = describe_replicas(out, verify="full")
    assert view.widths == (2,)
    whole = prepare(checkpoint, tmp_path / "whole", progress=False)
    text = calibration if calibrated else None
    assert files(out) == files(add_replicas(whole, checkpoint, ReplicaOptions((2,), 32), text, progress=False))


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="memory of a process as Linux counts it")
@pytest.mark.parametrize("form", [Form.FP8, Form.GPTQ, Form.GGUF])
def test_a_killed_preparation_of_a_published_form_finishes(form: Form, tmp_path: Path) -> None:
    """As `bench prepare` does it with gigabytes: a mapped form, one that is written again, and a GGUF file."""
    row = measure_form(form, MoeShape(8, 32, 4, 512, 256), tmp_path / "work")
    assert row["checkpoint_gb"] > 0.03
    assert 0.5 <= row["killed_at"] < 1
    assert row["same_files"] == 1
    assert row["disk_mb"] == pytest.approx(row["plan_mb"], rel=0.05)
    assert row["mapped"] == ("no" if form is Form.GPTQ else "yes")
    assert not (tmp_path / "work").exists()
