"""Experts in memory: sources, the slot pool, slots of low-bit replicas, and the segments' places in the pool.

Nothing here imports torch before it allocates: the simulator uses it.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import itemgetter
from typing import TYPE_CHECKING, Any, Protocol, cast, runtime_checkable

from ...core import _core
from ...policies.moepic.split import Segments, SplitLayout
from ...store.format import ExpertShape, Published

if TYPE_CHECKING:
    import torch

    from .device import Arena, Device, Tensors
    from .form_slots import FormPool


@runtime_checkable
class PendingExpert(Protocol):
    """A whole expert that is not in this node's memory yet; used by the loader's thread only."""

    def ask(self, behind: Sequence[Any]) -> None:
        """Request its bytes, and those of the experts behind it in the queue; returns at once."""
        ...

    def tensors(self) -> tuple[torch.Tensor, ...]:
        """Its tensors in the order of `SlotPool.tensors`; waits. Raises TierMoeError where the fetch fails."""
        ...


class SharedPending:
    """One pending expert for the copies of both its segments: fetched once, alive until both are copied."""

    __slots__ = ("__weakref__", "_tensors", "whole")

    def __init__(self, whole: PendingExpert) -> None:
        self.whole = whole
        self._tensors: tuple[torch.Tensor, ...] | None = None

    @property
    def fetched(self) -> bool:
        return self._tensors is not None

    def tensors(self) -> tuple[torch.Tensor, ...]:
        if self._tensors is None:
            self._tensors = self.whole.tensors()
        return self._tensors


class PendingSegment:
    """A `PendingExpert` of the neurons [begin, end); both segments of an expert share one fetch."""

    __slots__ = ("_begin", "_end", "_shared")

    def __init__(self, shared: SharedPending, begin: int, end: int) -> None:
        self._shared, self._begin, self._end = shared, begin, end

    def ask(self, behind: Sequence[Any]) -> None:
        wanted = dict.fromkeys(segment._shared for segment in (self, *behind) if not segment._shared.fetched)
        if wanted:
            first, *others = [shared.whole for shared in wanted]
            first.ask(others)

    def tensors(self) -> tuple[torch.Tensor, ...]:
        return neuron_slice(self._shared.tensors(), self._begin, self._end)


def neuron_slice(tensors: tuple[torch.Tensor, ...], begin: int, end: int) -> tuple[torch.Tensor, ...]:
    """The neurons [begin, end) of an expert without biases: gate_up [I, G, H], down [I, H]."""
    return tuple(map(itemgetter(slice(begin, end)), tensors))


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
    """

    gate_up: torch.Tensor
    down: torch.Tensor
    gate_up_bias: torch.Tensor | None
    down_bias: torch.Tensor | None
    always: int | None = None

    @staticmethod
    def allocate(
        shape: ExpertShape, slots: int, dtype: torch.dtype, device: torch.device, memory: SlotMemory | None = None
    ) -> SlotPool:
        """memory: where slots come and go, `memory.most` in all; None: there are `slots`."""
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
        return self.gate_up.dtype

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


class ExpertSource(Protocol):
    """Where the experts of one MoE layer come from."""

    def expert(self, index: int) -> tuple[torch.Tensor, ...] | PendingExpert:
        """One expert: tensors to copy, the same at each call, or its `PendingExpert`. Returns at once."""
        ...


class HostLayer(Protocol):
    """One MoE layer's experts in host memory; `tensors` are all of them, for pinning."""

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]: ...
    def expert(self, index: int) -> tuple[torch.Tensor, ...]: ...

    def moved(self, tensors: tuple[torch.Tensor, ...]) -> Any:
        """The same experts in other memory, given as `tensors` are."""
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


