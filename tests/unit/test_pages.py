"""A file that is truncated or changes while it is mapped: an error that names it, from whoever would send results."""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
import truncated
from channel_peer import wait_until
from numpy.typing import NDArray
from serving import greedy, prepared, settings
from tiny_models import save_tiny_checkpoint
from truncated import PAGE

from tiermoe.actors.gpu_worker import GpuWorker
from tiermoe.actors.requests import GenerationRequest, SamplingParams
from tiermoe.actors.store import pages
from tiermoe.actors.store.format import DENSE_NAME
from tiermoe.actors.store.pages import FileStamp, StoreGuard, check_pages, map_file, problem
from tiermoe.errors import NotServing, StoreError


def _outcome(run: Callable[[Path], None], folder: Path) -> tuple[int | None, str | None]:
    """Exit code and error of a process of its own: a bad page stays known to its process."""
    context = multiprocessing.get_context("spawn")
    answers = context.SimpleQueue()
    process = context.Process(target=truncated.report, args=(run, folder, answers))
    process.start()
    process.join(60)
    return process.exitcode, None if answers.empty() else answers.get()


@pytest.mark.parametrize("run", [truncated.read, truncated.lead, truncated.ndp])
def test_a_truncated_file_is_named(run: Callable[[Path], None], tmp_path: Path) -> None:
    code, error = _outcome(run, tmp_path)
    assert code == 0
    assert error is not None
    assert str(tmp_path) in error
    assert "was truncated, or its disk fails" in error


def test_other_bus_errors_end_the_process_as_before(tmp_path: Path) -> None:
    assert _outcome(truncated.unguarded, tmp_path)[0] == -signal.SIGBUS


_SAME, _OTHER = b"\1" * PAGE, b"\2" * PAGE


def _mapped(path: Path) -> NDArray[np.uint8]:
    with open(path, "rb") as file:
        return np.frombuffer(map_file(file.fileno(), str(path), FileStamp.of(path.stat())), np.uint8)


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "LOOK_S", 0.01)


@pytest.mark.usefixtures("at_once")
@pytest.mark.parametrize("change", ["written in place", "replaced", "removed"])
def test_a_change_stays_known_while_the_file_is_mapped(tmp_path: Path, change: str) -> None:
    path = tmp_path / "file"
    path.write_bytes(_SAME)
    before, array = path.stat(), _mapped(path)
    assert problem() is None
    if change == "written in place":
        with open(path, "r+b") as file:
            file.write(_OTHER)
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))  # the change time stays
    elif change == "replaced":
        (tmp_path / "new").write_bytes(_SAME)
        (tmp_path / "new").replace(path)
    else:
        path.unlink()
    wait_until(lambda: problem() is not None)
    with pytest.raises(StoreError, match=str(path)):
        check_pages()
    path.write_bytes(_SAME)
    assert problem() is not None  # what was read meanwhile may be in a slot
    assert array[0] in (1, 2)
    del array
    assert problem() is None


@pytest.mark.usefixtures("at_once")
def test_a_hard_link_or_another_mode_is_no_change(tmp_path: Path) -> None:
    """Guards: a copy of a store by hard links, as benchmarks make one, stopped the servers of that store."""
    path, link = tmp_path / "file", tmp_path / "link"
    path.write_bytes(_SAME)
    before, array = path.stat(), _mapped(path)
    for change in (lambda: os.link(path, link), link.unlink, lambda: path.chmod(0o600)):
        change()
        time.sleep(0.02)  # the next look
        assert problem() is None
    path.write_bytes(_OTHER)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    wait_until(lambda: problem() is not None)
    del array
    assert problem() is None


@pytest.mark.usefixtures("at_once")
def test_a_guard_says_when_the_files_verify_again(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(_SAME)
    array = _mapped(path)
    verified: list[bool] = []

    def verify(whole: bool) -> None:
        verified.append(whole)
        if path.read_bytes() != _SAME:
            raise StoreError("it differs", "put it back")

    guard = StoreGuard(verify)
    assert guard.state() == {"state": "serving"}
    path.write_bytes(_OTHER)
    wait_until(lambda: guard.state()["state"] == "damaged")
    assert str(path) in guard.state()["problem"]
    wait_until(lambda: len(verified) == 1)
    time.sleep(0.1)
    assert verified == [False]  # not again while it stays as it is
    path.unlink()
    path.write_bytes(_SAME)
    wait_until(lambda: guard.state()["state"] == "mended")
    assert guard.state()["state"] == "mended"
    assert problem() is not None
    del array


@pytest.mark.usefixtures("at_once")
def test_a_lead_stops_at_a_change_and_starts_again_with_the_file_put_back(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Guards: dense weights were mapped by another library, unwatched; a changed layer gave wrong tokens, 200 OK."""
    store = prepared(save_tiny_checkpoint("mixtral", tmp_path / "checkpoint"), tmp_path / "store")
    view, path = store.describe(), tmp_path / "store" / DENSE_NAME
    store.close()
    before = path.read_bytes()
    # a record of the failed forward would keep its frames, and those the mapping, as long as pytest keeps records
    caplog.set_level(logging.CRITICAL, "ContinuousBatchingLogger")
    with closing(GpuWorker(settings(0.25), view)) as worker:
        worker.start()
        expected = greedy(worker, [[5, 9, 2]], 3)
        stream = worker.submit(GenerationRequest("running", (7, 1, 3), SamplingParams(max_tokens=100, ignore_eos=True)))
        events = iter(stream)
        next(events)
        with open(path, "r+b") as file:
            file.seek(-4, os.SEEK_END)
            file.write(b"\0\0\0\0")
        last = list(events)[-1]
        assert (last.finish, last.error_type) == ("error", "StoreError")
        assert str(path) in str(last.error)
        health = worker.health()
        assert health["state"] == "damaged"
        assert str(path) in health["problem"]
        with pytest.raises(NotServing, match=str(path)):
            worker.submit(GenerationRequest("next", (1,)))
        path.write_bytes(before)
        wait_until(lambda: worker.health()["state"] == "mended")
    del worker, stream, events
    wait_until(lambda: problem() is None)
    with closing(GpuWorker(settings(0.25), view)) as worker:  # as Ray makes it again
        worker.start()
        assert worker.health()["state"] == "serving"
        assert greedy(worker, [[5, 9, 2]], 3) == expected
