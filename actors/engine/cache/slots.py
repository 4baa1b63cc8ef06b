"""Experts in memory: sources, the slot pool, and slots of low-bit replicas.

Nothing here imports torch before it allocates: the simulator uses it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import itemgetter
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, runtime_checkable

from ...store.format import ExpertShape, Published

if TYPE_CHECKING:
    import torch

    from .device import Arena, Device


@runtime_checkable
class PendingExpert(Protocol):
    """A whole expert that is not in this node's memory yet; used by the loader's thread only.

    lasts: whether its tensors stay as they are while they are referenced; else until another's are asked for.
    """

    lasts: ClassVar[bool]

    def ask(self, behind: Sequence[Any]) -> None:
        """Request its bytes, and those of the experts behind it in the queue; returns at once."""
        ...

    def tensors(self) -> tuple[torch.Tensor, ...]:
        """Its tensors in the order of `SlotPool.tensors`; waits. Raises TierMoeError where the fetch fails."""
        ...


class SlotMemory:
    """The memory of a pool whose last slots come and go: an arena for each of its tensors.

    least: slots that there are at first, and always. most: slots for which there are addresses.
    """

    def __init__(self, device: Device, least: int, most: int) -> None:
        self.least, self.most = least, most
        self.device, self._slots = device, least
        self._arenas: list[tuple[Arena, int]] = []  # with the bytes of a slot there

    def tensor(self, dims: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """[most, *dims]. Raises torch.OutOfMemoryError: there is no room for `least` slots."""
        nbytes = math.prod(dims) * dtype.itemsize
        arena = self.device.arena(self.most * nbytes)
        arena.resize(self.least * nbytes)
        self._arenas.append((arena, nbytes))
        return arena.tensor.view(dtype).view(self.most, *dims)

    def resize(self, slots: int) -> None:
        """The first slots are there; nothing uses the others.

        Raises:
            torch.OutOfMemoryError: there is no room for more; then there are as many as before.
        """
        import torch

        try:
            for arena, nbytes in self._arenas:
                arena.resize(slots * nbytes)
        except torch.OutOfMemoryError:
            for arena, nbytes in self._arenas:
                arena.resize(self._slots * nbytes)
            raise
        self._slots = slots


@dataclass(frozen=True)
class SlotPool:
    """One contiguous allocation per tensor kind, made once; slot s of each is one whole expert.

    Shapes: gate_up [S, I, G, H], down [S, I, H], gate_up_bias [S, I, G] or None, down_bias [S, H] or None; neuron j of
    an expert is gate_up[s, j] and down[s, j]. The same tensors are also S*I neurons, which slots of other sizes share
    (`neuron_range`).

    always: the first slots, which are there from the start on (`SlotMemory`); None: all.
    computes: dtype of the compute, where slots hold the store's; None: that of the slots.
    """

    gate_up: torch.Tensor
    down: torch.Tensor
    gate_up_bias: torch.Tensor | None
    down_bias: torch.Tensor | None
    always: int | None = None
    computes: torch.dtype | None = None

    @staticmethod
    def allocate(
        shape: ExpertShape, slots: int, dtype: torch.dtype, device: torch.device, memory: SlotMemory | None = None,
        computes: torch.dtype | None = None,
    ) -> SlotPool:  # fmt: skip
        """dtype: of the slots. memory: where slots come and go, `memory.most` in all; None: there are `slots`."""
        import torch

        def empty(*dims: int) -> torch.Tensor:
            if memory is not None:
                return memory.tensor(dims, dtype)
            return torch.empty((slots, *dims), dtype=dtype, device=device)

        i, g, h = shape.intermediate, shape.gates, shape.hidden
        return SlotPool(
            gate_up=empty(i, g, h),
            down=empty(i, h),
            gate_up_bias=empty(i, g) if shape.has_bias else None,
            down_bias=empty(h) if shape.has_bias else None,
            always=slots,
            computes=computes,
        )

    @cached_property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        return tuple([t for t in (self.gate_up, self.down, self.gate_up_bias, self.down_bias) if t is not None])

    @cached_property
    def _rows(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The neurons of all slots: gate_up [S*I, G, H], down [S*I, H]."""
        return self.gate_up.flatten(0, 1), self.down.flatten(0, 1)

    @property
    def bytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in self.tensors)

    @property
    def device(self) -> torch.device:
        return self.gate_up.device

    @property
    def dtype(self) -> torch.dtype:
        """Of the compute."""
        return self.computes or self.gate_up.dtype

    @property
    def hidden(self) -> int:
        """Width of rows: H."""
        return self.gate_up.shape[-1]

    @property
    def neurons(self) -> int:
        """Of one slot: I."""
        return self.gate_up.shape[1]

    @property
    def total_neurons(self) -> int:
        """Of all slots: S*I."""
        return self.gate_up.shape[0] * self.gate_up.shape[1]

    def slot(self, index: int, layer: int = 0) -> tuple[torch.Tensor, ...]:
        """The tensors of one slot, in the order of `tensors`; alike for all layers."""
        return tuple(map(itemgetter(index), self.tensors))

    def neuron_range(self, first: int, count: int) -> tuple[torch.Tensor, ...]:
        """Neurons of the pool, counted over all slots: gate_up [n, G, H], down [n, H]; without biases."""
        gate_up, down = self._rows
        return gate_up[first : first + count], down[first : first + count]


