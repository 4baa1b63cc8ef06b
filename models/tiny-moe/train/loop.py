"""The training loop: workers share parameters and gradients in memory, one thread each."""

from __future__ import annotations

import ctypes
import json
import math
import os
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from corpus import KINDS
from data import BatchStream
from model import Losses, TrainingForward
from optimizer import PHASES, Budget, OptimizerConfig, Phase, SharedOptimizer, phase_at, rate_at
from routing import heldout_documents, routing_figures
from tiermoe.errors import RuntimeFailure

CHECKPOINT = "checkpoint.safetensors"


class WorkerFailedError(RuntimeFailure):
    """A training process ended before its budget did."""

    def __init__(self, what: str) -> None:
        super().__init__(what, "run the same command again: it resumes at the last checkpoint")


@dataclass(frozen=True)
class RouterLosses:
    """Weights of each layer's router losses (``Losses``).

    The balance weight of a layer follows its load: it rises while the variance of the relative load is above ``skew``,
    and falls while it is below. A constant weight that leaves trained routers some skew loses most experts in the first
    steps, before the embedding distinguishes tokens.
    """

    skew: float = 0.24
    balance_first: float = 0.1
    balance_range: tuple[float, float] = (2e-4, 0.1)
    balance_step: float = 0.06  # greatest change of the weight's logarithm in a step
    burst: float = 0.01
    burst_from: float = 0.03  # progress until which the burst weight rises from 0
    z: float = 0.0

    def total(self, losses: Losses, balance: Tensor, progress: float) -> Tensor:
        """``balance`` [layers]: the current weights."""
        burst = self.burst * min(1.0, progress / self.burst_from)
        return (balance * losses.balance).sum() + burst * losses.burst.sum() + self.z * losses.z.sum()

    def follow(self, balance: Tensor, recent: Tensor) -> None:
        """Move the weights ``balance`` [layers] after a step that left the shares ``recent`` [layers, E]."""
        variance = (recent * recent.shape[1] - 1).square().mean(1)
        change = (variance / self.skew - 1).clamp(-1, 1) * self.balance_step
        balance.mul_(change.exp()).clamp_(*self.balance_range)


@dataclass(frozen=True)
class LoopConfig:
    work_dir: Path
    budget: Budget
    seed: int = 0
    workers: int = 2
    router: RouterLosses = field(default_factory=RouterLosses)
    load_memory: float = 0.7  # share of the earlier steps in the load that the balance loss sees
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    phases: tuple[Phase, ...] = PHASES
    micro_tokens: int = 4096
    report_every_s: float = 20
    evaluate_every_s: float = 1200
    checkpoint_every_s: float = 180
    compute_dtype: torch.dtype = torch.bfloat16


def train(config: Any, parameters: dict[str, Tensor], loop: LoopConfig, resume: bool) -> SharedState:
    """Run the loop to the end of its budget; raises WorkerFailedError.

    One worker runs in this process (for an accelerator); several are processes of their own.
    """
    shared = SharedState(config, parameters, loop)
    drawn = shared.load(loop.work_dir) if resume and (loop.work_dir / CHECKPOINT).exists() else {}
    pids = loop.work_dir / "train.pids"
    if loop.workers == 1:
        pids.write_text(f"{os.getpid()}\n")
        _retain_freed_memory()
        Worker(0, shared, loop, threading.Barrier(1), drawn).run()
        return shared
    context = torch.multiprocessing.get_context("spawn")
    barrier = context.Barrier(loop.workers)
    processes = [
        context.Process(target=_worker, args=(rank, shared, loop, barrier, drawn), daemon=True)
        for rank in range(loop.workers)
    ]
    for process in processes:
        process.start()
    pids.write_text("".join(f"{pid}\n" for pid in (os.getpid(), *(process.pid for process in processes))))
    _watch(processes, shared, loop)
    return shared


def _worker(rank: int, shared: SharedState, loop: LoopConfig, barrier: Any, drawn: dict[str, int]) -> None:
    _retain_freed_memory()
    # Two threads of one process on a small machine are slower than two processes of one.
    torch.set_num_threads(1)
    Worker(rank, shared, loop, barrier, drawn).run()


