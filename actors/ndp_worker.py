"""The near-data worker: holds the cold experts, quantized, and computes them in host memory.

Experts that the store keeps in their published form are computed from that form, where the checkpoint maps them.

    ExpertBatch (rows, expert ids, widths, weights) -> per width one kernel call -> ExpertResult (a sum per row)

A plain class without torch; `cluster.deploy` makes it an actor on a node with the Ray resource `ndp`. It serves from
construction on: a restart by Ray constructs it and calls nothing else.
"""

from __future__ import annotations

import os
import time
from dataclasses import replace
from itertools import pairwise
from typing import Any, Literal

import numpy as np

from ..errors import ConfigError, StoreError
from ..kernels.form_ffn import FormLayer
from ..kernels.packed_ffn import FullLayer, PackedLayer, Threads
from ..limits import memory
from ..proto.messages import ExpertBatch, ExpertResult, HealthReport, HealthRequest, Message
from ..proto.options import ServerOptions
from ..proto.peers import Directory, ndp_name
from ..proto.server import ChannelServer
from .policies.cost import FULL_BITS, BatchCosts
from .sample import ProcessSample, take_sample
from .settings import NdpSettings
from .store.files import ExpertStore, open_views
from .store.pages import FileWatch
from .store.published import FormArrays
from .store.replicas import describe_replicas, open_replicas

_PACE_SPIN_S = 200e-6  # a sleep may last longer by about this much; the rest is spun


