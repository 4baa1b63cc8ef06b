"""The engine of one shard: rows in, sums of experts out, through this device's own cache.

batch (rows of one layer) -> ids and weights by row -> the layer's pass, as the lead's -> sum per row
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ....errors import PolicyError, StoreError
from ....proto.messages import ExpertBatch, ExpertResult, PlacementCommand, PrefetchCommand
from ....proto.peers import StoreLink
from ...core import _core
from ...settings import EngineSettings
from ...store.dense import dense_folder
from ...store.files import StoreView
from ..cache.cache import ExpertCache
from ..cache.device import Activations, Device, settle_budget
from ..cache.sources import Sources, open_sources
from ..dispatch import DeviceBackend
from ..executors import CpuExecutor, executor_of
from ..hooks import Hooks, Native
from ..host_view import HostViews, LayerView
from ..layer import MoeLayer, Shared
from ..make_cache import ModelExperts, host_experts, make_cache
from ..make_device import activations_of, make_device
from ..model.form_kernels import kernels_of
from ..model.model import MoeBlock, build_blocks, compute_dtype
from ..placer import Placer
from ..stats import EngineStats, LayerResidency
from .matcher import tell_eviction, wanted_keys
from .shards import ShardResidency, owners


class ShardEngine:
    """Computes the experts that shard `index` owns.

    Cache methods must not overlap. A lead has one connection and so one calling thread, but a new connection may
    overlap the last call of the old one: hence the lock.

    Args:
        settings: of the lead; the budget is per device.
        index: 1..G-1.
        sources: of the experts, of all layers; closed with the engine. blocks: the model's MoE layers.

    Attributes:
        activations: moves rows from the channel to the device, and sums back.
        busy_s: of its batches, without waits for copies.

    Raises:
        BudgetError, ConfigError: see `make_cache`. RuntimeFailure: preloading failed. After an error no thread runs.
    """

    def __init__(
        self,
        settings: EngineSettings,
        index: int,
        model: ModelExperts,
        sources: Sources,
        blocks: Sequence[MoeBlock],
        device: Device,
    ) -> None:
        self.sources, self._device, shape = sources, device, model.shape
        mine = _keys_of(index, len(model.sources), shape.num_experts, settings)
        self._experts, self._hidden, self._dtype = shape.num_experts, shape.hidden, model.dtype
        self._reports_residency = settings.policy.on_miss.kind != "load"  # the lead's rule reads it
        self.activations: Activations = activations_of(device.torch_device)
        self.cache = make_cache(settings, model, device, mine)
        self._placer, self._spared = Placer(self.cache), _core.Spared()
        self._placer.native = self._spared
        self._layers: list[MoeLayer] = []
        self._lock = threading.Lock()
        self._iteration, self._layer = -1, -1  # the newest iteration, and the last layer that ran in it
        self.batches = self.rows = self.pairs = 0
        self.busy_s = 0.0
        self.late_commands = self.resting_commands = 0
        self._failure: PolicyError | None = None
        try:
            kernels = kernels_of(self.cache.pool, settings, blocks)
            backend = DeviceBackend(self.cache, _PartViews(), self.activations)
            ahead = [_StreamNext(self.cache, settings.policy.prefetch.kind)] if settings.policy.shards_stream else []
            shared = Shared(self.cache, backend, self._placer, Hooks(ahead=ahead), check=settings.integrity_checks)
            for i, block in enumerate(blocks):
                layer = MoeLayer(i, self._experts, shared, kernels.of(block), block.post, executor_of)
                layer.executor.core.partial = True
                self._layers.append(layer)
            if settings.policy.preload == "all":
                self.cache.core.preload(mine)
        except BaseException:
            self.close()
            raise

    def run(self, batch: ExpertBatch) -> ExpertResult:
        """The weighted sum of the batch's experts for each of its rows, in float32.

        In the result, `measured_s` is compute time, `paced_s` total time (the difference: waits for copies) and
        `modelled_s` the time that the link was busy with this layer's copies, by its own clock.

        Raises:
            StoreError: the batch is for another store. RuntimeFailure: a copy failed. PolicyError: of a policy.
        """
        with self._lock, torch.no_grad():
            self._refuse_foreign(batch)
            if self._failure is not None:
                raise self._failure
            self._device.enter()  # the channel's threads come and go
            self.cache.core.decode_only = batch.decode
            start_s = time.perf_counter()
            before = self.cache.core.counts(batch.layer)
            self._pass_to(batch.layer)
            partial = self.activations.deliver(self._layers[batch.layer].forward(*self._inputs(batch)))
            self.cache.settle_times()  # by now all has ended
            self.batches += 1
            self.rows += len(batch.hidden)
            self.pairs += len(batch.rows)
            total_s = time.perf_counter() - start_s
            counts = self.cache.core.counts(batch.layer)
            blocked_s, link_s = counts.blocked_io_s - before.blocked_io_s, counts.link_s - before.link_s
            self.busy_s += total_s - blocked_s
            resident = None
            if self._reports_residency:
                resident = ShardResidency.encode(self.cache.residency, self.cache.governor.resting)
            return ExpertResult(partial, total_s - blocked_s, link_s, total_s, resident)

    def residency(self) -> list[LayerResidency]:
        """The residency of each layer now; from any thread."""
        return self.cache.layer_residency()

    def prefetch(self, command: PrefetchCommand) -> None:
        """Queue loads behind demand; prefetches for layers that have run are dropped and counted."""
        with self._lock:
            self._device.enter()  # this may be the thread's first call
            if command.iteration > self._iteration:
                self._iteration, self._layer = command.iteration, -1
            keys = [key for key in wanted_keys(command)[0] if key < self.cache.residency.keys]
            tell_eviction(self.cache.eviction, command, self._experts)
            current = command.iteration == self._iteration
            keys = [key for key in keys if key // self._experts > self._layer] if current else []
            if not keys:
                self.late_commands += 1
            elif not self.cache.governor.allows():
                self.resting_commands += 1
            else:
                self.cache.poll()
                try:
                    self.cache.prefetch(keys)
                except PolicyError as error:  # a command has no answer: the next batch's says it
                    self._failure = error

    def place(self, command: PlacementCommand) -> None:
        """Make these the hot experts: load the absent ones, and evict other experts first from now on.

        Raises:
            StoreError: the command is for another store. RuntimeFailure: a preload's copy failed.
        """
        cache, keys = self.cache, command.keys.tolist()
        with self._lock:
            if max(keys, default=0) >= cache.residency.keys:
                raise StoreError(f"there is no expert {max(keys)}", "use the lead's store")
            self._device.enter()
            self._spared.keys = keys
            cache.poll()
            if command.preload:
                cache.flush()  # experts of an earlier lead
                cache.core.preload(keys)
            else:
                cache.core.migrate(keys, command.keep_others)

    def greet(self) -> None:
        """A new lead begins: its iterations are counted anew."""
        with self._lock:
            self._iteration, self._layer = -1, -1

    def stats(self) -> EngineStats:
        """The counters so far; the record is live."""
        return self.sources.count_in(self.cache.live_stats())

    def close(self) -> None:
        """Close the sources, which ends the loader's waits, and the cache. Safe to call twice."""
        self.sources.close()
        with self._lock:  # a batch may be in native code, which gives up the interpreter's lock
            self.cache.close()
        self._device.close()

    def _inputs(self, batch: ExpertBatch) -> tuple[torch.Tensor, Any, torch.Tensor]:
        """What the layer takes: rows and weights on the device, ids on the host."""
        ids, weights = routing_of(batch)
        hidden = self.activations.receive(batch.hidden)
        if hidden.device.type != "cpu":
            return hidden.to(self._dtype), ids, self.activations.receive(weights)
        exact = isinstance(self._layers[batch.layer].executor, CpuExecutor)  # its kernels take and give float32
        hidden = hidden.to(torch.float32 if exact else self._dtype)
        return hidden, torch.from_numpy(ids), self.activations.receive(weights)

    def _pass_to(self, layer: int) -> None:
        """The forward is at this layer: prefetches for layers that it passed without this shard are stale."""
        if layer <= self._layer:  # layers rise within a forward, so a new one has begun
            self._iteration, self._layer = self._iteration + 1, -1
        for passed in range(self._layer + 1, layer):
            self.cache.core.drop_stale(passed, [])
        self._layer = layer

    def _refuse_foreign(self, batch: ExpertBatch) -> None:
        layers = len(self._layers)
        if batch.layer >= layers or max(batch.experts.tolist(), default=0) >= self._experts:
            raise StoreError(
                f"the batch is for layer {batch.layer}, the store has {layers} of {self._experts} experts",
                "use the lead's store",
            )
        if batch.hidden.shape[1] != self._hidden:
            width = batch.hidden.shape[1]
            raise StoreError(f"rows are {width} wide, the experts {self._hidden}", "use the lead's store")
        if any(batch.bits.tolist()):
            raise StoreError("a shard computes in full precision only", "send 0 bits")


