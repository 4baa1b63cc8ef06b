"""Reading another node's store.

    ChannelReader  our channel: shared memory on one host, gRPC between hosts
    RefReader      Ray: from the store's object store to this node's

NumPy without torch; Ray is imported only for `cluster.store.transport: ray`.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from ...errors import MessageError, PeerLost, RemoteFailure, RuntimeFailure, StoreError, TierMoeError
from ...proto.channel import Channel, open_channel
from ...proto.messages import HealthReport, HealthRequest, Message, StoreReply, StoreRequest
from ...proto.options import ChannelOptions
from ...proto.peers import StoreLink
from ..settings import StoreSettings
from .files import NUMPY_TYPES
from .format import Manifest, manifest_digest

# A larger expert comes in several messages of neurons, so that one is written, one travels and one is read at the same
# time. Measured from 1 to 16 MiB over gRPC: 1.45 GB/s at 2 MiB, 0.91 at 16.
PART_BYTES = 2 << 20
_CONNECT_S = 2.0
# Bulk data fills the link for longer than a layer's messages do: liveness gets more time.
_LIVENESS_S = 2.0

Expert = tuple[NDArray[Any], ...]  # in the order of `ExpertShape.stacked`
Answer = Callable[[], list[Expert]]


class StoreReader(Protocol):
    """A connection to one store. transport: "shm", "grpc" or "ray". closed_because: None while it is usable."""

    @property
    def transport(self) -> str: ...
    @property
    def closed_because(self) -> str | None: ...

    def ask(self, layer: int, experts: Sequence[int], deadline_s: float) -> Answer:
        """Ask for experts of a layer; returns at once. Calling the answer waits for them.

        Raises, then or when called:
            RuntimeFailure: the store is lost, too slow, refuses, or answers with something else.
        """
        ...

    def close(self) -> None: ...


class ChannelReader:
    """A `StoreReader` over our channel."""

    def __init__(self, channel: Channel, manifest: Manifest) -> None:
        self._channel, self._manifest = channel, manifest

    @property
    def transport(self) -> str:
        return self._channel.transport

    @property
    def closed_because(self) -> str | None:
        return self._channel.closed_because

    def ask(self, layer: int, experts: Sequence[int], deadline_s: float) -> Answer:
        neurons, ids = self._manifest.experts.intermediate, np.array(experts, np.int32)
        per_neuron = max(1, self._manifest.expert_nbytes() * len(experts) // neurons)
        part = max(1, PART_BYTES // per_neuron)
        if self._manifest.published is not None:  # bytes of whole experts
            part = neurons
        parts = [
            (first, last, self._channel.submit(StoreRequest(layer, ids, first, last - first), deadline_s))
            for first, last in ((first, min(first + part, neurons)) for first in range(0, neurons, part))
        ]

        def joined() -> list[Expert]:
            if len(parts) == 1:
                return _per_expert(self._arrays(parts[0][2].result(), layer, ids, 0, neurons), len(ids))
            out = {
                name: np.empty((len(ids), *dims[1:]), NUMPY_TYPES[code])
                for name, (code, dims) in self._manifest.expert_tensors().items()
            }
            for first, last, pending in parts:
                for name, array in self._arrays(pending.result(), layer, ids, first, last).items():
                    if name == "down_bias":  # of outputs, not of neurons: whole in every part
                        out[name][:] = array
                    else:
                        out[name][:, first:last] = array
            return _per_expert(out, len(ids))

        return joined

    def close(self) -> None:
        self._channel.close()

    def _arrays(
        self, reply: Message | None, layer: int, ids: NDArray[np.int32], first: int, last: int
    ) -> Mapping[str, NDArray[Any]]:
        """The arrays of an answer in manifest order, once they are those that were asked for."""
        if (
            not isinstance(reply, StoreReply)
            or (reply.layer, reply.first) != (layer, first)
            or not np.array_equal(reply.experts, ids)
        ):
            raise _foreign("other experts than those asked for")
        whole = last - first == self._manifest.experts.intermediate
        wanted = {
            name: (
                NUMPY_TYPES[code],
                (len(ids), *(dims[1:] if whole or name == "down_bias" else (last - first, *dims[2:]))),
            )
            for name, (code, dims) in self._manifest.expert_tensors(layer).items()
        }
        found = {name: (array.dtype.type, array.shape) for name, array in reply.tensors.items()}
        if found != wanted:
            raise _foreign("arrays of other shapes or types than the manifest's")
        return {name: reply.tensors[name] for name in wanted}


class RefReader:
    """A `StoreReader` over Ray objects; `actor` is the store's name in this process's Ray namespace.

    Raises:
        RuntimeFailure: there is no such actor, or this process is not on Ray.
    """

    transport = "ray"
    closed_because = None  # a lost actor shows at the next `ask`

    def __init__(self, actor: str, manifest: Manifest) -> None:
        import ray

        try:
            self._handle = ray.get_actor(actor)
        except (ray.exceptions.RayError, ValueError, RuntimeError) as error:
            raise RuntimeFailure(f"no store actor '{actor}' ({error})", "check that the cluster is up") from error
        self._manifest = manifest

    def health(self, deadline_s: float) -> dict[str, Any]:
        """The store's health. Raises PeerLost: no answer."""
        return self._get(self._handle.health.remote(), deadline_s)

    def ask(self, layer: int, experts: Sequence[int], deadline_s: float) -> Answer:
        asked = self._handle.expert_refs.remote(layer, list(experts))

        def checked() -> list[Expert]:
            found = self._get(self._get(asked, deadline_s), deadline_s)
            wanted = [(NUMPY_TYPES[code], dims[1:]) for code, dims in self._manifest.expert_tensors(layer).values()]
            if len(found) != len(experts) or any([(a.dtype.type, a.shape) for a in e] != wanted for e in found):
                raise _foreign("arrays of other shapes or types than the manifest's")
            return [tuple(expert) for expert in found]

        return checked

    def close(self) -> None: ...

    @staticmethod
    def _get(ref: Any, deadline_s: float) -> Any:
        import ray

        try:
            return ray.get(ref, timeout=deadline_s)
        except ray.exceptions.RayError as error:
            cause = getattr(error, "cause", None)
            if isinstance(cause, TierMoeError):
                raise RemoteFailure(cause.what, cause.remedy, type(cause).__name__) from None
            raise PeerLost(f"Ray: {type(error).__name__}", "see whether the store's node is up") from error


