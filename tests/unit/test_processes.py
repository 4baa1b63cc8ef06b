"""A process is the same one while it lives, whatever its pid and the clock say."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest

from tiermoe.cluster.processes import ProcessId


def test_a_process_is_known_until_it_ends_also_before_its_parent_asks_after_it() -> None:
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as cat:
        one = ProcessId.of(cat.pid)
        assert ProcessId.parse(str(one)) == one
        assert one.lives()
        assert one.process() is not None
        assert not replace(one, start=one.start + 1).lives()  # another process that had the pid before
        cat.stdin.close()
        while one.lives():
            pass
        assert cat.returncode is None  # a zombie
        assert one.process() is None
        with pytest.raises(ProcessLookupError):
            ProcessId.of(cat.pid)
    assert one != ProcessId.of()
    assert ProcessId.of().lives()


@pytest.mark.skipif(sys.platform != "linux", reason="names of processes are in /proc/PID/stat")
def test_a_name_with_brackets_and_spaces_does_not_mislead() -> None:
    """The second field of /proc/PID/stat is the name, as the process likes it."""
    program = "open('/proc/self/comm', 'w').write(') Z 1 (a b'); print(flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        one = ProcessId.of(process.pid)
        process.stdout.readline()
        assert one.lives()
        process.communicate("\n")
