"""What a cache's core holds, for reading: which segments are where."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from ...policies.residency import State

if TYPE_CHECKING:
    from ...core import _core
    from .slot_map import SlotMap

_STATES = tuple(State)  # by number


class Residency:
    """The slots of a core and what is in them. Keys are those of segments.

    Attributes:
        states, evictable_now: uint8 [keys]: `State`; 1 where RESIDENT and not pinned. The core writes them in place.
        keys: number of segments. slots, class_slots: of all classes together, and of each.
        slot_bytes: of a whole expert.
    """

    def __init__(self, core: _core.Core, where: SlotMap) -> None:
        self._core, self.slot_bytes = core, where.slot_bytes
        self.states: NDArray[np.uint8] = core.states
        self.evictable_now: NDArray[np.uint8] = core.evictable
        self._slots, self._pins = core.slots, core.pins
        self.keys = len(self.states)
        self.laid_out(where)

    def laid_out(self, where: SlotMap) -> None:
        """The slots were laid out anew."""
        self._class_of = where.class_of
        self.class_slots = tuple(where.class_slots)
        self.slots = sum(self.class_slots)

    @property
    def emptied(self) -> int:
        """How often the last expert left, or the cache grew: then all layers have slots to fill."""
        return self._core.emptied

    def state(self, key: int) -> State:
        return _STATES[self.states[key]]

    def slot(self, key: int) -> int:
        """Of a LOADING or RESIDENT expert; KeyError otherwise."""
        found = int(self._slots[key])
        if found < 0:
            raise KeyError(key)
        return found

    def occupied(self, first: int = 0, stop: int | None = None) -> NDArray[np.bool_]:
        """A snapshot of which keys from `first` to `stop` are LOADING or RESIDENT."""
        return self.states[first:stop] != 0

    def class_of(self, key: int) -> int:
        return self._class_of[key] if self._class_of else 0

    def free_of(self, slot_class: int) -> int:
        return self._core.free_of(slot_class)

    @property
    def free_slots(self) -> int:
        return self._core.free_slots

    def held(self) -> list[int]:
        """Keys that occupy a slot, LOADING or RESIDENT, in rising order."""
        return self.states.nonzero()[0].tolist()

    @property
    def pins(self) -> int:
        """Pins of all experts: 0 between forwards."""
        return int(self._pins.sum())
