"""Which expert is in which slot: bookkeeping of the expert cache without tensors and threads.

Where experts are split, "expert" here means a segment.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Sequence
from enum import IntEnum
from typing import NamedTuple, NoReturn

import numpy as np
from numpy.typing import NDArray


class State(IntEnum):
    """State of an expert in the slot pool."""

    ABSENT = 0
    LOADING = 1
    RESIDENT = 2


class ResidencyError(AssertionError):
    """An impossible transition, or a violated invariant: a bug."""


class Reservation(NamedTuple):
    """A slot reserved for one expert while its bytes are in flight.

    generation: the slot's at the time of reservation; a copy for an older generation is too late and must not be
    published.
    """

    key: int
    slot: int
    generation: int


class Residency:
    """Slots, states, pins and generations of one pool.

    Two-phase: `reserve` (ABSENT -> LOADING) takes a free slot; `publish` (LOADING -> RESIDENT) or `release` (LOADING ->
    ABSENT) ends it. `evict` (RESIDENT -> ABSENT) frees the slot. A pinned expert is neither evicted nor released. Every
    operation is O(1) and atomic: it raises and changes nothing, or succeeds.

    All slots are of class 0 until `divide`; an expert takes a slot of its own class.

    Args:
        keys: number of experts in all layers. slots: each large enough for one expert. slot_bytes: of one slot.

    Attributes:
        slots: of all classes together.
        emptied: how often the last expert has left.
        resident_slots: int32 [keys] for native code: the slot of each RESIDENT expert, -1 of others.
    """

    def __init__(self, keys: int, slots: int, slot_bytes: int) -> None:
        if slots < 1 or keys < 1:
            raise ResidencyError(f"a residency needs at least one key and one slot, got {keys} and {slots}")
        self.slot_bytes, self.emptied = slot_bytes, 0
        self._slot: dict[int, int] = {}  # key -> slot, for LOADING and RESIDENT
        self.slot = self._slot.__getitem__  # of a LOADING or RESIDENT expert; KeyError otherwise
        self._pins: dict[int, int] = {}  # key -> count, only counts above zero
        self.divide([0] * keys, [slots], [slot_bytes])

    def divide(self, class_of: Sequence[int], slots: Sequence[int], class_bytes: Sequence[int]) -> None:
        """Replace the slots of an empty pool. Slots are numbered consecutively, class 0 first.

        Args:
            class_of: slot class of each key [keys].
            slots, class_bytes: number of slots of each class, and bytes of one.

        Raises:
            ResidencyError: the pool is not empty, or the lengths differ.
        """
        if self._slot or len(slots) != len(class_bytes) or not set(class_of) <= set(range(len(slots))):
            raise ResidencyError(f"{len(slots)} classes for {len(class_of)} keys, {len(self._slot)} of them held")
        self.keys, self.slots = len(class_of), sum(slots)
        self.class_slots, self._class_bytes = tuple(slots), tuple(class_bytes)
        self._class_of = class_of
        self._state = [State.ABSENT] * self.keys
        self.state = self._state.__getitem__  # of a key
        self._occupies = bytearray(self.keys)  # 1: LOADING or RESIDENT
        self._evictable = bytearray(self.keys)  # 1: RESIDENT and not pinned
        self.resident_slots = array("i", [-1]) * self.keys
        self._class_of_slot = [number for number, count in enumerate(slots) for _ in range(count)]
        self._free: list[list[int]] = [[] for _ in slots]  # by class, the lowest slot last
        for slot in range(self.slots - 1, -1, -1):
            self._free[self._class_of_slot[slot]].append(slot)
        self._generation = [0] * self.slots

    def by_state(self, keys: Iterable[int]) -> tuple[list[int], list[int], list[int]]:
        """These keys in the given order: the RESIDENT, the LOADING and the ABSENT ones."""
        found: tuple[list[int], list[int], list[int]] = ([], [], [])
        states = self._state
        for key in keys:
            found[2 - states[key]].append(key)
        return found

    def evictable(self, keep: Iterable[int] = ()) -> Callable[[int], bool]:
        """A snapshot of which keys may be evicted: RESIDENT, not pinned and not in `keep`."""
        mask = self._evictable.copy()
        for key in keep:
            mask[key] = 0
        return mask.__getitem__  # type: ignore[return-value]  # 0 or 1

    def states(self) -> list[State]:
        """A snapshot of all keys' states; from any thread."""
        return self._state.copy()

    def occupied(self, first: int = 0, stop: int | None = None) -> NDArray[np.bool_]:
        """A snapshot of which keys from `first` to `stop` are LOADING or RESIDENT."""
        return np.frombuffer(self._occupies, np.bool_)[first:stop].copy()

    def absent(self, first: int, stop: int) -> int:
        """How many keys from `first` to `stop` are ABSENT."""
        return self._occupies.count(0, first, stop)

    def class_of(self, key: int) -> int:
        return self._class_of[key]

    def by_class(self, keys: Sequence[int]) -> dict[int, list[int]]:
        """These keys by their slot class, in the given order."""
        if len(self._free) == 1:
            return {0: list(keys)}
        out: dict[int, list[int]] = {}
        for key in keys:
            out.setdefault(self._class_of[key], []).append(key)
        return out

    def free_of(self, slot_class: int) -> int:
        return len(self._free[slot_class])

    @property
    def free_slots(self) -> int:
        return sum(map(len, self._free))

    @property
    def bytes_held(self) -> int:
        used = zip(self.class_slots, self._free, self._class_bytes, strict=True)
        return sum((slots - len(free)) * size for slots, free, size in used)

    def held(self) -> Iterable[int]:
        """Keys that occupy a slot, LOADING or RESIDENT."""
        return self._slot.keys()

    def pinned(self, key: int) -> bool:
        return key in self._pins

    def reserve(self, key: int) -> Reservation:
        """ABSENT -> LOADING in a free slot.

        Raises:
            ResidencyError: there is no such key, it is not absent, or no slot is free.
        """
        if not 0 <= key < self.keys:
            raise ResidencyError(f"there is no expert {key}: keys are 0 to {self.keys - 1}")
        if self._state[key] != State.ABSENT:
            raise ResidencyError(f"expert {key} is {self._state[key].name}, not ABSENT")
        free = self._free[self._class_of[key]]
        if not free:
            raise ResidencyError("no free slot; evict first")
        slot = free.pop()
        self._generation[slot] += 1
        self._state[key] = State.LOADING
        self._occupies[key] = 1
        self._slot[key] = slot
        return tuple.__new__(Reservation, (key, slot, self._generation[slot]))  # half the time of `Reservation(...)`

    def publish(self, *reservations: Reservation) -> None:
        """LOADING -> RESIDENT, each once its bytes are in its slot."""
        for reservation in reservations:
            key, slot, generation = reservation
            if self._state[key] != State.LOADING or self._slot[key] != slot or self._generation[slot] != generation:
                self._refuse(reservation)
            self._state[key] = State.RESIDENT
            self._evictable[key] = key not in self._pins
            self.resident_slots[key] = slot

    def release(self, reservation: Reservation) -> None:
        """LOADING -> ABSENT: the load was cancelled."""
        key, slot, generation = reservation
        if self._state[key] != State.LOADING or self._slot[key] != slot or self._generation[slot] != generation:
            self._refuse(reservation)
        self._drop((key,))

    def evict(self, *keys: int) -> None:
        """RESIDENT -> ABSENT, one after the other; weights are read-only, so nothing is copied back."""
        for key in keys:
            if self._state[key] != State.RESIDENT:
                raise ResidencyError(f"expert {key} is {self._state[key].name}, not RESIDENT")
        self._drop(keys)

    def pin(self, *keys: int) -> None:
        """Keep LOADING or RESIDENT experts in their slots until as many `unpin` calls."""
        states, pins, evictable = self._state, self._pins, self._evictable
        for key in keys:
            if states[key] == State.ABSENT:
                raise ResidencyError(f"expert {key} is ABSENT and cannot be pinned")
        for key in keys:
            pins[key] = pins.get(key, 0) + 1
            evictable[key] = 0

    def unpin(self, *keys: int) -> None:
        states, pins, evictable = self._state, self._pins, self._evictable
        for key in keys:
            if key not in pins:
                raise ResidencyError(f"expert {key} is not pinned")
        for key in keys:
            pins[key] -= 1
            if not pins[key]:
                del pins[key]
                evictable[key] = states[key] == State.RESIDENT

    def unpin_all(self) -> None:
        """Drop every pin: the forward that pinned failed."""
        for key in self._pins:
            self._evictable[key] = self._state[key] == State.RESIDENT
        self._pins.clear()

    def check_integrity(self) -> None:
        """Raise ResidencyError if an invariant is violated. O(keys + slots); for tests and idle time."""
        used = sorted(self._slot.values())
        free = sorted(slot for slots in self._free for slot in slots)
        if sorted(used + free) != list(range(self.slots)):
            raise ResidencyError(f"slots are lost or shared: used {used}, free {free}")
        for slot_class, slots in enumerate(self._free):
            if any(self._class_of_slot[slot] != slot_class for slot in slots):
                raise ResidencyError(f"free slots of class {slot_class} are of another: {slots}")
        for key, slot in self._slot.items():
            if self.resident_slots[key] not in (-1, slot):
                raise ResidencyError(f"native code sees expert {key} in slot {self.resident_slots[key]}, not {slot}")
            if self._class_of_slot[slot] != self._class_of[key]:
                raise ResidencyError(f"expert {key} is in slot {slot}, which is of another class")
        for key in range(self.keys):
            if (self._state[key] == State.ABSENT) == (key in self._slot) or self._occupies[key] != (key in self._slot):
                raise ResidencyError(f"expert {key} is {self._state[key].name} but its slot says otherwise")
            if (self.resident_slots[key] >= 0) != (self._state[key] == State.RESIDENT):
                raise ResidencyError(f"expert {key} is {self._state[key].name}, native code sees otherwise")
            if self._evictable[key] != (self._state[key] == State.RESIDENT and key not in self._pins):
                raise ResidencyError(f"expert {key} is {self._state[key].name} and marked as evictable, or the reverse")
        for key, count in self._pins.items():
            if count < 1 or self._state[key] == State.ABSENT:
                raise ResidencyError(f"expert {key} has {count} pins while {self._state[key].name}")

    def _refuse(self, reservation: Reservation) -> NoReturn:
        key, slot, generation = reservation
        if self._state[key] != State.LOADING or self._slot[key] != slot:
            raise ResidencyError(f"expert {key} is not loading into slot {slot}")
        raise ResidencyError(f"slot {slot} was given away since generation {generation}")

    def _drop(self, keys: Sequence[int]) -> None:
        pins, slots, free, class_of = self._pins, self._slot, self._free, self._class_of
        for key in keys:
            if key in pins:
                raise ResidencyError(f"expert {key} is pinned")
            free[class_of[key]].append(slots.pop(key))
            self._state[key] = State.ABSENT
            self._occupies[key] = self._evictable[key] = 0
            self.resident_slots[key] = -1
            self.emptied += not slots
