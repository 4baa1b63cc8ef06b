"""Devices that cache experts: a GPU, or the CPU that stands in for one at a stated link rate.

A device copies host tensors into slot tensors and orders compute behind copies. It decides nothing.

`Activations` carry a layer's rows from the compute device to its peers, and their sums back:

    begin (hidden) -> the routing is read -> take (the rows of one peer) -> the channel
    the channel -> sums (of a peer) -> add

and at a shard:

    the channel -> receive (rows, weights) -> kernels -> deliver (the sums) -> the channel

On a GPU they go through pinned memory, and the host waits once, for the rows that it sends (`cuda.activations`).
"""

from __future__ import annotations

import mmap
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from ....limits import host_free_bytes
from ....proto.options import Supply
from ...budget import Budget
from ...settings import CopySettings, EngineSettings, LinkSettings

Tensors = tuple[torch.Tensor, ...]


@dataclass(frozen=True, slots=True)
class Copied:
    """A finished copy.

    start_s, end_s: when it occupied the link, `time.perf_counter` seconds. link_s: seconds by the link's own clock: on
    the stand-in latency and bytes at the stated rate, on a GPU end - start. writeback_s: its first part, which copied
    the slot's old expert back.
    """

    start_s: float
    end_s: float
    link_s: float = 0.0
    writeback_s: float = 0.0


@dataclass(frozen=True)
class PinReport:
    """Bytes of experts by what pinning did with them, and the seconds it took.

    registered: pinned in place. copied: pinned as a copy. staged: neither; copied through staging buffers, and the
    forward waits. problem: why some are not registered; None: all are.
    """

    registered: int
    copied: int
    staged: int
    problem: str | None
    seconds: float

    def beside(self, other: PinReport) -> PinReport:
        return PinReport(
            self.registered + other.registered, self.copied + other.copied, self.staged + other.staged,
            self.problem or other.problem, self.seconds + other.seconds,
        )  # fmt: skip


class Arena(Protocol):
    """Memory of a device at fixed addresses, of which the first bytes are there and the rest is only reserved."""

    @property
    def tensor(self) -> torch.Tensor:
        """The whole range, uint8 [most]; what is only reserved is not read or written."""
        ...

    def resize(self, nbytes: int) -> None:
        """The first bytes, rounded up to pages, are there; those that stay keep what they hold.

        When some go, nothing enqueued may use them (`Device.settle`).

        Raises:
            torch.OutOfMemoryError: there is no room; then nothing has changed.
        """
        ...

    def close(self) -> None:
        """Give all of it back; nobody uses the tensor any more. Safe to call twice."""
        ...


class HostArena:
    """An `Arena` of host memory: an anonymous mapping, whose pages come with their first write."""

    def __init__(self, nbytes: int) -> None:
        size = -(-max(1, nbytes) // mmap.PAGESIZE) * mmap.PAGESIZE
        self._memory: mmap.mmap | None = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.tensor, self._end = torch.frombuffer(self._memory, dtype=torch.uint8, count=nbytes), size

    def resize(self, nbytes: int) -> None:
        keep = -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
        if self._memory is not None and keep < self._end:
            self._memory.madvise(mmap.MADV_DONTNEED, keep, self._end - keep)

    def close(self) -> None:
        """The mapping lives as long as the last tensor on it; its memory goes now."""
        if self._memory is not None:
            self.resize(0)
            self._memory = None


class HostExperts(Protocol):
    """One MoE layer's experts in host memory; `tensors` are all of them, for pinning."""

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]: ...
    def expert(self, index: int) -> tuple[torch.Tensor, ...]: ...

    def moved(self, tensors: tuple[torch.Tensor, ...]) -> Any:
        """The same experts in other memory, given as `tensors` are."""
        ...


class Device(Protocol):
    """What the cache and the loader need of a device.

    Bytes are counted as written to the slot, in the slot's dtype, on both executors.
    """

    torch_device: torch.device
    executor: Literal["real", "emulated"]

    def enter(self) -> None:
        """Make it the calling thread's current device."""
        ...

    def free_bytes(self) -> int:
        """Memory that can be allocated now: what this process, and others, have not taken."""
        ...

    def arena_problem(self) -> str | None:
        """Why this device has no `arena`; None: it has."""
        ...

    def arena(self, nbytes: int) -> Arena:
        """Memory that may grow to so many bytes; none of it is there yet, or a page.

        Raises:
            torch.OutOfMemoryError: there is no room for a page.
        """
        ...

    def settle(self) -> None:
        """Make the host wait for all that is enqueued on the device."""
        ...

    def move(self, dst: Tensors, src: Tensors) -> None:
        """Copy one slot to another, in order with the compute; on the forward's thread."""
        ...

    def mark_use(self) -> Any:
        """A mark of all compute enqueued so far; a later copy into its slots waits for it."""
        ...

    def copy(self, dst: Tensors, src: Tensors, after: Any) -> Copied:
        """Copy one expert after `after` (of `mark_use`), and wait; called on a loader's thread."""
        ...

    def pin(
        self, layers: Sequence[HostExperts], settings: CopySettings
    ) -> tuple[Sequence[HostExperts], PinReport | None]:
        """Pin host memory that experts are copied from.

        Returns:
            The layers, some maybe in other memory, and a report; None: this device needs no pinned memory.
        """
        ...

    def close(self) -> None:
        """Release pinned host memory, after the copy queues. Safe to call twice."""
        ...


