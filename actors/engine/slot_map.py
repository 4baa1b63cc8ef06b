"""Where experts lie in the pool, whole or cut in two, which bytes go there, and which are there now."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from collections.abc import Set as AbstractSet
from typing import TYPE_CHECKING

from ..policies.moepic.split import CacheCut, Segments
from ..policies.residency import Reservation, Residency, State
from .low_bit_part import LowBitPart
from .promise import Promise, PromisedSegment, Shared, neuron_slice

if TYPE_CHECKING:  # torch: the simulator uses this module without it
    from .device import Tensors
    from .pool import ExpertSource, SlotPool


class SlotMap:
    """Segments of experts, their slots' places in the pool, and their sources.

    Without a cut an expert is one segment, which has its key, and slot s is the s-th expert of the pool. With slots for
    low-bit replicas (`add_low_bit`) a replica is a segment, too, which stands in for its expert's.

    Args:
        pool: the slot tensors. weights: where the experts of each MoE layer come from.
        residency: laid out anew by `divide`; as given it has a slot class for whole experts.
    """

    def __init__(self, pool: SlotPool, weights: Sequence[ExpertSource], residency: Residency) -> None:
        self.pool, self._weights, self._residency = pool, weights, residency
        self.keys, self.experts = residency.keys, residency.keys // len(weights)
        self._expert_bytes = residency.slot_bytes
        self._neurons = pool.neurons
        self._segments: Segments | None = None
        self._low_bit: LowBitPart | None = None
        self.whole_slots = residency.slots  # before those of replicas
        self._shared: weakref.WeakValueDictionary[int, Shared] = weakref.WeakValueDictionary()

    @property
    def cut(self) -> CacheCut | None:
        """The present division of the slots; None where a slot is a whole expert."""
        return None if self._segments is None else self._segments.cut

    def check(self, cut: CacheCut) -> None:
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

    def divide(self, cut: CacheCut) -> None:
        """Lay out the slots by a cut, while nothing is held.

        Raises:
            ValueError: the pool cannot be divided so; nothing has changed.
        """
        self.check(cut)
        segments = Segments(cut, self.experts)
        sizes = [n * self._expert_bytes // cut.neurons for n in segments.slot_neurons]
        self._residency.divide(segments.class_of, segments.slots, sizes)
        self._segments = segments

    def add_low_bit(self, part: LowBitPart) -> None:
        """Further slots, for replicas, while nothing is held and there is no cut."""
        self._residency.divide(
            [0] * self.keys + [1] * self.keys, [self.whole_slots, part.slots], [self._expert_bytes, part.slot_bytes]
        )
        self._low_bit = part

    def of(self, keys: Sequence[int], low: AbstractSet[int] = frozenset()) -> Sequence[int]:
        """The segments of these experts, each expert's together; of those in `low` their replicas."""
        if low:
            return [key + self.keys if key in low else key for key in keys]
        return keys if self._segments is None else self._segments.of(keys)

    def layer_of(self, segment: int) -> int:
        return segment % self.keys // self.experts

    def experts_of(self, segments: Sequence[int]) -> Iterable[int]:
        """The experts of which all or, under a cut, the segment that stands for them is among these."""
        keys = self.keys
        if self._segments is None:
            return segments if self._low_bit is None else [segment % keys for segment in segments]
        shown = self._segments.shown
        return [segment % keys for segment in segments if shown[segment % keys] == segment]

    def shown(self) -> Sequence[int] | None:
        """The segment that stands for each expert; None where each stands for itself."""
        return None if self._segments is None else self._segments.shown

    def states(self) -> list[State]:
        """Of all experts at one moment, from any thread; under a cut those of their tops."""
        shown, states = self.shown(), self._residency.states()
        return states[: self.keys] if shown is None else [states[segment] for segment in shown]

    def standing(self, layer: int) -> tuple[list[State], int]:
        """Of each expert of a layer as in `states`, and how many there may be at once, were no other layer's there."""
        shown, residency, base = self.shown(), self._residency, layer * self.experts
        keys = range(base, base + self.experts)
        segments = keys if shown is None else shown[base : base + self.experts]
        return [residency.state(s) for s in segments], residency.class_slots[residency.class_of(segments[0])]

    def vacant(self, layer: int) -> int:
        """Slots in which this layer's experts go (of a split one its top) and which hold nothing."""
        shown, residency, key = self.shown(), self._residency, layer * self.experts
        return residency.free_of(residency.class_of(key if shown is None else shown[key]))

    def bytes_of(self, segment: int) -> int:
        """Bytes that its load moves."""
        if self._segments is None:
            low_bit = self._low_bit
            return self._expert_bytes if low_bit is None or segment < self.keys else low_bit.slot_bytes
        return self._segments.neurons[segment] * self._expert_bytes // self._neurons

    def place(self, segment: int, slot: int) -> tuple[int, int]:
        """Where it, no replica, lies while it has this slot: its first neuron in the pool, and how many."""
        if self._segments is None:
            return slot * self._neurons, self._neurons
        return self._segments.first[slot], self._segments.neurons[segment]

    def copy_of(self, reservation: Reservation) -> tuple[Tensors, Tensors | Promise]:
        """Where a load goes, and where from."""
        segments, segment = self._segments, reservation.key
        key = segment % self.keys
        low_bit = self._low_bit
        if low_bit is not None and segment >= self.keys:
            source = low_bit.weights[key // self.experts].expert(key % self.experts)
            return low_bit.pool.slot(reservation.slot - self.whole_slots), source
        whole = self._weights[key // self.experts].expert(key % self.experts)
        if segments is None:
            return self.pool.slot(reservation.slot), whole
        begin, count = segments.begins[segment], segments.neurons[segment]
        dst = self.pool.neuron_range(segments.first[reservation.slot], count)
        if isinstance(whole, tuple):  # asking whether it is a `Promise` takes longer than the rest
            return dst, neuron_slice(whole, begin, begin + count)
        shared = self._shared.get(key)
        if shared is None:
            shared = self._shared[key] = Shared(whole)
        return dst, PromisedSegment(shared, begin, begin + count)