def connect_store(link: StoreLink, manifest: Manifest, settings: StoreSettings) -> StoreReader:
    """A connection to a store that reports itself well and holds the same model.

    Raises:
        RuntimeFailure: the store is absent. StoreError: it is damaged, or another one.
    """
    if settings.transport == "ray":
        if link.actor is None:
            raise StoreError(f"{link.name} is not a Ray actor", "use store.transport: grpc")
        reader = RefReader(link.actor, manifest)
        _check(link, reader.health(_CONNECT_S), manifest)
        return reader
    channel = open_store_channel(link, settings)
    try:
        report = channel.call(HealthRequest(), _CONNECT_S)
        if not isinstance(report, HealthReport) or report.role != "store":
            raise _foreign("no health report of a store")
        _check(link, report.details, manifest)
    except BaseException:
        channel.close()
        raise
    return ChannelReader(channel, manifest)


def open_store_channel(link: StoreLink, settings: StoreSettings) -> Channel:
    """A channel to the address that the store registered.

    Raises:
        PeerLost: no address is registered. RuntimeFailure: the store cannot be reached, or refuses.
    """
    address = link.link.address()
    if address is None:
        raise PeerLost(f"{link.name} registered no address", "start its node")
    return open_channel(
        address,
        ChannelOptions(token=link.link.token, tls=link.link.directory.tls, liveness_s=_LIVENESS_S),
    )


def _check(link: StoreLink, details: Mapping[str, Any], manifest: Manifest) -> None:
    if details.get("state") != "serving":
        raise StoreError(f"{link.name} is {details.get('state')}: {details.get('problem')}", "repair its files")
    if details.get("store") != manifest_digest(manifest):
        raise StoreError(f"{link.name} holds another model, or another build of it", "copy one store to all nodes")
    present = set(str(details.get("layers")).split(","))
    missing = [layer for layer in link.layers if str(layer) not in present]
    if missing:
        raise StoreError(f"{link.name} does not hold MoE layer {missing[0]}", "give it the layers that the plan says")


def _per_expert(arrays: Mapping[str, NDArray[Any]], count: int) -> list[Expert]:
    return [tuple(array[i] for array in arrays.values()) for i in range(count)]


def _foreign(what: str) -> MessageError:
    return MessageError(f"the store answered with {what}", "run the same version of tiermoe on all nodes")


class RefBook:
    """References to experts in Ray's object store, least recently used first.

    At most `most_bytes` of them, and at least the newest; Ray frees an object when its last reader drops it.
    """

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._lock = threading.Lock()
        self._refs: OrderedDict[tuple[int, int], tuple[Any, int]] = OrderedDict()
        self._nbytes = 0

    @property
    def nbytes(self) -> int:
        return self._nbytes

    def get(self, key: tuple[int, int], nbytes: int, arrays: Callable[[], list[NDArray[Any]]]) -> Any:
        """The reference of an expert; a new object is put after older ones are dropped."""
        import ray

        with self._lock:
            if key in self._refs:
                self._refs.move_to_end(key)
                return self._refs[key][0]
            while self._refs and self._nbytes + nbytes > self._most_bytes:
                self._nbytes -= self._refs.popitem(last=False)[1][1]
            ref = ray.put(arrays())
            self._refs[key] = (ref, nbytes)
            self._nbytes += nbytes
            return ref

    def clear(self) -> None:
        """Drop all references."""
        with self._lock:
            self._refs.clear()
            self._nbytes = 0
