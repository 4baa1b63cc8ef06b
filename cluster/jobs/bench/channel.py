"""`tiermoe bench channel`: round trips over shared memory and gRPC, beside a bare gRPC stream and a Ray actor call."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import grpc
import numpy as np
from rich.progress import Progress

from ....errors import RuntimeFailure
from ....proto import grpc_transport
from ....proto.channel import Channel, open_channel
from ....proto.messages import ExpertBatch, ExpertResult
from ....proto.options import ChannelOptions, Limits
from ...config import RaySettings, RunConfig, engine_settings
from ...deploy import Deployment
from .channel_peer import BARE_ECHO, NO_MODEL, EchoWorker, NoStore
from .metrics import Bar, Case, Measures, Report, interleaved, ratio, rows_of

WIDTH, TOP_K = 2048, 8
SIZES = {"8 KiB": 1, "1 MiB": 128}  # rows of float32
TRIPS = {"8 KiB": 400, "1 MiB": 60}
RAY_TRIPS = 40
_DEADLINE_S = 30.0
_START_S = 60.0


def bench_channel(repeats: int, progress: Progress | None) -> Report:
    """p50 and p99 of round trips to another process, of 8 KiB and 1 MiB each way.

    A round trip of a channel is an `ExpertBatch` encoded, checked, answered by an `ExpertResult` and that decoded; of
    the others it is bytes (a string for Ray) there and back. The two processes have a core each where there are two.

    Bars: at 8 KiB shared memory <= 1/20 of the gRPC channel; the gRPC channel <= 1.3 of the bare stream.
    """
    ours, theirs = _cores()
    settings = {
        "repeats": repeats, "trips": TRIPS, "ray_trips": RAY_TRIPS, "width": WIDTH, "top_k": TOP_K,
        "bound_to_cores": None if ours is None else [ours, theirs], "spin_s": ChannelOptions().spin_s,
    }  # fmt: skip
    report = Report("channel", "real", settings=settings)
    with contextlib.ExitStack() as stack:
        config = RunConfig(threads=1, ray=RaySettings(num_cpus=2))
        runtime = stack.enter_context(
            Deployment(
                config, engine_settings(config), "", worker_class=EchoWorker, store_class=NoStore, facts=NO_MODEL
            )
        )
        if ours is not None:  # after Ray, whose processes would inherit it
            before = os.sched_getaffinity(0)
            stack.callback(os.sched_setaffinity, 0, before)
            os.sched_setaffinity(0, {ours})
        addresses = stack.enter_context(_peer(theirs))
        channels = [
            stack.enter_context(open_channel(addresses["channel"], ChannelOptions(transport=transport)))
            for transport in ("shm", "grpc")
        ]
        bare = stack.enter_context(_bare_stream(addresses["bare"]))
        cases = []
        for size, rows in SIZES.items():
            data = bytes(rows * WIDTH * 4)
            text = "x" * len(data)
            cases += [
                *(_case(f"{channel.transport} {size}", _batches(channel, rows), TRIPS[size]) for channel in channels),
                _case(f"bare grpc {size}", lambda data=data: bare(data), TRIPS[size]),  # type: ignore[misc]
                _case(f"ray {size}", lambda text=text: runtime.cancel(text), RAY_TRIPS),  # type: ignore[misc]
            ]
        results = interleaved(cases, repeats, 1, progress)
    report.rows = rows_of(results)
    p50 = {name: measures["p50_us"].median for name, measures in results.items()}
    report.bars = [
        Bar("shm over gRPC channel, 8 KiB", ratio(p50["shm 8 KiB"], p50["grpc 8 KiB"]), "<=", 1 / 20),
        *(
            Bar(f"gRPC channel over bare stream, {s}", ratio(p50[f"grpc {s}"], p50[f"bare grpc {s}"]), "<=", 1.3)
            for s in SIZES
        ),
    ]
    return report


def _case(name: str, trip: Callable[[], object], trips: int) -> Case:
    def run() -> Measures:
        times = []
        for _ in range(trips):
            begin = time.perf_counter()
            trip()
            times.append(time.perf_counter() - begin)
        p50, p99 = np.percentile(times, (50, 99)) * 1e6
        return {"p50_us": float(p50), "p99_us": float(p99)}

    return Case(name, run)


def _batches(channel: Channel, rows: int) -> Callable[[], object]:
    """The call of a decoding step (one row through 8 experts) or of a prefill (128 rows, 16 for each)."""
    pairs = max(TOP_K, rows)
    numbers = np.arange(pairs, dtype=np.int32) % rows
    batch = ExpertBatch(
        layer=0,
        experts=np.arange(TOP_K, dtype=np.int32),
        bits=np.full(TOP_K, 3, np.uint8),
        starts=np.linspace(0, pairs, TOP_K + 1, dtype=np.int32),
        rows=numbers,
        weights=np.full(pairs, 1 / TOP_K, np.float32),
        hidden=np.random.default_rng(0).standard_normal((rows, WIDTH), np.float32),
    )

    def trip() -> None:
        reply = channel.call(batch, _DEADLINE_S)
        if not isinstance(reply, ExpertResult) or reply.partial.shape != batch.hidden.shape:
            raise RuntimeFailure("the peer answered with something else", "report this as a bug")

    return trip


def _cores() -> tuple[int, int] | tuple[None, None]:
    if not hasattr(os, "sched_getaffinity"):
        return None, None
    cores = sorted(os.sched_getaffinity(0))
    return (cores[0], cores[1]) if len(cores) > 1 else (None, None)


@contextlib.contextmanager
def _peer(core: int | None) -> Iterator[dict[str, str]]:
    module = f"{__package__}.channel_peer"
    arguments = [] if core is None else [str(core)]
    process = subprocess.Popen(
        [sys.executable, "-m", module, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        if not line:
            raise RuntimeFailure("the peer did not start", "its own words are above")
        yield json.loads(line)
    finally:
        process.kill()  # it holds nothing that wants saving
        process.communicate(timeout=_START_S)


@contextlib.contextmanager
def _bare_stream(address: str) -> Iterator[Callable[[bytes], bytes]]:
    outgoing: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
    with grpc.insecure_channel(address, options=grpc_transport.settings(Limits().max_message_bytes)) as channel:
        replies = channel.stream_stream(BARE_ECHO)(iter(outgoing.get, None))

        def trip(data: bytes) -> bytes:
            outgoing.put(data)
            return next(replies)

        try:
            yield trip
        finally:
            outgoing.put(None)
            replies.cancel()
