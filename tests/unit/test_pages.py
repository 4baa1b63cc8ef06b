"""A file that is truncated while it is mapped: an error that names it, from whichever process reads it first."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from handmade_store import HIDDEN, write_store
from serving import greedy, prepared, settings
from tiny_models import save_tiny_checkpoint

from tiermoe.actors.gpu_worker import GpuWorker
from tiermoe.actors.ndp_worker import NdpWorker
from tiermoe.actors.settings import NdpSettings
from tiermoe.actors.store.format import layer_name
from tiermoe.actors.store.pages import check_pages, map_file, read_pages
from tiermoe.cluster.config import load_hardware
from tiermoe.errors import StoreError
from tiermoe.proto.messages import ExpertBatch
from tiermoe.proto.peers import LocalDirectory

_PAGE = 4096


def _truncate(path: Path, nbytes: int = _PAGE) -> None:
    os.truncate(path, nbytes)


def _read(folder: Path) -> None:
    path = folder / "file"
    path.write_bytes(b"\1" * 4 * _PAGE)
    with open(path, "rb") as file:
        array = np.frombuffer(map_file(file.fileno(), str(path)), np.uint8)
    check_pages()
    _truncate(path)
    assert array[0] == 1
    assert array[2 * _PAGE] == 0
    read_pages([array[None]])


def _lead(folder: Path) -> None:
    store = prepared(save_tiny_checkpoint("mixtral", folder / "checkpoint"), folder / "store")
    worker = GpuWorker(settings(0.25), store.describe())
    worker.start()
    try:
        assert len(greedy(worker, [[5, 9, 2]], 3)[0]) == 3
        for layer in store.manifest.layers:
            _truncate(folder / "store" / layer.file)
        greedy(worker, [[7, 1, 3, 8, 6, 4]], 8)
    finally:
        worker.close()


def _ndp(folder: Path) -> None:
    store = write_store(folder / "store")
    worker = NdpWorker(NdpSettings(hardware=vars(load_hardware("paper-ndp"))), str(store), LocalDirectory())
    try:
        _truncate(store / layer_name(0), 0)
        none, hidden = np.zeros(1, np.int32), np.ones((1, HIDDEN), np.float32)
        starts = np.array([0, 1], np.int32)
        worker.handle(ExpertBatch(0, none, none.astype(np.uint8), starts, none, np.ones(1, np.float32), hidden))
    finally:
        worker.close()


def _unguarded(folder: Path) -> None:
    path = folder / "other"
    path.write_bytes(b"\1" * 4 * _PAGE)
    pages = np.memmap(path, np.uint8, "r")
    _truncate(path)
    pages[2 * _PAGE].item()


def _report(run: Callable[[Path], None], folder: Path, answers: Any) -> None:
    try:
        run(folder)
    except (StoreError, AssertionError) as error:  # an assertion of `greedy`: the request's error
        answers.put(str(error))
    else:
        answers.put("no error")


def _outcome(run: Callable[[Path], None], folder: Path) -> tuple[int | None, str | None]:
    """Exit code and error of a process of its own: a bad page stays known to its process."""
    context = multiprocessing.get_context("spawn")
    answers = context.SimpleQueue()
    process = context.Process(target=_report, args=(run, folder, answers))
    process.start()
    process.join(60)
    return process.exitcode, None if answers.empty() else answers.get()


@pytest.mark.parametrize("run", [_read, _lead, _ndp])
def test_a_truncated_file_is_named(run: Callable[[Path], None], tmp_path: Path) -> None:
    code, error = _outcome(run, tmp_path)
    assert code == 0
    assert error is not None
    assert str(tmp_path) in error
    assert "was truncated, or its disk fails" in error


def test_other_bus_errors_end_the_process_as_before(tmp_path: Path) -> None:
    assert _outcome(_unguarded, tmp_path)[0] == -signal.SIGBUS
