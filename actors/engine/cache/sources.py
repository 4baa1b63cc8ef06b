"""Where a worker's experts come from: its own node's files by mapping, another node's store for the rest.

    open_sources -> per layer: LayerWeights (mapped tensors) | RemoteLayer (an expert is a `PendingExpert`)
    loader's thread: ask(this expert, those behind it in the queue) -> tensors() -> device copy

The thread of the forward never fetches: it hands pending experts to the loader, as it hands mapped tensors.

Which store. Of the stores that hold a layer, layer l takes the first living one, counted from place l, so that layers
spread over replicas. One that is lost or fails is passed over for the next; its connection is made again in the
background. While no node has the layer, the loader waits, but no longer than `deadline_s` after the fetch began, nor
after the last of its stores was lost: one outage is waited for once, and what comes later fails at once until a store
is back.

Pipelining. Experts of one layer that stand behind each other in the loader's queue share a request of up to
`PART_BYTES`; two requests are under way, so that a store prepares one answer while the one before travels and is
copied. No more, since a demand load queues behind what is under way.

Transport "auto" is our channel, over gRPC between hosts. `tiermoe bench transfer` of commit 15d3550 (two cores,
loopback) gave, for it and for Ray's objects put on demand: one expert of 0.19 MiB 2.1 and 9.1 ms, sixteen 7.5 and 37
ms, one of 16.5 MiB 22 and 25 ms, one of 112 MiB 120 and 114 ms: the large ones are alike. Besides, Ray's way needs
room for them in two object stores, and it notices a dead node late.
"""

from __future__ import annotations

import threading
import time
import warnings
import weakref
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray

from ....errors import MessageError, RemoteFailure, RuntimeFailure, StoreError
from ....proto.options import Traffic
from ....proto.peers import Reconnecting, StoreLink
from ...settings import CopySettings, StoreSettings
from ...store.files import LayerArrays, StoreView, open_views
from ...store.format import Manifest
from ...store.published import FormArrays
from ...store.remote import PART_BYTES, Answer, StoreReader, connect_store
from ..stats import EngineStats
from .device import Device, HostExperts, PinReport, Tensors
from .form_slots import FormWeights
from .host_tier import HostTier
from .slots import ExpertSource, LayerWeights

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}  # by their names in a store
_UNDER_WAY = 2  # requests
_START_S = 30.0  # seconds to reach a store of each layer, which are started before the lead


def host_tensor(array: NDArray[Any], dtype: torch.dtype) -> torch.Tensor:
    """A read-only array as a tensor on the same memory, which the tensor keeps alive."""
    with warnings.catch_warnings():  # torch has no read-only tensors: nothing writes to these
        warnings.filterwarnings("ignore", message="The given (buffer|NumPy array) is not writable")
        return torch.frombuffer(array.data.cast("B"), dtype=dtype).view(array.shape)


def host_layers(arrays: Sequence[LayerArrays | FormArrays]) -> list[LayerWeights | FormWeights]:
    """Mapped experts of either layout as torch tensors, without a copy."""
    return [form_weights(a) if isinstance(a, FormArrays) else host_weights([a])[0] for a in arrays]


def form_weights(layer: FormArrays) -> FormWeights:
    """Mapped experts as tensors on the same memory."""
    experts = range(len(next(iter(layer.parts.values()))))
    return FormWeights(tuple(tuple(host_tensor(part, torch.uint8) for part in layer.expert(e)) for e in experts))


def host_weights(arrays: Sequence[LayerArrays]) -> list[LayerWeights]:
    """Mapped arrays as torch tensors in the store's dtype, without a copy."""
    out = []
    for layer in arrays:
        dtype = DTYPES[layer.dtype]
        kinds = (layer.gate_up, layer.down, layer.gate_up_bias, layer.down_bias)
        out.append(LayerWeights(tuple(host_tensor(a, dtype) for a in kinds if a is not None)))
    return out


@dataclass(frozen=True)
class OwnExperts:
    """Some experts of a layer, as a device pins them where they lie."""

    layer: HostExperts
    experts: Sequence[int]

    @property
    def tensors(self) -> Tensors:
        return tuple(part for expert in self.experts for part in self.layer.expert(expert))

    def expert(self, index: int) -> Tensors:
        return self.layer.expert(index)

    def moved(self, tensors: Tensors) -> HostExperts:
        raise NotImplementedError("experts that may be copied are pinned by whole layers")


