"""Experts in memory: sources, the slot pool, slots of low-bit replicas, and the segments' places in the pool.

Nothing here imports torch before it allocates: the simulator uses it.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from functools import cached_property
from operator import itemgetter
from typing import TYPE_CHECKING, Any, Protocol, cast, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from ...policies.moepic.split import Segments, SplitLayout
from ...policies.residency import Residency, State
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
        self._device, self._slots = device, least
        self._arenas: list[tuple[Arena, int]] = []  # with the bytes of a slot there

    def tensor(self, dims: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """[most, *dims]. Raises torch.OutOfMemoryError: there is no room for `least` slots."""
        nbytes = math.prod(dims) * dtype.itemsize
        arena = self._device.arena(self.most * nbytes)
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

    `divide` lays out `residency` anew; as given it has one slot class, for whole experts.
    """

    def __init__(self, pool: SlotPool | FormPool, weights: Sequence[ExpertSource], residency: Residency) -> None:
        self.pool, self._weights, self._residency = pool, weights, residency
        self.keys, self.experts = residency.keys, residency.keys // len(weights)
        self._expert_bytes = residency.slot_bytes
        self._neurons = pool.neurons
        self._forms: Published | None = getattr(pool, "published", None)  # of a `FormPool`: layers may differ
        self._segments: Segments | None = None
        self.shown: Sequence[int] | None = None  # the segment that stands for each expert; None: each for itself
        self._low_bit: LowBitPart | None = None
        self.whole_slots = residency.slots  # before those of replicas
        layers = [key // self.experts for key in range(self.keys)]
        self.layer_of = (layers * 2).__getitem__  # of a segment
        self._bytes = [self._expert_bytes] * self.keys
        if self._forms is not None:
            self._bytes = [self._forms.of(key // self.experts).nbytes() for key in range(self.keys)]
        self.bytes_of = self._bytes.__getitem__  # that a load of a segment copies
        self.sources: dict[int, Tensors] = {}  # found before: of each segment
        self.targets: dict[tuple[int, int], Tensors] = {}  # found before: of each slot and number of bytes
        self._shared: weakref.WeakValueDictionary[int, SharedPending] = weakref.WeakValueDictionary()

    @property
    def cut(self) -> SplitLayout | None:
        """The present division of the slots; None where a slot is a whole expert."""
        return None if self._segments is None else self._segments.cut

    def check(self, cut: SplitLayout) -> None:
        """Raise ValueError unless the pool can be divided so."""
        if cut.neurons != self._neurons or len(cut.tops) != len(self._weights):
            raise ValueError(
                f"a cut of {len(cut.tops)} layers and experts of {cut.neurons} neurons; "
                f"there are {len(self._weights)} layers and {self._neurons} neurons"
            )
        if cut.total_neurons > self.pool.total_neurons:
            raise ValueError(f"a cut of {cut.total_neurons} neurons, the pool has {self.pool.total_neurons}")
        if max(cut.slots) > self.experts:
            raise ValueError(f"a layer has {max(cut.slots)} slots for tops of {self.experts} experts")

    def divide(self, cut: SplitLayout) -> None:
        """Lay out the slots by a split, in an empty cache. Raises ValueError, and changes nothing, as `check`."""
        self.check(cut)
        segments = Segments(cut, self.experts)
        sizes = [n * self._expert_bytes // cut.neurons for n in segments.slot_neurons]
        self._residency.divide(segments.class_of, segments.slots, sizes)
        self._segments, self.shown = segments, segments.shown
        self._bytes[:] = [n * self._expert_bytes // self._neurons for n in segments.neurons]
        self.sources.clear()
        self.targets.clear()

    def add_low_bit(self, part: LowBitPart) -> None:
        """Add slots for replicas to an empty cache without a split."""
        self._residency.divide(
            [0] * self.keys + [1] * self.keys, [self.whole_slots, part.slots], [self._expert_bytes, part.slot_bytes]
        )
        self._low_bit = part
        self._bytes += [part.slot_bytes] * self.keys

    def of(self, keys: Sequence[int], low: AbstractSet[int] = frozenset()) -> Sequence[int]:
        """The segments of these experts, grouped by expert; for those in `low` their replicas."""
        if self._segments is None:
            return [key + self.keys if key in low else key for key in keys] if low else keys
        return self._segments.of(keys)

    def states(self) -> list[State]:
        """Of all experts, from any thread; of split experts the state of the top."""
        shown, states = self.shown, self._residency.states()
        return states[: self.keys] if shown is None else [states[segment] for segment in shown]

    def standing(self, layer: int) -> tuple[NDArray[np.bool_], int]:
        """Which experts of a layer are resident or loading [E] (of split experts the tops), and the most that fit at
        once.
        """
        shown, residency, base = self.shown, self._residency, layer * self.experts
        if shown is None:
            return residency.occupied(base, base + self.experts), residency.class_slots[0]
        slots = residency.class_slots[residency.class_of(shown[base])]
        return residency.occupied()[list(shown[base : base + self.experts])], slots

    def vacant(self, layer: int) -> int:
        """Free slots for this layer's experts (of split experts for the tops)."""
        shown, residency, key = self.shown, self._residency, layer * self.experts
        return residency.free_of(residency.class_of(key if shown is None else shown[key]))

    def unit_bytes(self, layer: int) -> int:
        """Of a whole expert of the layer, or of one neuron where experts are split."""
        if self._segments is None:
            return self._bytes[layer * self.experts]
        return self._expert_bytes // self._neurons

    @property
    def segment_layout(self) -> Segments | None:
        """Where experts are split: the segments and their slots."""
        return self._segments

    @property
    def layout(self) -> tuple[list[int], list[int]]:
        """Where experts are split: the first neuron of each slot in the pool, and the neurons of each segment."""
        assert self._segments is not None  # there is a cut
        return self._segments.first, self._segments.neurons

    def place(self, segment: int, slot: int) -> tuple[int, int]:
        """First neuron in the pool and number of neurons of a segment (no replica) in this slot."""
        if self._segments is None:
            return slot * self._neurons, self._neurons
        return self._segments.first[slot], self._segments.neurons[segment]

    def source(self, segment: int) -> Tensors | PendingExpert:
        """Where a load of this segment comes from."""
        segments, low_bit = self._segments, self._low_bit
        layer, expert = divmod(segment % self.keys, self.experts)
        if low_bit is not None and segment >= self.keys:
            found = low_bit.weights[layer].expert(expert)
        else:
            found = self._weights[layer].expert(expert)
        if segments is not None:
            begin, end = segments.begins[segment], segments.begins[segment] + segments.neurons[segment]
            if not isinstance(found, tuple):
                shared = self._shared.get(segment % self.keys)
                if shared is None:
                    shared = self._shared[segment % self.keys] = SharedPending(found)
                return PendingSegment(shared, begin, end)
            found = neuron_slice(found, begin, end)
        if isinstance(found, tuple):
            self.sources[segment] = found
        return found

    def target(self, segment: int, slot: int) -> Tensors:
        """Where in a slot a load of this segment goes."""
        if self._low_bit is not None and segment >= self.keys:
            found = self._low_bit.pool.slot(slot - self.whole_slots)
        elif self._segments is None:
            found = self.pool.slot(slot, segment % self.keys // self.experts)
            if self._forms is not None and len(self._forms.forms) > 1:
                return found  # a slot's target depends on the form, too
        else:
            found = cast(SlotPool, self.pool).neuron_range(self._segments.first[slot], self._segments.neurons[segment])
        self.targets[slot, self._bytes[segment]] = found
        return found