class _StreamNext:
    """Queues this device's part of the next layer where a pass sweeps; else the lead says what is prefetched."""

    def __init__(self, cache: ExpertCache, source: str) -> None:
        self._core, self._source = cache.core, cache.number_of(source)

    def native(self, index: int, to: Native) -> Callable[[], object]:
        return lambda: to.core.stream_next(self._source)

    def layer(self, index: int, view: Any) -> None:
        self._core.stream(self._source)


class _PartView(LayerView):
    """Of a batch: a pair without an expert (-1) is one that another GPU or worker runs."""

    __slots__ = ()

    def routing(self, layer: int, experts: int) -> _core.Routing:
        return _core.Routing(layer, experts, self.ids, partial=True)


class _PartViews(HostViews):
    def look(
        self, layer: int, hidden: torch.Tensor, ids: Any, weights: torch.Tensor, weighed: bool = False
    ) -> LayerView:
        return _PartView(self.fetch, hidden, ids, weights)


def routing_of(batch: ExpertBatch) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """A batch's routing by row: ids, of which -1 is none, and weights [T, K]; K: the most experts of a row."""
    tokens, pairs = len(batch.hidden), len(batch.rows)
    experts = np.repeat(batch.experts.astype(np.int64), np.diff(batch.starts))  # [P]
    if tokens == 1 and pairs:
        return experts[np.newaxis], batch.weights[np.newaxis]
    by_row = np.argsort(batch.rows, kind="stable")  # [P]
    rows, counts = batch.rows[by_row], np.bincount(batch.rows, minlength=tokens)
    at = np.arange(pairs) - (np.cumsum(counts) - counts)[rows]  # place of each pair in its row
    shape = tokens, max(1, int(counts.max(initial=0)))
    ids, weights = np.full(shape, -1, np.int64), np.zeros(shape, np.float32)
    ids[rows, at], weights[rows, at] = experts[by_row], batch.weights[by_row]
    return ids, weights


