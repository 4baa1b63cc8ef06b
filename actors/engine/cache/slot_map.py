"""Where the segments of experts come from, and their places in the pool.

Nothing here imports torch: the simulator uses it.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from operator import itemgetter
from typing import TYPE_CHECKING, Any, ClassVar, cast

from ...core import _core
from ...policies.moepic.split import Segments, SplitLayout
from ...store.format import Published
from .slots import ExpertSource, LowBitPart, MappedPool, PendingExpert, SlotMemory, SlotPool

if TYPE_CHECKING:
    import torch

    from .device import Tensors
    from .form_slots import FormPool


class SharedPending:
    """One pending expert for the copies of both its segments: fetched once, alive until both are copied; one that does
    not last is asked for again.
    """

    __slots__ = ("__weakref__", "_tensors", "whole")

    def __init__(self, whole: PendingExpert) -> None:
        self.whole = whole
        self._tensors: tuple[torch.Tensor, ...] | None = None

    @property
    def fetched(self) -> bool:
        return self._tensors is not None

    def tensors(self) -> tuple[torch.Tensor, ...]:
        if self._tensors is not None:
            return self._tensors
        found = self.whole.tensors()
        if self.whole.lasts:
            self._tensors = found
        return found


class PendingSegment:
    """A `PendingExpert` of the neurons [begin, end); both segments of an expert share one fetch."""

    lasts: ClassVar[bool] = False
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
        self, pool: SlotPool | FormPool | MappedPool, weights: Sequence[ExpertSource], experts: int, slots: int,
        slot_bytes: int, split: SplitLayout | None = None, low_bit: LowBitPart | None = None,
        memory: SlotMemory | None = None,
    ) -> None:  # fmt: skip
        self.pool, self.weights, self.experts, self.keys = pool, weights, experts, experts * len(weights)
        self.slot_bytes, self.neurons, self.whole_slots = slot_bytes, pool.neurons, slots
        self.low_bit, self.memory = low_bit, memory
        self._forms: Published | None = getattr(pool, "published", None)  # of a `FormPool`: layers may differ
        self.segments: Segments | None = None
        layers = [key // experts for key in range(self.keys)]
        self.layer_of = (layers * 2).__getitem__  # of a segment
        self._bytes = [slot_bytes] * self.keys
        if isinstance(pool, MappedPool):
            self._bytes = [0] * self.keys  # an expert is where it is
        elif self._forms is not None:
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

    def layout(self) -> _core.Layout:
        """The layout, for the core."""
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
            found = cast("SlotPool | FormPool", self.pool).slot(slot, segment % self.keys // self.experts)
            if self._forms is not None and len(self._forms.forms) > 1:
                return found  # a slot's target depends on the form, too
        else:
            found = cast(SlotPool, self.pool).neuron_range(self.segments.first[slot], self.segments.neurons[segment])
        self._targets[slot, nbytes] = found
        return found
