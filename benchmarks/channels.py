"""Micro-benchmarks between two processes: `channel` (round trips) and `matcher` (expert maps and their publication)."""

from __future__ import annotations

import contextlib
import functools
import os
import queue
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, ProcessPoolExecutor, ThreadPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

import grpc
import numpy as np
import psutil
import ray
from rich.progress import Progress

from tiermoe.actors.engine.peers.matcher import MatcherLink
from tiermoe.actors.policies.fmoe import ExpertMapPrefetch
from tiermoe.actors.policies.fmoe.maps import WIDTH as EMBEDDING_WIDTH
from tiermoe.actors.policies.fmoe.maps import ExpertMapStore, Sketch, unit_rows
from tiermoe.actors.settings import MatcherSettings
from tiermoe.actors.store.artifacts import MapShape, save_maps
from tiermoe.cluster.config import default_model_dir
from tiermoe.cluster.host import thread_limits
from tiermoe.cluster.jobs.bench.metrics import Bar, Case, Measures, Report, interleaved, ratio, rows_of
from tiermoe.cluster.jobs.prediction import ROUTING
from tiermoe.cluster.ray_session import leave, start_local
from tiermoe.cluster.scratch import Scratch
from tiermoe.cluster.simulate.shapes import shape_named
from tiermoe.cluster.simulate.trace import Trace
from tiermoe.cluster.worker_process import Role, WorkerProcess
from tiermoe.errors import RuntimeFailure
from tiermoe.proto import grpc_transport
from tiermoe.proto.channel import Channel, open_channel
from tiermoe.proto.messages import ExpertBatch, ExpertResult, Message
from tiermoe.proto.options import ChannelOptions, Limits
from tiermoe.proto.server import ChannelServer

if TYPE_CHECKING:
    from . import cases

HIDDEN, TOP_K = 2048, 8
SIZES = {"8 KiB": 1, "1 MiB": 128}  # rows of float32
TRIPS = {"8 KiB": 400, "1 MiB": 60}
RAY_TRIPS = 40
RAY_STORE_BYTES = 80_000_000

_OF_TABLE = ("mixtral-8x7b", "qwen1.5-moe-a2.7b", "deepseek-v2-lite")  # models of configs/shapes
LARGEST = 50_000  # maps
CAPACITIES = (1000, 10_000, LARGEST)
DISTANCE = 3  # of the matcher's forecasts
LAYER_S = 1e-3  # of a layer of the publishing lead
LATE_S = 1.0  # that the lead waits for one command
ITERATIONS = 6  # of each repetition of publishing

_DEADLINE_S = 30.0
_BARE_ECHO = "/bench/Echo"


@contextlib.contextmanager
def other_process(**environment: str) -> Iterator[Executor]:
    """A process that runs functions of this module; a submitted one that ends it raises `BrokenProcessPool`.

    environment: read by numerical libraries when they are loaded.
    """
    with ProcessPoolExecutor(1, get_context("spawn")) as process:
        with mock.patch.dict(os.environ, environment):
            process.submit(os.getpid).result()  # it is started
        yield process


# -- channel -----------------------------------------------------------------------------------------------------------