def _retain_freed_memory() -> None:
    """Keep freed memory in glibc's malloc: page faults of activations cost more than their use."""
    with suppress(OSError, AttributeError):
        libc = ctypes.CDLL("libc.so.6")
        libc.mallopt(-4, 0)  # M_MMAP_MAX: no mapping per large block
        libc.mallopt(-1, 2**31 - 1)  # M_TRIM_THRESHOLD


def _watch(processes: list[Any], shared: SharedState, loop: LoopConfig) -> None:
    text = TextColumn("train {task.fields[tokens]}")
    with Progress(text, BarColumn(), TaskProgressColumn(), TimeElapsedColumn()) as progress:
        task = progress.add_task("train", total=1.0, tokens="")
        while any(process.is_alive() for process in processes):
            failed = [p.exitcode for p in processes if p.exitcode not in (None, 0)]
            if failed:
                for process in processes:
                    process.terminate()
                raise WorkerFailedError(f"a training process ended with exit code {failed[0]}")
            processes[0].join(timeout=1.0)
            _, tokens, active_s = shared.counters.tolist()
            share = loop.budget.progress(tokens, active_s)
            progress.update(task, completed=share, tokens=f"{tokens / 1e6:.2f} M tokens")
    if any(process.exitcode for process in processes):
        raise WorkerFailedError("a training process failed in its last step")


class SharedState:
    """Parameters, gradients, optimizer state and counters, shared by all workers."""

    def __init__(self, config: Any, parameters: dict[str, Tensor], loop: LoopConfig) -> None:
        self.config = config
        self.parameters = {name: p.detach() for name, p in parameters.items()}
        self.grads = [{name: torch.zeros_like(p) for name, p in self.parameters.items()} for _ in range(loop.workers)]
        self.counters = torch.zeros(3, dtype=torch.float64)  # steps, tokens, active seconds
        layers, experts = config.num_hidden_layers, config.num_experts
        # The balance loss is over the whole batch and the steps before it, never over one micro-batch: balance within
        # a few rows would forbid that experts specialise in a kind of text.
        self.step_load = torch.zeros(loop.workers, layers, experts)  # of the current step
        device = next(iter(self.parameters.values())).device
        self.recent = torch.full((layers, experts), 1 / experts, device=device)  # shares of the last steps' load
        self.balance = torch.full((layers,), loop.router.balance_first, device=device)  # weights of the balance loss
        state = [*self.parameters.values(), self.counters, self.step_load, self.recent, self.balance]
        for tensor in [*state, *(t for g in self.grads for t in g.values())]:
            if tensor.device.type == "cpu":
                tensor.share_memory_()
        self.optimizer = SharedOptimizer(self.parameters, self.grads, loop.optimizer)

    def _tensors(self) -> dict[str, Tensor]:
        parameters = {f"parameter.{name}": p for name, p in self.parameters.items()}
        optimizer = {f"optimizer.{name}": t for name, t in self.optimizer.state().items()}
        return parameters | optimizer | {"recent": self.recent, "balance": self.balance}

    def remember_load(self, memory: float) -> None:
        """Move ``step_load`` into ``recent``, which keeps the share ``memory`` of what it was."""
        load = self.step_load.sum(0).to(self.recent.device)
        self.recent.lerp_(load / load.sum(1, keepdim=True), 1 - memory)
        self.step_load.zero_()

    def save(self, folder: Path, stream: BatchStream) -> None:
        """Write a checkpoint; the final rename makes it current."""
        metadata = {"counters": json.dumps(self.counters.tolist()), "drawn": json.dumps(stream.drawn)}
        save_file(self._tensors(), folder / "checkpoint.new", metadata=metadata)
        (folder / "checkpoint.new").rename(folder / CHECKPOINT)

    def load(self, folder: Path) -> dict[str, int]:
        """Read the checkpoint in place; returns the position in the corpus."""
        with safe_open(folder / CHECKPOINT, framework="pt") as file:
            for name, tensor in self._tensors().items():
                tensor.copy_(file.get_tensor(name))
            metadata = file.metadata()
        self.counters.copy_(torch.tensor(json.loads(metadata["counters"]), dtype=torch.float64))
        return dict(json.loads(metadata["drawn"]))


