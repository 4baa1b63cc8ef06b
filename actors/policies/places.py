"""How many experts each GPU keeps of every layer, where the others are computed elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray


@dataclass(frozen=True, eq=False)
class Places:
    """The GPU of each expert, and its places for each layer: what a hot set must fit into.

    Every GPU has places of its own in every layer. So none is given more hot experts than it has slots, whatever is
    important, and the hot experts of a layer, which run side by side, are spread over all GPUs.

    Args:
        owner: int [L, E], GPU 0..G-1 of each expert.
        count: int [L, G], places of each GPU in each layer; at most as many as it owns experts there.
    """

    owner: NDArray[np.int64]
    count: NDArray[np.int64]

    @staticmethod
    def fit(owner: ArrayLike, slots: Sequence[int], per_layer: int | None) -> Places:
        """Places within the slots of each GPU.

        Args:
            owner: int [L, E].
            slots: of each of G GPUs.
            per_layer: K, places of a layer over all GPUs: dealt out one by one, in layer l beginning with GPU l mod G.
                None: as many as fit; the slots of a GPU divided by L, rounded down.

        Raises:
            ValueError: K is outside [0, E], or a GPU has too few slots; the message says which.
        """
        table = np.asarray(owner, np.int64)
        layers, experts = table.shape
        gpus = len(slots)
        owned = np.stack([np.bincount(row, minlength=gpus) for row in table])  # [L, G]
        if per_layer is None:
            return Places(table, np.minimum(owned, np.asarray(slots) // layers))
        if not 0 <= per_layer <= experts:
            raise ValueError(f"hot_per_layer is {per_layer}; give 0 to {experts}, the experts of a layer")
        count = np.stack([_dealt(per_layer, row, layer % gpus) for layer, row in enumerate(owned.tolist())])
        for gpu, (needed, there) in enumerate(zip(count.sum(axis=0).tolist(), slots, strict=True)):
            if needed > there:
                where = f" on GPU {gpu}" if gpus > 1 else ""
                raise ValueError(
                    f"{per_layer} hot experts in {layers} layers take {needed} slots{where}; the budget holds {there}"
                )
        return Places(table, count)

    @property
    def layers(self) -> int:
        """L."""
        return len(self.owner)

    @property
    def experts(self) -> int:
        """E."""
        return self.owner.shape[1]

    @property
    def per_layer(self) -> int:
        """Places of a layer over all GPUs; of the layer with the fewest."""
        return int(self.count.sum(axis=1).min())

    def first(self, layer: int, order: Sequence[int]) -> list[int]:
        """The experts that get the places of a layer if they come in this order, in this order."""
        left, owner = self.count[layer].tolist(), self.owner[layer].tolist()
        out = []
        for expert in order:
            if left[owner[expert]]:
                left[owner[expert]] -= 1
                out.append(expert)
        return out


def _dealt(places: int, owned: Sequence[int], first: int) -> list[int]:
    """Places of each GPU when `places` are dealt out in turn, none getting more than it owns."""
    out, gpu = [0] * len(owned), first
    while places:
        if out[gpu] < owned[gpu]:
            out[gpu] += 1
            places -= 1
        gpu = (gpu + 1) % len(owned)
    return out
