"""Starts the workers of a run and shows their progress."""

from __future__ import annotations

import os
from typing import Any

import torch
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

from ....errors import RuntimeFailure
from .loop import LoopConfig, NoBarrier, SharedState, Worker, keep_memory

_AGAIN = "run the same command again: it goes on from the last checkpoint"


class WorkerFailedError(RuntimeFailure):
    """A training process ended before its budget did."""


def train(config: Any, parameters: dict[str, torch.Tensor], loop: LoopConfig, resume: bool) -> SharedState:
    """Run the loop to the end of its budget; raises WorkerFailedError.

    One worker runs in this process (the form for an accelerator); several are started as processes.
    """
    shared = SharedState(config, parameters, loop)
    exists = (loop.work_dir / "checkpoint.safetensors").exists()
    drawn = shared.load(loop.work_dir) if resume and exists else {}
    if loop.workers == 1:
        (loop.work_dir / "train.pids").write_text(f"{os.getpid()}\n")
        keep_memory()
        Worker(0, shared, loop, NoBarrier(), drawn).run()
        return shared
    context = torch.multiprocessing.get_context("spawn")
    barrier = context.Barrier(loop.workers)
    processes = [
        context.Process(target=_worker, args=(rank, shared, loop, barrier, drawn), daemon=True)
        for rank in range(loop.workers)
    ]
    for process in processes:
        process.start()
    pids = [os.getpid(), *(process.pid for process in processes)]
    (loop.work_dir / "train.pids").write_text("\n".join(map(str, pids)) + "\n")
    _watch(processes, shared, loop)
    return shared


def _worker(rank: int, shared: SharedState, loop: LoopConfig, barrier: Any, drawn: dict[str, int]) -> None:
    keep_memory()
    # Two threads of one process on a small machine are slower than two processes of one.
    torch.set_num_threads(1)
    Worker(rank, shared, loop, barrier, drawn).run()


def _watch(processes: list[Any], shared: SharedState, loop: LoopConfig) -> None:
    text = TextColumn("train {task.fields[tokens]}")
    columns = (text, BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
    with Progress(*columns) as progress:
        task = progress.add_task("train", total=1.0, tokens="")
        while any(process.is_alive() for process in processes):
            failed = [p.exitcode for p in processes if p.exitcode not in (None, 0)]
            if failed:
                for process in processes:
                    process.terminate()
                raise WorkerFailedError(f"a training process ended with exit code {failed[0]}", _AGAIN)
            processes[0].join(timeout=1.0)
            _, tokens, active_s = shared.counters.tolist()
            share = loop.budget.progress(int(tokens), active_s)
            progress.update(task, completed=share, tokens=f"{tokens / 1e6:.2f} M tokens")
    if any(process.exitcode for process in processes):
        raise WorkerFailedError("a training process failed in its last step", _AGAIN)
