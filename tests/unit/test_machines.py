"""The machines that tests of several nodes run on: isolated from each other, joined by cables, gone without a trace."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from machines import Switch, why_not_isolated

_REASON = why_not_isolated()
_DEADLINE_S = 20.0
_HOLD = """
import sys; sys.path.insert(0, sys.argv[1])
from pathlib import Path
from machines import Switch
machine = Switch(Path(sys.argv[2])).add()
print(machine.first, flush=True)
sys.stdin.read()
"""

pytestmark = pytest.mark.skipif(_REASON is not None, reason=str(_REASON))


@pytest.fixture
def switch(tmp_path: Path) -> Iterator[Switch]:
    switch = Switch(tmp_path)
    yield switch
    switch.close()


def test_machines_share_no_memory_and_no_files_and_see_only_their_own_processes(
    switch: Switch, tmp_path: Path
) -> None:
    one, two = switch.add(), switch.add()
    for folder in (tmp_path, Path("/dev/shm")):
        subprocess.run(one.command("touch", str(folder / "mark")), timeout=_DEADLINE_S, check=True)
        listed = [
            subprocess.run(m.command("ls", str(folder)), capture_output=True, text=True, timeout=_DEADLINE_S).stdout
            for m in (one, two)
        ]
        assert listed == ["mark\n", ""]
        assert not (folder / "mark").exists()
    sleeps = two.command("sh", "-c", "echo up; exec sleep 60")
    server = subprocess.Popen(sleeps, stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    assert server.stdout.readline() == "up\n"
    assert [p.ppid() for p in two.processes()] == [server.pid]
    assert one.processes() == []


def test_a_folder_is_hidden_from_one_machine(switch: Switch, tmp_path: Path) -> None:
    one, two = switch.add(), switch.add()
    hidden = Path(__file__).parent
    one.hide(hidden)
    assert [subprocess.run(m.command("test", "-e", __file__), check=False).returncode for m in (one, two)] == [1, 0]
    one.show(hidden)
    assert subprocess.run(one.command("test", "-e", __file__), check=False).returncode == 0


def test_nothing_outlives_a_test_that_is_killed(tmp_path: Path) -> None:
    here = str(Path(__file__).parent.parent)
    command = [sys.executable, "-c", _HOLD, here, str(tmp_path)]
    owner = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    first = psutil.Process(int(owner.stdout.readline()))
    family = [first, *psutil.Process(owner.pid).children(recursive=True)]
    assert len(family) > 3
    os.kill(owner.pid, signal.SIGKILL)
    owner.communicate(timeout=_DEADLINE_S)
    _, alive = psutil.wait_procs(family, timeout=_DEADLINE_S)
    assert not alive