class RemoteExpert:
    """A `PendingExpert` on another node; used by the loader's thread only."""

    lasts: ClassVar[bool] = True
    __slots__ = ("__weakref__", "expert", "fetch", "layer", "stores")

    def __init__(self, stores: RemoteStores, layer: int, expert: int) -> None:
        self.stores, self.layer, self.expert = stores, layer, expert
        self.fetch: _Fetch | None = None

    def ask(self, behind: Sequence[RemoteExpert]) -> None:
        self.stores.ask([self, *behind])

    def tensors(self) -> Tensors:
        """Its tensors in host memory. Raises StoreError: no store delivered it in time."""
        return self.stores.take(self)


class RemoteLayer:
    """The source of one MoE layer in other nodes' host memory."""

    def __init__(self, stores: RemoteStores, layer: int) -> None:
        self._stores, self._layer = stores, layer

    def expert(self, index: int) -> RemoteExpert:
        return RemoteExpert(self._stores, self._layer, index)


class _Fetch:
    """One request: experts of one layer from one store."""

    def __init__(
        self, holder: Reconnecting[StoreReader], reader: StoreReader, answer: Answer, experts: Sequence[int]
    ) -> None:
        self.holder, self.reader, self._answer = holder, reader, answer
        self._experts = list(experts)
        self._arrived: dict[int, tuple[NDArray[Any], ...]] | None = None
        self.failed = False

    def result(self, expert: int) -> tuple[NDArray[Any], ...]:
        """The arrays of one expert; the first call waits for the whole request."""
        if self._arrived is None:
            self._arrived = dict(zip(self._experts, self._answer(), strict=True))
        return self._arrived.pop(expert)


