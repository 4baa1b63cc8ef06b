"""Helping threads leave the core of who they help."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Iterator

import pytest

from tiermoe.actors.core import _core
from tiermoe.proto import shm

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="affinity is Linux's")


@pytest.fixture
def cores() -> Iterator[set[int]]:
    """Those of the test, which may bind its thread."""
    found = os.sched_getaffinity(0)
    if len(found) < 2:
        pytest.skip("needs two cores")
    yield found
    os.sched_setaffinity(0, found)


def test_the_copying_thread_of_a_link(cores: set[int]) -> None:
    before, core = set(os.listdir("/proc/self/task")), min(cores)
    link = _core.ThreadLink(0.0, 0.0)
    (thread,) = (int(name) for name in set(os.listdir("/proc/self/task")) - before)

    def copy() -> None:
        link.hold(0.0)
        while link.pending:
            time.sleep(1e-4)

    copy()
    os.sched_setaffinity(0, {core})
    os.sched_setaffinity(thread, {core})
    copy()
    assert os.sched_getaffinity(thread) == cores - {core}
    link.close()


def test_a_reader_of_requests(cores: set[int]) -> None:
    """Guards: a near-data worker that woke on the lead's core answered 300 us late, for as long as it stayed there."""
    offer, core = shm.offer(4096, 0.0), min(cores)
    accepted = shm.accept(os.getpid(), offer.fd, 4096, 0.0, helps=True)
    assert accepted is not None
    offer.close_fd()
    found = list[set[int]]()

    def read() -> None:
        for bound in (False, False, True):
            if bound:
                os.sched_setaffinity(0, {core})
            assert accepted[0].requests.read(10.0, 1 << 20) == b"a"
        found.append(os.sched_getaffinity(0))

    reader = threading.Thread(target=read)
    reader.start()
    os.sched_setaffinity(0, {core})
    for _ in range(3):
        assert offer.rings.requests.write((b"a",), 10.0)
    reader.join(10)
    assert found == [cores - {core}]
