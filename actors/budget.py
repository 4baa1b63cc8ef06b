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


def mixed_slots(held: int, slot_bytes: int, replica_bytes: int, share: float, experts: int) -> tuple[int, int]:
    """Slots for experts in full and slots for low-bit replicas of them, together within the budget.

    Args:
        held: the budget in bytes. slot_bytes, replica_bytes: of one slot of each.
        share: of the budget, for replicas. experts: routed experts in all layers; no more slots of either are made.

    Raises:
        BudgetError: it does not hold one of each.
    """
    replicas = min(int(held * share) // replica_bytes, experts)
    full = min((held - replicas * replica_bytes) // slot_bytes, experts)
    if not replicas or not full:
        raise BudgetError(
            f"the budget of {held} bytes does not hold an expert in full ({slot_bytes} bytes) and, in {share:.0%} of "
            f"it, a replica ({replica_bytes} bytes)",
            f"give at least {max(math.ceil(replica_bytes / share), math.ceil(slot_bytes / (1 - share)))} bytes",
        )
    return full, replicas