class RemoteStores:
    """The stores of other nodes, and which of them is asked.

    Args:
        layers: those to be read from other nodes. links: of the stores. settings: transport and deadline.

    `ask` and `take` are for the loader's one thread.

    Raises:
        StoreError: no link holds one of the layers.
    """

    def __init__(
        self, manifest: Manifest, layers: Sequence[int], links: Sequence[StoreLink], settings: StoreSettings
    ) -> None:
        missing = [layer for layer in layers if not any(layer in link.layers for link in links)]
        if missing:
            raise StoreError(
                f"no store holds MoE {_named(missing)}", "give a store these layers, or copy their files to this node"
            )
        self._settings = settings
        self._dtype = DTYPES[manifest.dtype] if manifest.published is None else torch.uint8
        self._per_request = max(1, PART_BYTES // manifest.expert_nbytes())
        self._under_way: weakref.WeakSet[_Fetch] = weakref.WeakSet()
        self._changed, self._closed = threading.Condition(), False
        used = [link for link in links if set(link.layers) & set(layers)]
        self._holders: dict[str, Reconnecting[StoreReader]] = {
            link.name: Reconnecting(link.name, partial(connect_store, link, manifest, settings), changed=self._changed)
            for link in used
        }
        for holder in self._holders.values():
            holder.start()
        self._of_layer = dict[int, list[Reconnecting[StoreReader]]]()
        for layer in layers:
            holders = [self._holders[link.name] for link in used if layer in link.layers]
            first = layer % len(holders)
            self._of_layer[layer] = holders[first:] + holders[:first]
        self.refetches = 0
        self.reads = {name: Traffic() for name in self._holders}  # of experts, by store

    def start(self, deadline_s: float) -> None:
        """Wait until every layer has a store. Raises StoreError after `deadline_s` seconds."""
        until_s = time.monotonic() + deadline_s
        for layer, holders in self._of_layer.items():
            self._await_one(holders, max(0.0, until_s - time.monotonic()))
            if all(holder.current is None for holder in holders):
                raise self._nobody(layer, {})

    def layer(self, index: int) -> RemoteLayer:
        return RemoteLayer(self, index)

    def peers(self) -> dict[str, str]:
        """By store: "connected" or "lost"."""
        return {name: "lost" if holder.current is None else "connected" for name, holder in self._holders.items()}

    def refusal(self) -> StoreError | None:
        """Why a layer cannot be had: no store of it is connected, and the files of one do not verify."""
        for layer, holders in self._of_layer.items():
            if all(holder.current is None for holder in holders) and any(holder.refused for holder in holders):
                why = "; ".join(holder.reason for holder in holders if holder.refused)
                return StoreError(f"MoE layer {layer} cannot be read: {why}", "put the file back on that node")
        return None

    @property
    def transports(self) -> dict[str, str]:
        """By connected store: "shm", "grpc" or "ray"."""
        readers = {name: holder.current for name, holder in self._holders.items()}
        return {name: reader.transport for name, reader in readers.items() if reader is not None}

    def describe(self) -> list[dict[str, Any]]:
        """By store: transport, the layers read from it first, and those it is a spare for."""
        transports = self.transports
        return [
            {
                "store": name,
                "transport": transports.get(name),
                "layers": [layer for layer, having in self._of_layer.items() if having[0] is holder],
                "spare_layers": [layer for layer, having in self._of_layer.items() if holder in having[1:]],
            }
            for name, holder in self._holders.items()
        ]

    def ask(self, wanted: Sequence[RemoteExpert]) -> None:
        """Begin requests for these experts, in this order, while fewer than `_UNDER_WAY` are under way."""
        rest = [one for one in wanted if one.fetch is None or one.fetch.failed]
        while rest and len(self._under_way) < _UNDER_WAY:
            layer = rest[0].layer
            group = [one for one in rest if one.layer == layer][: self._per_request]
            holder = next((h for h in self._of_layer[layer] if h.current is not None), None)
            share = sum(h.current is not None for h in self._of_layer[layer])
            if holder is None or not self._begin(holder, group, self._settings.deadline_s / max(1, share)):
                return  # `take` says what is to be done
            rest = [one for one in rest if one not in group]

    def take(self, wanted: RemoteExpert) -> Tensors:
        """Wait for an expert, from whichever store delivers it.

        Raises:
            StoreError: none did; the error names the layers and their stores.
        """
        until_s = time.monotonic() + self._settings.deadline_s
        failures: Counter[str] = Counter()
        refusals: dict[str, str] = {}
        while True:
            fetch = wanted.fetch
            if fetch is None or fetch.failed:
                fetch = self._ask_again(wanted, until_s, failures, refusals)
            began_s, read = time.monotonic(), self.reads[fetch.holder.name]
            try:
                arrays = fetch.result(wanted.expert)
            except RuntimeFailure as failure:
                self._give_up(fetch, failure)
                failures[fetch.holder.name] += 1
                if isinstance(failure, RemoteFailure | MessageError):
                    refusals[fetch.holder.name] = failure.what
                continue
            finally:
                read.waited_s += time.monotonic() - began_s
            wanted.fetch = None
            read.received(sum(array.nbytes for array in arrays))
            return tuple(host_tensor(np.ascontiguousarray(array), self._dtype) for array in arrays)

    def close(self) -> None:
        """Close the connections; a waiting `take` raises now. Safe to call twice."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        for holder in self._holders.values():
            holder.close()

    def _ask_again(
        self, wanted: RemoteExpert, until_s: float, failures: Counter[str], refusals: Mapping[str, str]
    ) -> _Fetch:
        """Ask the connected store with the fewest failures that did not refuse; waits until there is one."""
        willing = [holder for holder in self._of_layer[wanted.layer] if holder.name not in refusals]
        while willing and not self._closed:
            now_s = time.monotonic()
            living = [holder for holder in willing if holder.current is not None]
            if living and now_s < until_s:
                best = min(living, key=lambda holder: failures[holder.name])
                # the others shall have time too
                if self._begin(best, [wanted], (until_s - now_s) / len(living)) and wanted.fetch is not None:
                    return wanted.fetch
                continue
            outage_s = max(holder.lost_s or now_s for holder in willing)
            left_s = min(until_s, outage_s + self._settings.deadline_s) - now_s
            if left_s <= 0:
                break
            self._await_one(willing, left_s)
        raise self._nobody(wanted.layer, refusals)

    def _begin(self, holder: Reconnecting[StoreReader], group: Sequence[RemoteExpert], deadline_s: float) -> bool:
        """Send one request; False: that store is lost."""
        reader = holder.current
        if reader is None:
            return False
        experts = [one.expert for one in group]
        try:
            fetch = _Fetch(holder, reader, reader.ask(group[0].layer, experts, deadline_s), experts)
        except RuntimeFailure as failure:
            holder.lost(reader, failure.what)
            return False
        self._under_way.add(fetch)
        for one in group:
            one.fetch = fetch
        return True

    def _give_up(self, fetch: _Fetch, failure: RuntimeFailure) -> None:
        fetch.failed = True
        self._under_way.discard(fetch)
        self.refetches += 1
        fetch.holder.lost(fetch.reader, failure.what)

    def _await_one(self, holders: Sequence[Reconnecting[StoreReader]], timeout_s: float) -> None:
        """Wait until one of these stores is connected."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._closed or any(holder.current is not None for holder in holders), timeout_s
            )

    def _nobody(self, layer: int, refusals: Mapping[str, str]) -> StoreError:
        """The error for an expert of this layer; it names every layer that no connected store has."""
        holders = self._of_layer[layer]
        why = "; ".join(f"{h.name}: {refusals.get(h.name) or h.reason}" for h in holders)
        gone = [i for i, having in self._of_layer.items() if all(h.current is None for h in having)]
        return StoreError(
            f"MoE {_named(sorted({layer, *gone}))} cannot be read: no store gave an expert of layer {layer} "
            f"within {self._settings.deadline_s:g} s ({why})",
            f"bring back {' or '.join(h.name for h in holders)}, or copy the layer's file to this node",
        )