@dataclass(frozen=True)
class MappedPool:
    """No slots but the experts themselves, where a store maps them: slot s is the s-th expert of all layers.

    weights: of each MoE layer, all of this node. shape: of an expert. dtype: of the compute.
    published: their forms; None: they are neurons, in the store's type.
    """

    weights: Sequence[MappedExperts]
    shape: ExpertShape
    dtype: torch.dtype
    published: Published | None = None

    bytes = 0  # of its own

    @property
    def device(self) -> torch.device:
        return self.weights[0].tensors[0].device

    @property
    def hidden(self) -> int:
        """Width of rows: H."""
        return self.shape.hidden

    @property
    def neurons(self) -> int:
        """Of one slot: I."""
        return self.shape.intermediate

    @property
    def total_neurons(self) -> int:
        """Of all slots: S*I."""
        return len(self.weights) * self.shape.num_experts * self.neurons

    def slot(self, index: int, layer: int) -> tuple[torch.Tensor, ...]:
        """The tensors of an expert, read-only."""
        return self.weights[layer].expert(index - layer * self.shape.num_experts)


class MappedExperts(Protocol):
    """One MoE layer's experts in this host's memory: `LayerWeights` or `form_slots.FormWeights`."""

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]: ...
    def expert(self, index: int) -> tuple[torch.Tensor, ...]: ...


class ExpertSource(Protocol):
    """Where the experts of one MoE layer come from."""

    def expert(self, index: int) -> tuple[torch.Tensor, ...] | PendingExpert:
        """One expert: tensors to copy, the same at each call, or its `PendingExpert`. Returns at once."""
        ...


@dataclass(frozen=True)
class LayerWeights:
    """One MoE layer's experts in host memory, read-only, in the checkpoint's dtype; shapes [E, ...] as in
    `SlotPool`.
    """

    tensors: tuple[torch.Tensor, ...]

    def expert(self, index: int) -> tuple[torch.Tensor, ...]:
        """The tensors of one expert, in the order of `SlotPool.tensors`."""
        return tuple(map(itemgetter(index), self.tensors))

    def moved(self, tensors: tuple[torch.Tensor, ...]) -> LayerWeights:
        """The same experts in other memory."""
        return LayerWeights(tensors)


class ReplicaSlots(Protocol):
    """Slots of equal size in one allocation."""

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]: ...
    @property
    def bytes(self) -> int: ...
    def slot(self, index: int) -> tuple[torch.Tensor, ...]: ...


@dataclass(frozen=True)
class LowBitPart:
    """Slots of low-bit replicas, and the source of their bytes.

    The replica of expert `key` has the key `key + keys` (keys: experts of all layers). It is reserved, copied, pinned,
    run and evicted like an expert, in slots of class 1.

    pool: the slot tensors. weights: the replicas of each MoE layer. slots: their number. slot_bytes: of one replica,
    with scales and padding.
    """

    pool: ReplicaSlots
    weights: Sequence[ExpertSource]
    slots: int
    slot_bytes: int
