"""Where experts are cached and how bytes get there: a GPU, or the CPU that stands in for one at a stated rate.

A device copies host tensors into slot tensors (on the loader's thread) and lets the compute wait
for a copy. It knows no experts and decides nothing.

`Activations` carry a layer's rows from the compute device to its peers, and their sums back:

    begin (hidden) -> the routing is read -> take (the rows of one peer) -> the channel
    the channel -> receive (a peer's sums) -> a tensor on the compute device

A shard is at the other end:

    the channel -> receive (rows, weights) -> kernels -> deliver (the sums) -> the channel

If the compute device is the CPU, the rows are there already. On a GPU they go through pinned memory; only the host
waits, once, for the rows that it is about to send (`cuda.activations`).
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from ....errors import ConfigError
from ....proto.options import Supply
from ...settings import CopySettings, LinkSettings

if TYPE_CHECKING:
    from .slots import LayerWeights

Tensors = tuple[torch.Tensor, ...]


@dataclass(frozen=True, slots=True)
class Copied:
    """A finished copy.

    start_s, end_s: the time the link was given to it, `time.perf_counter` seconds.
    event: of a copy that is enqueued on a GPU's stream and timed later (`loader.Books`); None: the times are these.
    link_s: what it took by the clock of the link: on the stand-in latency and bytes at the stated rate, however late
    the processor was; on a GPU the same as the time above.
    """

    start_s: float
    end_s: float
    event: Any
    link_s: float = 0.0


@dataclass(frozen=True)
class PinReport:
    """What became of the experts in this host's memory when a GPU was to copy from them: bytes, and seconds it took.

    registered: pinned where they lie. copied: pinned as a copy of this process's own. staged: neither; their copies go
    through staging buffers, and the forward waits for them. problem: why some are not registered; None: all are.
    """

    registered: int
    copied: int
    staged: int
    problem: str | None
    seconds: float

    def beside(self, other: PinReport) -> PinReport:
        """Of both."""
        return PinReport(
            self.registered + other.registered, self.copied + other.copied, self.staged + other.staged,
            self.problem or other.problem, self.seconds + other.seconds,
        )  # fmt: skip


class Device(Protocol):
    """What the cache and the loader need of a device.

    The bytes of a copy are those written to the slot, in the slot's dtype, in every counter and on both
    executors; a link that carries a narrower store dtype moves fewer.
    """

    torch_device: torch.device
    executor: Literal["real", "emulated"]

    def enter(self) -> None:
        """The calling thread computes here from now on: kernels are launched on a thread's current GPU."""
        ...

    def mark_use(self) -> Any:
        """A token for 'all compute enqueued so far', which a later copy into its slots waits for."""
        ...

    def copy(self, dst: Tensors, src: Tensors, after: Any) -> Copied:
        """Copy one expert and wait for it; called on a loader's thread. `after` is a token of `mark_use`."""
        ...

    def pin(
        self, layers: Sequence[LayerWeights], settings: CopySettings
    ) -> tuple[Sequence[LayerWeights], PinReport | None]:
        """Pin host memory that experts are copied from: the layers, some perhaps in other memory now, and what it came
        to; None: this device copies from any memory alike."""
        ...

    def close(self) -> None:
        """Give back what was taken of the host; after the copy queues. Safe to call twice."""
        ...


class CpuDevice:
    """The CPU stands in for a GPU: bounded slots, and a link throttled to a stated rate.

    A copy occupies the link for `latency_us + bytes / gbps`; copies follow each other without
    overlap, as on one PCIe direction.
    With `gbps` None the link is as fast as memory and only latency is added.
    """

    executor: Literal["real", "emulated"] = "emulated"

    def __init__(self, link: LinkSettings) -> None:
        self.torch_device, self.link = torch.device("cpu"), link
        self._latency_s = link.latency_us * 1e-6
        self._bytes_per_s = link.gbps * 1e9 if link.gbps is not None else None
        self._link_free_s = 0.0

    def enter(self) -> None:
        return None

    def mark_use(self) -> None:
        return None  # compute is synchronous: what was enqueued is done

    def copy(self, dst: Tensors, src: Tensors, after: Any) -> Copied:
        start_s = max(time.perf_counter(), self._link_free_s)
        duration_s = self._latency_s
        for d, s in zip(dst, src, strict=True):
            d.copy_(s)
            if self._bytes_per_s is not None:
                duration_s += d.nbytes / self._bytes_per_s
        end_s = max(start_s + duration_s, time.perf_counter())
        self._link_free_s = end_s
        while (left_s := end_s - time.perf_counter()) > 0:
            time.sleep(left_s)
        return Copied(start_s, end_s, None, duration_s)

    def pin(self, layers: Sequence[LayerWeights], settings: CopySettings) -> tuple[Sequence[LayerWeights], None]:
        return layers, None

    def close(self) -> None:
        return None


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


def make_device(kind: str, link: LinkSettings, gpu: int | None = None) -> Device:
    """The device for `auto`, `cpu` or `cuda`.

    Args:
        gpu: number of the CUDA device, which becomes this process's current one; None: the current one.

    Raises:
        ConfigError: CUDA is asked for and not there, or there are too few GPUs.
    """
    if kind == "auto":
        kind = "cuda" if torch.cuda.is_available() else "cpu"
    if kind == "cpu":
        return CpuDevice(link)
    if not torch.cuda.is_available():
        raise ConfigError("device cuda is not available", "use --device cpu (the CPU stands in for a GPU)")
    if gpu is not None:
        if gpu >= torch.cuda.device_count():
            raise ConfigError(
                f"shard {gpu} needs GPU {gpu}, this machine shows {torch.cuda.device_count()}",
                "use fewer shards, or --device cpu (the CPU stands in for GPUs)",
            )
        torch.cuda.set_device(gpu)
    from ..cuda.device import CudaDevice
    from ..cuda.runtime import TorchRuntime

    return CudaDevice(TorchRuntime(torch.cuda.current_device()))


def activations_of(device: torch.device) -> Activations:
    """The way from and to a compute device."""
    if device.type == "cpu":
        return PlainActivations(device)
    from ..cuda.activations import PinnedActivations
    from ..cuda.runtime import TorchRuntime

    return PinnedActivations(TorchRuntime(device.index or 0))
