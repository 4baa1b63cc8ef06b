"""Which expert is in which slot, as policies see it: `core.hpp` keeps it.

Where experts are split, "expert" here means a segment.
"""

from __future__ import annotations

from enum import IntEnum


class State(IntEnum):
    """State of an expert in the slot pool; `core::State`."""

    ABSENT = 0
    LOADING = 1
    RESIDENT = 2


class ResidencyError(AssertionError):
    """An impossible transition, or a violated invariant: a bug."""
