"""Work of `bench` on two Ray nodes: one thing a node at a time, a lost node's again; test_jobs.py has an experiment."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tiermoe.benchmarks.machines import Loopback, RayNodes, environment

pytestmark = [pytest.mark.nodes, pytest.mark.timeout(400)]

_WAIT_S = 120.0


@pytest.fixture
def nodes() -> Iterator[RayNodes]:
    machines = Loopback()
    try:
        found = RayNodes(machines, cpus=1)
        found.add(1)
        yield found
    finally:
        machines.close()


def _wait(what: Callable[[], Any]) -> Any:
    end_s = time.monotonic() + _WAIT_S
    while not (found := what()):
        assert time.monotonic() < end_s
        time.sleep(0.05)
    return found


def test_a_lost_node_s_thing_runs_again_and_no_node_has_two(nodes: RayNodes, tmp_path: Path) -> None:
    driver = Path(__file__).with_name("cells_driver.py")
    process = subprocess.Popen(
        [sys.executable, str(driver), nodes.address, str(tmp_path), "4"], env=environment(),
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:

        def begun() -> dict[str, int]:
            """Number by node, of what runs."""
            return {p.name.split("-")[2]: int(p.name.split("-")[1]) for p in tmp_path.glob("begun-*")}

        _wait(lambda: len(begun()) == 2)
        assert sorted(begun().values()) == [0, 1]  # 2 and 3 wait although each node's process only waits too
        second = nodes.nodes[1]
        lost = begun()[second.address]
        nodes.kill_raylet(second)
        for path in tmp_path.glob(f"begun-{lost}-*"):
            path.unlink()
        for number in range(4):
            (tmp_path / f"go-{number}").touch()
        out, errors = process.communicate(timeout=_WAIT_S)
    finally:
        process.kill()
    assert process.returncode == 0, errors
    found = [json.loads(line) for line in out.splitlines()]
    assert sorted(row["index"] for row in found) == [0, 1, 2, 3]
    assert all(row["found"] == {"number": row["index"], "tenfold": 10 * row["index"]} for row in found)
    assert {row["node"] for row in found if row["index"] == lost} == {nodes.head.address}
