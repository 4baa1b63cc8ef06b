"""Eviction by worth: whoever plans misses says what each resident is worth, and this order carries it out."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..core import _core
from .eviction import NativeOrder
from .registry import PolicyContext, register


@register("eviction", "worth")
class WorthOrder(NativeOrder):
    """Residents of least worth leave first; each layer has an equal share of the slots.

    Order: experts that were not admitted (`refuse`); if the layer at work holds its share or more, its residents by
    worth; then of the layers above their share, the fullest first, what exceeds it; then all others, layer by layer.
    Worth is what the placer gives (`bind`), ties by key; in layers that the prompts of this forward have used, their
    uses (`prompt`), ties by last use. Without `bind` a layer's residents leave by last use.

    State: the residents of each layer by last use, and those refused. O(1) per key, `victims` O(L log L + residents of
    the layers that it looks at, and their ranking).
    """

    per_layer = False
    handle: _core.WholeOrder

    @classmethod
    def make(cls, options: Any, context: PolicyContext) -> WorthOrder:
        return cls(context.layers, context.experts)

    def __init__(self, layers: int, experts: int) -> None:
        super().__init__(_core.WholeOrder("worth", layers, experts))
        self._layers = layers
        self._worths: NDArray[np.float64] | None = None  # both are read in place
        self._uses: NDArray[np.int64] | None = None

    @property
    def layer(self) -> int:
        """The layer at work, whose routing is known, or for which a copy is to be made."""
        return self.handle.layer

    @layer.setter
    def layer(self, layer: int) -> None:
        self.handle.layer = layer

    @property
    def refused(self) -> Collection[int]:
        """Residents that leave before all others, in this order."""
        return self.handle.refused

    def bind(self, slots: int, worths: NDArray[np.float64]) -> None:
        """The slots of all layers together, and what each expert is worth [L, E], which may change from now on.

        Raises ValueError: worths are not of [L, E]; TypeError: not float64, or not contiguous.
        """
        self.handle.bind(slots // self._layers, worths)
        self._worths = worths

    def prompt(self, uses: NDArray[np.int64] | None) -> None:
        """Uses of each expert by the prompts that run now [L, E], which may change from now on; None: none runs.

        Raises ValueError: uses are not of [L, E]; TypeError: not int64, or not contiguous.
        """
        self.handle.prompt(uses)
        self._uses = uses

    def refuse(self, key: int) -> None:
        """This resident is of less worth than all others."""
        self.handle.refuse(key)

    def admit(self, key: int) -> None:
        """Undo `refuse`."""
        self.handle.admit(key)

    def settled(self) -> frozenset[int]:
        """The residents of the other layers, of each those of greatest worth that are within its share."""
        return frozenset(self.handle.settled())

    def note(self) -> None:
        """Note what passes use from now on."""
        self.handle.note()

    def noted(self) -> list[tuple[int, NDArray[np.int32]]]:
        """The experts of each layer that were used since `note`, layers in rising order; noting ends."""
        return [(layer, np.frombuffer(experts, np.int32)) for layer, experts in self.handle.noted()]
