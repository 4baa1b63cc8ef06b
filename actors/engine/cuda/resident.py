"""Residency on the device: the host's side. Not used by an engine yet; see `docs/gpu.md`.

A decode step runs without the host: `kernels.triton.resolve` finds each expert, reads what is absent from registered
host memory, and appends the routing to a ring. The host follows the ring, behind, and changes what is resident:

    retire    slot_of[old] = ABSENT           on the compute stream: later steps read the expert from host memory
    copy      the expert into the old slot    on the copy stream, behind an event after the retirement
    publish   slot_of[new] = slot             on the copy stream, behind the copy

A slot is written only after the compute has passed the retirement, so no kernel reads a slot that changes. A step that
runs while `publish` does sees the expert absent or resident: both give the same value. The present host path stays as
the reference.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from ....kernels.triton.resolve import ABSENT, RING_HEAD, ResidentKernels, Tables
from ..cache.slots import LayerWeights, SlotPool
from .runtime import GpuRuntime
from .tables import TableRing


class Routed(NamedTuple):
    """One layer of one step, as the device ran it: ids [N], weights [N] of its pairs, in routing order."""

    step: int
    layer: int
    misses: int
    ids: NDArray[np.int64]
    weights: NDArray[np.float32]


class DeviceResidency:
    """The tables, the ring and the copies of one cache whose residency is on the device.

    Args:
        pool: the slots, without biases; empty.
        weights: of each MoE layer, in registered memory and in the slots' dtype.
        top_k: experts of a token. rows: the most of a forward. steps: that the ring holds.

    Raises:
        ValueError: the experts have biases, another dtype than the slots, or do not lie in pinned memory.
    """

    def __init__(
        self, runtime: GpuRuntime, pool: SlotPool, weights: Sequence[LayerWeights], activation: str, top_k: int,
        rows: int = 16, steps: int = 64,
    ) -> None:  # fmt: skip
        experts, slots, device = len(weights[0].tensors[0]), len(pool.gate_up), pool.gate_up.device
        for layer in weights:
            if len(layer.tensors) != 2 or any(t.dtype != pool.gate_up.dtype for t in layer.tensors):
                raise ValueError("residency on the device takes experts without biases, in the slots' dtype")
            if not all(runtime.is_pinned(t) for t in layer.tensors):
                raise ValueError("residency on the device reads experts from pinned memory")
        self._runtime, self._pool, self._weights = runtime, pool, list(weights)
        self._layers, self.experts, self._entries = len(weights), experts, steps * len(weights)
        width = rows * top_k
        homes = [
            (gate_up.data_ptr() + e * gate_up[0].nbytes, down.data_ptr() + e * down[0].nbytes)
            for gate_up, down in (layer.tensors for layer in weights)
            for e in range(experts)
        ]
        ring = runtime.pinned(self._entries * (RING_HEAD + width) * 8).view(torch.int64).view(self._entries, -1)
        shares = runtime.pinned(self._entries * width * 4).view(torch.float32).view(self._entries, width)
        ring.fill_(-1)
        self.tables = Tables(
            torch.full((self._layers * experts,), ABSENT, dtype=torch.int32, device=device),
            torch.zeros(slots, dtype=torch.int64, device=device), torch.zeros(1, dtype=torch.int64, device=device),
            torch.tensor(homes, dtype=torch.int64, device=device), ring, shares,
        )  # fmt: skip
        self._ring, self._shares = ring.numpy(), shares.numpy()
        self.kernels = ResidentKernels(pool.gate_up, pool.down, activation, self._layers, experts, self.tables)
        self._changes, self._copies = TableRing(runtime, entries=64, nbytes=4096), runtime.stream()
        self._held: list[int | None] = [None] * slots  # the expert that each slot holds or gets
        self._under_way: dict[int, Any] = {}  # slot -> its copy's event
        self._read = self._layers  # entries of steps 1, 2, ... that `routed` has given

    def load(self, key: int, slot: int) -> None:
        """Copy expert `key` into a slot, whose expert is read from host memory from now on; never waits.

        Raises:
            ValueError: the slot's last copy has not ended, or the expert is in another slot.
        """
        runtime, event = self._runtime, self._under_way.get(slot)
        if (event is not None and not runtime.query(event)) or key in self._held:
            raise ValueError(f"expert {key} cannot be loaded into slot {slot} now")
        if (old := self._held[slot]) is not None:
            self._publish(self._changes.put(np.array([[old, ABSENT]], np.int32)))
        retired, copied = runtime.event(timing=False), runtime.event(timing=False)
        change = self._changes.put(np.array([[key, slot]], np.int32))
        runtime.record(retired, runtime.current())
        layer, expert = divmod(key, self.experts)
        runtime.wait_event(self._copies, retired)
        with runtime.on(self._copies):
            for target, source in zip(self._pool.tensors, self._weights[layer].tensors, strict=True):
                runtime.copy(target[slot], source[expert])
            self._publish(change)
        runtime.record(copied, self._copies)
        self._held[slot], self._under_way[slot] = key, copied

    def _publish(self, change: torch.Tensor) -> None:
        self._runtime.launch(lambda: self.kernels.publish(change))

    def free_slots(self) -> list[int]:
        """Slots without an expert."""
        return [slot for slot, key in enumerate(self._held) if key is None]

    def routed(self, step: int) -> Iterator[Routed]:
        """The layers of steps up to `step`, which has ended (its event was seen), each once and in order.

        Raises:
            ValueError: the host is behind by more than the ring holds.
        """
        last = (step + 1) * self._layers
        if last - self._read > self._entries:
            raise ValueError(f"the ring holds {self._entries} layers, the host is {last - self._read} behind")
        while self._read < last:
            place = self._read % self._entries
            now, layer, pairs, misses, *_ = self._ring[place].tolist()
            if (now, layer) != divmod(self._read, self._layers):
                return  # the forward had fewer layers here, or has not reached this one
            ids = self._ring[place, RING_HEAD : RING_HEAD + pairs].copy()
            yield Routed(now, layer, misses, ids, self._shares[place, :pairs].copy())
            self._read += 1
