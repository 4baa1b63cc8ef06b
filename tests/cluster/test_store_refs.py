"""A store's experts as Ray objects: the very bytes, within a bound, refused in words, and after a restart."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from handmade_store import EXPERTS, layer_values, write_store

from tiermoe.actors.engine.cache.sources import RemoteStores
from tiermoe.actors.settings import StoreSettings
from tiermoe.actors.store.files import ExpertStore
from tiermoe.actors.store.server import StoreWorker
from tiermoe.cluster.ray_session import leave, start_local
from tiermoe.cluster.scratch import Scratch
from tiermoe.errors import RemoteFailure, StoreError
from tiermoe.proto.peers import LocalDirectory, PeerLink, StoreLink

LAYERS = 2
NAME = "test/store/0"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_store(tmp_path_factory.mktemp("refs") / "store", LAYERS)


@pytest.fixture(scope="module")
def actor(folder: Path) -> Iterator[Any]:
    import ray

    scratch = Scratch()
    try:
        start_local(scratch, 2, {}, 80_000_000, 1)
        expert_bytes = ExpertStore(folder).manifest.expert_nbytes()
        yield ray.remote(name=NAME, max_restarts=-1, max_task_retries=0, max_concurrency=2)(StoreWorker).remote(
            str(folder), 0, None, "stamp", ref_bytes=2 * expert_bytes
        )
    finally:
        leave()
        scratch.close()


@pytest.fixture
def reader(folder: Path, actor: Any) -> Iterator[RemoteStores]:
    link = StoreLink("store/0", tuple(range(LAYERS)), PeerLink(LocalDirectory(), name="store/0"), NAME)
    settings = StoreSettings(transport="ray", deadline_s=30.0)
    with closing(RemoteStores(ExpertStore(folder, "stamp").manifest, range(LAYERS), [link], settings)) as reader:
        reader.start(30.0)
        yield reader


def assert_right(reader: RemoteStores) -> None:
    promises = [reader.layer(layer).expert(e) for layer in range(LAYERS) for e in range(EXPERTS)]
    for i, promise in enumerate(promises):
        promise.ask(promises[i + 1 :])
        layer, e = divmod(i, EXPERTS)
        for tensor, array in zip(promise.tensors(), layer_values(layer).values(), strict=True):
            np.testing.assert_array_equal(tensor.numpy(), array[e])


def test_the_very_bytes_within_a_bound(reader: RemoteStores, actor: Any, folder: Path) -> None:
    import ray

    assert_right(reader)
    assert reader.transports == {"store/0": "ray"}
    health = ray.get(actor.health.remote())
    assert health["ref_bytes"] == 2 * ExpertStore(folder).manifest.expert_nbytes()
    assert health["experts_sent"] == LAYERS * EXPERTS
    assert health["address"] == ""  # it listens nowhere


def test_a_refusal_keeps_its_words(reader: RemoteStores) -> None:
    current = reader._holders["store/0"].current
    assert current is not None
    with pytest.raises(RemoteFailure, match="does not hold MoE layer 7") as refused:
        current.ask(7, [0], 30.0)()
    assert refused.value.kind == StoreError.__name__


def test_an_actor_that_is_restarted_is_found_again(reader: RemoteStores, actor: Any) -> None:
    """Also by a read that meets the old one's death: Ray kills it a moment after it was told to."""
    import ray

    pid = ray.get(actor.health.remote())["pid"]
    ray.kill(actor, no_restart=False)
    assert_right(reader)
    assert other_process(actor, pid)
    assert_right(reader)


def other_process(actor: Any, pid: int) -> bool:
    """Whether the actor runs in another process than this within a minute."""
    import ray

    end_s = time.monotonic() + 60.0
    while time.monotonic() < end_s:
        with contextlib.suppress(ray.exceptions.RayError):  # it is being restarted
            if ray.get(actor.health.remote(), timeout=10.0)["pid"] != pid:
                return True
    return False