class Sources:
    """The experts of all layers, mapped or remote.

    Attributes:
        weights: one source per MoE layer.
        mapped: the tensors of this node's files, for pinning.
        remote: None where all layers are mapped.
        tier: host memory that all are read into; None: the mapped ones are copied from where they are.
    """

    tier: HostTier | None = None

    def __init__(self, weights: list[ExpertSource], mapped: list[HostExperts], remote: RemoteStores | None) -> None:
        self.weights, self.mapped, self.remote = weights, mapped, remote

    def pin(
        self, device: Device, settings: CopySettings, own: Sequence[int] | None = None, experts: int = 0
    ) -> PinReport | None:
        """Have the device pin the mapped layers; before caches are made. None where the device pins nothing.

        Args:
            own: keys of the experts that are copied from here; None: all. Whole layers are pinned where they may be
                copied for it.
            experts: in a layer, for the keys.
        """
        if own is not None and settings.pin == "mapped" and settings.unpinned == "stage":
            mine: dict[int, list[int]] = {}
            for key in own:
                mine.setdefault(key // experts, []).append(key % experts)
            of = {id(source): mine.get(layer, []) for layer, source in enumerate(self.weights)}
            return device.pin([OwnExperts(one, of[id(one)]) for one in self.mapped], settings)[1]
        layers, report = device.pin(self.mapped, settings)
        now = {id(old): new for old, new in zip(self.mapped, layers, strict=True)}
        self.weights = [now.get(id(source), source) for source in self.weights]
        self.mapped = list(layers)
        return report

    def read_into(self, tier: HostTier) -> None:
        """Load experts from host memory of their own, which reads the disk; what is mapped is not touched any more."""
        self.tier, self.mapped = tier, []
        self.weights = [tier.layer(layer) for layer in range(len(self.weights))]

    def count_in(self, stats: EngineStats) -> EngineStats:
        """These counters of a cache, with those of the host memory that it is loaded from."""
        if self.tier is not None:
            stats.host_memory = self.tier.stats
        return stats

    def peers(self) -> Mapping[str, str]:
        """By store that is read from: "connected" or "lost"."""
        return {} if self.remote is None else self.remote.peers()

    def reads(self) -> dict[str, dict[str, float]]:
        """By store what was read from it, an expert a message, as in `actors.sample.ProcessSample.peers`."""
        return {} if self.remote is None else {n: read.of_client() for n, read in self.remote.reads.items()}

    def refusal(self) -> StoreError | None:
        """Why a layer of another node cannot be had until somebody mends a store there; None: each can."""
        return None if self.remote is None else self.remote.refusal()

    def describe(self) -> list[dict[str, Any]] | None:
        """For the plan: each store with its layers; None where all layers are mapped."""
        return None if self.remote is None else self.remote.describe()

    def close(self) -> None:
        """Close the connections, and stop reading the disk. Safe to call twice."""
        if self.remote is not None:
            self.remote.close()
        if self.tier is not None:
            self.tier.close()


def open_sources(view: StoreView, stores: Sequence[StoreLink], settings: StoreSettings) -> Sources:
    """Map the layers of this node's store and connect to the stores of the others.

    Args:
        view: of this node; its `layers` are mapped.
        stores: of other nodes.

    Raises:
        StoreError: a file changed, a layer is nowhere, or none of its stores was reached.
    """
    manifest = view.manifest
    mapped = dict(zip((layer.index for layer in view.layers), host_layers(open_views(view)), strict=True))
    absent = [layer.index for layer in manifest.layers if layer.index not in mapped]
    if not absent:
        return Sources([mapped[layer.index] for layer in manifest.layers], list(mapped.values()), None)
    remote = RemoteStores(manifest, absent, stores, settings)
    try:
        remote.start(_START_S)
    except BaseException:
        remote.close()
        raise
    weights: list[ExpertSource] = [mapped.get(layer.index) or remote.layer(layer.index) for layer in manifest.layers]
    return Sources(weights, list(mapped.values()), remote)


def _named(layers: Sequence[int]) -> str:
    numbers = [str(layer) for layer in layers[:12]] + (["..."] if len(layers) > 12 else [])
    return f"layer{'s' if len(layers) > 1 else ''} {', '.join(numbers)}"
