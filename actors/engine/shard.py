"""The experts of one shard: rows in, sums out, through this device's own cache.

    batch (rows of one layer) -> plan -> loads -> residents, arrivals -> norm after each expert -> sum per row
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from ...errors import StoreError
from ...kernels.expert_ffn import ExpertKernel
from ...proto.messages import ExpertBatch, ExpertResult, PrefetchCommand
from ..expert_store import StoreView, open_views
from ..policies.plan import LoadOnMiss
from ..settings import EngineSettings
from ..store_format import ExpertShape
from .allocate import make_cache
from .device import Device, make_device
from .engine import host_weights, kernel_for
from .matching import tell_eviction, wanted_keys
from .model import MoeBlock, build_blocks, compute_dtype
from .pool import LayerWeights
from .runner import ExpertRunner
from .shards import owners
from .stats import EngineStats


class ShardEngine:
    """Computes the experts that shard `index` owns.

    A lead has one connection, so one thread calls; one that connected anew may overlap the last call of its old
    connection, so a lock keeps the cache's rule that its methods run one after another.

    Args:
        settings: those of the lead; the budget is this device's own.
        index: 1..G-1.
        weights: host weights of all layers. blocks: what is to be known of the model's layers.

    Raises:
        BudgetError, ConfigError: see `make_cache`. RuntimeFailure: preloading failed. Whatever is raised, no thread
            stays.
    """

    def __init__(
        self,
        settings: EngineSettings,
        index: int,
        shape: ExpertShape,
        weights: Sequence[LayerWeights],
        blocks: Sequence[MoeBlock],
        device: Device,
        dtype: torch.dtype,
    ) -> None:
        mine = [key for key, owner in enumerate(owners(len(weights), shape.num_experts, settings.shards))
                if owner == index]  # fmt: skip
        self._experts, self._hidden, self._dtype = shape.num_experts, shape.hidden, dtype
        self._check = settings.integrity_checks
        self.cache = make_cache(settings, shape, weights, device, dtype, len(mine))
        self._kernels: list[ExpertKernel] = [kernel_for(self.cache.pool, block) for block in blocks]
        self._posts = [block.post for block in blocks]
        self._runner = ExpertRunner(self.cache, LoadOnMiss())
        self._lock = threading.Lock()
        self._iteration, self._layer = -1, -1  # the newest iteration heard of, and the last layer that ran in it
        self.batches = self.pairs = 0
        self.late_commands = self.resting_commands = 0
        try:
            if settings.policy.preload == "all":
                self.cache.preload(mine)
        except BaseException:
            self.close()
            raise

    def run(self, batch: ExpertBatch) -> ExpertResult:
        """The weighted sum of the batch's experts for each of its rows, in float32.

        Of the result, `measured_s` are the seconds of computing, `paced_s` those in all: the difference was spent
        waiting for copies. Nothing is modelled.

        Raises:
            StoreError: the batch is for another store. RuntimeFailure: a copy failed.
        """
        with self._lock, torch.no_grad():
            self._refuse_foreign(batch)
            start_s = time.perf_counter()
            stats = self.cache.stats.layers[batch.layer]
            blocked_s = stats.blocked_io_s
            try:
                partial = self._sum(batch).cpu().numpy()
            except BaseException:
                self.cache.abandon()
                raise
            if self._check:
                self.cache.check_integrity()
            self.batches += 1
            self.pairs += len(batch.rows)
            total_s = time.perf_counter() - start_s
            return ExpertResult(partial, total_s - (stats.blocked_io_s - blocked_s), 0.0, total_s)

    def prefetch(self, command: PrefetchCommand) -> None:
        """Queue loads behind demand; what comes after its layer has run is dropped and counted."""
        with self._lock:
            if command.iteration > self._iteration:
                self._iteration, self._layer = command.iteration, -1
            keys = [key for key in wanted_keys(command) if key < self.cache.residency.keys]
            tell_eviction(self.cache.eviction, command, self._experts)
            if command.iteration == self._iteration:
                keys = [key for key in keys if key // self._experts > self._layer]
            else:
                keys = []
            if not keys:
                self.late_commands += 1
            elif not self.cache.governor.allows():
                self.resting_commands += 1
            else:
                self.cache.poll()
                self.cache.prefetch(keys)

    def greet(self) -> None:
        """A lead begins: what another one counted is no measure of its commands."""
        with self._lock:
            self._iteration, self._layer = -1, -1

    def stats(self) -> EngineStats:
        """The counters so far; the record is live."""
        stats = self.cache.stats
        stats.loads_in_flight = self.cache.loads_in_flight
        stats.prefetch_resting = self.cache.governor.resting
        return stats

    def close(self) -> None:
        """Stop the loader. Safe to call twice."""
        self.cache.close()

    def _sum(self, batch: ExpertBatch) -> torch.Tensor:
        cache, layer, base = self.cache, batch.layer, batch.layer * self._experts
        device = cache.pool.gate_up.device
        cache.poll()
        self._pass_to(layer)
        experts, starts = batch.experts.tolist(), batch.starts.tolist()
        keys = [base + e for e in experts]
        cache.drop_stale(layer, keys)
        plan = self._runner.start(layer, keys)
        hidden = _tensor(batch.hidden).to(device=device, dtype=self._dtype)  # [T, H]
        weights = _tensor(batch.weights).to(device)  # [P]
        rows = None if len(hidden) == 1 else _tensor(batch.rows).to(device=device, dtype=torch.int64)  # [P]
        x = hidden.expand(len(weights), -1) if rows is None else hidden[rows]  # [P, H]: each pair is a token of its own
        y = hidden.new_empty((len(weights), hidden.shape[1]))
        spans = {key: (starts[i], starts[i + 1]) for i, key in enumerate(keys)}
        pairs = torch.arange(len(weights), device=device)
        self._runner.run(layer, plan, spans, x, pairs, 1, self._kernels[layer], y)
        post = self._posts[layer]
        if post is not None:
            y = post(y)
        y = y.float()
        return (weights @ y).unsqueeze(0) if rows is None else _weighted_sum(y, rows, weights, len(hidden))

    def _pass_to(self, layer: int) -> None:
        """The forward is at this layer: guesses for the ones that it went past without this shard are stale."""
        if layer <= self._layer:  # layers rise within a forward, so a new one has begun
            self._iteration, self._layer = self._iteration + 1, -1
        for passed in range(self._layer + 1, layer):
            self.cache.drop_stale(passed, ())
        self._layer = layer

    def _refuse_foreign(self, batch: ExpertBatch) -> None:
        layers = len(self._kernels)
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


def open_shard(settings: EngineSettings, index: int, view: StoreView, gpu: int | None) -> ShardEngine:
    """The engine of shard `index` on a store of this node: no dense weights are loaded.

    Args:
        gpu: number of the CUDA device; None: the current one.

    Raises:
        StoreError: the store does not fit its model. ConfigError: there is no such GPU. And as `ShardEngine`.
    """
    torch.set_num_threads(settings.threads)
    device = make_device(settings.device, settings.link, gpu)
    dtype = compute_dtype(settings.dtype, device.torch_device)
    weights = host_weights(open_views(view))
    if device.executor == "real":
        for layer in weights:
            device.pin_host(layer.tensors)
    blocks = build_blocks(Path(view.path), view.manifest, dtype, device.torch_device)
    return ShardEngine(settings, index, view.manifest.experts, weights, blocks, device, dtype)


def _tensor(array: np.ndarray) -> torch.Tensor:
    """A copy, for what arrived is read-only; uint16 holds bfloat16 bits."""
    if array.dtype == np.uint16:
        return torch.from_numpy(array.view(np.int16).copy()).view(torch.bfloat16)
    return torch.from_numpy(array.copy())


def _weighted_sum(y: torch.Tensor, rows: torch.Tensor, weights: torch.Tensor, tokens: int) -> torch.Tensor:
    """out[t] = sum of weights[p] * y[p] over the pairs p of row t, in a fixed order [T, H]."""
    if y.device.type == "cpu":
        return y.new_zeros((tokens, y.shape[1])).index_add_(0, rows, y * weights.unsqueeze(1))
    mix = y.new_zeros((tokens, len(rows)))  # [T, P]; CUDA's index_add_ adds in no fixed order
    mix[rows, torch.arange(len(rows), device=y.device)] = weights
    return mix @ y
