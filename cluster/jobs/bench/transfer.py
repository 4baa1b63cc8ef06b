"""`tiermoe bench transfer`: experts out of another node's store, over our channel and as Ray objects, side by side.

One `StoreWorker` serves both ways at once: an actor on the second of two Ray nodes of this machine, whose objects
travel to the first one's object store before they are read, and whose channel server is asked over gRPC, as from
another host. They are read as a worker's loader reads them (`engine.sources`): small experts share requests, two
requests are under way. Every answer is compared with the file, byte by byte, outside of what is timed.
"""

from __future__ import annotations

import hashlib
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from rich.progress import Progress

from ....actors.engine.cache.device import Tensors
from ....actors.engine.cache.sources import RemoteStores, host_weights
from ....actors.settings import StoreSettings
from ....actors.store.files import ExpertStore
from ....actors.store.format import (
    MANIFEST_NAME,
    DenseFile,
    ExpertShape,
    FileRecord,
    LayerFile,
    Manifest,
    layer_name,
)
from ....actors.store.server import StoreWorker
from ....errors import RuntimeFailure
from ....proto.options import ServerOptions
from ....proto.peers import LocalDirectory, PeerLink, StoreLink, store_name
from ..prepare.writer import write_file, write_tensors
from .metrics import Case, Measures, Report, interleaved, rows_of
from .two_nodes import two_nodes

_DEADLINE_S = 60.0
_ACTOR = "bench-store"


@dataclass(frozen=True)
class Model:
    """Whose experts: `experts` of hidden x intermediate each, in bfloat16; a batch is `batch` of them."""

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
    """A store whose Ray objects can be thrown away, so that each reading begins with none, or with all put before."""

    def forget(self) -> None:
        self._refs.clear()

    def channel(self) -> str:
        return self.address or ""


def bench_transfer(repeats: int, progress: Progress | None) -> Report:
    """Milliseconds and GB/s (1e9 bytes) per reading: one expert, or a batch of experts of one layer.

    memcpy: the same bytes copied within this process. grpc: over our channel. ray: an actor call for refs,
    the experts put into the store's object store, then `ray.get`; put before: as if the store had put them earlier.

    Raises:
        RuntimeFailure: the bytes that came are not those of the file, or Ray did not start.
    """
    batch_bytes = [model.batch * model.shape.nbytes(2) for model in MODELS]
    report = Report(
        "transfer", "real",
        settings={
            "repeats": repeats,
            "models": {m.name: {"expert_bytes": m.shape.nbytes(2), "batch": m.batch} for m in MODELS},
        },
        shown=("case", "measure", "median", "minimum", "maximum"),
    )  # fmt: skip
    with tempfile.TemporaryDirectory(prefix="tiermoe-transfer-") as folder:
        stores = [_write_store(model, Path(folder) / str(i)) for i, model in enumerate(MODELS)]
        with two_nodes(4 * max(batch_bytes)) as other:
            readings = [
                reading
                for i, (model, path) in enumerate(zip(MODELS, stores, strict=True))
                for reading in _readings(model, path, f"{_ACTOR}-{i}", other)
            ]
            try:
                results = interleaved([reading.case for reading in readings], repeats, 1, progress)
            finally:
                for reading in readings:
                    reading.close()
    report.rows = rows_of(results)
    return report


@dataclass(frozen=True)
class _Reading:
    """A case and what ends its connection."""

    case: Case
    close: Callable[[], None]


def _readings(model: Model, store: Path, actor: str, other: Callable[..., Any]) -> list[_Reading]:
    import ray

    opened = ExpertStore(store, "stamp")
    nbytes = model.shape.nbytes(2)
    worker = other(
        ForgetfulStore, actor, str(store), 0, None, "stamp", LocalDirectory(), None,
        ServerOptions(shared_memory=False), model.batch * nbytes,
    )  # fmt: skip
    board = LocalDirectory({store_name(0): ray.get(worker.channel.remote())})
    link = StoreLink(store_name(0), (0,), PeerLink(board, name=store_name(0)), actor)
    ways: tuple[Literal["grpc", "ray"], ...] = ("grpc", "ray")
    readers = {
        way: RemoteStores(opened.manifest, [0], [link], StoreSettings(transport=way, deadline_s=_DEADLINE_S))
        for way in ways
    }
    for reader in readers.values():
        reader.start(_DEADLINE_S)
    layer = opened.layers[0]
    tensors = [tensor.view(torch.int16) for tensor in host_weights(opened.layers)[0].tensors]

    def reading(way: Literal["grpc", "ray"], experts: list[int], before: bool) -> Measures:
        held: Any = None
        ray.get(worker.forget.remote())
        if before:
            held = ray.get(worker.expert_refs.remote(0, experts))
        begin_s = time.perf_counter()
        promises = [readers[way].layer(0).expert(e) for e in experts]
        found = []
        for i, promise in enumerate(promises):
            promise.ask(promises[i + 1 :])
            found.append(promise.tensors())
        taken_s = time.perf_counter() - begin_s
        check_bytes(found, experts, tensors)
        del held
        return _measures(taken_s, len(experts) * nbytes)

    def copied(experts: list[int]) -> Measures:
        sources = [layer.gate_up[experts[0] : experts[-1] + 1], layer.down[experts[0] : experts[-1] + 1]]
        targets = [np.zeros_like(source) for source in sources]  # touches the pages
        begin_s = time.perf_counter()
        for target, source in zip(targets, sources, strict=True):
            np.copyto(target, source)
        return _measures(time.perf_counter() - begin_s, len(experts) * nbytes)

    out = []
    for count in sorted({1, model.batch}):
        experts = list(range(count))
        what = f"{model.name}, {count} x {nbytes / 2**20:.3g} MiB"
        cases = {
            "memcpy": lambda e=experts: copied(e),
            "grpc": lambda e=experts: reading("grpc", e, before=False),
            "ray": lambda e=experts: reading("ray", e, before=False),
            "ray, put before": lambda e=experts: reading("ray", e, before=True),
        }
        out += [_Reading(Case(f"{what}: {name}", run), _nothing) for name, run in cases.items()]
    return [
        *out[:-2], *(_Reading(last.case, readers[t].close) for last, t in zip(out[-2:], readers, strict=True)),
    ]  # fmt: skip


def check_bytes(found: Sequence[Tensors], experts: Sequence[int], layer: Sequence[torch.Tensor]) -> None:
    """Whether what arrived is what the file holds, as 16-bit patterns.

    Args:
        found: the tensors of each of `experts`.
        layer: those of the file, with experts in front.

    Raises:
        RuntimeFailure: it is not.
    """
    for e, arrays in zip(experts, found, strict=True):
        if not all(torch.equal(a.view(torch.int16), t[e]) for a, t in zip(arrays, layer, strict=True)):
            raise RuntimeFailure(f"expert {e} arrived with other bytes than the file's", "report this as a bug")


def _nothing() -> None: ...


def _measures(taken_s: float, nbytes: int) -> Measures:
    return {"ms": taken_s * 1e3, "gbps": nbytes / taken_s / 1e9}


def _write_store(model: Model, folder: Path) -> Path:
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
    ExpertStore(folder)  # hashed once; every opening after it goes by the stamps
    return folder


def _random(rng: np.random.Generator, shape: tuple[int, ...]) -> NDArray[np.uint16]:
    """Bit patterns of bfloat16 numbers of everyday size."""
    numbers = rng.integers(0, 1 << 16, shape, np.uint16)
    numbers &= 0xBFFF  # an exponent below that of 2.0: finite
    return numbers