class CpuDevice:
    """The CPU stands in for a GPU: bounded slots, and a link throttled to a stated rate. Or (`executor` real) it is the
    device, where experts run as they lie in host memory and nothing is copied.

    A copy occupies the link for `latency_us + bytes / gbps`, and copies do not overlap, as in one PCIe direction. With
    `gbps` None only the latency is added.
    """

    def __init__(self, link: LinkSettings, executor: Literal["real", "emulated"] = "emulated") -> None:
        self.torch_device, self.link, self.executor = torch.device("cpu"), link, executor
        self._latency_s = link.latency_us * 1e-6
        self._bytes_per_s = link.gbps * 1e9 if link.gbps is not None else None
        self._link_free_s = 0.0

    def enter(self) -> None:
        return None

    def free_bytes(self) -> int:
        return host_free_bytes()

    def arena_problem(self) -> None:
        return None

    def arena(self, nbytes: int) -> HostArena:
        return HostArena(nbytes)

    def settle(self) -> None:
        return None

    def move(self, dst: Tensors, src: Tensors) -> None:
        for d, s in zip(dst, src, strict=True):
            d.copy_(s)

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
        return Copied(start_s, end_s, duration_s)

    def pin(self, layers: Sequence[HostExperts], settings: CopySettings) -> tuple[Sequence[HostExperts], None]:
        return layers, None

    def close(self) -> None:
        return None


class Outgoing(Protocol):
    """The rows of one layer on their way to the host; used by the forward's thread."""

    def take(self, tokens: NDArray[np.int64]) -> tuple[NDArray[np.float32], Any]:
        """The rows of some tokens; waits for them.

        Args:
            tokens: their numbers [R], rising.

        Returns:
            The rows [R, H], unchanged while referenced, and `tokens` as `Activations.add` takes them; None: all.
        """
        ...


class Activations(Protocol):
    """Transfers to and from the peers of one engine."""

    @property
    def supply(self) -> Supply | None:
        """Where the channels to the peers put received arrays; None: anywhere."""
        ...

    @property
    def label(self) -> str:
        """For the plan: the kind of transfer."""
        ...

    def begin(self, hidden: torch.Tensor) -> Outgoing:
        """Prepare to send rows of hidden [T, H]. Never waits."""
        ...

    def receive(self, array: NDArray[Any]) -> torch.Tensor:
        """A received array, such as rows [R, H], on the compute device. Never waits; uint16 holds bfloat16 bits."""
        ...

    def sums(self, array: NDArray[np.float32]) -> Any:
        """A peer's sums [R, H] as `add` takes them. Never waits."""
        ...

    def add(self, out: torch.Tensor, rows: Any, sums: Any) -> None:
        """Add a peer's sums to rows of out [T, H]. rows: of `Outgoing.take`. sums: of `sums`."""
        ...

    def deliver(self, sums: torch.Tensor) -> NDArray[np.float32]:
        """Sums [R, H] on the host; waits once."""
        ...


class PlainActivations:
    """Synchronous copies: for the CPU, where most are none, and as a baseline."""

    supply: Supply | None = None
    label = "plain"

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def begin(self, hidden: torch.Tensor) -> Outgoing:
        return _PlainRows(hidden)

    def receive(self, array: NDArray[Any]) -> torch.Tensor:
        if array.dtype == np.uint16:
            return self.receive(array.view(np.int16)).view(torch.bfloat16)
        return torch.from_numpy(array.copy()).to(self._device)  # a copy on the CPU too: what arrives is read-only

    def sums(self, array: NDArray[np.float32]) -> NDArray[np.float32]:
        return array

    def add(self, out: torch.Tensor, rows: NDArray[np.int64] | None, sums: NDArray[np.float32]) -> None:
        if out.dtype == torch.float32 and out.device.type == "cpu":  # of few rows NumPy takes a quarter of the time
            on_host = out.numpy()
            on_host[slice(None) if rows is None else rows] += sums
        else:
            found = self.receive(sums).to(out.dtype)
            out.add_(found) if rows is None else out.index_add_(0, torch.from_numpy(rows).to(out.device), found)

    def deliver(self, sums: torch.Tensor) -> NDArray[np.float32]:
        found: NDArray[np.float32] = sums.detach().float().cpu().numpy()
        return found


class _PlainRows:
    __slots__ = ("_hidden",)

    def __init__(self, hidden: torch.Tensor) -> None:
        self._hidden = hidden

    def take(self, tokens: NDArray[np.int64]) -> tuple[NDArray[np.float32], NDArray[np.int64] | None]:
        states = self._hidden
        if states.dtype != torch.float32 or states.device.type != "cpu":
            states = states.float().cpu()
        rows: NDArray[np.float32] = states.numpy()
        return (rows, None) if len(tokens) == len(rows) else (rows[tokens], tokens)


def settle_budget(settings: EngineSettings, device: Device, lead: bool = True) -> EngineSettings:
    """The settings with what `budget: auto` comes to on this device, before anything is loaded there.

    Args:
        lead: whether dense weights and KV cache go there.

    Raises:
        BudgetError: too little is free; the message has every term.
    """
    if settings.budget.auto is None:
        return settings
    auto = settings.budget.auto.measured(device.free_bytes(), lead)
    if auto.nbytes:  # or it is refused
        settings = settings.model_copy(update={"budget": Budget(auto=auto)})
    return settings