def open_shard(
    settings: EngineSettings, index: int, view: StoreView, gpu: int | None, stores: Sequence[StoreLink] = ()
) -> ShardEngine:
    """The engine of shard `index` on a store of this node, without dense weights.

    Args:
        gpu: number of the CUDA device; None: the current one.
        stores: of other nodes, for the layers that `view` lacks.

    Raises:
        StoreError: the store does not fit its model, or no store has a layer. ConfigError: there is no such GPU.
            Further errors as `ShardEngine`.
    """
    torch.set_num_threads(settings.threads)
    device = make_device(settings.device, settings.link, gpu)
    dtype = compute_dtype(settings.dtype, device.torch_device)
    settings = settle_budget(settings, device, lead=False)
    sources = open_sources(view, stores, settings.store)
    try:
        shape = view.manifest.experts
        own = _keys_of(index, len(sources.weights), shape.num_experts, settings)
        host_experts(sources, view.manifest, settings, device, dtype, own)
        with dense_folder(view, stores, settings.store) as folder:
            blocks = build_blocks(folder, view.manifest, dtype, device.torch_device)
        manifest = view.manifest
        model = ModelExperts(manifest.experts, sources.weights, dtype, published=manifest.published)
        return ShardEngine(settings, index, model, sources, blocks, device)
    except BaseException:
        sources.close()
        device.close()
        raise


def _keys_of(shard: int, layers: int, experts: int, settings: EngineSettings) -> list[int]:
    """Of the experts that belong to a shard."""
    return [key for key, owner in enumerate(owners(layers, experts, settings.shards)) if owner == shard]
