"""ActiveEvict's measures of a run's transfers, from the counters of any executor."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Transfers:
    """Transfers of a run, prefill included, for each generated token (ActiveEvict, Tables 2 and 3).

    blocking_ms: the compute waited for copies. total_ms: the link was busy, by its own clock. loaded_mb: loaded to the
    device. written_back_mb: copied back at evictions. redundant: share of the loaded bytes that left unused, or that
    pre-eviction had removed since the layer's last run. precision: share of the prefetched and demanded experts that
    were used. recall: share of the needed, absent experts that the preset's own fetches brought: by prefetch if it
    prefetches, else by demand. hit_rate: share that was present when the routing was known. dropped: (token, expert)
    pairs that did not run.
    """

    blocking_ms: float
    total_ms: float
    loaded_mb: float
    written_back_mb: float
    redundant: float
    precision: float
    recall: float
    hit_rate: float
    dropped: float


def transfers(counters: Mapping[str, Any], tokens: int) -> Transfers:
    """From `EngineStats.as_dict()` after so many generated tokens."""

    def share(part: float, whole: float, empty: float) -> float:
        return min(part / whole, 1.0) if whole else empty

    sources = counters["prefetch_sources"].values()
    used = sum(s["hits"] + s["late"] for s in sources)
    asked = sum(s["queued"] - s["cancelled"] for s in sources)
    demanded = counters["misses"] - counters["late_prefetches"]
    loaded = counters["bytes_loaded"]
    avoidable = counters["bytes_wasted"] + counters["bytes_premature"]
    return Transfers(
        1e3 * counters["blocked_io_s"] / tokens, 1e3 * counters["link_s"] / tokens, loaded / 1e6 / tokens,
        counters["bytes_written_back"] / 1e6 / tokens, share(avoidable, loaded, 0.0),
        share(used + demanded, asked + demanded, 1.0), share(used, used + demanded, 1.0) if asked else 1.0,
        counters["hit_rate"], counters["dropped"] / tokens,
    )  # fmt: skip
