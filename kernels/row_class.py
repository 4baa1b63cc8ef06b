"""Classes of experts by their own row count, which alone decides how an expert is computed.

Were it the rows of a whole call, a result would depend on which experts happen to run beside it.
"""

from __future__ import annotations

from typing import Literal, get_args

RowClass = Literal["decode", "short", "prefill"]
ROW_CLASSES: tuple[RowClass, ...] = get_args(RowClass)
DECODE_ROWS = 16  # at most: the rows of one tensor-core tile, where an expert is bound by its weights' bytes
SHORT_ROWS = 64


def row_class(rows: int) -> RowClass:
    """The class of an expert with this many rows."""
    if rows <= DECODE_ROWS:
        return "decode"
    return "short" if rows <= SHORT_ROWS else "prefill"
