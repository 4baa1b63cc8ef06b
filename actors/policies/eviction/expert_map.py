"""Eviction guided by expert maps (fMoE)."""

from __future__ import annotations

from collections.abc import Sequence

from .lfu import Lfu


class ExpertMapEviction(Lfu):
    """Evicts the expert with the highest priority 1 / (p * freq) (fMoE section 4.5).

    State: that of `Lfu`, and p, the probability that the map which was matched last for the expert's layer gives it. An
    expert whose layer was not matched yet has the mean of the first probabilities told: with none told, this is `Lfu`.
    The experts of a layer that are held move when their p is told, O(log n) each.

    Args:
        half_life: of a use, see `Lfu`; None: uses count for good, as in the paper.
    """

    def __init__(self, half_life: float | None = None) -> None:
        super().__init__(half_life)
        self._probability: dict[int, float] = {}
        self._unknown: float | None = None

    def expect(self, keys: Sequence[int], probabilities: Sequence[float]) -> None:
        """What the matched map says of these experts, held or not: whole layers of it."""
        first = self._unknown is None and len(keys) > 0
        self._probability.update(zip(keys, probabilities, strict=True))
        if first:
            self._unknown = sum(probabilities) / len(keys)
            self._place_again()
            return
        for key in keys:
            if key in self._order:
                self._place(key, self._order.stamp(key))

    def _weight(self, key: int) -> float:
        return self._probability.get(key, 1.0 if self._unknown is None else self._unknown)
