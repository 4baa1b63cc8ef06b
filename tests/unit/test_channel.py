"""Both transports alike: ids, deadlines, typed errors, bounds, back-pressure."""

from __future__ import annotations

import contextlib
import gc
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import grpc
import numpy as np
import pytest
from channel_peer import batch, wait_until
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tiermoe.errors import (
    ChannelRefused,
    ConfigError,
    DeadlinePassed,
    MessageError,
    MessageTooLarge,
    PeerLost,
    RemoteFailure,
    StoreError,
)
from tiermoe.proto import codec, grpc_transport
from tiermoe.proto.channel import Channel, Pending, open_channel
from tiermoe.proto.codec import encode, to_bytes
from tiermoe.proto.messages import ExpertBatch, ExpertResult, HealthReport, HealthRequest, Hello, Message, StoreRequest
from tiermoe.proto.options import ChannelOptions, Limits, ServerOptions
from tiermoe.proto.server import ChannelServer

TRANSPORTS = ("grpc", "shm") if sys.platform == "linux" else ("grpc",)
_SOON_S = 5.0


class Worker:
    """A handler that counts what it runs, and waits where a test tells it to."""

    def __init__(self) -> None:
        self.layers: list[int] = []
        self.go = threading.Event()
        self.started = threading.Event()
        self.go.set()

    def __call__(self, message: Message) -> Message | None:
        if isinstance(message, ExpertBatch):
            self.started.set()
            self.go.wait(_SOON_S)
            self.layers.append(message.layer)
            return ExpertResult(message.hidden + 1, float(message.layer), 0.0, 0.0)
        if isinstance(message, StoreRequest):
            raise StoreError("layer 1 is damaged", "prepare the store again")
        if isinstance(message, HealthRequest):
            raise ZeroDivisionError("by accident")
        return None


