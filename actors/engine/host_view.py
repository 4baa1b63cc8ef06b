"""The data that a layer's policies read on the host, fetched in one transfer.

    look (ids, weights, foreseen scores) -> one fetch -> LayerView: NumPy arrays

On a GPU every fetch waits for the compute stream. So each policy names its scores up front (`Asker`), and one fetch
brings all, by a kernel that computes the scores of linear routers; other data is fetched on access. On the CPU nothing
is copied, and scores are computed on access: a demand load need not wait for a later layer's router.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ..core import _core

if TYPE_CHECKING:
    import torch

    from .cache.device import Outgoing
    from .model.model import RouterProbe


class Asked(NamedTuple):
    """A router's scores [T, E] on a layer's input, in float32."""

    probe: RouterProbe
    softmax: bool  # over the experts
    rows: tuple[int, ...] = ()  # of the input; empty: all


# (layer, its tokens) -> the scores that a policy reads once the layer's routing is known
Asker = Callable[[int, int], Iterable[Asked]]
# a linear router for a kernel: weight [D*E, H], bias [D*E] or None, D, softmax
Router: TypeAlias = "tuple[torch.Tensor, torch.Tensor | None, int, bool]"


class Fetch(Protocol):
    """Brings tensors to the host."""

    def __call__(
        self, tensors: Sequence[torch.Tensor], hidden: torch.Tensor | None = None, asked: Sequence[Asked] = ()
    ) -> list[NDArray[Any]]:
        """Arrays of tensors without gradient, then the scores asked of hidden [T, H], after at most one wait.

        16-bit floats arrive as float32. On the CPU arrays are in the tensors' memory.
        """
        ...


def share(
    tensors: Sequence[torch.Tensor], hidden: torch.Tensor | None = None, asked: Sequence[Asked] = ()
) -> list[NDArray[Any]]:
    """The `Fetch` of host memory: nothing is copied that NumPy has."""
    halves = [tensor.itemsize == 2 and tensor.is_floating_point() for tensor in tensors]
    found = [(tensor.float() if half else tensor).numpy() for tensor, half in zip(tensors, halves, strict=True)]
    return found if hidden is None else found + [_scores_on_host(one, hidden) for one in asked]


def upload(array: NDArray[Any], device: torch.device) -> torch.Tensor:
    """A small array on a device, without a wait and past the copies of experts; on the CPU in the array's memory."""
    if device.type == "cpu":
        import torch

        return torch.from_numpy(array)
    from .cuda.tables import ring_of

    return ring_of(device).put(array)


def upload_as(dtype: torch.dtype, array: NDArray[np.float32], device: torch.device) -> torch.Tensor:
    """`upload` of floats that the host rounds to a dtype of 2 or 4 bytes, which saves the device a launch."""
    import torch

    if dtype == torch.float32:
        return upload(array, device)
    return upload(torch.from_numpy(array).to(dtype).view(torch.int16).numpy(), device).view(dtype)


def pairs_of(routing: _core.Routing, device: torch.device) -> torch.Tensor:
    """`Routing.order` on a device [T * K]."""
    return _in_order(routing.top_k, device) if routing.in_order else upload(routing.order, device)


@cache
def _in_order(top_k: int, device: torch.device) -> torch.Tensor:
    """Pairs of one token with distinct experts; shared, read-only."""
    import torch

    return torch.arange(top_k, device=device)


