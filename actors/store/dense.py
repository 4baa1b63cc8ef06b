"""The dense weights and small files of a store, for a node without store files.

Configuration, tokenizer, manifest, dense weights and replica tables come from another node's store over its channel, in
bounded pieces, and are checked against the manifest's digests before use. Without NumPy and torch.
"""

from __future__ import annotations

import contextlib
import hashlib
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal

from ...errors import MessageError, PeerLost, RemoteFailure, RuntimeFailure, StoreError
from ...proto.channel import Channel
from ...proto.messages import FileReply, FileRequest
from ...proto.peers import StoreLink
from ..settings import StoreSettings
from .files import ExpertStore, FileView, StoreView
from .format import MANIFEST_NAME, FileRecord, Manifest
from .pages import FileStamp
from .remote import open_store_channel
from .replicas import REPLICAS_NAME, read_replicas

PIECE_BYTES = 8 << 20
_MOST_MANIFEST_BYTES = 64 << 20
_LOOK_S = 0.1


def view_here(
    store: str,
    verify: Literal["full", "stamp"],
    layers: Sequence[int] | None,
    stores: Sequence[StoreLink],
    settings: StoreSettings,
) -> StoreView:
    """The view of a node's layers of a store; a node without layers needs no folder, only other stores.

    Raises:
        StoreError: the folder is damaged, or no other store answered.
    """
    if not stores or layers is None or layers:
        return ExpertStore(store, verify, layers).describe()
    with contextlib.closing(_Files(stores, settings)) as source:
        manifest = source.manifest()[1]
    dense = str(Path(store) / manifest.dense.file)
    return StoreView(store, manifest, (), FileView(dense, FileStamp(manifest.dense.nbytes, 0, 0, 0), {}))


@contextlib.contextmanager
def dense_folder(view: StoreView, stores: Sequence[StoreLink], settings: StoreSettings) -> Iterator[Path]:
    """A folder of this node with the dense weights: the view's own, or without layers a temporary copy.

    Raises:
        StoreError: as `fetch_dense`, or the stores hold another model than the view.
    """
    if view.layers or not stores:
        yield Path(view.path)
        return
    with tempfile.TemporaryDirectory(prefix="tiermoe-dense-") as folder:
        if fetch_dense(stores, Path(folder), settings).manifest != view.manifest:
            raise StoreError("the stores hold another model than the one described", "copy one store to all nodes")
        yield Path(folder)


def fetch_dense(stores: Sequence[StoreLink], folder: Path, settings: StoreSettings) -> StoreView:
    """Copy every file of a store but its experts into an existing folder of this process.

    Args:
        stores: any that hold the model; when one fails, the next one continues.

    Returns:
        A view of the folder, without layers.

    Raises:
        StoreError: no store gave a file within `settings.deadline_s` seconds, or its digest differs.
    """
    with contextlib.closing(_Files(stores, settings)) as source:
        data, manifest = source.manifest()
        (folder / MANIFEST_NAME).write_bytes(data)
        for record in (manifest.dense, *manifest.extras):
            source.copy(record, folder)
        with contextlib.suppress(_Refused):  # the stores have no replicas
            (folder / REPLICAS_NAME).write_bytes(source.read(REPLICAS_NAME))
        if (replicas := read_replicas(folder, manifest)) is not None:
            source.copy(replicas.losses, folder)  # the calibration tables
    dense = folder / manifest.dense.file
    return StoreView(str(folder), manifest, (), FileView(str(dense), FileStamp.of(dense.stat()), {}))


class _Refused(StoreError):
    """Every store refused to give a file."""


class _Files:
    """Pieces of files from the first store that gives them."""

    def __init__(self, stores: Sequence[StoreLink], settings: StoreSettings) -> None:
        self._stores, self._settings = list(stores), settings
        self._channel: Channel | None = None
        self.name = "no store"

    def manifest(self) -> tuple[bytes, Manifest]:
        """The manifest, encoded and decoded."""
        data = self.read(MANIFEST_NAME)
        return data, Manifest.decode(data, f"the manifest of {self.name}")

    def read(self, name: str) -> bytes:
        """A file whose size no manifest gives."""
        first = self._piece(name, 0, PIECE_BYTES)
        if first.size > _MOST_MANIFEST_BYTES:
            raise StoreError(f"{name} of {self.name} has {first.size} bytes", "check that it is a store")
        data = first.data.tobytes()
        return data + b"".join(self.pieces(name, first.size, len(data)))

    def pieces(self, name: str, size: int, offset: int = 0) -> Iterator[memoryview]:
        """The bytes of a file from `offset` on, in order."""
        while offset < size:
            reply = self._piece(name, offset, min(PIECE_BYTES, size - offset))
            if reply.size != size:
                raise StoreError(
                    f"{name} of {self.name} has {reply.size} bytes, not {size}", "copy one store to all nodes"
                )
            offset += len(reply.data)
            yield reply.data.data

    def copy(self, record: FileRecord, folder: Path) -> None:
        """Write a file into a folder. Raises StoreError: not available, not writable, or its digest differs."""
        digest, path = hashlib.sha256(), folder / record.file
        try:
            with open(path, "wb") as file:
                for piece in self.pieces(record.file, record.nbytes):
                    digest.update(piece)
                    file.write(piece)
        except OSError as error:
            raise StoreError(f"{path} cannot be written ({error.strerror})", "free some space") from error
        if digest.hexdigest() != record.sha256:
            what = f"{record.file} of {self.name} does not match its SHA-256"
            raise StoreError(what, "prepare the store of that node again")

    def close(self) -> None:
        channel, self._channel = self._channel, None
        if channel is not None:
            channel.close()

    def _piece(self, name: str, offset: int, length: int) -> FileReply:
        until_s = time.monotonic() + self._settings.deadline_s
        problems: dict[str, str] = {}
        refused: set[str] = set()
        while (left_s := until_s - time.monotonic()) > 0 and len(refused) < len(self._stores):
            try:
                return self._ask(FileRequest(name, offset, length), left_s / len(self._stores))
            except RuntimeFailure as failure:
                store = self._stores.pop(0)
                self._stores.append(store)
                problems[store.name] = failure.what
                if isinstance(failure, RemoteFailure):
                    refused.add(store.name)
                self.close()
                if len(problems) == len(self._stores):
                    time.sleep(min(_LOOK_S, left_s))  # until a store comes back
        kind = _Refused if len(refused) == len(self._stores) else StoreError
        raise kind(
            f"{name} was not had from a store ({'; '.join(f'{n}: {p}' for n, p in problems.items())})",
            "see whether the nodes with the stores are up",
        )

    def _ask(self, request: FileRequest, deadline_s: float) -> FileReply:
        if self._channel is None:
            self._channel = open_store_channel(self._stores[0], self._settings)
            self.name = self._stores[0].name
        reply = self._channel.call(request, deadline_s)
        if not isinstance(reply, FileReply) or (reply.name, reply.offset) != (request.name, request.offset):
            raise MessageError("the store answered with something else", "run the same version of tiermoe on all nodes")
        if not 0 < len(reply.data) <= request.length and reply.offset < reply.size:
            raise PeerLost("the store sent no bytes", "see its log")
        return reply
