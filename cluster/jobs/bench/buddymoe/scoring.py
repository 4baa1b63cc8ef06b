"""Quality of a worker with its counters, as plain values that a row keeps, and back."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
from rich.progress import Progress

from .....actors.settings import EngineSettings
from ....local import LocalWorker
from ...evaluate.quality import EvaluationOptions, Quality
from ..figures import Row

_COUNTED = ("bytes_loaded_demand", "bytes_loaded_prefetch", "bytes_wasted", "hits", "misses", "late_prefetches")


class Scoring:
    """Scores policies on the same windows and choices; the lossless reference is made once, when first needed.

    Each is scored by a worker of its own on a link whose clock goes on by the same time for each layer, so that what is
    on the device when a layer runs, and with it every figure, does not depend on how busy the machine is.

    Args:
        model_dir: a checkpoint with held-out text. store: its store. options: how much is scored.
        layer_us: microseconds of a layer.
    """

    def __init__(self, model_dir: Path, store: Path, options: EvaluationOptions, layer_us: float) -> None:
        self._model_dir, self._store, self._options, self._layer_us = model_dir, store, options, layer_us
        self._evaluation: Any = None

    def __call__(self, worker: Any, progress: Progress | None) -> dict[str, Any]:
        """Figures of `Quality.as_dict`, its sums, and what was counted meanwhile, for the policy of a worker.

        `picks`: (token, expert) pairs that the routers picked; `substitutions` and `dropped` are of these.
        """
        from ...evaluate.scoring import Evaluation  # torch: seconds that refused options need not pay

        if self._evaluation is None:
            self._evaluation = Evaluation(self._model_dir, self._options)
            self._evaluation.reference(progress)
        settings: EngineSettings = worker.settings
        stepped = settings.model_copy(
            update={"link": settings.link.model_copy(update={"layer_us": self._layer_us})}
        )  # fmt: skip
        with closing(LocalWorker(stepped, self._store, 0)) as own:
            own.start()
            own.reset_stats()
            return self._measured(own, progress)

    def _measured(self, worker: Any, progress: Progress | None) -> dict[str, Any]:
        quality: Quality = self._evaluation.measure(worker, progress)
        stats = worker.stats()
        total = stats.total()
        return quality.as_dict() | {
            "sums": {name: values.tolist() for name, values in quality.sums.items()},
            "picks": self._rows() * len(stats.layers) * worker.engine.top_k,
            "substitutions": stats.substitutions,
            "dropped": stats.dropped,
            **{name: getattr(total, name) for name in _COUNTED},
        }

    def _rows(self) -> int:
        """Tokens that pass a layer; the last of a window or choice is not fed."""
        of_windows = sum(len(window.ids) - 1 for window in self._evaluation.windows)
        of_items = sum(
            len(item.context) + sum(len(tokens) - 1 for tokens in item.candidates) for item in self._evaluation.items
        )
        return of_windows + of_items


def quality_of(row: Row, options: EvaluationOptions) -> Quality:
    """What `Scoring` put into a row.

    Args:
        options: that it was scored with.
    """
    found = row["quality"]
    sums = {name: np.asarray(values, np.float64) for name, values in found["sums"].items()}
    return Quality(row["policy"], row["lossless"], found["executor"], sums, options)
