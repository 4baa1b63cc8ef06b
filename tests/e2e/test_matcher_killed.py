"""kill -9 of the matcher: the lead goes on without it, and it comes back with what it knew."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from map_contexts import SETTINGS, SHAPE, TOP_K, Iteration, iteration
from numpy.typing import NDArray

from tiermoe.actors.engine.peers.matcher import MatcherLink
from tiermoe.cluster.worker_process import Role, WorkerProcess
from tiermoe.proto.messages import HealthReport, HealthRequest, PrefetchCommand

pytestmark = pytest.mark.slow

_PATIENCE_S = 30.0


def test_killed_and_restarted(tmp_path: Path) -> None:
    settings = SETTINGS.model_copy(update={"snapshot_s": 0.02})
    role = Role.matcher(settings, SHAPE, TOP_K, snapshot=tmp_path / "maps")
    with WorkerProcess(role) as process, closing(MatcherLink(process.link, settings, SHAPE)) as link:
        link.start()
        assert link.wait_until_found(_PATIENCE_S)
        for number in range(5):
            _run(link, iteration(number))
        assert link.source == "expert-map"
        _until(lambda: _saved(link) == 5)

        pid = process.pid
        for context in range(2):  # in the midst of an iteration
            link.observe(5, context, *_at(iteration(5), context))
        os.kill(pid, signal.SIGKILL)
        _until(lambda: link.source == "next-gate")
        for number in range(5, 105):  # nobody is there, and nothing waits
            shown = iteration(number)
            link.begin(number, shown.sequences, shown.embeddings)
            for layer in range(SHAPE.layers):
                assert link.take(number, layer) == []
                link.observe(number, layer, *_at(shown, layer))
        assert "not there" in link.report()["problem"]

        process.restart()
        assert link.wait_until_found(_PATIENCE_S)
        again = iteration(105, seed=3)
        taken = _run(link, again)
        assert link.source == "expert-map"
        begun = taken[0]  # the semantic match is the iteration that was seen before: it names its experts first
        first_layer = [key for key in begun.keys.tolist()[: len(begun.keys) - begun.hints] if key < SHAPE.experts]
        top = (-again.probabilities[0, 0]).argsort()[:TOP_K]
        assert first_layer == top.tolist()
        assert link.report()["lost"] == 1


def _at(shown: Iteration, layer: int) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    return shown.sequences, shown.probabilities[layer]


def _run(link: MatcherLink, shown: Iteration) -> list[PrefetchCommand]:
    link.begin(shown.number, shown.sequences, shown.embeddings)
    for layer in range(SHAPE.layers):
        link.observe(shown.number, layer, *_at(shown, layer))
    taken: list[PrefetchCommand] = []
    while link.waiting:
        link._asked[0].pending.result()  # at most its deadline
        taken += link.take(shown.number, -1)
    return taken


def _saved(link: MatcherLink) -> int:
    channel = link._peer.channel
    report = None if channel is None else channel.call(HealthRequest(), _PATIENCE_S)
    assert isinstance(report, HealthReport)
    maps, unsaved = int(report.details["maps"]), int(report.details["unsaved"])
    return maps if unsaved == 0 else -1


def _until(holds: Callable[[], bool]) -> None:
    until_s = time.monotonic() + _PATIENCE_S
    while not holds():
        assert time.monotonic() < until_s
        time.sleep(0.005)