@pytest.fixture(params=TRANSPORTS)
def transport(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def worker() -> Worker:
    return Worker()


Opener = Callable[..., Channel]


def seconds(pending: Pending) -> float:
    """The layer of the batch, as `Worker` answers it."""
    reply = pending.result()
    assert isinstance(reply, ExpertResult)
    return reply.measured_s


@pytest.fixture
def connect(transport: str, worker: Worker) -> Iterator[Opener]:
    """Start a server and open a channel to it."""
    things: list[Channel | ChannelServer] = []

    def connect(server: ServerOptions | None = None, **options: object) -> Channel:
        things.append(ChannelServer(worker, server))
        things.append(open_channel(things[-1].address, ChannelOptions(transport=transport, **options)))  # type: ignore
        return things[-1]  # type: ignore[return-value]

    yield connect
    worker.go.set()
    for thing in reversed(things):
        thing.close()


def test_a_batch_is_answered(connect: Opener, transport: str) -> None:
    channel = connect()
    assert (channel.transport, channel.alive, channel.closed_because) == (transport, True, None)
    reply = channel.call(batch(layer=4), _SOON_S)
    assert isinstance(reply, ExpertResult)
    assert reply.measured_s == 4.0
    np.testing.assert_array_equal(reply.partial, batch().hidden + 1)
    assert channel.call(HealthReport("lead", {}), _SOON_S) is None  # an acknowledgement


def test_both_sides_count_the_same(transport: str, worker: Worker) -> None:
    """Over all connections of the same options, also those that have ended."""
    options = ChannelOptions(transport=transport)  # type: ignore[arg-type]
    with ChannelServer(worker) as server:
        for _ in range(2):
            with open_channel(server.address, options) as channel:
                assert channel.post(batch())
                channel.call(batch(), _SOON_S)
                with pytest.raises(RemoteFailure):
                    channel.call(HealthRequest(), _SOON_S)
            wait_until(lambda: server.connections == 0)
        here, there = options.traffic, server.traffic
    assert (here.messages_sent, here.messages_received) == (6, 4)
    assert (here.messages_sent, here.messages_received) == (there.messages_received, there.messages_sent)
    assert (here.bytes_sent, here.bytes_received) == (there.bytes_received, there.bytes_sent)
    assert here.waited_s > 0 < there.answering_s
    assert here.answering_s == there.waited_s == 0


def test_answers_may_be_taken_in_any_order_and_by_several_threads(connect: Opener) -> None:
    channel = connect(ring_bytes=4096)
    pendings = [channel.submit(batch(layer=n), _SOON_S) for n in range(20)]
    order = [int(n) for n in np.random.default_rng(0).permutation(20)]
    with ThreadPoolExecutor(6) as pool:
        assert list(pool.map(lambda n: seconds(pendings[n]), order, timeout=_SOON_S)) == [float(n) for n in order]
    assert all(pending.done() for pending in pendings)


def test_errors_keep_their_kind(connect: Opener) -> None:
    channel = connect()
    with pytest.raises(RemoteFailure, match="layer 1 is damaged; prepare the store again") as caught:
        channel.call(StoreRequest(1, np.array([1], np.int32)), _SOON_S)
    assert caught.value.kind == "StoreError"
    with pytest.raises(RemoteFailure, match="ZeroDivisionError: by accident") as caught:
        channel.call(HealthRequest(), _SOON_S)
    assert caught.value.kind == "InternalError"
    assert isinstance(channel.call(batch(), _SOON_S), ExpertResult)  # and the channel goes on


def test_what_the_server_does_not_accept_is_a_typed_error(connect: Opener, worker: Worker) -> None:
    channel = connect(ServerOptions(limits=Limits(layers=4)))
    with pytest.raises(RemoteFailure, match="layer 4 is not below 4") as caught:
        channel.call(batch(layer=4), _SOON_S)
    assert caught.value.kind == "MessageError"
    assert worker.layers == []


def test_messages_that_are_malformed_or_above_either_bound_are_not_sent(connect: Opener) -> None:
    channel = connect(ServerOptions(limits=Limits(max_message_bytes=4096)))
    with pytest.raises(MessageError):
        channel.submit("hello", 1.0)  # type: ignore[arg-type]
    with pytest.raises(MessageTooLarge, match="4096"):
        channel.call(batch(64, 64), _SOON_S)
    assert isinstance(channel.call(batch(), _SOON_S), ExpertResult)


def test_an_answer_that_is_too_large_is_an_error(connect: Opener) -> None:
    channel = connect(ServerOptions(limits=Limits(max_message_bytes=8192)))
    half = batch(32, 64)
    with pytest.raises(RemoteFailure) as caught:  # float16 comes back as float32, twice as large
        channel.call(ExpertBatch(
            half.layer, half.experts, half.bits, half.starts, half.rows, half.weights,
            half.hidden.astype(np.float16).repeat(1, 0)), _SOON_S)  # fmt: skip
    assert caught.value.kind in ("MessageTooLarge", "MessageError")


def test_the_deadline_ends_the_wait_and_unstarted_work(connect: Opener, worker: Worker) -> None:
    channel = connect()
    worker.go.clear()
    first = channel.submit(batch(layer=1), 30.0)
    second = channel.submit(batch(layer=2), 0.1)
    begin = time.monotonic()
    with pytest.raises(DeadlinePassed):
        second.result()
    assert time.monotonic() - begin < _SOON_S
    threading.Event().wait(0.05)  # the server may think up to one way's time that the deadline is still to come
    worker.go.set()
    assert isinstance(first.result(), ExpertResult)
    assert isinstance(channel.call(batch(layer=3), _SOON_S), ExpertResult)
    assert worker.layers == [1, 3]  # the second came to its turn after its deadline


def test_a_full_way_makes_submit_wait_and_drops_posts(connect: Opener, worker: Worker) -> None:
    channel = connect(ring_bytes=4096, queued_bytes=4096)
    worker.go.clear()
    some = batch(5, 128) if channel.transport == "shm" else batch(1024, 1024)  # gRPC's own windows take more
    first = channel.submit(batch(), _SOON_S)
    assert worker.started.wait(_SOON_S)

    def fill() -> None:
        for _ in range(10):
            channel.submit(some, 0.2)

    with pytest.raises(DeadlinePassed, match="full"):
        fill()
    assert [channel.post(some) for _ in range(5)] == [False] * 5
    worker.go.set()
    assert isinstance(first.result(), ExpertResult)


@pytest.mark.parametrize(("count", "rows", "width"), [(4, 100, 128), (3, 300, 1024), (50, 4, 32)])
def test_answers_that_no_caller_takes_do_not_block_requests(connect: Opener, count: int, rows: int, width: int) -> None:
    """Guards against both sides waiting for each other, also in the middle of a message longer than the ring."""
    channel = connect(ring_bytes=4096)
    pendings = [channel.submit(batch(rows, width, layer=n), _SOON_S) for n in range(count)]
    assert [seconds(pending) for pending in pendings] == list(range(count))


def test_posts_arrive_and_one_that_fails_ends_nothing(connect: Opener, worker: Worker) -> None:
    channel = connect()
    assert channel.post(HealthRequest())
    assert channel.post(batch(layer=7))
    wait_until(lambda: worker.layers == [7])
    assert isinstance(channel.call(batch(), _SOON_S), ExpertResult)


def test_a_server_that_closes_is_lost_at_once(connect: Opener, worker: Worker, transport: str) -> None:
    server = ChannelServer(worker)
    channel = open_channel(server.address, ChannelOptions(transport=transport, liveness_s=20))  # type: ignore[arg-type]
    worker.go.clear()
    pending = channel.submit(batch(), 30.0)
    assert worker.started.wait(_SOON_S)
    closer = threading.Thread(target=server.close)
    begin = time.monotonic()
    closer.start()
    with pytest.raises(PeerLost):
        pending.result()
    assert time.monotonic() - begin < _SOON_S
    assert not channel.alive
    worker.go.set()
    closer.join(_SOON_S)
    channel.close()


@pytest.mark.skipif(sys.platform != "linux", reason="shared memory")
def test_a_channel_that_is_over_frees_its_memory_at_once(worker: Worker) -> None:
    """Each kept its descriptors until a full garbage collection, which a lead does hardly ever."""

    def rings() -> int:
        found = 0
        for number in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):  # closed meanwhile
                found += "tiermoe-channel" in os.readlink(f"/proc/self/fd/{number}")
        return found

    gc.collect()
    before = rings()
    gc.disable()
    try:
        with ChannelServer(worker, ServerOptions()) as server:
            for _ in range(3):
                with open_channel(server.address, ChannelOptions(transport="shm")) as channel:
                    assert seconds(channel.submit(batch(3), _SOON_S)) == 3.0
                del channel
            wait_until(lambda: rings() == before)
    finally:
        gc.enable()


