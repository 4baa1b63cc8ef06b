"""Whose rows a forward carries: what policies that follow a sequence from prefill to decode need to know."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class SequenceRows:
    """The rows `start` to `stop` of the next forward belong to sequence `name`.

    decode: the sequence's prefill was over before this forward, so its expert placement is fixed; False for
    rows of its prompt, also where the prompt is fed in several forwards.
    """

    name: str
    start: int
    stop: int
    decode: bool


class SequenceWatcher(Protocol):
    """Follows sequences; the expert engine is one."""

    def begin_forward(self, sequences: Sequence[SequenceRows]) -> None:
        """The next forward carries these rows; on the forward's thread."""
        ...

    def end_sequence(self, name: str) -> None:
        """A sequence is over; from any thread, also for one that no forward carried."""
        ...
