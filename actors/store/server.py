"""The expert store of one node, for the other nodes: experts over a channel, or as Ray objects.

    StoreRequest (a layer, experts)  -> StoreReply (their arrays, views of the mapped files)
    FileRequest (a piece of a file)  -> FileReply: the dense weights and the small files, for a node without store files

A plain class without torch; `cluster.deploy` makes it an actor. It serves from construction on: a restart by Ray
constructs it and calls nothing else. Each connection has its own thread, so a large read does not delay `health`.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from ...errors import ConfigError, StoreError
from ...proto.messages import FileReply, FileRequest, HealthReport, HealthRequest, Message, StoreReply, StoreRequest
from ...proto.options import ServerOptions, Traffic, too_large
from ...proto.peers import Directory, store_name
from ...proto.server import ChannelServer
from ..sample import ProcessSample, take_sample
from .files import ExpertStore, LayerArrays, StoreView
from .format import MANIFEST_NAME, REBUILD, manifest_digest
from .pages import FileWatch
from .published import FormArrays
from .remote import RefBook
from .replicas import REPLICAS_NAME, read_replicas

_ROOM = 64 * 1024  # bytes of a message around its arrays


class StoreWorker:
    """Holds a store, or some layers of it, and answers requests for experts.

    Args:
        path, layers, verify: as of `ExpertStore`.
        index: number among the stores of the cluster.
        directory: gives the host to listen on and takes the address; None: the store does not listen, and only
            processes of its own node map it.
        token: required of clients; None: only this machine may connect.
        options: of the channel server; its host and token are those above.
        ref_bytes: limit of its objects in Ray's object store; one expert always fits.

    Raises:
        StoreError: the store is damaged, or lacks one of the layers.
    """

    def __init__(
        self,
        path: str,
        index: int = 0,
        layers: Sequence[int] | None = None,
        verify: Literal["full", "stamp"] = "full",
        directory: Directory | None = None,
        token: str | None = None,
        options: ServerOptions | None = None,
        ref_bytes: int = 64 << 20,
    ) -> None:
        self._store = ExpertStore(path, verify, layers)
        self._view, self._name = self._store.describe(), store_name(index)
        self._layers = {arrays.index: arrays for arrays in self._store.mapped}
        manifest = self._view.manifest
        self._digest = manifest_digest(manifest)
        self._files = {MANIFEST_NAME, *(record.file for record in (manifest.dense, *manifest.extras))}
        with suppress(StoreError):  # the NDP worker refuses damaged replicas
            replicas = read_replicas(Path(self._view.path), manifest)
            self._files |= set() if replicas is None else {REPLICAS_NAME, replicas.losses.file}
        self._lock = threading.Lock()
        self._experts_sent = self._bytes_sent = 0
        self._refs = RefBook(ref_bytes)
        self._server: ChannelServer | None = None
        options = options or ServerOptions()
        self._most = options.limits.max_message_bytes - _ROOM
        if directory is not None:
            options = replace(options, host=directory.host(), token=token, tls=directory.tls)
            self._server = ChannelServer(self.handle, options)
            try:
                directory.register(self._name, self._server.address)
            except BaseException:
                self._server.close()
                raise
        self._watch = FileWatch()

    @property
    def address(self) -> str | None:
        """HOST:PORT; None when it does not listen."""
        return None if self._server is None else self._server.address

    def describe(self) -> StoreView:
        """What another process of this node needs to map the files."""
        return self._view

    def handle(self, message: Message) -> Message:
        """Answer one message of the channel; a raised TierMoeError is sent back."""
        if isinstance(message, StoreRequest):
            return self._experts(message)
        if isinstance(message, FileRequest):
            return self._file(message)
        if isinstance(message, HealthRequest):
            return HealthReport("store", self.health())
        raise ConfigError(f"a store does not answer {type(message).__name__}", "ask it for experts or files")

    def expert_refs(self, layer: int, experts: Sequence[int]) -> list[Any]:
        """A Ray object reference for each of these experts: its arrays in the order of `ExpertShape.stacked`.

        References, not arrays: the caller's `ray.get` copies from object store to object store. Only the newest
        `ref_bytes` stay, so a store is never in Ray's memory as a whole.

        Raises:
            StoreError: there is no such layer or expert here.
        """
        tensors = _by_name(self._layer(layer, np.asarray(experts, np.int64)))
        nbytes = self._view.manifest.expert_nbytes()
        self._count(len(experts), len(experts) * nbytes)
        return [
            self._refs.get((layer, e), nbytes, lambda e=e: [array[e] for array in tensors.values()])  # type: ignore[misc]
            for e in experts
        ]

    def health(self) -> dict[str, Any]:
        """Layers, bytes and counters."""
        with self._lock:
            sent = {"experts_sent": self._experts_sent, "bytes_sent": self._bytes_sent}
        return {
            "state": "serving",
            "address": self.address or "",
            "pid": os.getpid(),
            "store": self._digest,
            "layers": ",".join(map(str, self._layers)),
            "nbytes": self._store.nbytes,
            "ref_bytes": self._refs.nbytes,
        } | sent

    def sample(self) -> ProcessSample:
        """What it has given; by whom it was asked is in the readers' samples."""
        with self._lock:
            sent: dict[str, float] = {"experts_sent": self._experts_sent, "expert_bytes_sent": self._bytes_sent}
        return take_sample(sent | (Traffic() if self._server is None else self._server.traffic).of_server())

    def close(self) -> None:
        """Stop serving. Safe to call twice."""
        self._watch.close()
        if self._server is not None:
            self._server.close()
        self._refs.clear()
        self._store.close()

    def _experts(self, request: StoreRequest) -> StoreReply:
        tensors = _by_name(self._layer(request.layer, request.experts))
        shape = self._view.manifest.experts
        last = request.first + request.neurons if request.neurons else shape.intermediate
        if not request.first < last <= shape.intermediate:
            raise StoreError(
                f"neurons {request.first} to {last} are not within the {shape.intermediate} of an expert",
                "use the lead's store",
            )
        if last - request.first < shape.intermediate:
            if self._view.manifest.published is not None:
                raise StoreError("experts in a published form are sent whole", "use the same version on all nodes")
            part = slice(request.first, last)
            tensors = {n: a if n == "down_bias" else a[:, part] for n, a in tensors.items()}  # type: ignore[call-overload]
        nbytes = sum(a[0].nbytes for a in tensors.values()) * len(request.experts)
        if nbytes > self._most:  # before anything is copied
            raise too_large(nbytes, self._most)
        self._count(len(request.experts), nbytes)
        rows = {n: _rows(a, request.experts) for n, a in tensors.items()}
        return StoreReply(request.layer, request.experts, rows, request.first)

    def _layer(self, layer: int, experts: NDArray[np.integer[Any]]) -> LayerArrays | FormArrays:
        """The arrays of a layer that has all these experts."""
        found = self._layers.get(layer)
        if found is None:
            layers = ", ".join(map(str, self._layers)) or "none"
            raise StoreError(f"{self._name} does not hold MoE layer {layer}; it holds {layers}", "ask another store")
        count = self._view.manifest.experts.num_experts
        ids: list[int] = experts.tolist()
        if not ids or len(set(ids)) != len(ids) or not 0 <= min(ids) <= max(ids) < count:
            raise StoreError(f"experts {ids[:8]} are none, named twice, or not among {count}", "use the lead's store")
        return found

    def _file(self, request: FileRequest) -> FileReply:
        """A piece of a file; the reader checks the digest of the whole."""
        if request.name not in self._files:
            raise StoreError(f"{self._name} gives no file '{request.name[:64]}'", "ask for what its manifest names")
        path = os.path.join(self._view.path, request.name)
        try:
            with open(path, "rb") as file:
                size = os.fstat(file.fileno()).st_size
                if request.offset > size:
                    raise StoreError(f"{request.name} of {self._name} has {size} bytes", "ask for what is there")
                file.seek(request.offset)
                data = file.read(min(request.length, self._most, size - request.offset))
        except OSError as error:
            raise StoreError(f"{path} cannot be read ({error.strerror})", REBUILD) from error
        return FileReply(request.name, request.offset, size, np.frombuffer(data, np.uint8))

    def _count(self, experts: int, nbytes: int) -> None:
        with self._lock:
            self._experts_sent += experts
            self._bytes_sent += nbytes


Stacked = NDArray[Any] | Sequence[NDArray[Any]]  # by expert


def _by_name(layer: LayerArrays | FormArrays) -> Mapping[str, Stacked]:
    if isinstance(layer, FormArrays):
        return layer.parts
    kinds = {
        "gate_up": layer.gate_up, "down": layer.down,
        "gate_up_bias": layer.gate_up_bias, "down_bias": layer.down_bias,
    }  # fmt: skip
    return {name: array for name, array in kinds.items() if array is not None}


def _rows(array: Stacked, experts: NDArray[np.int32]) -> NDArray[Any]:
    """array[experts]; a view when the experts are consecutive in one array."""
    if not isinstance(array, np.ndarray):
        return np.stack([array[e] for e in experts.tolist()])
    first, last = int(experts[0]), int(experts[-1]) + 1
    if last - first == len(experts) and np.array_equal(experts, np.arange(first, last)):
        return array[first:last]
    return array[experts]
