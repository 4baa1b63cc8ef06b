"""`bench channel`: round trips between two processes."""

from __future__ import annotations

import contextlib
import os
import queue
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from multiprocessing import get_context
from typing import TYPE_CHECKING, Any

import grpc
import numpy as np
import ray
from rich.progress import Progress

from tiermoe.cluster.jobs.bench.metrics import Bar, Case, Measures, Report, interleaved, ratio, rows_of
from tiermoe.cluster.ray_session import leave, start_local
from tiermoe.cluster.scratch import Scratch
from tiermoe.errors import RuntimeFailure
from tiermoe.proto import grpc_transport, shm
from tiermoe.proto.channel import Channel, open_channel
from tiermoe.proto.messages import ExpertBatch, ExpertResult, Message
from tiermoe.proto.options import ChannelOptions, Limits, TransportChoice
from tiermoe.proto.server import ChannelServer

if TYPE_CHECKING:
    from . import cases

HIDDEN, TOP_K = 2048, 8
SIZES = {"8 KiB": 1, "1 MiB": 128}  # rows of float32
TRIPS = {"8 KiB": 400, "1 MiB": 60}
RAY_TRIPS = 40
RAY_STORE_BYTES = 80_000_000

_DEADLINE_S = 30.0
_BARE_ECHO = "/bench/Echo"


def channel(options: cases.Channel, progress: Progress | None) -> Report:
    """p50 and p99 of round trips to another process, of 8 KiB and 1 MiB each way.

    A round trip of a channel is an `ExpertBatch` encoded, checked, answered by an `ExpertResult` and that decoded; of
    the others it is bytes (a string for Ray) there and back. What the bare ones take is the transport's; the rest of a
    channel's time is Python's on both sides. The two processes have a core each where there are two.

    Bars: at 8 KiB shared memory <= 5 of the bare ring, and <= 1/8 of the gRPC channel; the gRPC channel <= 1.8 of the
    bare stream.
    """
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    ours, theirs = cores[:2] if len(cores) > 1 else (None, None)
    settings = options.settings(
        trips=TRIPS, ray_trips=RAY_TRIPS, width=HIDDEN, top_k=TOP_K,
        bound_to_cores=None if ours is None else [ours, theirs], spin_s=ChannelOptions().spin_s,
    )  # fmt: skip
    report = Report("channel", "real", settings=settings)
    with contextlib.ExitStack() as stack:
        echo = stack.enter_context(_echo_actor())
        if ours is not None:  # after Ray, whose processes would inherit it
            stack.callback(os.sched_setaffinity, 0, os.sched_getaffinity(0))
            os.sched_setaffinity(0, {ours})
        process = stack.enter_context(ProcessPoolExecutor(1, get_context("spawn")))
        addresses = process.submit(_echoes, theirs).result()
        stack.callback(lambda: process.submit(_close_servers).result())
        channels = [
            stack.enter_context(open_channel(addresses["channel"], ChannelOptions(transport=transport)))
            for transport in ("shm", "grpc")
        ]
        bare = stack.enter_context(_bare_stream(addresses["bare"]))
        ring = stack.enter_context(_bare_ring(process))
        cases = []
        for size, rows in SIZES.items():
            data = bytes(rows * HIDDEN * 4)
            text = "x" * len(data)
            cases += [
                *(_trips(f"{one.transport} {size}", _expert_batch(one, rows), TRIPS[size]) for one in channels),
                _trips(f"bare ring {size}", lambda data=data: ring(data), TRIPS[size]),  # type: ignore[misc]
                _trips(f"bare grpc {size}", lambda data=data: bare(data), TRIPS[size]),  # type: ignore[misc]
                _trips(f"ray {size}", lambda text=text: echo(text), RAY_TRIPS),  # type: ignore[misc]
            ]
        results = interleaved(cases, options.repeats, 1, progress)
    report.rows = rows_of(results)
    p50 = {name: measures["p50_us"].median for name, measures in results.items()}
    report.bars = [
        Bar("shm over bare ring, 8 KiB", ratio(p50["shm 8 KiB"], p50["bare ring 8 KiB"]), "<=", 5.0),
        Bar("shm over gRPC channel, 8 KiB", ratio(p50["shm 8 KiB"], p50["grpc 8 KiB"]), "<=", 1 / 8),
        *(
            Bar(f"gRPC channel over bare stream, {s}", ratio(p50[f"grpc {s}"], p50[f"bare grpc {s}"]), "<=", 1.8)
            for s in SIZES
        ),
    ]
    return report


def round_trip_us(transport: TransportChoice) -> float:
    """Microseconds of 8 KiB there and back to another process over a channel of this transport: the median."""
    with ProcessPoolExecutor(1, get_context("spawn")) as process:
        address = process.submit(_echoes, None).result()["channel"]
        try:
            with open_channel(address, ChannelOptions(transport=transport)) as channel:
                case = _trips(transport, _expert_batch(channel, SIZES["8 KiB"]), TRIPS["8 KiB"])
                case.run()
                return case.run()["p50_us"]
        finally:
            process.submit(_close_servers).result()


