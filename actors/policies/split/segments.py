"""The segments of experts under a cut: their names, their sizes, and where their slots lie."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import accumulate

from .cut import CacheCut


class Segments:
    """Segments and slots of one cut.

    Of N experts, those of layer l being the keys l * E to (l + 1) * E - 1, the top of expert k is segment k and its
    bottom segment N + k. Slot classes: class l holds the tops of layer l, class L (the buffer) all bottoms. Slots are
    numbered through, those of class 0 first, and follow each other in the pool in this order.

    Attributes:
        neurons: of each segment [2 N]; 0 where there is no such segment.
        begins: number of its first neuron within its expert [2 N].
        class_of: slot class of each segment [2 N].
        slots: number of slots of each class [L + 1].
        slot_neurons: neurons of a slot of each class [L + 1].
        first: first neuron of each slot in the pool.
        shown: of each expert [N] the segment that stands for it: its top, or all of it where there are no tops.

    Raises:
        ValueError: a layer has more slots than experts.
    """

    def __init__(self, cut: CacheCut, experts: int) -> None:
        if max(cut.slots) > experts:
            raise ValueError(f"a layer has {max(cut.slots)} slots for tops of {experts} experts")
        layers, whole = range(len(cut.tops)), cut.neurons
        self.cut, self.keys = cut, len(cut.tops) * experts
        self.neurons = [n for n in cut.tops for _ in range(experts)]
        self.neurons += [whole - n for n in self.neurons]
        self.begins = [0] * self.keys + self.neurons[: self.keys]
        self.class_of = [layer for layer in layers for _ in range(experts)] + [len(cut.tops)] * self.keys
        self.slots = [*cut.slots, cut.buffer_slots]
        self.slot_neurons = [*cut.tops, cut.buffer_neurons]
        sizes = [n for n, count in zip(self.slot_neurons, self.slots, strict=True) for _ in range(count)]
        self.first = [0, *accumulate(sizes)][:-1]
        self.shown = [key if self.neurons[key] else self.keys + key for key in range(self.keys)]

    def of(self, keys: Iterable[int]) -> list[int]:
        """The segments of these experts, each expert's together, its top first."""
        n, neurons = self.keys, self.neurons
        return [segment for key in keys for segment in (key, n + key) if neurons[segment]]
