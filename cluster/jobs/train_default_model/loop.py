"""The training loop: workers share parameters and gradients in memory, one thread each."""

from __future__ import annotations

import ctypes
import json
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from .evaluate import stream_bits_per_byte
from .forward import TrainingForward
from .optimizer import OptimizerConfig, SharedOptimizer
from .report import Reporter
from .schedule import PHASES, Budget, Phase, phase_at, rate_at
from .tokens import BatchStream

_MICRO_TOKENS = 4096


class Barrier(Protocol):
    """What the loop needs of ``multiprocessing.Barrier``."""

    def wait(self) -> Any: ...


class NoBarrier:
    """The barrier of a single worker."""

    def wait(self) -> None:
        return None


@dataclass(frozen=True)
class LoopConfig:
    """Everything a run needs to know apart from the weights."""

    work_dir: Path
    budget: Budget
    seed: int = 0
    workers: int = 2
    balance_weight: float = 0.06  # of the mean over layers
    z_weight: float = 1e-3
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    phases: tuple[Phase, ...] = PHASES
    micro_tokens: int = _MICRO_TOKENS
    report_every_s: float = 20
    evaluate_every_s: float = 300
    checkpoint_every_s: float = 180
    compute_dtype: torch.dtype = torch.bfloat16


class SharedState:
    """Parameters, gradients, optimizer state and counters that all workers see."""

    def __init__(self, config: Any, parameters: dict[str, Tensor], loop: LoopConfig) -> None:
        self.config = config
        self.parameters = {name: p.detach() for name, p in parameters.items()}
        self.grads = [{name: torch.zeros_like(p) for name, p in self.parameters.items()} for _ in range(loop.workers)]
        self.counters = torch.zeros(3, dtype=torch.float64)  # steps, tokens, active seconds
        for tensor in [*self.parameters.values(), *(t for g in self.grads for t in g.values()), self.counters]:
            if tensor.device.type == "cpu":
                tensor.share_memory_()
        self.optimizer = SharedOptimizer(list(self.parameters.items()), self.grads, loop.optimizer)

    def save(self, folder: Path, stream: BatchStream) -> None:
        """Write a checkpoint; the last rename makes it the current one."""
        folder.mkdir(parents=True, exist_ok=True)
        tensors = {f"parameter.{name}": p for name, p in self.parameters.items()}
        tensors |= {f"optimizer.{name}": t for name, t in self.optimizer.state().items()}
        metadata = {"counters": json.dumps(self.counters.tolist()), "drawn": json.dumps(stream.drawn)}
        save_file(tensors, folder / "checkpoint.new", metadata=metadata)
        (folder / "checkpoint.new").rename(folder / "checkpoint.safetensors")

    def load(self, folder: Path) -> dict[str, int]:
        """Read the checkpoint back in place; returns the position in the corpus."""
        from safetensors import safe_open

        path = folder / "checkpoint.safetensors"
        tensors = load_file(path)
        for name, parameter in self.parameters.items():
            parameter.copy_(tensors[f"parameter.{name}"])
        prefix = "optimizer."
        self.optimizer.load_state({k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)})
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata()
        self.counters.copy_(torch.tensor(json.loads(metadata["counters"]), dtype=torch.float64))
        return dict(json.loads(metadata["drawn"]))


def keep_memory() -> None:
    """Ask glibc's malloc to keep freed memory: page faults of activations cost more than their use."""
    with suppress(OSError, AttributeError):
        libc = ctypes.CDLL("libc.so.6")
        libc.mallopt(-4, 0)  # M_MMAP_MAX: no mapping per large block
        libc.mallopt(-1, 2**31 - 1)  # M_TRIM_THRESHOLD


class Worker:
    """One process of the run; rank 0 also reports, evaluates and saves."""

    def __init__(self, rank: int, shared: SharedState, loop: LoopConfig, barrier: Barrier, drawn: dict[str, int]):
        self._rank, self._shared, self._loop, self._barrier = rank, shared, loop, barrier
        self._stream = BatchStream(loop.work_dir / "tokens", loop.seed)
        self._stream.drawn = dict(drawn)
        self._parameters = {name: p.requires_grad_() for name, p in shared.parameters.items()}
        for name, parameter in self._parameters.items():
            parameter.grad = shared.grads[rank][name]
        self._device = next(iter(self._parameters.values())).device
        self._forward = TrainingForward(shared.config, self._parameters, loop.compute_dtype)
        self._owners = shared.optimizer.owners(loop.workers)
        self._reporter = Reporter(loop.work_dir / "train.jsonl")

    def run(self, max_steps: int | None = None) -> None:
        """Train until the budget is spent (or for ``max_steps``)."""
        counters, budget = self._shared.counters, self._loop.budget
        done = 0
        while done != max_steps:
            steps, tokens, active_s = counters.tolist()
            progress = budget.progress(int(tokens), active_s)
            if progress >= 1:
                break
            self._step(int(steps) + 1, progress)
            done += 1
        if self._rank == 0:
            self._shared.save(self._loop.work_dir, self._stream)
        self._barrier.wait()

    def _step(self, step: int, progress: float) -> None:
        loop, phase = self._loop, phase_at(progress, self._loop.phases)
        started_s = time.process_time()
        rows = self._stream.next_rows(phase.batch_tokens // phase.length, phase.length)
        tokens = torch.from_numpy(np.ascontiguousarray(rows[self._rank :: loop.workers])).to(self._device)
        micros = tokens.split(max(1, loop.micro_tokens // phase.length))
        for micro in micros:
            losses = self._forward(micro, 1 / (rows.shape[0] * phase.length))
            weight = len(micro) / rows.shape[0]
            extra = loop.balance_weight * losses.balance + loop.z_weight * losses.z
            (losses.cross_entropy + weight * extra).backward()
            self._reporter.add(losses, loop.workers)
        self._barrier.wait()
        momentum = min(0.95, 0.85 + 0.1 * step / 200)
        self._shared.optimizer.step(self._rank, self._owners, step, rate_at(progress, step), momentum)
        if self._rank == 0:
            self._housekeep(step, rows.shape[0] * phase.length, started_s, progress)
        self._barrier.wait()
        self._forward.refresh()

    def _housekeep(self, step: int, new_tokens: int, started_s: float, progress: float) -> None:
        counters, reporter = self._shared.counters, self._reporter
        reporter.end_step(new_tokens)
        counters += torch.tensor([1, new_tokens, time.process_time() - started_s], dtype=torch.float64)
        if reporter.due("report", self._loop.report_every_s):
            reporter.report(counters.tolist(), progress)
        if reporter.due("evaluate", self._loop.evaluate_every_s):
            self._forward.refresh()
            figures = stream_bits_per_byte(self._forward, self._loop.work_dir)
            reporter.write({"step": step, **figures})
        if reporter.due("checkpoint", self._loop.checkpoint_every_s):
            self._shared.save(self._loop.work_dir, self._stream)
