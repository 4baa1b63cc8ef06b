"""The engine of one shard: rows in, sums of experts out, through this device's own cache.

batch (rows of one layer) -> plan -> loads -> residents, arrivals -> norm after each expert -> sum per row
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from ....errors import PolicyError, StoreError
from ....proto.messages import ExpertBatch, ExpertResult, PlacementCommand, PrefetchCommand
from ....proto.peers import StoreLink
from ...core import _core
from ...settings import EngineSettings
from ...store.dense import dense_folder
from ...store.files import StoreView
from ..cache.device import Activations, Device, settle_budget
from ..cache.sources import Sources, open_sources
from ..host_view import pairs_of
from ..layer import Groups, MoeLayer, Pass, Replicas, Shared
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
        self._experts, self._hidden = shape.num_experts, shape.hidden
        self._reports_residency = settings.policy.on_miss.kind != "load"  # the lead's rule reads it
        self.activations: Activations = activations_of(device.torch_device)
        self.cache = make_cache(settings, model, device, mine)
        self._placer = Placer(self.cache)  # `place` sets its `keep`
        self._layers: list[MoeLayer] = []
        self._lock = threading.Lock()
        self._iteration, self._layer = -1, -1  # the newest iteration, and the last layer that ran in it
        self.batches = self.rows = self.pairs = 0
        self.busy_s = 0.0
        self.late_commands = self.resting_commands = 0
        self._failure: PolicyError | None = None
        try:
            kernels = kernels_of(self.cache.pool, settings, blocks)
            backend = _BatchBackend(self.activations, model.dtype)
            shared = Shared(self.cache, backend, self._placer, check=settings.integrity_checks)
            self._layers += [
                MoeLayer(i, self._experts, shared, kernels.of(block), block.post) for i, block in enumerate(blocks)
            ]
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
            partial = self.activations.deliver(self._layers[batch.layer].forward(batch))
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
            self._placer.keep = frozenset(keys)
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


@dataclass(frozen=True)
class _BatchView:
    """A batch of the lead's rows as a `hooks.View`. Each (row, expert) pair is a token of its own."""

    batch: ExpertBatch

    def routing(self, layer: int, experts: int) -> _core.Routing:
        batch = self.batch
        counts = np.diff(batch.starts).tolist()
        return _core.Routing.of_counts(layer, experts, len(batch.hidden), batch.experts.tolist(), counts)


class _BatchBackend:
    """Runs the lead's batches on this shard's device (`layer.Backend`): weighted sums in float32."""

    def __init__(self, activations: Activations, dtype: torch.dtype) -> None:
        self._activations, self._dtype = activations, dtype

    def look(self, step: MoeLayer, weighed: bool, batch: ExpertBatch) -> _BatchView:
        return _BatchView(batch)

    def send(self, of: Pass) -> list[Any]:
        raise AssertionError("a shard sends nothing on")

    def join(self, of: Pass, call: Any) -> bool:
        raise AssertionError("a shard has sent nothing on")

    def begin(self, of: Pass) -> _BatchRows:
        batch, receive = of.view.batch, self._activations.receive
        hidden = receive(batch.hidden).to(self._dtype)  # [T, H]
        weights = receive(batch.weights)  # [P]
        rows = None if len(hidden) == 1 else receive(batch.rows).to(torch.int64)  # [P]
        x = hidden.expand(len(weights), -1) if rows is None else hidden[rows]  # [P, H]
        y = hidden.new_empty((len(weights), hidden.shape[1]))
        return _BatchRows(x, pairs_of(of.routing, x.device), y, weights, rows, len(hidden))

    def run(self, of: Pass, groups: Groups, replicas: Replicas) -> None:
        work = of.work
        of.step.kernel.run(work.x, work.pairs, groups, of.routing.top_k, work.y)

    def combine(self, of: Pass) -> torch.Tensor:
        _, _, y, weights, rows, tokens = of.work
        if of.step.post is not None:
            y = of.step.post(y)
        y = y.float()
        return (weights @ y).unsqueeze(0) if rows is None else _weighted_sum(y, rows, weights, tokens)


class _BatchRows(NamedTuple):
    """Of a pass: x and y [P, H], pairs and weights [P], rows [P] of so many tokens; None: of one."""

    x: torch.Tensor
    pairs: torch.Tensor
    y: torch.Tensor
    weights: torch.Tensor
    rows: torch.Tensor | None
    tokens: int


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


def _weighted_sum(y: torch.Tensor, rows: torch.Tensor, weights: torch.Tensor, tokens: int) -> torch.Tensor:
    """out[t] = sum of weights[p] * y[p] over the pairs p of row t, in a fixed order [T, H]."""
    if y.device.type == "cpu":
        return y.new_zeros((tokens, y.shape[1])).index_add_(0, rows, y * weights.unsqueeze(1))
    mix = y.new_zeros((tokens, len(rows)))  # [T, P]; CUDA's index_add_ adds in no fixed order
    mix[rows, torch.arange(len(rows), device=y.device)] = weights
    return mix @ y
