"""The log of a run: one JSON line for each report."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .forward import Losses


class Reporter:
    """Running means of one worker, written as JSON lines."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._last_s: dict[str, float] = {}
        self._started_s = time.monotonic()
        self._clear()

    def _clear(self) -> None:
        self._sums = torch.zeros(3, dtype=torch.float64)  # loss, balance, z
        self._micros, self._steps, self._tokens = 0, 0, 0
        self._load: Tensor | None = None
        self._since_s = time.monotonic()

    def add(self, losses: Losses, workers: int) -> None:
        """Take in one micro-batch; its loss is this worker's part of the mean of a step."""
        values = (losses.cross_entropy.detach() * workers, losses.balance.detach(), losses.z.detach())
        self._sums += torch.stack(values).double().cpu()
        self._micros += 1
        self._load = losses.load if self._load is None else self._load + losses.load

    def end_step(self, tokens: int) -> None:
        """Count one optimizer step over ``tokens`` tokens of all workers."""
        self._steps += 1
        self._tokens += tokens

    def due(self, what: str, every_s: float) -> bool:
        """Whether ``every_s`` have passed since this last returned true for ``what``, or since the start."""
        now_s = time.monotonic()
        if now_s - self._last_s.get(what, self._started_s) < every_s:
            return False
        self._last_s[what] = now_s
        return True

    def report(self, counters: list[float], progress: float) -> None:
        """Write the means since the last report; shares are multiples of the uniform share."""
        steps, tokens, active_s = counters
        assert self._load is not None
        share = self._load / self._load.sum(1, keepdim=True) * self._load.shape[1]
        loss, balance, z = self._sums.tolist()
        self.write(
            {
                "step": int(steps),
                "tokens": int(tokens),
                "progress": round(progress, 4),
                "active_s": round(active_s),
                "loss": round(loss / self._steps, 4),
                "balance": round(balance / self._micros, 4),
                "z": round(z / self._micros, 3),
                "min_share": round(float(share.min()), 3),
                "max_share": round(float(share.max()), 3),
                "tokens_per_s": round(self._tokens / (time.monotonic() - self._since_s)),
            }
        )
        self._clear()

    def write(self, record: dict[str, Any]) -> None:
        """Append one record."""
        with self._path.open("a") as out:
            out.write(json.dumps(record) + "\n")
