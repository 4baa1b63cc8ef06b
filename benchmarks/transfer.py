"""Micro-benchmark `transfer`: experts from another node's store, over our channel and as Ray objects, side by side.

One `StoreWorker`, an actor on the second of two Ray nodes of this machine, serves both ways: its objects travel to the
first node's object store, and its channel answers over gRPC, as from another host. They are read as a worker's loader
reads them (`engine.cache.sources`). Every answer is compared with the file, outside the timed part.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from rich.progress import Progress

from tiermoe.actors.engine.cache.device import Tensors
from tiermoe.actors.engine.cache.sources import RemoteStores, host_weights
from tiermoe.actors.settings import StoreSettings
from tiermoe.actors.store.files import ExpertStore
from tiermoe.actors.store.format import (
    MANIFEST_NAME,
    DenseFile,
    ExpertShape,
    FileRecord,
    LayerFile,
    Manifest,
    layer_name,
)
from tiermoe.actors.store.server import StoreWorker
from tiermoe.cluster.jobs.bench.metrics import Case, Measures, Report, interleaved, rows_of
from tiermoe.cluster.jobs.prepare.writer import write_file, write_tensors
from tiermoe.cluster.ray_auth import ensure_private_token
from tiermoe.cluster.scratch import Scratch
from tiermoe.errors import RuntimeFailure
from tiermoe.proto.options import ServerOptions
from tiermoe.proto.peers import LocalDirectory, PeerLink, StoreLink, store_name

if "ray" not in sys.modules:  # Ray reads it once, at its import
    os.environ.setdefault("RAY_AUTH_MODE", "token")

import ray

from tiermoe.cluster.ray_session import join, leave, refuse_second

if TYPE_CHECKING:
    from .cases import Transfer

_DEADLINE_S = 60.0
_START_S = 90.0
_MARK = "bench_other"  # a resource that only the other node has

Way = Literal["grpc", "ray"]


@dataclass(frozen=True)
class Model:
    """`experts` experts of hidden x intermediate each, in bfloat16; a batch is `batch` of them."""

    name: str
    hidden: int
    intermediate: int
    experts: int
    batch: int

    @property
    def shape(self) -> ExpertShape:
        return ExpertShape(
            num_experts=self.experts, hidden=self.hidden, intermediate=self.intermediate, gates=2, has_bias=False
        )


MODELS = (
    Model("default model", 256, 128, 32, 16),
    Model("Qwen1.5-MoE", 2048, 1408, 8, 4),
    Model("Mixtral, a third", 4096, 4779, 2, 2),
)


class ForgetfulStore(StoreWorker):
    """A store whose Ray objects can be dropped, so that each reading begins with none, or with all put before."""

    def forget(self) -> None:
        self._refs.clear()

    def channel(self) -> str:
        return self.address or ""


def transfer(options: Transfer, progress: Progress | None) -> Report:
    """Milliseconds and GB/s (1e9 bytes) per reading: one expert, or a batch of experts of one layer.

    memcpy: the same bytes copied within this process. grpc: over our channel. ray: an actor call for refs, the experts
    put into the store's object store, then `ray.get`; put before: the experts are there already.

    Raises:
        RuntimeFailure: the received bytes differ from the file, or Ray did not start.
    """
    models = {m.name: {"expert_bytes": m.shape.nbytes(2), "batch": m.batch} for m in MODELS}
    settings = options.settings(models=models)
    report = Report("transfer", "real", settings=settings, shown=("case", "measure", "median", "minimum", "maximum"))
    largest = max(model.batch * model.shape.nbytes(2) for model in MODELS)
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="tiermoe-transfer-")))
        stores = [write_store(model, folder / str(i)) for i, model in enumerate(MODELS)]
        other = stack.enter_context(_two_nodes(4 * largest))
        cases = []
        for i, (model, store) in enumerate(zip(MODELS, stores, strict=True)):
            cases += _cases(model, store, f"bench-store-{i}", other, stack)
        report.rows = rows_of(interleaved(cases, options.repeats, 1, progress))
    return report


def _cases(model: Model, store: Path, actor: str, other: Callable[..., Any], stack: contextlib.ExitStack) -> list[Case]:
    """Every way to read one expert and a batch of a model; `stack` ends the connections."""
    opened = ExpertStore(store, "stamp")
    nbytes = model.shape.nbytes(2)
    worker = other(
        ForgetfulStore, actor, str(store), 0, None, "stamp", LocalDirectory(), None,
        ServerOptions(shared_memory=False), model.batch * nbytes,
    )  # fmt: skip
    board = LocalDirectory({store_name(0): ray.get(worker.channel.remote())})
    link = StoreLink(store_name(0), (0,), PeerLink(board, name=store_name(0)), actor)
    readers: dict[Way, RemoteStores] = {}
    for way in ("grpc", "ray"):
        settings = StoreSettings(transport=way, deadline_s=_DEADLINE_S)
        readers[way] = RemoteStores(opened.manifest, [0], [link], settings)
        stack.callback(readers[way].close)
        readers[way].start(_DEADLINE_S)
    layer = opened.layers[0]
    tensors = [tensor.view(torch.int16) for tensor in host_weights(opened.layers)[0].tensors]

    def read(way: Way, experts: list[int], before: bool) -> Measures:
        ray.get(worker.forget.remote())
        refs = ray.get(worker.expert_refs.remote(0, experts)) if before else None
        begin_s = time.perf_counter()
        wanted = [readers[way].layer(0).expert(e) for e in experts]
        found = []
        for i, expert in enumerate(wanted):
            expert.ask(wanted[i + 1 :])
            found.append(expert.tensors())
        taken_s = time.perf_counter() - begin_s
        check_bytes(found, experts, tensors)
        del refs
        return measures(taken_s, experts)

    def copy(experts: list[int]) -> Measures:
        sources = [layer.gate_up[experts[0] : experts[-1] + 1], layer.down[experts[0] : experts[-1] + 1]]
        targets = [np.zeros_like(source) for source in sources]  # touches the pages
        begin_s = time.perf_counter()
        for target, source in zip(targets, sources, strict=True):
            np.copyto(target, source)
        return measures(time.perf_counter() - begin_s, experts)

    def measures(taken_s: float, experts: list[int]) -> Measures:
        return {"ms": taken_s * 1e3, "gbps": len(experts) * nbytes / taken_s / 1e9}

    cases = []
    for count in sorted({1, model.batch}):
        experts = list(range(count))
        ways: dict[str, Callable[[], Measures]] = {
            "memcpy": lambda e=experts: copy(e),  # type: ignore[misc]
            "grpc": lambda e=experts: read("grpc", e, before=False),  # type: ignore[misc]
            "ray": lambda e=experts: read("ray", e, before=False),  # type: ignore[misc]
            "ray, put before": lambda e=experts: read("ray", e, before=True),  # type: ignore[misc]
        }
        what = f"{model.name}, {count} x {nbytes / 2**20:.3g} MiB"
        cases += [Case(f"{what}: {name}", run) for name, run in ways.items()]
    return cases


def check_bytes(found: Sequence[Tensors], experts: Sequence[int], layer: Sequence[torch.Tensor]) -> None:
    """Compare received tensors of `experts` with those of the file [E, ...], as 16-bit patterns.

    Raises:
        RuntimeFailure: they differ.
    """
    for e, arrays in zip(experts, found, strict=True):
        if not all(torch.equal(a.view(torch.int16), t[e]) for a, t in zip(arrays, layer, strict=True)):
            raise RuntimeFailure(f"expert {e} arrived with other bytes than the file's", "report this as a bug")


def write_store(model: Model, folder: Path) -> Path:
    """A store of one MoE layer with finite random experts; no model can be built from it."""
    folder.mkdir()
    shape, rng = model.shape, np.random.default_rng(0)
    tensors = {name: ("BF16", dims) for name, dims in shape.stacked().items()}
    layer = write_tensors(
        folder / layer_name(0), tensors, (_random(rng, dims).data.cast("B") for _, dims in tensors.values())
    )
    dense = write_tensors(folder / "dense.safetensors", {"norm": ("BF16", (1,))}, [b"\0\0"])
    config = b"{}"
    (folder / "config.json").write_bytes(config)
    digest = hashlib.sha256(config).hexdigest()
    manifest = Manifest(
        format_version=1, model=model.name, architecture="none", dtype="bfloat16", transformers_version="0",
        experts=shape, layers=(LayerFile(index=0, module="experts", **layer.model_dump()),),
        dense=DenseFile(tied=(), **dense.model_dump()),
        extras=(FileRecord(file="config.json", nbytes=len(config), sha256=digest),), source=(),
    )  # fmt: skip
    write_file(folder / MANIFEST_NAME, manifest.encode())
    ExpertStore(folder)  # hashes it once; later openings go by the stamps
    return folder


def _random(rng: np.random.Generator, shape: tuple[int, ...]) -> NDArray[np.uint16]:
    """Bit patterns of bfloat16 numbers of everyday size."""
    numbers = rng.integers(0, 1 << 16, shape, np.uint16)
    numbers &= 0xBFFF  # an exponent below that of 2.0: finite
    return numbers


@contextlib.contextmanager
def _two_nodes(object_store_bytes: int) -> Iterator[Callable[..., Any]]:
    """A Ray of two nodes on this machine, each with an object store of this size; this process joins the first.

    Objects travel between the nodes as between hosts, over the loopback interface. A Ray that runs already is not used;
    all processes and files lie below one scratch folder and go with it.

    Yields:
        other(plain class, name, *args): an actor of it on the other node, reachable by that name.

    Raises:
        RuntimeFailure: this process uses Ray already, or a node did not start.
    """
    refuse_second()
    ensure_private_token()
    with contextlib.closing(Scratch()) as scratch:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = int(probe.getsockname()[1])
        head = ["--head", f"--port={port}", "--node-ip-address=127.0.0.1", "--include-dashboard=false"]
        mark = f"--resources={json.dumps({_MARK: 1})}"
        _start_node(scratch, head, object_store_bytes)
        _start_node(scratch, [f"--address=127.0.0.1:{port}", "--node-ip-address=127.0.0.2", mark], object_store_bytes)
        join(f"127.0.0.1:{port}")
        try:
            yield _on_the_other
        finally:
            leave()


def _on_the_other(plain: type, name: str, *args: Any) -> Any:
    actor = ray.remote(name=name, num_cpus=0, resources={_MARK: 0.01}, max_concurrency=2)(plain).remote(*args)
    nodes = {node["NodeID"]: node for node in ray.nodes()}
    here = nodes[ray.get_runtime_context().get_node_id()]
    if _MARK in here["Resources"]:
        raise RuntimeFailure("Ray put this process on the node that it is to read from", "report this as a bug")
    return actor


def _start_node(scratch: Scratch, more: list[str], object_store_bytes: int) -> None:
    command = [
        str(Path(sys.executable).with_name("ray")), "start", *more, "--num-cpus=1", f"--temp-dir={scratch.path}",
        "--disable-usage-stats", f"--object-store-memory={object_store_bytes}",
    ]  # fmt: skip
    environment = os.environ | {"RAY_AUTH_MODE": os.environ.get("RAY_AUTH_MODE", "disabled")}  # this process's
    log = scratch.path / "start.log"
    with log.open("w") as output:  # a file: Ray's servers inherit it, and would hold a pipe open
        done = subprocess.run(command, env=environment, stdout=output, stderr=output, timeout=_START_S, check=False)
    if done.returncode != 0:
        last = (log.read_text().strip().splitlines() or ["it printed nothing"])[-1]
        raise RuntimeFailure(f"`ray start` failed: {last}", "see whether Ray starts here at all: `ray start --head`")