def channel(options: cases.Channel, progress: Progress | None) -> Report:
    """p50 and p99 of round trips to another process, of 8 KiB and 1 MiB each way.

    A round trip of a channel is an `ExpertBatch` encoded, checked, answered by an `ExpertResult` and that decoded; of
    the others it is bytes (a string for Ray) there and back. The two processes have a core each where there are two.

    Bars: at 8 KiB shared memory <= 1/20 of the gRPC channel; the gRPC channel <= 1.3 of the bare stream.
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
        process = stack.enter_context(other_process())
        addresses = process.submit(_echoes, theirs).result()
        stack.callback(lambda: process.submit(_close_servers).result())
        channels = [
            stack.enter_context(open_channel(addresses["channel"], ChannelOptions(transport=transport)))
            for transport in ("shm", "grpc")
        ]
        bare = stack.enter_context(_bare_stream(addresses["bare"]))
        cases = []
        for size, rows in SIZES.items():
            data = bytes(rows * HIDDEN * 4)
            text = "x" * len(data)
            cases += [
                *(_trips(f"{one.transport} {size}", _expert_batch(one, rows), TRIPS[size]) for one in channels),
                _trips(f"bare grpc {size}", lambda data=data: bare(data), TRIPS[size]),  # type: ignore[misc]
                _trips(f"ray {size}", lambda text=text: echo(text), RAY_TRIPS),  # type: ignore[misc]
            ]
        results = interleaved(cases, options.repeats, 1, progress)
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


def _trips(name: str, trip: Callable[[], object], trips: int) -> Case:
    def run() -> Measures:
        times = []
        for _ in range(trips):
            begin = time.perf_counter()
            trip()
            times.append(time.perf_counter() - begin)
        return _percentiles("", times)

    return Case(name, run)


def _percentiles(prefix: str, times_s: list[float]) -> Measures:
    p50, p99 = np.percentile(times_s, (50, 99)) * 1e6
    return {f"{prefix}p50_us": float(p50), f"{prefix}p99_us": float(p99)}


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


def _close_servers() -> None:
    _servers.close()


# -- matcher -----------------------------------------------------------------------------------------------------------


def matcher(options: cases.Matcher, progress: Progress | None) -> Report:
    """Stores of 1K, 10K and 50K maps for four models, on one thread; and a lead that publishes to a matcher.

    A layer's search updates the running products with one layer and chooses the best entry; a forecast also selects
    experts. An update stores an iteration whose search has its scores, O(C + LJ); one without a search computes them,
    O(C(LJ + D)). The maps are random.

    The lead publishes one sequence, multiplies matrices for the time of a layer, and looks for its command meanwhile
    (the lag), so that other threads may have its interpreter and its caches are realistic.

    Bars: a layer's search <= 100 us at 1K and <= 5 ms at 50K maps; 50K maps of 32 x 8 <= 200 MB; a publish <= 20 us.
    """
    shapes = model_shapes()
    settings = options.settings(
        iterations=ITERATIONS, layer_s=LAYER_S, distance=DISTANCE, embedding_width=EMBEDDING_WIDTH
    )
    report = Report("matcher", "real", settings=settings, shown=("case", "measure", "median", "minimum", "maximum"))
    with contextlib.ExitStack() as stack:
        # another process: its numerical library can still be limited to one thread
        process = stack.enter_context(other_process(**thread_limits(1)))
        cases = []
        for name, (shape, top_k) in shapes.items():
            for capacity in CAPACITIES:
                of = shape.layers, shape.experts, shape.hidden, top_k, capacity
                cases.append(Case(f"{name} {capacity}", lambda of=of: process.submit(_store_measures, *of).result()))  # type: ignore[misc]
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tiermoe-bench-")))
        for name, (shape, top_k) in shapes.items():
            for transport in ("shm", "grpc"):
                chosen = MatcherSettings(distance=DISTANCE, transport=transport, learn=False)
                link = stack.enter_context(_matcher_process(chosen, shape, top_k, folder))
                cases.append(Case(f"publish {name} {transport}", _Lead(link, shape)))
        results = interleaved(cases, options.repeats, 1, progress)
    report.rows = rows_of(results)
    for name in shapes:
        for capacity, limit_us in ((1000, 100.0), (LARGEST, 5000.0)):
            value = results[f"{name} {capacity}"]["layer_search_us"].median
            report.bars.append(Bar(f"us of a layer's search, {name}, {capacity} maps", value, "<=", limit_us))
        value = results[f"publish {name} shm"]["publish_p50_us"].median
        report.bars.append(Bar(f"us of a publish, {name}", value, "<=", 20.0))
    largest = results[f"mixtral-8x7b {LARGEST}"]
    value = max(largest["store_mb"].median, largest["resident_mb"].median)
    report.bars.append(Bar(f"MB of {LARGEST} maps, mixtral-8x7b", value, "<=", 200.0))
    return report


def model_shapes() -> dict[str, tuple[MapShape, int]]:
    """Shape and top-k of three models of the literature and of the default model."""
    table = {name.removesuffix("-a2.7b"): shape_named(name) for name in _OF_TABLE}
    found = {name: (MapShape(name, of.moe_layers, of.experts, of.hidden), of.top_k) for name, of in table.items()}
    own = Trace(default_model_dir() / ROUTING).header
    return found | {"default": (MapShape("default", own.layers, own.experts, own.hidden), own.top_k)}


@contextlib.contextmanager
def _matcher_process(settings: MatcherSettings, shape: MapShape, top_k: int, folder: Path) -> Iterator[MatcherLink]:
    """A connection to a new matcher with a full store of maps."""
    warm = folder / f"{shape.model}.safetensors"
    if not warm.exists():
        width = min(shape.hidden, settings.width)
        store = ExpertMapStore(shape.layers, shape.experts, width, settings.distance, settings.capacity)
        save_maps(warm, _random_maps(np.random.default_rng(0), store), shape)
    with (
        WorkerProcess(Role.matcher(settings, shape, top_k, warm=warm)) as process,
        contextlib.closing(MatcherLink(process.link, settings, shape)) as link,
    ):
        link.start()
        if not link.wait_until_found(_DEADLINE_S):
            raise RuntimeFailure(f"the matcher was not reached: {link.problem}", "report this as a bug")
        yield link


class _Lead:
    """A forward that computes, publishes and looks for commands."""

    def __init__(self, link: MatcherLink, shape: MapShape) -> None:
        self._link, self._shape = link, shape
        self._random = np.random.default_rng(1)
        self._sequences = np.zeros(1, np.int64)
        self._number = 0
        self._matrix = self._random.standard_normal((256, 512), np.float32)
        self._row, self._out = self._matrix[:1, :256].copy(), np.empty((1, 512), np.float32)

    def __call__(self) -> Measures:
        link, shape = self._link, self._shape
        publishes: list[float] = []
        lags: list[float] = []
        for _ in range(ITERATIONS):
            self._number += 1
            embedding = self._random.standard_normal((1, shape.hidden), np.float32)
            maps = _softmax(self._random, shape.layers, 1, shape.experts)
            for layer in range(-1, shape.layers):
                begin_s = time.perf_counter()
                if layer < 0:
                    link.begin(self._number, self._sequences, embedding)
                else:
                    link.observe(self._number, layer, self._sequences, maps[layer])
                publishes.append(time.perf_counter() - begin_s)
                came = False
                while time.perf_counter() < begin_s + (LATE_S if link.waiting else LAYER_S):
                    np.matmul(self._row, self._matrix, out=self._out)
                    if not came and link.take(self._number, layer):
                        lags.append(time.perf_counter() - begin_s)
                        came = True
        return _percentiles("publish_", publishes) | _percentiles("lag_", lags)


class _StoreCase:
    """One full store of `capacity` expert maps of a model, and iterations to search and store."""

    def __init__(self, layers: int, experts: int, hidden: int, top_k: int, capacity: int) -> None:
        before = psutil.Process().memory_info().rss
        self._random = np.random.default_rng(0)
        self._sketch = Sketch(hidden)
        self._hidden = hidden
        self.store = ExpertMapStore(layers, experts, self._sketch.width, DISTANCE, capacity)
        self.store.load(_random_maps(self._random, self.store))
        self._policy = ExpertMapPrefetch(self.store, hidden, top_k, learn=False)
        self._resident = psutil.Process().memory_info().rss - before

    def measure(self) -> dict[str, float]:
        """Microseconds, medians over the layers of one iteration of one sequence; megabytes."""
        store, random = self.store, self._random
        embedding = random.standard_normal((1, self._hidden), np.float32)
        maps = _softmax(random, store.layers, 1, store.experts)

        begin_us = _us(lambda: self._policy.begin(embedding))
        forecasts = [_us(lambda i=i: self._policy.observe(i, maps[i])) for i in range(store.layers)]  # type: ignore[misc]
        ahead = max(1, store.layers - 1 - DISTANCE)  # layers with one to forecast

        search = store.search(self._sketch(embedding))

        def one_layer(layer: int) -> None:
            search.observe(layer, maps[layer])
            search.match(semantic=False)

        searches = [_us(lambda i=i: one_layer(i)) for i in range(store.layers)]  # type: ignore[misc]
        update_us = _us(search.commit)
        entry = self._sketch(embedding)[0], np.ascontiguousarray(maps[:, 0])
        return {
            "layer_search_us": float(np.median(searches)),
            "layer_forecast_us": float(np.median(forecasts[:ahead])),
            "semantic_forecast_us": begin_us,
            "update_us": update_us,
            "update_without_search_us": _us(lambda: store.add(*entry)),
            "store_mb": store.nbytes / 1e6,
            "resident_mb": self._resident / 1e6,
        }


_store_case = functools.cache(_StoreCase)  # each is built for its first repetition, and stays


def _store_measures(*of: int) -> Measures:
    """In the other process: search and update the store of expert maps of such a `_StoreCase`."""
    return _store_case(*of).measure()


def _softmax(random: np.random.Generator, *shape: int) -> np.ndarray:
    raw = np.exp(2 * random.standard_normal(shape, np.float32))
    raw /= raw.sum(axis=-1, keepdims=True)
    return raw


def _random_maps(random: np.random.Generator, store: ExpertMapStore) -> dict[str, np.ndarray]:
    """As many maps as an `ExpertMapStore` holds."""
    return {
        "embeddings": unit_rows(random.standard_normal((store.capacity, store.width), np.float32)),
        "maps": _softmax(random, store.layers, store.capacity, store.experts),
    }


def _us(work: Callable[[], Any]) -> float:
    begin_s = time.perf_counter()
    work()
    return (time.perf_counter() - begin_s) * 1e6