class NdpWorker:
    """Computes experts on its replicas, or on the store's own weights (0 bits).

    Args:
        store: folder of the expert store; its layers and replicas are mapped, not copied.
        directory: gives the host to listen on and takes the address.
        token: required of clients; None: only this machine may connect.
        verify: as of `ExpertStore`.
        options: of the channel server; its host and token are those above.
        index: number among the NDP workers, 0..N-1. Each maps all experts, so any can compute any.

    Raises:
        StoreError: the store or its replicas are damaged. ConfigError: the device to model or the cores are wrong.
    """

    def __init__(
        self,
        settings: NdpSettings,
        store: str,
        directory: Directory,
        token: str | None = None,
        verify: Literal["full", "stamp"] = "stamp",
        options: ServerOptions | None = None,
        index: int = 0,
    ) -> None:
        self._settings, self._index = settings, index
        try:
            self._device = settings.device
        except ValueError as error:
            raise ConfigError(f"the NDP device to model: {error}", "see configs/hardware") from error
        self._open(store, verify)
        shape = self._shape
        self._costs = BatchCosts(self._device, shape.hidden, shape.intermediate, self._full_bits, self._group)
        self._layers: dict[tuple[int, int, str], Any] = {}  # (layer, bits, activation) -> its kernel operand
        self._threads = _threads(settings, index)
        self._batches = self._rows = self._pairs = 0
        self._busy_s = 0.0
        options = options or ServerOptions(helps=True)
        options = replace(options, host=directory.host(), token=token, tls=directory.tls)
        self._server = ChannelServer(self.handle, options)
        directory.register(ndp_name(index), self._server.address)
        self._watch = FileWatch()

    def _open(self, store: str, verify: Literal["full", "stamp"]) -> None:
        """Map the store's experts and replicas; `bench gpu` overrides it with random ones."""
        self._view = view = ExpertStore(store, verify).describe()
        self._full = open_views(view)
        self._shape, published = view.manifest.experts, view.manifest.published
        self._full_bits = FULL_BITS if published is None else min(FULL_BITS, published.bits)
        replicas = describe_replicas(store, verify)
        self._group = replicas.manifest.group if replicas is not None else None
        self._replicas = open_replicas(replicas) if replicas is not None else {}
        self._packed_shapes = replicas.shapes if replicas is not None else {}

    @property
    def address(self) -> str:
        """HOST:PORT."""
        return self._server.address

    def handle(self, message: Message) -> Message:
        """Answer one message of the channel; a raised TierMoeError is sent back."""
        if isinstance(message, ExpertBatch):
            return self._compute(message)
        if isinstance(message, HealthRequest):
            return HealthReport("ndp", self.health())
        raise ConfigError(f"the NDP worker does not answer {type(message).__name__}", "send it expert batches")

    def health(self) -> dict[str, Any]:
        """Its configuration and counters."""
        return {
            "state": "serving",
            "index": self._index,
            "address": self.address,
            "pid": os.getpid(),
            "profile": self._device.name,
            "paced": self._settings.pace,
            "threads": self._settings.worker_threads,
            "cores": ",".join(map(str, self._settings.cores_of(self._index))),
            "widths": ",".join(map(str, self._replicas)),
            "memory": memory().total,
            "batches": self._batches,
            "pairs": self._pairs,
            "busy_s": self._busy_s,
        }

    def sample(self) -> ProcessSample:
        """Its counters. `busy_s`: of its kernels; `answering_s` has the modelled device's pace too."""
        own = {"batches": self._batches, "rows": self._rows, "pairs": self._pairs, "busy_s": self._busy_s}
        return take_sample(own | self._server.traffic.of_server())

    def close(self) -> None:
        """Stop serving. Safe to call twice."""
        self._watch.close()
        self._server.close()

    def _compute(self, batch: ExpertBatch) -> ExpertResult:
        start_s = time.perf_counter()
        self._check(batch)
        hidden = _as_float32(batch.hidden)
        widths, spans = batch.bits.tolist(), list(pairwise(batch.starts.tolist()))
        groups = dict[int, list[tuple[int, int, int]]]()
        for expert, bits, span in zip(batch.experts.tolist(), widths, spans, strict=True):
            groups.setdefault(bits, []).append((expert, *span))
        partials = []
        for bits in sorted(groups):
            operand = self._operand(batch.layer, bits, batch.activation)
            partials.append(np.empty(hidden.shape, np.float32))
            operand.run(groups[bits], batch.rows, batch.weights, hidden, partials[-1])
        partial = partials[0] if partials else np.zeros(hidden.shape, np.float32)
        for other in partials[1:]:
            partial += other
        measured_s = time.perf_counter() - start_s
        counts = [stop - start for start, stop in spans]
        modelled_s = self._costs.total_s(zip(widths, counts, strict=True), batch.hidden.nbytes, partial.nbytes)
        if self._settings.pace:
            _wait_until(start_s + modelled_s)
        self._batches += 1
        self._rows += len(hidden)
        self._pairs += len(batch.rows)
        self._busy_s += measured_s
        return ExpertResult(partial, measured_s, modelled_s, time.perf_counter() - start_s)

    def _check(self, batch: ExpertBatch) -> None:
        if not 0 <= batch.layer < len(self._full):
            raise StoreError(f"the store has no MoE layer {batch.layer}", "use the store that the lead uses")
        if batch.hidden.shape[1] != self._shape.hidden:
            raise StoreError(
                f"rows are {batch.hidden.shape[1]} wide, the experts {self._shape.hidden}", "use the lead's store"
            )
        if len(batch.experts) and int(batch.experts.max()) >= self._shape.num_experts:
            raise StoreError(f"there is no expert {int(batch.experts.max())}", "use the lead's store")

    def _operand(self, layer: int, bits: int, activation: str) -> PackedLayer | FullLayer | FormLayer:
        key = (layer, bits, activation)
        if key not in self._layers:
            if bits == 0:
                full = self._full[layer]
                if isinstance(full, FormArrays):
                    experts = [full.aligned(e) for e in range(self._shape.num_experts)]
                    self._layers[key] = FormLayer(experts, [full.form] * len(experts), activation, self._threads)
                else:
                    self._layers[key] = FullLayer(full.gate_up, full.down, full.dtype, activation, self._threads)
            elif bits in self._replicas:
                self._layers[key] = PackedLayer(
                    self._replicas[bits][layer], self._packed_shapes[bits], activation, self._threads
                )
            else:
                raise StoreError(f"the store has no replicas of {bits} bits", f"run `tiermoe prepare --bits {bits}`")
        return self._layers[key]


def _threads(settings: NdpSettings, index: int) -> Threads:
    count, cores = settings.worker_threads, settings.cores_of(index)
    try:
        return Threads(count, cores)
    except (ValueError, OSError) as error:
        raise ConfigError(
            f"NDP worker {index} cannot have {count} threads on cores {list(cores) or 'of any number'}: {error}",
            "lower ndp.threads, or name other ndp.cores",
        ) from error


def _as_float32(hidden: np.ndarray) -> np.ndarray:
    if hidden.dtype == np.uint16:  # bfloat16 bits are the upper half of float32's
        return (hidden.astype(np.uint32) << 16).view(np.float32)
    return np.ascontiguousarray(hidden, np.float32)


def _wait_until(moment_s: float) -> None:
    """Sleep, then spin: a sleep is less exact than modelled times are short."""
    while (left_s := moment_s - time.perf_counter()) > 0:
        if left_s > _PACE_SPIN_S:
            time.sleep(left_s - _PACE_SPIN_S)