class SlotMap:
    """Maps segments of experts to slots in the pool and to sources.

    Without a split an expert is one segment with its own key, and slot s is the pool's s-th expert. A low-bit replica
    is a segment that stands in for its expert's.

    Args:
        pool: the slot tensors, allocated once; `pool.bytes` is the whole expert memory, with `memory` at its most.
        weights: the sources of each MoE layer's experts. experts: of a layer. slots, slot_bytes: for whole experts.
        split: how slots are divided between tops and bottoms; None: a slot is a whole expert, for good.
        low_bit: further slots within the same budget, for low-bit replicas; not with a split.
        memory: of the pool, if its last slots come and go: of whole experts.

    Raises:
        ValueError: the split does not fit the pool.
    """

    def __init__(
        self, pool: SlotPool | FormPool, weights: Sequence[ExpertSource], experts: int, slots: int, slot_bytes: int,
        split: SplitLayout | None = None, low_bit: LowBitPart | None = None, memory: SlotMemory | None = None,
    ) -> None:  # fmt: skip
        self.pool, self.weights, self.experts, self.keys = pool, weights, experts, experts * len(weights)
        self.slot_bytes, self.neurons, self.whole_slots = slot_bytes, pool.neurons, slots
        self.low_bit, self.memory = low_bit, memory
        self._forms: Published | None = getattr(pool, "published", None)  # of a `FormPool`: layers may differ
        self.segments: Segments | None = None
        layers = [key // experts for key in range(self.keys)]
        self.layer_of = (layers * 2).__getitem__  # of a segment
        self._bytes = [slot_bytes] * self.keys
        if self._forms is not None:
            self._bytes = [self._forms.of(layer).nbytes() for layer in layers]
        if low_bit is not None:
            self._bytes += [low_bit.slot_bytes] * self.keys
        self.bytes_of = self._bytes.__getitem__  # that a load of a segment copies
        self._sources: dict[int, Tensors] = {}  # found before: of each segment
        self._targets: dict[tuple[int, int], Tensors] = {}  # found before: of each slot and number of bytes
        self._shared: weakref.WeakValueDictionary[int, SharedPending] = weakref.WeakValueDictionary()
        if split is not None:
            self.divide(split)

    @property
    def most_slots(self) -> int:
        """Whole slots that there may be at some time."""
        return self.whole_slots if self.memory is None else self.memory.most

    @property
    def split(self) -> SplitLayout | None:
        """The present division of the slots; None where a slot is a whole expert."""
        return None if self.segments is None else self.segments.split

    def check(self, split: SplitLayout) -> None:
        """Raise ValueError unless the pool can be divided so."""
        if split.neurons != self.neurons or len(split.tops) != len(self.weights):
            raise ValueError(
                f"a split of {len(split.tops)} layers and experts of {split.neurons} neurons; "
                f"there are {len(self.weights)} layers and {self.neurons} neurons"
            )
        if split.total_neurons > self.pool.total_neurons:
            raise ValueError(f"a split of {split.total_neurons} neurons, the pool has {self.pool.total_neurons}")
        if max(split.slots) > self.experts:
            raise ValueError(f"a layer has {max(split.slots)} slots for tops of {self.experts} experts")

    def divide(self, split: SplitLayout) -> None:
        """Divide the slots of an empty cache by a split. Raises ValueError, and changes nothing, as `check`."""
        self.check(split)
        self.segments = segments = Segments(split, self.experts)
        self._bytes[:] = [n * self.slot_bytes // self.neurons for n in segments.neurons]
        self._sources.clear()
        self._targets.clear()

    @property
    def class_of(self) -> Sequence[int]:
        """Slot class of each segment; empty: all are of class 0."""
        if self.segments is not None:
            return self.segments.class_of
        return [] if self.low_bit is None else [0] * self.keys + [1] * self.keys

    @property
    def class_slots(self) -> Sequence[int]:
        """Number of slots of each class."""
        if self.segments is not None:
            return self.segments.slots
        return [self.whole_slots] if self.low_bit is None else [self.whole_slots, self.low_bit.slots]

    @property
    def class_bytes(self) -> Sequence[int]:
        """Of a slot of each class."""
        if self.segments is not None:
            return [n * self.slot_bytes // self.neurons for n in self.segments.slot_neurons]
        return [self.slot_bytes] if self.low_bit is None else [self.slot_bytes, self.low_bit.slot_bytes]

    def layout(self) -> _core.Layout:
        """As the core is told."""
        segments = self.segments
        return _core.Layout(
            len(self.weights), self.experts, 1 if segments is None and self.low_bit is None else 2, self.class_of,
            self.class_slots, [] if segments is None else segments.neurons, self._bytes, segments is not None,
            self.most_slots, [] if segments is None else segments.first,
        )  # fmt: skip

    def source(self, segment: int) -> Tensors | PendingExpert:
        """Where a load of this segment comes from."""
        if segment in self._sources:
            return self._sources[segment]
        segments = self.segments
        layer, expert = divmod(segment % self.keys, self.experts)
        if self.low_bit is not None and segment >= self.keys:
            found = self.low_bit.weights[layer].expert(expert)
        else:
            found = self.weights[layer].expert(expert)
        if segments is not None:
            begin, end = segments.begins[segment], segments.begins[segment] + segments.neurons[segment]
            if not isinstance(found, tuple):
                shared = self._shared.get(segment % self.keys)
                if shared is None:
                    shared = self._shared[segment % self.keys] = SharedPending(found)
                return PendingSegment(shared, begin, end)
            found = neuron_slice(found, begin, end)
        if isinstance(found, tuple):
            self._sources[segment] = found
        return found

    def target(self, segment: int, slot: int) -> Tensors:
        """Where in a slot a load of this segment goes."""
        nbytes = self._bytes[segment]
        if (known := self._targets.get((slot, nbytes))) is not None:
            return known
        if self.low_bit is not None and segment >= self.keys:
            found = self.low_bit.pool.slot(slot - self.whole_slots)
        elif self.segments is None:
            found = self.pool.slot(slot, segment % self.keys // self.experts)
            if self._forms is not None and len(self._forms.forms) > 1:
                return found  # a slot's target depends on the form, too
        else:
            found = cast(SlotPool, self.pool).neuron_range(self.segments.first[slot], self.segments.neurons[segment])
        self._targets[slot, nbytes] = found
        return found
