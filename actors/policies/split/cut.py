"""How expert memory is divided between tops, which are cached by layer, and bottoms, which all layers share."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil


@dataclass(frozen=True)
class CacheCut:
    """One division of expert memory (MoEpic section 4.1); sizes are neurons, in which all experts count alike.

    The top of an expert of layer l is its neurons [0, n_l), its bottom the others. A layer with n_l = I has no bottoms
    and is a plain cache; one with n_l = 0 has no tops, and all of an expert is its bottom.

    Attributes:
        neurons: I, those of one expert.
        tops: n_l of each layer, 0 to I.
        slots: C_l, tops of each layer that are cached; none where n_l = 0, else at least one.
        buffer_slots: slots for bottoms, each as large as the largest of them; none where no layer has a bottom.

    Raises:
        ValueError: the numbers do not belong together.
    """

    neurons: int
    tops: tuple[int, ...]
    slots: tuple[int, ...]
    buffer_slots: int

    def __post_init__(self) -> None:
        if self.neurons < 1 or not self.tops or len(self.tops) != len(self.slots):
            raise ValueError(f"{len(self.tops)} tops and {len(self.slots)} numbers of slots, of {self.neurons} neurons")
        for layer, (top, slots) in enumerate(zip(self.tops, self.slots, strict=True)):
            if not 0 <= top <= self.neurons:
                raise ValueError(f"the top of layer {layer} has {top} of {self.neurons} neurons")
            if slots < 0 or (top == 0) != (slots == 0):
                raise ValueError(f"layer {layer} has {slots} slots for tops of {top} neurons")
        if self.buffer_slots < 0 or (self.buffer_neurons == 0) != (self.buffer_slots == 0):
            raise ValueError(f"{self.buffer_slots} buffer slots for bottoms of up to {self.buffer_neurons} neurons")

    @property
    def buffer_neurons(self) -> int:
        """Neurons of one buffer slot: of the largest bottom."""
        return self.neurons - min(self.tops)

    @property
    def total_neurons(self) -> int:
        """Neurons of all slots together."""
        cached = sum(top * slots for top, slots in zip(self.tops, self.slots, strict=True))
        return cached + self.buffer_slots * self.buffer_neurons

    @staticmethod
    def uniform(
        layers: int, experts: int, neurons: int, budget_neurons: int, theta: float, buffer_experts: int
    ) -> CacheCut:
        """The fixed split: tops of round(theta * I) neurons, and as many slots in each layer as the rest buys.

        The buffer gets the memory of `buffer_experts` experts, less where no layer would be left a slot. What is over
        gives one slot more to the first layers; where all tops are cached it goes to the buffer. With theta = 0 there
        is only the buffer, and memory beyond it is not used: nothing is kept longer than it takes to use it.

        Raises:
            ValueError: theta is not 0 to 1, or the budget does not hold one slot of each kind.
        """
        if not 0 <= theta <= 1 or min(layers, experts, neurons) < 1 or buffer_experts < 1:
            raise ValueError(f"no cut of {layers} x {experts} experts by theta {theta}, buffer {buffer_experts}")
        top = round(theta * neurons)
        bottom, every = neurons - top, layers * experts
        if top == 0:
            slots = min(budget_neurons // neurons, buffer_experts, every)
            _least(slots, neurons, budget_neurons)
            return CacheCut(neurons, (0,) * layers, (0,) * layers, slots)
        buffer = 0
        if bottom:
            spare = budget_neurons - layers * top  # beside one top of each layer
            buffer = min(buffer_experts * neurons // bottom, spare // bottom, every)
            _least(buffer, layers * top + bottom, budget_neurons)
        cached = min((budget_neurons - buffer * bottom) // top, every)
        _least(cached // layers, layers * top + bottom, budget_neurons)
        if bottom and cached == every:
            buffer = min((budget_neurons - every * top) // bottom, every)
        each, over = divmod(cached, layers)
        slots_of = tuple(each + (layer < over) for layer in range(layers))
        return CacheCut(neurons, (top,) * layers, slots_of, buffer)


def buffer_for(theta: float, top_k: int) -> int:
    """Full experts of buffer that hold the bottoms of two layers' top-k, at least top-k of them.

    While one layer's bottoms are in use, so that they must stay, the next layer's arrive. With the paper's K experts a
    cut of theta < 0.5 has no room for these.
    """
    return max(top_k, ceil(2 * top_k * (1 - theta) - 1e-9))


def _least(slots: int, needed: int, budget: int) -> None:
    if slots < 1:
        raise ValueError(f"the cut needs {needed} neurons at least, the budget holds {budget}")
