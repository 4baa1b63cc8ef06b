"""Which expert is in which slot: bookkeeping of the expert cache without tensors and threads.

Where experts are split, "expert" here means a segment. The state is in arrays, so that native code reads and changes it
in place (`kernels/cpu/loads.hpp`).
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


_STATES = tuple(State)
_LOADING, _RESIDENT = int(State.LOADING), int(State.RESIDENT)


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

    All slots are of class 0 until `divide`; an expert takes a slot of its own class. While they are, `resize` changes
    their number.

    Args:
        keys: number of experts in all layers. slots: each large enough for one expert. slot_bytes: of one slot.
        most: slots that there may be at some time; None: as many as now.

    Attributes:
        slots: of all classes together.
        held_slot: `slot` of an expert that is known to be LOADING or RESIDENT, in a fraction of the time.
    """

    def __init__(self, keys: int, slots: int, slot_bytes: int, most: int | None = None) -> None:
        if slots < 1 or keys < 1:
            raise ResidencyError(f"a residency needs at least one key and one slot, got {keys} and {slots}")
        self.slot_bytes, self.most = slot_bytes, slots if most is None else most
        self._state = bytearray()
        self._counts = array("q", [0])
        self.divide([0] * keys, [slots], [slot_bytes])

    def divide(self, class_of: Sequence[int], slots: Sequence[int], class_bytes: Sequence[int]) -> None:
        """Replace the slots of an empty pool. Slots are numbered consecutively, class 0 first.

        Args:
            class_of: slot class of each key [keys].
            slots, class_bytes: number of slots of each class, and bytes of one.

        Raises:
            ResidencyError: the pool is not empty, or the lengths differ.
        """
        held = len(self._state) - self._state.count(0)
        if held or len(slots) != len(class_bytes) or not set(class_of) <= set(range(len(slots))):
            raise ResidencyError(f"{len(slots)} classes for {len(class_of)} keys, {held} of them held")
        self.keys, self.slots = len(class_of), sum(slots)
        self.class_slots, self._class_bytes = tuple(slots), tuple(class_bytes)
        self._class_of = class_of
        self._state = bytearray(self.keys)  # `State` of each key
        self._evictable = bytearray(self.keys)  # 1: RESIDENT and not pinned
        self._slot = array("i", [-1]) * self.keys  # of LOADING and RESIDENT experts, else -1
        self.held_slot = self._slot.__getitem__
        self._pins = array("i", [0]) * self.keys
        room = self.most if len(slots) == 1 else self.slots  # native code keeps the addresses of the arrays
        self._class_of_slot = [number for number, count in enumerate(slots) for _ in range(count)]
        # Free slots of each class, the lowest last: a stack that begins at the class's first slot.
        self._first = [sum(slots[:number]) for number in range(len(slots))]
        self._free = array("i")
        for first, count in zip(self._first, slots, strict=True):
            self._free.extend(range(first + count - 1, first - 1, -1))
        self._free.extend([0] * (room - len(self._free)))
        self._counts = array("q", [self._counts[0], *slots])  # how often the last has left; free slots of each class
        self._generation = array("q", [0]) * max(room, self.slots)

    def resize(self, slots: int) -> list[tuple[int, int, int]]:
        """Change the number of slots of a pool of one class: the last ones come or go.

        Experts in slots that go move to free slots of lower numbers. Who calls has evicted what does not fit, and
        copies the bytes of those that move. O(slots).

        Returns:
            (key, slot before, slot now) of each expert that moves.

        Raises:
            ResidencyError: there are several classes; `slots` is not within 1 and `most`; more experts are held; one
                that would move is LOADING or pinned.
        """
        if len(self.class_slots) > 1 or not 1 <= slots <= self.most:
            raise ResidencyError(f"{slots} slots of 1 to {self.most}, in {len(self.class_slots)} classes")
        held = {self._slot[key]: key for key in self.held()}
        moving = sorted(slot for slot in held if slot >= slots)
        free = [slot for slot in range(slots) if slot not in held]
        if len(moving) > len(free):
            raise ResidencyError(f"{len(held)} experts are held, for {slots} slots")
        for slot in moving:
            if self._pins[held[slot]] or self._state[held[slot]] != _RESIDENT:
                raise ResidencyError(f"expert {held[slot]} cannot move from slot {slot}: it is pinned or loading")
        moves = [(held[slot], slot, to) for slot, to in zip(moving, free, strict=False)]
        for key, _, to in moves:
            self._slot[key] = to
            self._generation[to] += 1
        rest = free[len(moves) :]
        self._counts[0] += slots > self.slots  # there are slots to fill, as in an empty pool
        for place, slot in enumerate(reversed(rest)):  # one by one: native code has the array's address
            self._free[place] = slot
        self._counts[1], self.slots, self.class_slots = len(rest), slots, (slots,)
        self._class_of_slot = [0] * slots
        return moves

    @property
    def arrays(self) -> tuple[bytearray | array[int], ...]:
        """The whole state, for native code: states [keys] (`State`), evictable [keys], slots [keys] (-1: none), pins
        [keys], free slots [slots] (a stack), generations [slots], counts (see `emptied`, and free slots of each class).
        They are other objects after `divide`.
        """
        return self._state, self._evictable, self._slot, self._pins, self._free, self._generation, self._counts

    @property
    def emptied(self) -> int:
        """How often there came slots for all layers to fill: the last expert left, or the pool grew."""
        return self._counts[0]

    def state(self, key: int) -> State:
        return _STATES[self._state[key]]

    def slot(self, key: int) -> int:
        """Of a LOADING or RESIDENT expert; KeyError otherwise."""
        found = self._slot[key]
        if found < 0:
            raise KeyError(key)
        return found

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
        return list(map(_STATES.__getitem__, bytes(self._state)))

    def occupied(self, first: int = 0, stop: int | None = None) -> NDArray[np.bool_]:
        """A snapshot of which keys from `first` to `stop` are LOADING or RESIDENT."""
        return np.frombuffer(self._state, np.uint8)[first:stop] != 0

    def absent(self, first: int, stop: int) -> int:
        """How many keys from `first` to `stop` are ABSENT."""
        return self._state.count(0, first, stop)

    def class_of(self, key: int) -> int:
        return self._class_of[key]

    def by_class(self, keys: Sequence[int]) -> dict[int, list[int]]:
        """These keys by their slot class, in the given order."""
        if len(self._first) == 1:
            return {0: list(keys)}
        out: dict[int, list[int]] = {}
        class_of = self._class_of
        for key in keys:
            out.setdefault(class_of[key], []).append(key)
        return out

    def free_of(self, slot_class: int) -> int:
        return self._counts[1 + slot_class]

    @property
    def free_slots(self) -> int:
        return sum(self._counts[1:])

    @property
    def bytes_held(self) -> int:
        used = zip(self.class_slots, self._counts[1:], self._class_bytes, strict=True)
        return sum((slots - free) * size for slots, free, size in used)

    def held(self) -> list[int]:
        """Keys that occupy a slot, LOADING or RESIDENT, in rising order."""
        return np.frombuffer(self._state, np.uint8).nonzero()[0].tolist()

    def pinned(self, key: int) -> bool:
        return self._pins[key] > 0

    @property
    def pins(self) -> int:
        """Pins of all experts: 0 between forwards."""
        return sum(self._pins)

    def reserve(self, key: int) -> Reservation:
        """ABSENT -> LOADING in a free slot.

        Raises:
            ResidencyError: there is no such key, it is not absent, or no slot is free.
        """
        if not 0 <= key < self.keys:
            raise ResidencyError(f"there is no expert {key}: keys are 0 to {self.keys - 1}")
        if self._state[key]:
            raise ResidencyError(f"expert {key} is {self.state(key).name}, not ABSENT")
        slot_class, counts = self._class_of[key], self._counts
        left = counts[1 + slot_class] - 1
        if left < 0:
            raise ResidencyError("no free slot; evict first")
        counts[1 + slot_class] = left
        slot = self._slot[key] = self._free[self._first[slot_class] + left]
        generation = self._generation[slot] = self._generation[slot] + 1
        self._state[key] = _LOADING
        return tuple.__new__(Reservation, (key, slot, generation))  # half the time of `Reservation(...)`

    def publish(self, *reservations: Reservation) -> None:
        """LOADING -> RESIDENT, each once its bytes are in its slot."""
        states, slots, generations = self._state, self._slot, self._generation
        for reservation in reservations:
            key, slot, generation = reservation
            if states[key] != _LOADING or slots[key] != slot or generations[slot] != generation:
                self._refuse(reservation)
            states[key] = _RESIDENT
            self._evictable[key] = not self._pins[key]

    def release(self, reservation: Reservation) -> None:
        """LOADING -> ABSENT: the load was cancelled."""
        key, slot, generation = reservation
        if self._state[key] != _LOADING or self._slot[key] != slot or self._generation[slot] != generation:
            self._refuse(reservation)
        self._drop((key,))

    def evict(self, *keys: int) -> None:
        """RESIDENT -> ABSENT, one after the other; weights are read-only, so nothing is copied back."""
        if min(map(self._state.__getitem__, keys), default=_RESIDENT) < _RESIDENT:
            key = next(key for key in keys if self._state[key] < _RESIDENT)
            raise ResidencyError(f"expert {key} is {self.state(key).name}, not RESIDENT")
        self._drop(keys)

    def pin(self, *keys: int) -> None:
        """Keep LOADING or RESIDENT experts in their slots until as many `unpin` calls."""
        states, pins, evictable = self._state, self._pins, self._evictable
        if not all(map(states.__getitem__, keys)):
            raise ResidencyError(f"of experts {keys} one is ABSENT and cannot be pinned")
        for key in keys:
            pins[key] += 1
            evictable[key] = 0

    def unpin(self, *keys: int) -> None:
        states, pins, evictable = self._state, self._pins, self._evictable
        if not all(map(pins.__getitem__, keys)):
            raise ResidencyError(f"of experts {keys} one is not pinned")
        for key in keys:
            left = pins[key] = pins[key] - 1
            if not left:
                evictable[key] = states[key] == _RESIDENT

    def unpin_all(self) -> None:
        """Drop every pin: the forward that pinned failed."""
        for key, count in enumerate(self._pins):
            if count:
                self._pins[key], self._evictable[key] = 0, self._state[key] == _RESIDENT

    def check_integrity(self) -> None:
        """Raise ResidencyError if an invariant is violated. O(keys + slots); for tests and idle time."""
        free = [
            slot
            for first, count in zip(self._first, self._counts[1:], strict=True)
            for slot in self._free[first : first + count]
        ]
        used = [slot for slot in self._slot if slot >= 0]
        if sorted(used + free) != list(range(self.slots)):
            raise ResidencyError(f"slots are lost or shared: used {sorted(used)}, free {sorted(free)}")
        for slot_class, (first, count) in enumerate(zip(self._first, self._counts[1:], strict=True)):
            slots = self._free[first : first + count]
            if any(self._class_of_slot[slot] != slot_class for slot in slots):
                raise ResidencyError(f"free slots of class {slot_class} are of another: {slots.tolist()}")
        for key, (slot, pins) in enumerate(zip(self._slot, self._pins, strict=True)):
            state = self.state(key)
            if (state == State.ABSENT) == (slot >= 0):
                raise ResidencyError(f"expert {key} is {state.name} but its slot says otherwise")
            if slot >= 0 and self._class_of_slot[slot] != self._class_of[key]:
                raise ResidencyError(f"expert {key} is in slot {slot}, which is of another class")
            if self._evictable[key] != (state == State.RESIDENT and not pins):
                raise ResidencyError(f"expert {key} is {state.name} and marked as evictable, or the reverse")
            if pins < 0 or (pins and state == State.ABSENT):
                raise ResidencyError(f"expert {key} has {pins} pins while {state.name}")

    def _refuse(self, reservation: Reservation) -> NoReturn:
        key, slot, generation = reservation
        if self._state[key] != _LOADING or self._slot[key] != slot:
            raise ResidencyError(f"expert {key} is not loading into slot {slot}")
        raise ResidencyError(f"slot {slot} was given away since generation {generation}")

    def _drop(self, keys: Sequence[int]) -> None:
        pins, slots, counts, first, free = self._pins, self._slot, self._counts, self._first, self._free
        for key in keys:
            if pins[key]:
                raise ResidencyError(f"expert {key} is pinned")
            slot_class = self._class_of[key]
            before = counts[1 + slot_class]
            free[first[slot_class] + before] = slots[key]
            counts[1 + slot_class] = before + 1
            slots[key], self._state[key], self._evictable[key] = -1, 0, 0
        if keys:
            counts[0] += sum(counts) - counts[0] == self.slots
