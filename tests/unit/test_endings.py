"""Signals: said at once, also while native code keeps the main thread; and not ignored where a script's shell does."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

_PROGRAM = """
import hashlib, os, signal, sys, time
from tiermoe.cluster import cli
from tiermoe.cluster.jobs.ending import BoundedEnd

def native():  # holds the main thread in native code, where Python's handlers wait
    hashlib.pbkdf2_hmac("sha256", b"", b"", (1 << 31) - 1)

def forced():
    return True

@cli.app.command("waits")
def waits() -> None:
    print("there", flush=True)
    time.sleep(60)

@cli.app.command("exits")
def exits() -> None:  # as Ray's client does where a signal comes within its calls
    try:
        print("there", flush=True)
        time.sleep(60)
    except SystemExit:
        raise SystemExit(1)

@cli.app.command("starts")
def starts() -> None:
    with BoundedEnd(forced, terminated=143):
        print("there", flush=True)
        native()

@cli.app.command("closes")
def closes() -> None:
    with BoundedEnd(forced) as ending:
        ending.serving()
        try:
            print("there", flush=True)
            time.sleep(60)
        finally:
            native()

cli.main()
"""


@contextmanager
def _started(command: str, ignored: bool) -> Iterator[subprocess.Popen[str]]:
    """The program, as a shell without job control starts it in the background where SIGINT is `ignored`."""
    with subprocess.Popen(
        [sys.executable, "-c", _PROGRAM, command], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        preexec_fn=(lambda: signal.signal(signal.SIGINT, signal.SIG_IGN)) if ignored else None,
    ) as process:  # fmt: skip
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "there\n"
            yield process
        finally:
            process.kill()


@pytest.mark.parametrize("ignored", [False, True], ids=["as usual", "ignored by the shell"])
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
@pytest.mark.parametrize("command", ["waits", "exits", "starts"])
def test_a_signal_is_answered_at_once_and_ends_the_command(
    command: str, number: signal.Signals, code: int, ignored: bool
) -> None:
    """Guards a silence of seconds while Ray starts, `kill -INT` of a background job that did nothing, and the exit code
    1 of a SIGTERM while actors were placed.
    """
    with _started(command, ignored) as process:
        process.send_signal(number)
        begin_s = time.monotonic()
        assert process.stderr is not None
        assert process.stderr.readline() == "ending ...\n"
        assert time.monotonic() - begin_s < 5.0  # the native call takes minutes, and a full machine pauses
        assert process.wait(20) == code
        assert "Traceback" not in process.stderr.read()


def test_a_second_signal_does_not_wait_for_the_end_in_order() -> None:
    with _started("closes", ignored=True) as process:
        process.send_signal(signal.SIGINT)
        assert process.stderr is not None
        assert process.stderr.readline() == "ending ...\n"
        time.sleep(0.5)
        assert process.poll() is None  # it has 40 s
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == 130
        assert process.stderr.read() == ""  # said once


def test_a_background_job_of_a_script(tmp_path: Path) -> None:
    """The case as it was found: no job control, so the shell starts the job with SIGINT ignored."""
    os.mkfifo(tmp_path / "said")
    script = (
        f'"{sys.executable}" -c "$PROGRAM" waits > said & '
        'read -r line < said; kill -INT $!; wait $!; echo "$line, code $?"'
    )
    done = subprocess.run(
        ["sh", "-c", script], env=os.environ | {"PROGRAM": _PROGRAM}, capture_output=True, text=True, timeout=60,
        check=True, cwd=tmp_path,
    )  # fmt: skip
    assert (done.stdout, done.stderr) == ("there, code 130\n", "ending ...\n")


@pytest.mark.parametrize(
    "module",
    [
        "interrupt()\n",
        "try: interrupt()\nexcept BaseException: raise ImportError('no typer')\n",  # as some libraries do
        "from tiermoe.errors import PeerLost\ntry: interrupt()\nfinally: raise PeerLost('it ended', 'wait')\n",
        "class Lost:\n    def __del__(self): interrupt()\nLost()\ntime.sleep(60)\n",  # Python drops it
    ],
)
def test_ctrl_c_while_modules_are_imported_is_one_line(module: str, tmp_path: Path) -> None:
    """It was a traceback before the handlers were there, and where a library answers it with an error of its own."""
    head = "import os, signal, time\ndef interrupt(): signal.raise_signal(signal.SIGINT)\n"
    (tmp_path / "typer.py").write_text(head + module)
    paths = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    program = [sys.executable, "-c", "from tiermoe.cluster.cli import main; main()", "prepare", "x"]
    done = subprocess.run(
        program, env=os.environ | {"PYTHONPATH": paths}, capture_output=True, text=True, timeout=30, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "ending ...\n")