def _trips(name: str, trip: Callable[[], object], trips: int) -> Case:
    def run() -> Measures:
        times = []
        for _ in range(trips):
            begin = time.perf_counter()
            trip()
            times.append(time.perf_counter() - begin)
        p50, p99 = np.percentile(times, (50, 99)) * 1e6
        return {"p50_us": float(p50), "p99_us": float(p99)}

    return Case(name, run)


def _expert_batch(channel: Channel, rows: int) -> Callable[[], object]:
    """The call of a decoding step (one row through 8 experts) or of a prefill (128 rows, 16 for each)."""
    pairs = max(TOP_K, rows)
    batch = ExpertBatch(
        layer=0,
        experts=np.arange(TOP_K, dtype=np.int32),
        bits=np.full(TOP_K, 3, np.uint8),
        starts=np.linspace(0, pairs, TOP_K + 1, dtype=np.int32),
        rows=np.arange(pairs, dtype=np.int32) % rows,
        weights=np.full(pairs, 1 / TOP_K, np.float32),
        hidden=np.random.default_rng(0).standard_normal((rows, HIDDEN), np.float32),
    )

    def trip() -> None:
        reply = channel.call(batch, _DEADLINE_S)
        if not isinstance(reply, ExpertResult) or reply.partial.shape != batch.hidden.shape:
            raise RuntimeFailure("the peer answered with something else", "report this as a bug")

    return trip


class Echo:
    """For Ray: an actor that returns its argument."""

    def echo(self, text: str) -> str:
        return text


@contextlib.contextmanager
def _echo_actor() -> Iterator[Callable[[str], str]]:
    """A call of an actor of a Ray on this machine."""
    with contextlib.closing(Scratch()) as scratch:
        try:
            start_local(scratch, 2, {}, RAY_STORE_BYTES, 1)
            actor = ray.remote(num_cpus=0)(Echo).remote()
            yield lambda text: ray.get(actor.echo.remote(text))
        finally:
            leave()


@contextlib.contextmanager
def _bare_stream(address: str) -> Iterator[Callable[[bytes], bytes]]:
    outgoing: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
    with grpc.insecure_channel(address, options=grpc_transport.settings(Limits().max_message_bytes)) as connection:
        replies = connection.stream_stream(_BARE_ECHO)(iter(outgoing.get, None))

        def trip(data: bytes) -> bytes:
            outgoing.put(data)
            return next(replies)

        try:
            yield trip
        finally:
            outgoing.put(None)
            replies.cancel()


@contextlib.contextmanager
def _bare_ring(process: ProcessPoolExecutor) -> Iterator[Callable[[bytes], bytes]]:
    """Bytes through the rings of shared memory, without messages."""
    offered = shm.offer(ChannelOptions().ring_bytes, ChannelOptions().spin_s)
    try:
        process.submit(_echo_ring, os.getpid(), offered.fd, offered.ring_bytes).result()
    finally:
        offered.close_fd()
    rings = offered.rings

    def trip(data: bytes) -> bytes:
        rings.requests.write((data,), _DEADLINE_S)
        found = rings.replies.read(_DEADLINE_S, Limits().max_message_bytes)
        if found is None:
            raise RuntimeFailure("the peer answered with something else", "report this as a bug")
        return bytes(found)

    try:
        yield trip
    finally:
        rings.close()


_servers = contextlib.ExitStack()  # of the other process


def _echoes(core: int | None) -> dict[str, str]:
    """In the other process: a channel server and a bare gRPC stream with the channel's settings, which both echo.

    core: to which the process is bound first. Returns both addresses.
    """

    def answer(message: Message) -> Message | None:
        assert isinstance(message, ExpertBatch)
        return ExpertResult(message.hidden, 0.0, 0.0, 0.0)

    def echo(incoming: Iterator[bytes], context: Any) -> Iterator[bytes]:
        yield from incoming

    class BareEcho:
        def service(self, details: Any) -> Any:
            return grpc.stream_stream_rpc_method_handler(echo) if details.method == _BARE_ECHO else None

    if core is not None:  # before the servers, whose threads inherit it
        os.sched_setaffinity(0, {core})
    server = _servers.enter_context(ChannelServer(answer))
    options = grpc_transport.settings(Limits().max_message_bytes)
    bare = grpc.server(ThreadPoolExecutor(4), options=options)
    bare.add_generic_rpc_handlers((BareEcho(),))
    port = bare.add_insecure_port("127.0.0.1:0")
    bare.start()
    _servers.callback(lambda: bare.stop(None).wait(2.0))
    return {"channel": server.address, "bare": f"127.0.0.1:{port}"}


def _echo_ring(pid: int, fd: int, ring_bytes: int) -> None:
    """In the other process: echo what comes through an offered pair of rings, until it is closed."""
    found = shm.accept(pid, fd, ring_bytes, ChannelOptions().spin_s)
    assert found is not None  # the same user on the same machine
    rings = found[0]

    def echo() -> None:
        with contextlib.suppress(shm.RingEnded):
            while True:
                data = rings.requests.read(_DEADLINE_S, Limits().max_message_bytes)
                if data is not None:
                    rings.replies.write((data,), _DEADLINE_S)

    threading.Thread(target=echo, daemon=True).start()


def _close_servers() -> None:
    _servers.close()
