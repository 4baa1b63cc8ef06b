"""What a substitution is given and gives, for each of its implementations (`substitute`)."""

from __future__ import annotations

from typing import Literal, NamedTuple, Protocol

import numpy as np
import torch
from numpy.typing import NDArray


class Options(Protocol):
    """How experts are replaced: `SubstitutionOptions`."""

    @property
    def rho(self) -> int | None: ...
    @property
    def search(self) -> int | None: ...
    @property
    def temperature(self) -> float: ...
    @property
    def gamma(self) -> float | None: ...
    @property
    def eta(self) -> float: ...
    @property
    def reuse(self) -> float: ...
    @property
    def fallback(self) -> Literal["load", "drop"]: ...
    @property
    def weights(self) -> Literal["slot", "buddy"]: ...
    @property
    def renormalise(self) -> bool: ...


class BuddyLists(Protocol):
    """Buddy lists of a layer: `Buddies`."""

    @property
    def ids(self) -> NDArray[np.int32]: ...
    @property
    def similarity(self) -> NDArray[np.float32]: ...


class ReplacedArrays(NamedTuple):
    """ids [T, K] int64, weights [T, K] float32, pairs replaced, pairs left out."""

    ids: NDArray[np.int64]
    weights: NDArray[np.float32]
    substituted: int
    dropped: int


class ReplacedTensors(NamedTuple):
    """As `ReplacedArrays`, on the device of the routing.

    The counts [2] int64, pairs replaced and pairs left out, are there too: whoever reads a number of them waits for a
    GPU, and a forward need not.
    """

    ids: torch.Tensor
    weights: torch.Tensor
    counts: torch.Tensor

    @property
    def substituted(self) -> int:
        return int(self.counts[0])

    @property
    def dropped(self) -> int:
        return int(self.counts[1])

    @staticmethod
    def untouched(ids: torch.Tensor, weights: torch.Tensor) -> ReplacedTensors:
        """Nothing was replaced."""
        return ReplacedTensors(ids, weights, torch.zeros(2, dtype=torch.int64, device=ids.device))


class BuddyTensors(NamedTuple):
    """Buddy lists of a layer on a device: ids [E, R] int32, similarity [E, R] float32."""

    ids: torch.Tensor
    similarity: torch.Tensor

    @staticmethod
    def of(buddies: BuddyLists, device: torch.device | str = "cpu") -> BuddyTensors:
        return BuddyTensors(torch.from_numpy(buddies.ids).to(device), torch.from_numpy(buddies.similarity).to(device))


def require_probabilities(probabilities: torch.Tensor | None, options: Options) -> None:
    """Raise ValueError where the options go by the router's probabilities and there are none."""
    if probabilities is None and (options.eta > 0 or options.weights == "buddy"):
        raise ValueError("eta, and weights by the buddy, need the router's probabilities")
