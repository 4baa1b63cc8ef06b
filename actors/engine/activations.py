"""How a layer's rows get from the compute device to its peers, and their sums back: `Activations`.

    begin (hidden) -> the routing is read -> take (the rows of one peer) -> the channel
    the channel -> receive (a peer's sums) -> a tensor on the compute device

A shard is at the other end:

    the channel -> receive (rows, weights) -> kernels -> deliver (the sums) -> the channel

Where the compute device is the CPU the rows are there already. On a GPU they go through pinned memory without making
anything wait but the host, once, for the rows that it is about to send (`cuda.activations`).
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from ...proto.options import Supply


class Outgoing(Protocol):
    """The rows of one layer, on their way to the host; used by the forward's thread."""

    def take(self, tokens: NDArray[np.int64]) -> tuple[NDArray[np.float32], torch.Tensor]:
        """The rows of some tokens, once they are there.

        Args:
            tokens: their numbers [R], rising.

        Returns:
            The rows [R, H], which stay as they are while anybody refers to them, and `tokens` on the compute device.
        """
        ...


class Activations(Protocol):
    """The way to peers and back for one engine."""

    @property
    def supply(self) -> Supply | None:
        """Where the channels to the peers put what they receive; None: anywhere."""
        ...

    @property
    def label(self) -> str:
        """For the plan: how they travel."""
        ...

    def begin(self, hidden: torch.Tensor) -> Outgoing:
        """A layer may send rows of hidden [T, H]. Never waits."""
        ...

    def receive(self, array: NDArray[Any]) -> torch.Tensor:
        """What arrived, such as a peer's sums [R, H], on the compute device, for what is enqueued from now on.

        Never waits. uint16 holds bfloat16 bits.
        """
        ...

    def deliver(self, sums: torch.Tensor) -> NDArray[np.float32]:
        """Sums [R, H] on the host, once they are there: the one wait of an answer."""
        ...


class PlainActivations:
    """Tensors are copied when they are asked for: on the CPU, where most of it is no copy, and to compare with."""

    supply: Supply | None = None
    label = "plain"

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def begin(self, hidden: torch.Tensor) -> Outgoing:
        return _PlainRows(hidden)

    def receive(self, array: NDArray[Any]) -> torch.Tensor:
        if array.dtype == np.uint16:
            return self.receive(array.view(np.int16)).view(torch.bfloat16)
        return torch.tensor(array, device=self._device)  # a copy on the CPU too: what arrives is read-only

    def deliver(self, sums: torch.Tensor) -> NDArray[np.float32]:
        found: NDArray[np.float32] = sums.detach().float().cpu().numpy()
        return found


class _PlainRows:
    __slots__ = ("_hidden",)

    def __init__(self, hidden: torch.Tensor) -> None:
        self._hidden = hidden

    def take(self, tokens: NDArray[np.int64]) -> tuple[NDArray[np.float32], torch.Tensor]:
        hidden, used = self._hidden, torch.from_numpy(tokens).to(self._hidden.device)
        states = hidden if len(tokens) == len(hidden) else hidden[used]
        rows: NDArray[np.float32] = states.detach().float().contiguous().cpu().numpy()
        return rows, used
