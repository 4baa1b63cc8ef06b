"""Nothing outlives a run that was interrupted or killed: no process, no directory, no shared memory."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

_DRIVER = Path(__file__).with_name("driver.py")
_GONE_WITHIN_S = 30.0


@contextmanager
def _driver(phase: str) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen([sys.executable, str(_DRIVER), phase], stdout=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def _wait_for(process: subprocess.Popen[str], line: str) -> None:
    assert process.stdout is not None
    for seen in process.stdout:
        if seen.strip() == line:
            return
    pytest.fail(f"the driver ended before it printed {line}")


def _family(process: subprocess.Popen[str]) -> tuple[list[psutil.Process], Path]:
    """All descendants of the driver, and its scratch directory as the helper's command line names it."""
    family = psutil.Process(process.pid).children(recursive=True)
    helper = next(p for p in family if p.cmdline()[-2:-1] and p.cmdline()[-2].endswith("scratch.py"))
    return family, Path(helper.cmdline()[-1])


def _assert_gone(family: list[psutil.Process], scratch: Path) -> None:
    _, alive = psutil.wait_procs(family, timeout=_GONE_WITHIN_S)
    assert not alive, [p.name() for p in alive]
    assert not scratch.exists()
    assert not [name for name in os.listdir("/dev/shm") if "plasma" in name or "ray" in name]


@pytest.mark.slow
def test_two_runs_at_once_then_one_is_interrupted_and_one_killed() -> None:
    with _driver("generate") as interrupted, _driver("generate") as killed:
        for process in (interrupted, killed):
            _wait_for(process, "TOKEN")
        first, second = _family(interrupted), _family(killed)
        assert first[1] != second[1]
        assert len(first[0]) > 3  # Ray's servers, the two actors, the helper

        interrupted.send_signal(signal.SIGINT)
        assert interrupted.wait(timeout=_GONE_WITHIN_S) == 130
        _assert_gone(*first)

        assert all(p.is_running() for p in second[0])  # the other run is not touched
        killed.kill()
        _assert_gone(*second)


def test_an_interrupt_during_the_start_leaves_nothing() -> None:
    with _driver("start") as process:
        _wait_for(process, "PLACED")
        family = _family(process)
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=_GONE_WITHIN_S) == 130
        _assert_gone(*family)


@pytest.mark.slow
def test_two_runs_at_once_with_shards_and_ndp_workers() -> None:
    """Real workers with channels in shared memory between them; each run has its own, and leaves none."""
    options = ["--policy", "context-ndp-full", "--shards", "2", "--ndp-workers", "2", "--threads", "1", "--json", "-v"]
    command = [sys.executable, "-c", "from tiermoe.cluster.cli import main; main()", "run", "import os", *options]
    environment = {name: value for name, value in os.environ.items() if name != "RAY_AUTH_MODE"}
    runs = [
        subprocess.Popen(
            [*command, "--device", "cpu", "--max-tokens", "24"],
            env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for _ in range(2)
    ]  # fmt: skip
    families: list[psutil.Process] = []
    for run in runs:
        assert run.stderr is not None
        steps = list(iter(lambda run=run: run.stderr.readline().rstrip(), "Plan"))  # then all of them are there
        assert steps[0].startswith("starting Ray ...")  # and the seconds left, where a run before this one was noted
        families += psutil.Process(run.pid).children(recursive=True)
    said = [run.communicate(timeout=120) for run in runs]
    assert [run.returncode for run in runs] == [0, 0], said
    first, second = (json.loads(out) for out, _ in said)
    assert first["token_ids"] == second["token_ids"]
    assert len(families) > 8  # Ray's servers, six actors, the helper; one run may be over when the other is seen
    _, alive = psutil.wait_procs(families, timeout=_GONE_WITHIN_S)
    assert not alive, [p.name() for p in alive]
    assert not [name for name in os.listdir("/dev/shm") if name.startswith(("plasma", "ray", "tiermoe"))]
