"""What is done in a process of its own with a file that is truncated while it is mapped: `test_pages`.

Each imports what it needs, so that the process of the others starts at once.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from tiermoe.actors.store.format import layer_name
from tiermoe.actors.store.pages import FileStamp, check_pages, map_file, read_pages
from tiermoe.errors import StoreError

PAGE = 4096


def _truncate(path: Path, nbytes: int = PAGE) -> None:
    os.truncate(path, nbytes)


def read(folder: Path) -> None:
    path = folder / "file"
    path.write_bytes(b"\1" * 4 * PAGE)
    with open(path, "rb") as file:
        array = np.frombuffer(map_file(file.fileno(), str(path), FileStamp.of(path.stat())), np.uint8)
    check_pages()
    _truncate(path)
    assert array[0] == 1
    assert array[2 * PAGE] == 0
    read_pages([array[None]])


def lead(folder: Path) -> None:
    from serving import greedy, prepared, settings
    from tiny_models import save_tiny_checkpoint

    from tiermoe.actors.gpu_worker import GpuWorker

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


def ndp(folder: Path) -> None:
    from handmade_store import HIDDEN, write_store

    from tiermoe.actors.ndp_worker import NdpWorker
    from tiermoe.actors.settings import NdpSettings
    from tiermoe.cluster.config import load_hardware
    from tiermoe.proto.messages import ExpertBatch
    from tiermoe.proto.peers import LocalDirectory

    store = write_store(folder / "store")
    worker = NdpWorker(NdpSettings(hardware=vars(load_hardware("paper-ndp"))), str(store), LocalDirectory())
    try:
        _truncate(store / layer_name(0), 0)
        none, hidden = np.zeros(1, np.int32), np.ones((1, HIDDEN), np.float32)
        starts = np.array([0, 1], np.int32)
        worker.handle(ExpertBatch(0, none, none.astype(np.uint8), starts, none, np.ones(1, np.float32), hidden))
    finally:
        worker.close()


def unguarded(folder: Path) -> None:
    path = folder / "other"
    path.write_bytes(b"\1" * 4 * PAGE)
    pages = np.memmap(path, np.uint8, "r")
    _truncate(path)
    pages[2 * PAGE].item()


def report(run: Callable[[Path], None], folder: Path, answers: Any) -> None:
    try:
        run(folder)
    except (StoreError, AssertionError) as error:  # an assertion of `greedy`: the request's error
        answers.put(str(error))
    else:
        answers.put("no error")
