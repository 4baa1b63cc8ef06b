"""The CPU as a device that experts are copied to, at a stated rate."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

import torch

from ..settings import CopySettings, LinkSettings
from .device import Copied, Tensors

if TYPE_CHECKING:
    from .pool import LayerWeights


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