def test_close_ends_a_wait(connect: Opener, worker: Worker) -> None:
    channel = connect()
    worker.go.clear()
    pending = channel.submit(batch(), 30.0)
    assert worker.started.wait(_SOON_S)
    threading.Timer(0.05, channel.close).start()
    with pytest.raises(PeerLost, match="the channel was closed"):
        pending.result()


def test_a_token_is_demanded(transport: str, worker: Worker) -> None:
    with ChannelServer(worker, ServerOptions(token="right")) as server:
        for token in (None, "wrong", "righ", "right "):
            with pytest.raises(ChannelRefused, match="refused the token"):
                open_channel(server.address, ChannelOptions(transport=transport, token=token))  # type: ignore[arg-type]
        assert server.connections == 0
        options = ChannelOptions(transport=transport, token="right")  # type: ignore[arg-type]
        with open_channel(server.address, options) as channel:
            assert isinstance(channel.call(batch(), _SOON_S), ExpertResult)
        assert "right" not in repr(options)


def test_calls_without_the_token_hold_nothing(worker: Worker) -> None:
    """Guards: 136 calls that sent no message took all places; messages were received before the token was read."""
    calls = ["/grpc.health.v1.Health/Check", grpc_transport.EXCHANGE, "/grpc.health.v1.Health/Watch", "/no/such"]
    never = threading.Event()

    def silent() -> Iterator[bytes]:
        never.wait(_SOON_S)
        yield b""

    with ChannelServer(worker, ServerOptions(token="right", max_connections=1)) as server:
        with grpc.insecure_channel(server.address) as plain:
            held = [plain.stream_stream(calls[i % len(calls)])(silent()) for i in range(100)]
            with open_channel(server.address, ChannelOptions(token="right")) as channel:
                assert isinstance(channel.call(batch(), _SOON_S), ExpertResult)
            codes = {call.code() for call in held}
            assert codes <= {grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.UNIMPLEMENTED}
            assert grpc.StatusCode.UNAUTHENTICATED in codes  # without the message of a unary call
            never.set()
        with grpc.insecure_channel(server.address) as plain:
            check = health_pb2_grpc.HealthStub(plain).Check
            with pytest.raises(grpc.RpcError, match="token"):
                check(health_pb2.HealthCheckRequest(), timeout=_SOON_S)
            metadata = ((grpc_transport.TOKEN_KEY, "right"),)
            assert check(health_pb2.HealthCheckRequest(), timeout=_SOON_S, metadata=metadata).status == 1
        assert worker.layers == [3]


