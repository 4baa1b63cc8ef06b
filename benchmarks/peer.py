"""The other processes of `tiermoe bench channel` and `matcher`, and the actors that `channel` deploys.

`python -m tiermoe.benchmarks.peer channel|matcher` answers JSON lines on its standard input with JSON lines.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent import futures
from typing import Any

import numpy as np

from tiermoe.cluster.topology.spec import ModelFacts
from tiermoe.errors import RuntimeFailure

BARE_ECHO = "/bench/Echo"
DISTANCE = 3  # of the matcher's forecasts
_END_S = 60.0

Ask = Callable[[dict[str, Any]], dict[str, Any]]


@contextlib.contextmanager
def peer(kind: str, **environment: str) -> Iterator[Ask]:
    """Start such a process; questions and answers are JSON objects.

    Raises:
        RuntimeFailure: it ended before it answered.
    """
    process = subprocess.Popen(
        [sys.executable, "-m", __name__, kind], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        env=os.environ | environment,
    )  # fmt: skip
    stdin, stdout = process.stdin, process.stdout
    assert stdin is not None
    assert stdout is not None

    def ask(case: dict[str, Any]) -> dict[str, Any]:
        stdin.write(json.dumps(case) + "\n")
        stdin.flush()
        line = stdout.readline()
        if not line:
            raise RuntimeFailure(f"the process of the {kind}'s other side ended", "its own words are above")
        answer: dict[str, Any] = json.loads(line)
        return answer

    try:
        yield ask
    finally:
        process.kill()  # it has nothing to save
        process.communicate(timeout=_END_S)


NO_MODEL = ModelFacts(
    name="none", layers=1, experts=4, top_k=1, hidden=1, intermediate=1, gates=2, expert_elements=3, dense_elements=1,
    kv_elements=1, item_bytes=4, source="this benchmark",
)  # fmt: skip


class EchoWorker:
    """For `Deployment`: an actor whose `cancel` returns its argument."""

    def __init__(self, settings: Any, view: Any, ndp: Any = None) -> None: ...

    def start(self) -> dict[str, Any]:
        return {}

    def cancel(self, text: str) -> str:
        return text


class NoStore:
    """For `Deployment`: a store without a file."""

    def __init__(self, path: str, index: int) -> None: ...

    def describe(self) -> dict[str, Any]:
        return {}


@contextlib.contextmanager
def _echoes() -> Iterator[Ask]:
    """A channel server and a bare gRPC stream with the channel's settings, which both echo.

    The one question, {"core": number or None}, binds the process to that core; the answer is both addresses.
    """
    import grpc

    from tiermoe.proto import grpc_transport
    from tiermoe.proto.messages import ExpertBatch, ExpertResult, Message
    from tiermoe.proto.options import Limits
    from tiermoe.proto.server import ChannelServer

    def answer(message: Message) -> Message | None:
        assert isinstance(message, ExpertBatch)
        return ExpertResult(message.hidden, 0.0, 0.0, 0.0)

    def echo(incoming: Iterator[bytes], context: Any) -> Iterator[bytes]:
        yield from incoming

    class BareEcho:
        def service(self, details: Any) -> Any:
            return grpc.stream_stream_rpc_method_handler(echo) if details.method == BARE_ECHO else None

    with contextlib.ExitStack() as stack:

        def ask(case: dict[str, Any]) -> dict[str, Any]:
            if case["core"] is not None:  # before the servers, whose threads inherit it
                os.sched_setaffinity(0, {case["core"]})
            server = stack.enter_context(ChannelServer(answer))
            options = grpc_transport.settings(Limits().max_message_bytes)
            bare = grpc.server(futures.ThreadPoolExecutor(4), options=options)
            bare.add_generic_rpc_handlers((BareEcho(),))
            port = bare.add_insecure_port("127.0.0.1:0")
            bare.start()
            stack.callback(lambda: bare.stop(None).wait(2.0))
            return {"channel": server.address, "bare": f"127.0.0.1:{port}"}

        yield ask


class StoreCase:
    """One full store of `capacity` expert maps of a model, and iterations to search and store."""

    def __init__(self, layers: int, experts: int, hidden: int, top_k: int, capacity: int) -> None:
        import psutil

        from tiermoe.actors.policies.fmoe import ExpertMapPrefetch
        from tiermoe.actors.policies.fmoe.maps import ExpertMapStore, Sketch

        before = psutil.Process().memory_info().rss
        self._random = np.random.default_rng(0)
        self._sketch = Sketch(hidden)
        self._hidden = hidden
        self.store = ExpertMapStore(layers, experts, self._sketch.width, DISTANCE, capacity)
        self.store.load(random_maps(self._random, self.store))
        self._policy = ExpertMapPrefetch(self.store, hidden, top_k, learn=False)
        self._resident = psutil.Process().memory_info().rss - before

    def measure(self) -> dict[str, float]:
        """Microseconds, medians over the layers of one iteration of one sequence; megabytes."""
        from tiermoe.actors.policies.fmoe.maps import MapSearch

        store, random = self.store, self._random
        embedding = random.standard_normal((1, self._hidden), np.float32)
        maps = softmax(random, store.layers, 1, store.experts)

        begin_us = _us(lambda: self._policy.begin(embedding))
        forecasts = [_us(lambda i=i: self._policy.observe(i, maps[i])) for i in range(store.layers)]  # type: ignore[misc]
        ahead = max(1, store.layers - 1 - DISTANCE)  # layers with one to forecast

        search = MapSearch(store, self._sketch(embedding))

        def one_layer(layer: int) -> None:
            search.observe(layer, maps[layer])
            search.trajectory()

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


def softmax(random: np.random.Generator, *shape: int) -> np.ndarray:
    raw = np.exp(2 * random.standard_normal(shape, np.float32))
    raw /= raw.sum(axis=-1, keepdims=True)
    return raw


def random_maps(random: np.random.Generator, store: Any) -> dict[str, np.ndarray]:
    """As many maps as an `ExpertMapStore` holds."""
    from tiermoe.actors.policies.fmoe.maps import unit_rows

    return {
        "embeddings": unit_rows(random.standard_normal((store.capacity, store.width), np.float32)),
        "maps": softmax(random, store.layers, store.capacity, store.experts),
    }


def _us(work: Callable[[], Any]) -> float:
    begin_s = time.perf_counter()
    work()
    return (time.perf_counter() - begin_s) * 1e6


@contextlib.contextmanager
def _map_stores() -> Iterator[Ask]:
    """Search and update stores of expert maps; each is built for its first case, and stays."""
    cases: dict[str, StoreCase] = {}

    def ask(case: dict[str, Any]) -> dict[str, Any]:
        name = json.dumps(case)
        if name not in cases:
            cases[name] = StoreCase(**case)
        return cases[name].measure()

    yield ask


def main() -> None:
    with {"channel": _echoes, "matcher": _map_stores}[sys.argv[1]]() as ask:
        for line in sys.stdin:
            print(json.dumps(ask(json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
