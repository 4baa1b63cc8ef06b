"""How many bytes of experts a budget allows: the one place that rounds."""

from __future__ import annotations

import math

from ..errors import BudgetError


def budget_bytes(budget: float | int, slot_bytes: int, experts: int) -> int:
    """The budget in bytes; never less than the slots that it buys (`budget_bytes // slot_bytes`).

    Args:
        budget: a share of all `experts` slots' bytes (float) or bytes (int).
        slot_bytes: bytes of one slot.
        experts: routed experts in all layers.

    Raises:
        BudgetError: it does not hold one expert.
    """
    held = budget
    if isinstance(budget, float):
        whole_slots = int(budget * experts + 1e-9)  # 1/3 of three experts is one expert, whatever the rounding
        held = max(int(budget * experts * slot_bytes), whole_slots * slot_bytes)
    if held < slot_bytes:
        least, total = math.ceil(1e6 / experts) / 1e6, slot_bytes * experts
        raise BudgetError(
            f"budget {budget} holds no expert (one takes {slot_bytes} bytes, all {experts} take {total})",
            f"give at least {slot_bytes} bytes or a share of {least:.6f}",
        )
    return int(held)