def test_no_server_and_too_many_connections(worker: Worker) -> None:
    with pytest.raises(ChannelRefused, match="no channel server answers"):
        open_channel("127.0.0.1:1", ChannelOptions(open_deadline_s=2.0))
    with (
        ChannelServer(worker, ServerOptions(max_connections=1)) as server,
        open_channel(server.address),
        pytest.raises(ChannelRefused, match="too many connections"),
    ):
        open_channel(server.address)


def test_auto_falls_back_to_grpc_where_memory_is_not_shared(worker: Worker) -> None:
    with ChannelServer(worker, ServerOptions(shared_memory=False)) as server:
        with open_channel(server.address) as channel:
            assert channel.transport == "grpc"
        with pytest.raises(ChannelRefused, match="cannot share memory"):
            open_channel(server.address, ChannelOptions(transport="shm"))


def test_any_grpc_client_gets_the_health_and_nothing_else(worker: Worker) -> None:
    with ChannelServer(worker) as server, grpc.insecure_channel(server.address) as plain:
        stub = health_pb2_grpc.HealthStub(plain)
        answer = stub.Check(health_pb2.HealthCheckRequest(service="tiermoe.v1.Channel"), timeout=_SOON_S)
        assert answer.status == health_pb2.HealthCheckResponse.SERVING
        data = b"".join(codec.pack(encode(batch()), 1, 0, codec.REQUEST, 1 << 20)[0])
        with pytest.raises(grpc.RpcError):
            list(plain.stream_stream(grpc_transport.EXCHANGE)(iter([data]), timeout=_SOON_S))
        hello = to_bytes(Hello(grpc_transport.PROTOCOL_VERSION, 1, 4096))
        older = to_bytes(Hello(grpc_transport.PROTOCOL_VERSION - 1, 1, 4096))
        for first, why in ((b"\xff", "begins with"), (hello[:-1], "begins with"), (older, "speaks version")):
            with pytest.raises(grpc.RpcError, match=why):
                list(plain.stream_stream(grpc_transport.CONTROL)(iter([first]), timeout=_SOON_S))


def test_without_a_token_only_loopback_is_bound() -> None:
    for host in ("0.0.0.0", "::", "192.168.1.1", "node-3"):
        with pytest.raises(ConfigError, match="open to everybody"):
            ServerOptions(host=host)
    assert ServerOptions(host="0.0.0.0", token="t").token == "t"
