"""`tiermoe prepare` killed by SIGKILL, as the kernel does when memory runs out: the same command finishes it."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from published import RELEASES, write

from tiermoe.actors.store.files import ExpertStore
from tiermoe.actors.store.replicas import describe_replicas
from tiermoe.benchmarks.random_model import save_published
from tiermoe.cluster.jobs.bench.random_model import Form, MoeShape
from tiermoe.cluster.jobs.prepare import prepare
from tiermoe.cluster.jobs.prepare.replica_options import ReplicaOptions
from tiermoe.cluster.jobs.prepare.replicas import add_replicas
from tiermoe.cluster.topology.inputs import facts_of_checkpoint

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


def run(start: str, changes: int, model: Path, out: Path, *options: str) -> int:
    """The exit status of `tiermoe prepare`, which is killed at so many changes of files whose path starts so."""
    command = [sys.executable, "-c", _PROGRAM, f"{out}{start}", str(changes), "prepare", str(model), str(out), *options]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, timeout=_TIMEOUT_S, env=environment, capture_output=True).returncode


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="SIGKILL and the audit of opened files as on Linux")
@pytest.mark.parametrize("calibrated", [False, True])
def test_a_killed_preparation_with_replicas_finishes(
    checkpoint: Path, calibration: Path, tmp_path: Path, calibrated: bool
) -> None:
    out = tmp_path / "made" / "store"
    options = ("--bits", "2", "--group-size", "32", *(("--calibration", str(calibration)) if calibrated else ()))
    for start, changes in _KILLS[calibrated]:
        assert run(start, changes, checkpoint, out, *options) == -signal.SIGKILL, (start, changes)
        assert out.with_name(f"store{start}").exists()
        assert out.exists() == (start == ".replicas")
    ExpertStore(out)  # whole, while its replicas are not
    assert describe_replicas(out) is None
    assert run("", 0, checkpoint, out, *options) == 0
    assert [path.name for path in out.parent.iterdir()] == ["store"]
    ExpertStore(out, verify="full")
    view = describe_replicas(out, verify="full")
    assert view.widths == (2,)
    whole = prepare(checkpoint, tmp_path / "whole", progress=False)
    text = calibration if calibrated else None
    assert files(out) == files(add_replicas(whole, checkpoint, ReplicaOptions((2,), 32), text, progress=False))


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="SIGKILL and the audit of opened files as on Linux")
@pytest.mark.parametrize(("name", "mapped"), [
    ("Qwen/Qwen3-30B-A3B-Instruct-2507-FP8", True), ("Qwen/Qwen3-30B-A3B-GPTQ-Int4", False), ("GGUF", True),
])  # fmt: skip
def test_a_killed_preparation_of_a_published_form_finishes(name: str, mapped: bool, tmp_path: Path) -> None:
    """A form whose bytes are mapped, one that is written again, and a GGUF file."""
    if name == "GGUF":
        model = save_published(Form.GGUF, MoeShape(4, 4, 2, 256, 128, vocabulary=64), tmp_path / "model")
    else:
        model, _ = write(next(release for release in RELEASES if release.name == name), tmp_path)
    out = tmp_path / "made" / "store"
    assert run(".partial", 5, model, out) == -signal.SIGKILL
    assert out.with_name("store.partial").exists()
    assert not out.exists()
    assert run("", 0, model, out) == 0
    assert [path.name for path in out.parent.iterdir()] == ["store"]
    assert (facts_of_checkpoint(model).mapped_bytes > 0) == mapped
    assert run("", 0, model, tmp_path / "whole") == 0
    assert files(out) == files(tmp_path / "whole")
