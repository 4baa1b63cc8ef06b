"""The result of a comparison: one row for each policy, budget and link."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.progress import Progress

from ..metrics import Report, Spread
from ..serving import start_worker
from .kept import Finished, Kept
from .running import Scorer, Start, measure
from .sweep import Sweep

_SHOWN = ("policy", "budget", "link_gbps", "hit_rate", "ttft_ms", "tpot_ms", "blocked_io_s", "mb_loaded", "mb_wasted")
_QUALITY = ("perplexity_ratio", "top1_agreement", "kl_nats", "same_tokens")


def compare(
    sweep: Sweep, out: Path | None = None, progress: Progress | None = None, start: Start = start_worker,
    score: Scorer | None = None, name: str = "compare", score_lossless: bool = False,
) -> tuple[Report, Kept]:  # fmt: skip
    """Run a sweep, or the rest of it.

    Args:
        out: the result's file: what is finished is kept beside it until the caller discards it. None: nothing is kept.
        start, score, score_lossless: see `measure`.

    Returns:
        The report, and what was kept. A counter that no row has was zero in all repetitions of all rows.

    Raises:
        ConfigError, RuntimeFailure: see `Kept` and `measure`.
    """
    kept = Kept(out, sweep.fingerprint())
    return report_of(sweep, measure(sweep, kept, progress, start, score, score_lossless), name), kept


def report_of(sweep: Sweep, finished: Sequence[Finished], name: str) -> Report:
    """Medians with spread of every cell."""
    cells = [(found.group, cell) for found in finished for cell in found.cells]
    counted = {key for _, cell in cells for key, values in cell.values.items() if any(values)} | {"same_tokens"}
    rows, executors = list[dict[str, Any]](), sorted({cell.executor for _, cell in cells})
    for group, cell in cells:
        spreads = {key: Spread.of(values) for key, values in sorted(cell.values.items()) if key in counted}
        row: dict[str, Any] = {
            "policy": cell.policy, "budget": group.budget, "link_gbps": group.gbps, "lossless": cell.lossless,
            "hit_rate": _median(spreads, "hit_rate"), "ttft_ms": 1e3 * _median(spreads, "ttft_s"),
            "tpot_ms": 1e3 * _median(spreads, "tpot_s"), "blocked_io_s": _median(spreads, "blocked_io_s"),
            "mb_loaded": _median(spreads, "bytes_loaded") / 1e6, "mb_wasted": _median(spreads, "bytes_wasted") / 1e6,
        }  # fmt: skip
        quality = (cell.quality or {}) | {key: spreads[key].median for key in ("same_tokens",) if key in spreads}
        row |= {key: quality.get(key) for key in _QUALITY}
        row |= {
            "spread": {key: asdict(spread) for key, spread in spreads.items()},
            "layers": cell.layers,
            "quality": cell.quality,
        }
        rows.append(row)
    shown = _SHOWN if all(cell.lossless for _, cell in cells) else (*_SHOWN, *_QUALITY)
    return Report(name, ", ".join(executors), rows, settings=sweep.settings(), shown=shown)


def _median(spreads: dict[str, Spread], measure: str) -> float:
    return spreads[measure].median if measure in spreads else 0.0
