"""Where a layer's time goes: kernel against everything around it. For benchmarks; off it costs nothing."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from ...kernels.expert_ffn import ExpertKernel, Group
from .engine import ExpertEngine


@dataclass(frozen=True, slots=True)
class LayerPass:
    """One pass of one MoE layer: tokens in the batch, seconds in all and seconds inside kernel calls."""

    layer: int
    tokens: int
    total_s: float
    kernel_s: float


class _TimedKernel:
    """Adds up the time of the kernel that it stands in for."""

    def __init__(self, kernel: ExpertKernel) -> None:
        self.kernel = kernel
        self.spent_s = 0.0

    def run(self, hidden: torch.Tensor, pairs: torch.Tensor, groups: list[Group], top_k: int, y: torch.Tensor) -> None:
        start_s = time.perf_counter()
        self.kernel.run(hidden, pairs, groups, top_k, y)
        self.spent_s += time.perf_counter() - start_s

    def combine(self, y: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        start_s = time.perf_counter()
        out = self.kernel.combine(y, weights)
        self.spent_s += time.perf_counter() - start_s
        return out


@contextmanager
def layer_passes(engine: ExpertEngine) -> Iterator[list[LayerPass]]:
    """Collect every layer pass inside the `with` block; call it while no request is in flight.

    CPU only: on CUDA a kernel call returns before the kernel has run.
    """
    passes: list[LayerPass] = []
    kernels = [layer.kernel for layer in engine.layers]
    for layer in engine.layers:
        timed = _TimedKernel(layer.kernel)
        layer.kernel = timed
        layer.forward = _timed_forward(layer.index, layer.forward, timed, passes)  # type: ignore[method-assign]
    try:
        yield passes
    finally:
        for layer, kernel in zip(engine.layers, kernels, strict=True):
            layer.kernel = kernel
            del layer.forward  # the class's own again


def _timed_forward(index: int, forward, timed: _TimedKernel, passes: list[LayerPass]):  # type: ignore[no-untyped-def]
    def run(hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        timed.spent_s = 0.0
        start_s = time.perf_counter()
        out = forward(hidden, ids, weights)
        passes.append(LayerPass(index, hidden.shape[0], time.perf_counter() - start_s, timed.spent_s))
        return out

    return run