class Worker:
    """One process of the run; rank 0 also reports, evaluates and saves.

    Args:
        barrier: of ``multiprocessing`` or ``threading``, for all workers of the run.
        drawn: the position in the corpus.
    """

    def __init__(self, rank: int, shared: SharedState, loop: LoopConfig, barrier: Any, drawn: dict[str, int]) -> None:
        self._rank, self._shared, self._loop, self._barrier = rank, shared, loop, barrier
        self._stream = BatchStream(loop.work_dir / "tokens", loop.seed)
        self._stream.drawn = dict(drawn)
        parameters = {name: p.requires_grad_() for name, p in shared.parameters.items()}
        for name, parameter in parameters.items():
            parameter.grad = shared.grads[rank][name]
        self._forward = TrainingForward(shared.config, parameters, loop.compute_dtype)
        self._owned = [name for name, owner in shared.optimizer.owners(loop.workers).items() if owner == rank]
        self._reporter = Reporter(loop.work_dir / "train.jsonl")

    def run(self, max_steps: int | None = None) -> None:
        """Train until the budget is spent (or for ``max_steps``)."""
        done = 0
        while done != max_steps:
            steps, tokens, active_s = self._shared.counters.tolist()
            progress = self._loop.budget.progress(tokens, active_s)
            if progress >= 1:
                break
            self._step(int(steps) + 1, progress)
            done += 1
        if self._rank == 0:
            self._shared.save(self._loop.work_dir, self._stream)
        self._barrier.wait()

    def _step(self, step: int, progress: float) -> None:
        started_s = time.process_time()
        phase = phase_at(progress, self._loop.phases)
        rows = self._stream.next_rows(phase.batch_tokens // phase.length, phase.length)
        self.accumulate(rows, progress)
        self._barrier.wait()
        momentum = min(0.95, 0.85 + 0.1 * step / 200)
        self._shared.optimizer.step(self._owned, step, rate_at(progress, step), momentum)
        if self._rank == 0:
            self._housekeep(step, rows.shape[0] * phase.length, started_s, progress)
        self._barrier.wait()
        self._forward.refresh()

    def accumulate(self, rows: np.ndarray, progress: float) -> None:
        """Add the gradients of this worker's part of ``rows`` [B, L + 1], in micro-batches."""
        loop, (count, length) = self._loop, (rows.shape[0], rows.shape[1] - 1)
        tokens = torch.from_numpy(np.ascontiguousarray(rows[self._rank :: loop.workers])).to(self._forward.device)
        for micro in tokens.split(max(1, loop.micro_tokens // length)):
            losses = self._forward(micro, 1 / (count * length), self._shared.recent)
            extra = loop.router.total(losses, self._shared.balance, progress)
            (losses.cross_entropy + len(micro) / count * extra).backward()
            self._shared.step_load[self._rank] += losses.load.cpu()
            self._reporter.add(losses, loop.workers)

    def _housekeep(self, step: int, new_tokens: int, started_s: float, progress: float) -> None:
        counters, reporter = self._shared.counters, self._reporter
        self._shared.remember_load(self._loop.load_memory)
        self._loop.router.follow(self._shared.balance, self._shared.recent)
        reporter.end_step(new_tokens)
        counters += torch.tensor([1, new_tokens, time.process_time() - started_s], dtype=torch.float64)
        if reporter.due("report", self._loop.report_every_s):
            reporter.report(counters.tolist(), progress, self._shared.balance)
        if reporter.due("evaluate", self._loop.evaluate_every_s):
            self._forward.refresh()
            bits = stream_bits_per_byte(self._forward, self._loop.work_dir)
            routing = routing_figures(self._forward, heldout_documents(self._loop.work_dir))
            reporter.write({"step": step, **bits, **routing})
        if reporter.due("checkpoint", self._loop.checkpoint_every_s):
            self._shared.save(self._loop.work_dir, self._stream)


class Reporter:
    """Running means of one worker, written as one JSON line for each report."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._last_s: dict[str, float] = {}
        self._started_s = time.monotonic()
        self._clear()

    def _clear(self) -> None:
        self._sums = torch.zeros(4, dtype=torch.float64)  # loss, balance, burst, z
        self._micros, self._steps, self._tokens = 0, 0, 0
        self._load: Tensor | float = 0.0  # [layers, E]
        self._since_s = time.monotonic()

    def add(self, losses: Losses, workers: int) -> None:
        """Add one micro-batch; its loss is this worker's part of a step's mean."""
        values = losses.detached().double().cpu()
        values[0] *= workers
        self._sums += values
        self._micros += 1
        self._load = losses.load + self._load

    def end_step(self, tokens: int) -> None:
        self._steps += 1
        self._tokens += tokens

    def due(self, what: str, every_s: float) -> bool:
        """Whether ``every_s`` have passed since this last returned true for ``what``, or since the start."""
        now_s = time.monotonic()
        if now_s - self._last_s.get(what, self._started_s) < every_s:
            return False
        self._last_s[what] = now_s
        return True

    def report(self, counters: list[float], progress: float, weights: Tensor) -> None:
        """Write the means since the last report; shares are multiples of the uniform share.

        ``weights`` [layers]: of the balance loss; the least, the mean and the greatest are written.
        """
        steps, tokens, active_s = counters
        shares = _relative_shares(self._load)
        loss, balance, burst, z = self._sums.tolist()
        self.write(
            {
                "step": int(steps),
                "tokens": int(tokens),
                "progress": round(progress, 4),
                "active_s": round(active_s),
                "loss": round(loss / self._steps, 4),
                "balance": round(balance / self._micros, 4),
                "burst": round(burst / self._micros, 4),
                "z": round(z / self._micros, 3),
                "balance_weight": [round(float(w), 5) for w in (weights.min(), weights.mean(), weights.max())],
                "variance": round(float((shares - 1).square().mean()), 3),
                "min_share": round(float(shares.min()), 3),
                "max_share": round(float(shares.max()), 3),
                "tokens_per_s": round(self._tokens / (time.monotonic() - self._since_s)),
            }
        )
        self._clear()

    def write(self, record: dict[str, Any]) -> None:
        with self._path.open("a") as out:
            out.write(json.dumps(record) + "\n")


@torch.no_grad()
def stream_bits_per_byte(
    forward: TrainingForward, work_dir: Path, tokens_per_kind: int = 16384, length: int = 512
) -> dict[str, float]:
    """Bits per byte on rows of ``length`` tokens spread evenly over each kind's held-out documents.

    Also ``heldout_min_share``: the smallest load of an expert in any layer, as a multiple of the uniform share.
    """
    lengths = np.array(json.loads((work_dir / "token_bytes.json").read_text()))
    figures, total_bits, total_bytes, load = {}, 0.0, 0, 0.0
    for kind in KINDS:
        tokens = np.fromfile(work_dir / "tokens" / f"heldout-{kind}.bin", dtype=np.uint16)
        rows = max(1, min(tokens_per_kind, len(tokens) - 1) // length)
        starts = np.linspace(0, len(tokens) - 1 - length, rows).astype(np.int64)
        chosen = np.stack([tokens[start : start + length + 1] for start in starts]).astype(np.int64)
        bits = 0.0
        for batch in torch.from_numpy(chosen).split(8):
            losses = forward(batch.to(forward.device), 1.0)
            bits += float(losses.cross_entropy) / math.log(2)
            load = losses.load + load
        size = int(lengths[chosen[:, 1:]].sum())
        figures[f"bpb_{kind}"] = round(bits / size, 4)
        total_bits, total_bytes = total_bits + bits, total_bytes + size
    min_share = round(float(_relative_shares(load).min()), 4)
    return {**figures, "bpb": round(total_bits / total_bytes, 4), "heldout_min_share": min_share}


def _relative_shares(load: Tensor) -> Tensor:
    return load / load.sum(1, keepdim=True) * load.shape[1]