class LayerView:
    """One layer of one forward on the host.

    Args:
        hidden: the layer's input [T, H]. ids, weights: its routing [T, K]; ids that are an array, as of a shard, may
            have pairs without an expert (-1).
        weighed: fetch the weights now. asked: scores to fetch now.

    Attributes:
        tokens: T.
        picked: ids as the model picked them [T, K].
        ids: as they will run [T, K']; `picked` until `reroute`.
        hidden, device_weights: [T, H] and [T, K'], on the device. outgoing: the rows for peers, where some may be sent.
    """

    __slots__ = ("_fetch", "_scores", "_weights", "device_weights", "hidden", "ids", "outgoing", "picked", "tokens")

    def __init__(
        self,
        fetch: Fetch,
        hidden: torch.Tensor,
        ids: torch.Tensor | NDArray[np.int64],
        weights: torch.Tensor,
        weighed: bool = False,
        asked: Sequence[Asked] = (),
    ) -> None:
        self._fetch, self.hidden, self.device_weights = fetch, hidden, weights
        self.outgoing: Outgoing | None = None
        self._weights: NDArray[np.float32] | None = None
        self._scores: dict[Asked, NDArray[np.float32]] | None = None
        if fetch is share and not asked:  # the rest is fetched where it is read
            self.picked = ids if isinstance(ids, np.ndarray) else ids.numpy()
        else:
            self.picked, *found = fetch((ids, weights) if weighed else (ids,), hidden, asked)
            if weighed:
                self._weights = found.pop(0)
            if asked:
                self._scores = dict(zip(asked, found, strict=True))
        self.ids = self.picked
        self.tokens: int = self.picked.shape[0]

    @property
    def weights(self) -> NDArray[np.float32]:
        """Of `ids` [T, K]."""
        found = self._weights
        if found is None:
            (found,) = self._fetch((self.device_weights.detach(),))
            self._weights = found
        return found

    def scores(self, asked: Asked) -> NDArray[np.float32]:
        """[T, E], or [R, E] of R rows; fetched now if not fetched before."""
        fetched = self._scores
        if fetched is None:
            fetched = self._scores = {}
        found = fetched.get(asked)
        if found is None:
            (found,) = self._fetch((), self.hidden, (asked,))
            fetched[asked] = found
        return found

    def reroute(self, ids: NDArray[Any], weights: NDArray[np.floating], dropped: bool) -> None:
        """From now on the layer runs these [T, K]. dropped: remove columns without weight: [T, K'], 1 <= K' <= K."""
        if dropped:
            used: Any = weights.any(axis=0) if len(weights) > 1 else weights[0] != 0  # [K]
            if 0 < np.count_nonzero(used) < len(used):
                ids, weights = ids.compress(used, axis=1), weights.compress(used, axis=1)
        self.ids, self._weights = ids, np.ascontiguousarray(weights, np.float32)
        self.device_weights = upload_as(self.device_weights.dtype, self._weights, self.hidden.device)

    def routing(self, layer: int, experts: int) -> _core.Routing:
        """The pairs that run, by expert."""
        return _core.Routing(layer, experts, self.ids)


def _scores_on_host(asked: Asked, hidden: torch.Tensor) -> NDArray[np.float32]:
    """In one native call where it can be."""
    on_host = None if asked.rows else getattr(asked.probe, "on_host", None)
    found: NDArray[np.float32] | None = None if on_host is None else on_host(hidden, asked.softmax)
    return scores_of(asked, hidden).numpy() if found is None else found


def scores_of(asked: Asked, hidden: torch.Tensor) -> torch.Tensor:
    """The scores, on the device of hidden [T, H]."""
    import torch

    if asked.rows:
        hidden = hidden[upload(np.array(asked.rows, np.int64), hidden.device)]
    found = asked.probe(hidden).float()
    return torch.softmax(found, dim=-1) if asked.softmax else found


def routers_of(asked: Sequence[Asked], hidden: torch.Tensor) -> dict[Asked, Router]:
    """The linear routers whose scores a kernel can compute on its way; those left out are for `scores_of`."""
    rows = hidden.shape[0]
    return {one: found for one in asked if (found := operands_of(one, rows)) is not None}


def operands_of(asked: Asked, rows: int) -> Router | None:
    """Of a linear router whose scores of so many rows a kernel computes."""
    on_device = None if asked.rows else getattr(asked.probe, "on_device", None)
    operands = None if on_device is None else on_device(rows)
    return None if operands is None else (*operands, asked.softmax)


class HostViews:
    """Makes the views of one engine's layers.

    Args:
        ahead: fetch everything together, for devices where a fetch waits.
        askers: name the scores that policies read.
        weighed: every layer's weights are read.
    """

    def __init__(
        self, fetch: Fetch = share, ahead: bool = False, askers: Sequence[Asker] = (), weighed: bool = False
    ) -> None:
        self.fetch, self._ahead, self._askers, self._weighed = fetch, ahead, tuple(askers), weighed

    def look(
        self, layer: int, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, weighed: bool = False
    ) -> LayerView:
        """View a layer: hidden [T, H], ids [T, K], weights [T, K]. weighed: this layer's weights are read."""
        if not self._ahead:
            return LayerView(self.fetch, hidden, ids, weights)
        asked: Iterable[Asked] = ()
        if self._askers:
            tokens = hidden.shape[0]
            asked = dict.fromkeys(one for asker in self._askers for one in asker(layer, tokens))
        return LayerView(self.fetch, hidden, ids, weights, self._weighed or weighed, tuple(asked))

    def warm(self, layers: int, hidden: torch.Tensor, top_k: int) -> None:
        """Look at a decode row of each layer, for a device that compiles at first sight: not in a request.

        hidden: [1, H], of any numbers. Weights may be of its dtype or float32.
        """
        import torch

        with torch.inference_mode():
            ids = torch.zeros((1, top_k), dtype=torch.int64, device=hidden.device)
            for dtype in dict.fromkeys((hidden.dtype, torch.float32)):
                weights = torch.zeros((1, top_k), dtype=dtype, device=hidden.device)
                for layer in range(layers):
                    self.look(layer, hidden, ids, weights)
