"""What `make chaos` measures, as far as a test should guard it: the lead's death, Ray's, and ways to end a server."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

sys.path.insert(0, str(Path(__file__).parent))
from rig import Server, run_streams, served
from run import bodies

from tiermoe.cluster.config import default_model_dir

pytestmark = [
    pytest.mark.skipif(not default_model_dir().is_dir(), reason="the default model is not there"),
    pytest.mark.slow,
]
_OPTIONS = ("--policy", "context-ndp-full", "--budget", "25%")


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    """One server loses its lead, then its server process, then its raylet, which ends it."""
    with served(*_OPTIONS) as server:
        yield server


@pytest.fixture(scope="module")
def undisturbed(server: Server) -> list[str]:
    return [stream.text for stream in run_streams(server.url, bodies())]


def test_no_request_notices_the_leads_death(server: Server, undisturbed: list[str]) -> None:
    (lead,) = server.members("ray::GpuWorker")
    streams = run_streams(server.url, bodies(), lead.kill, after=200)
    assert [stream.error for stream in streams] == [None] * len(streams)
    assert [stream.text for stream in streams] == undisturbed
    assert "the lead died; it is started again" in server.said()


def test_the_death_of_the_server_process_costs_a_retry(server: Server, undisturbed: list[str]) -> None:
    """Serve's proxy was back after 11 s, and refused every connection until then: 20 of 20 streams failed."""
    (edge,) = server.members("ray::Edge")
    streams = run_streams(server.url, bodies(), edge.kill, after=200, tries=2)
    assert [stream.error for stream in streams] == [None] * len(streams)
    assert [stream.text for stream in streams] == undisturbed
    assert "edge/0 died; it is started again" in server.said()


def test_a_server_without_its_raylet_ends_in_one_line(server: Server) -> None:
    family = server.family()
    server.members("raylet")[0].kill()
    assert server.process.wait(timeout=10) == 1
    assert server.said().splitlines()[-1] == "error: Ray's raylet ended (exit code -9); start it again"
    assert not server.leftovers(family)


@pytest.mark.parametrize("hangs", [False, True], ids=["dead", "hung"])
def test_another_lead_takes_the_requests_over(hangs: bool) -> None:
    with served("--policy", "next-gate", "--budget", "25%", "--replicas", "2") as server:
        undisturbed = run_streams(server.url, bodies())
        lead = server.members("ray::GpuWorker")[0]
        streams = run_streams(server.url, bodies(), lead.suspend if hangs else lead.kill, after=200)
        assert [stream.error for stream in streams] == [None] * len(streams)
        assert [stream.text for stream in streams] == [stream.text for stream in undisturbed]


def test_sigterm_to_every_process_is_an_end_in_order() -> None:
    """As a service manager sends it."""
    with served(*_OPTIONS) as server:
        family = server.family()
        for process in (psutil.Process(server.process.pid), *family):
            process.terminate()
        assert server.process.wait(timeout=15) == 0
        assert "error" not in server.said()
        assert not server.leftovers(family)


def test_ctrl_c_while_ray_starts() -> None:
    with served(*_OPTIONS, wait=False) as server:
        while "starting Ray" not in server.said():
            assert server.process.poll() is None, server.said()
            time.sleep(0.05)
        time.sleep(3.0)  # into Ray's start, which says nothing
        family = server.family()
        os.killpg(server.process.pid, signal.SIGINT)
        assert server.process.wait(timeout=10) == 130
        assert "ending ..." in server.said()
        assert "Traceback" not in server.said()
        assert not server.leftovers(family)
