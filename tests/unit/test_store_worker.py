"""A store that others read: what it gives, what it refuses, and that it keeps no reader from asking how it is."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from handmade_store import EXPERTS, HIDDEN, INTERMEDIATE, layer_values, write_store
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tiermoe.actors.settings import StoreSettings
from tiermoe.actors.store.dense import fetch_dense
from tiermoe.actors.store.format import MANIFEST_NAME, layer_name
from tiermoe.actors.store.server import StoreWorker
from tiermoe.errors import MessageTooLarge, RemoteFailure, StoreError, TierMoeError
from tiermoe.proto.channel import open_channel
from tiermoe.proto.messages import ExpertResult, FileReply, FileRequest, HealthReport, HealthRequest, StoreReply
from tiermoe.proto.messages import StoreRequest as Request
from tiermoe.proto.options import Limits, ServerOptions
from tiermoe.proto.peers import LocalDirectory, PeerLink, StoreLink, store_name

SETTINGS = StoreSettings(deadline_s=5.0)


def ids(*experts: int) -> np.ndarray[Any, np.dtype[np.int32]]:
    return np.array(experts, np.int32)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_store(tmp_path / "store")


@pytest.fixture
def worker(folder: Path) -> Iterator[StoreWorker]:
    gc.collect()  # what the test before has mapped, and changed, is no reason to refuse
    with closing(StoreWorker(str(folder), directory=LocalDirectory())) as worker:
        yield worker


def link_to(*workers: StoreWorker) -> list[StoreLink]:
    board = LocalDirectory({store_name(i): str(worker.address) for i, worker in enumerate(workers)})
    return [StoreLink(name, (0, 1), PeerLink(board, name=name)) for name in board.addresses]


@pytest.mark.parametrize("experts", [(0,), (2,), (0, 1), (2, 0), (0, 1, 2)])
def test_gives_experts_over_its_channel(worker: StoreWorker, experts: tuple[int, ...]) -> None:
    with open_channel(str(worker.address)) as channel:
        reply = channel.call(Request(1, ids(*experts)), 5.0)
    assert isinstance(reply, StoreReply)
    assert reply.experts.tolist() == list(experts)
    assert list(reply.tensors) == ["gate_up", "down", "gate_up_bias", "down_bias"]
    for name, values in layer_values(1).items():
        np.testing.assert_array_equal(reply.tensors[name], values[list(experts)])
    assert worker.health()["experts_sent"] == len(experts)
    assert worker.health()["bytes_sent"] == len(experts) * worker.describe().manifest.expert_nbytes()


def test_gives_some_neurons_and_copies_no_single_expert(worker: StoreWorker) -> None:
    reply = worker.handle(Request(0, ids(1), 2, 3))
    assert isinstance(reply, StoreReply)
    assert reply.first == 2
    values = layer_values(0)
    np.testing.assert_array_equal(reply.tensors["gate_up"], values["gate_up"][1:2, 2:5])
    np.testing.assert_array_equal(reply.tensors["down"], values["down"][1:2, 2:5])
    np.testing.assert_array_equal(reply.tensors["down_bias"], values["down_bias"][1:2])
    reply = worker.handle(Request(0, ids(1)))
    assert isinstance(reply, StoreReply)
    assert np.shares_memory(reply.tensors["gate_up"], worker._store.layers[0].gate_up)


@pytest.mark.parametrize(
    ("request_", "what"),
    [
        (Request(2, ids(0)), "does not hold MoE layer 2; it holds 0, 1"),
        (Request(0, ids(3)), "experts \\[3\\]"),
        (Request(0, ids(1, 1)), "named twice"),
        (Request(0, ids()), "experts \\[\\]"),
        (Request(0, ids(0), 5, 0), "neurons 5 to 5"),
        (Request(0, ids(0), 4, 2), "neurons 4 to 6"),
        (FileRequest(layer_name(0), 0, 10), "gives no file 'layer-000"),
        (FileRequest("../store/config.json", 0, 10), "gives no file"),
        (FileRequest("verified.json", 0, 10), "gives no file"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_refuses(worker: StoreWorker, request_: Any, what: str) -> None:
    with pytest.raises(StoreError, match=what):
        worker.handle(request_)
    with open_channel(str(worker.address)) as channel:
        with pytest.raises(RemoteFailure) as refused:
            channel.call(request_, 5.0)
        assert refused.value.kind == "StoreError"
        assert isinstance(channel.call(HealthRequest(), 5.0), HealthReport)  # goes on


def test_refuses_other_messages(worker: StoreWorker) -> None:
    with pytest.raises(TierMoeError, match="does not answer ExpertResult"):
        worker.handle(ExpertResult(np.zeros((1, 1), np.float32), 0, 0, 0))


def test_a_slice_gives_its_slice(folder: Path) -> None:
    (folder / layer_name(0)).unlink()
    with closing(StoreWorker(str(folder), 3, [1], directory=(board := LocalDirectory()))) as worker:
        assert board.addresses == {"store/3": worker.address}
        assert isinstance(worker.handle(Request(1, ids(0))), StoreReply)
        with pytest.raises(StoreError, match="store/3 does not hold MoE layer 0; it holds 1"):
            worker.handle(Request(0, ids(0)))
        assert worker.health()["layers"] == "1"


def test_more_than_a_message_carries_is_refused_before_it_is_copied(folder: Path) -> None:
    options = ServerOptions(limits=Limits(max_message_bytes=64 * 1024 + 500))
    with closing(StoreWorker(str(folder), directory=LocalDirectory(), options=options)) as worker:
        with pytest.raises(MessageTooLarge):
            worker.handle(Request(0, ids(0)))
        assert isinstance(worker.handle(Request(0, ids(0), 0, 1)), StoreReply)


@given(
    layer=st.integers(0, 1023), experts=st.lists(st.integers(0, 4095), max_size=6),
    first=st.integers(0, 2**32 - 1), neurons=st.integers(0, 2**32 - 1),
)  # fmt: skip
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_request_is_answered_or_refused(
    worker: StoreWorker, layer: int, experts: list[int], first: int, neurons: int
) -> None:
    good = layer < 2 and 0 < len(experts) == len(set(experts)) and max(experts) < EXPERTS
    last = first + neurons if neurons else INTERMEDIATE
    good = good and first < last <= INTERMEDIATE
    try:
        reply = worker.handle(Request(layer, ids(*experts), first, neurons))
    except StoreError:
        assert not good
        return
    assert good
    assert isinstance(reply, StoreReply)
    assert reply.tensors["gate_up"].shape == (len(experts), last - first, 2, HIDDEN)


@given(
    name=st.sampled_from(["config.json", MANIFEST_NAME, "dense.safetensors"]),
    offset=st.integers(0, 300) | st.integers(0, 2**64 - 1), length=st.integers(1, 2**32 - 1),
)  # fmt: skip
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_piece_of_a_file(worker: StoreWorker, folder: Path, name: str, offset: int, length: int) -> None:
    data = (folder / name).read_bytes()
    try:
        reply = worker.handle(FileRequest(name, offset, length))
    except StoreError:
        assert offset > len(data)
        return
    assert isinstance(reply, FileReply)
    assert reply.size == len(data)
    assert reply.data.tobytes() == data[offset : offset + length]


def test_the_dense_weights_of_a_model(folder: Path, worker: StoreWorker, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr("tiermoe.actors.store.dense.PIECE_BYTES", 50)
    here = tmp_path / "here"
    here.mkdir()
    view = fetch_dense(link_to(worker), here, SETTINGS)
    assert view.layers == ()
    assert view.manifest == worker.describe().manifest
    assert sorted(path.name for path in here.iterdir()) == ["config.json", "dense.safetensors", MANIFEST_NAME]
    for path in here.iterdir():
        assert path.read_bytes() == (folder / path.name).read_bytes()


def test_dense_weights_come_from_the_next_store_where_one_ends_in_the_middle(
    folder: Path, tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.setattr("tiermoe.actors.store.dense.PIECE_BYTES", 50)
    here = tmp_path / "here"
    here.mkdir()
    with (
        closing(StoreWorker(str(folder), 0, directory=LocalDirectory())) as first,
        closing(StoreWorker(str(folder), 1, directory=LocalDirectory())) as second,
    ):
        given_pieces = first._file

        def ends(request: FileRequest) -> FileReply:
            if request.name == "dense.safetensors" and request.offset:
                raise StoreError("the disk is gone", "replace it")
            return given_pieces(request)

        first._file = ends  # type: ignore[method-assign]
        fetch_dense(link_to(first, second), here, SETTINGS)
    assert (here / "dense.safetensors").read_bytes() == (folder / "dense.safetensors").read_bytes()


def test_altered_dense_weights_are_refused(folder: Path, worker: StoreWorker, tmp_path: Path) -> None:
    manifest = bytearray((folder / MANIFEST_NAME).read_bytes())
    manifest[-10] ^= 1
    for name, data, why in (
        ("config.json", b"[]", r"config.json of store/0 does not match its SHA-256"),
        ("config.json", b"{} ", "3 bytes, not 2"),
        (MANIFEST_NAME, manifest, "manifest of store/0"),
    ):
        (folder / name).write_bytes(data)
        with pytest.raises(StoreError, match=why):
            fetch_dense(link_to(worker), tmp_path, SETTINGS)


def test_no_store_to_give_the_dense_weights(tmp_path: Path) -> None:
    links = [StoreLink("store/0", (0,), PeerLink(LocalDirectory(), name="store/0"))]
    with pytest.raises(StoreError, match=r"manifest.json was not had from a store \(store/0: store/0 registered no"):
        fetch_dense(links, tmp_path, StoreSettings(deadline_s=0.2))
