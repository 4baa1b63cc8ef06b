"""Where experts are cached and how bytes get there: what every device has, a GPU or the CPU standing in for one.

A device copies host tensors into slot tensors (on the loader's thread) and lets the compute wait
for a copy. It knows no experts and decides nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol

import torch

from ..settings import CopySettings

if TYPE_CHECKING:
    from .pool import LayerWeights

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
