"""What ActiveEvict's tables 2 and 3 show, from the engine's counters."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any


@dataclass(frozen=True)
class Transfers:
    """Of one run, for each generated token; what its prompts cost is in it.

    blocking_ms: the compute waited for copies (Table 3, blocking I/O). total_ms: the link was busy, by its own clock
    (total I/O). loaded_mb: bytes brought to the device (transfer volume). written_back_mb: bytes copied back first.
    redundant: of the bytes brought, the part that left unused or that pre-eviction had sent away since its layer last
    ran (redundant transfer). precision: of the experts fetched before or after their gate, the part that was used
    (Table 2). recall: of the experts that a layer needed and that were not there before, the part that the preset's own
    way of fetching brought: by prefetch where it prefetches, by demand elsewhere. hit_rate: there when the routing
    became known. dropped: (token, expert) pairs that did not run.
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
    sources = counters["prefetch_sources"].values()
    used = sum(s["hits"] + s["late"] for s in sources)
    guessed = sum(s["queued"] - s["cancelled"] for s in sources)
    demanded = counters["misses"] - counters["late_prefetches"]
    loaded = counters["bytes_loaded"]
    avoidable = counters["bytes_wasted"] + counters["bytes_premature"]
    return Transfers(
        1e3 * counters["blocked_io_s"] / tokens, 1e3 * counters["link_s"] / tokens, loaded / 1e6 / tokens,
        counters["bytes_written_back"] / 1e6 / tokens, _share(avoidable, loaded, 0.0),
        _share(used + demanded, guessed + demanded, 1.0), _share(used, used + demanded, 1.0) if guessed else 1.0,
        counters["hit_rate"], counters["dropped"] / tokens,
    )  # fmt: skip


def _of_repetition(spread: Mapping[str, Any], number: int) -> Mapping[str, Any]:
    """One repetition of a comparison's row as `transfers` reads it; a counter that the row has not was zero.

    Args:
        spread: of the row: by counter, what is nested joined with dots, with the "values" of the repetitions.
    """
    counters: defaultdict[str, Any] = defaultdict(float)
    sources: defaultdict[str, defaultdict[str, float]] = defaultdict(lambda: defaultdict(float))
    for name, found in spread.items():
        section, _, rest = name.partition(".")
        if section == "prefetch_sources":
            source, _, counter = rest.rpartition(".")
            sources[source][counter] = found["values"][number]
        else:
            counters[name] = found["values"][number]
    counters["prefetch_sources"] = sources
    return counters


def measured(row: Mapping[str, Any], tokens: int) -> dict[str, Any]:
    """Medians of one row of a sweep, whose repetitions generated so many tokens each; all of them under "values"."""
    spread = row["spread"]
    each = [_repetition(_of_repetition(spread, number), tokens) for number in range(len(spread["tpot_s"]["values"]))]
    if row["lossless"]:  # or the comparison would have failed
        each = [found | {"same_tokens": 1.0} for found in each]
    values = by_measure(each)
    return {name: median(found) for name, found in values.items()} | {"values": values}


def by_measure(each: Sequence[Mapping[str, float]]) -> dict[str, list[float]]:
    """What each repetition gave, as lists."""
    return {name: [found[name] for found in each] for name in each[0]}


def median_ratio(values: Sequence[float], over: Sequence[float]) -> float | None:
    """Median of the ratios, repetition by repetition; None where `over` is 0 too often for one.

    A repetition with a 0 below counts as infinite: to leave it out would hide the worst.
    """
    ratios = [a / b if b else math.inf for a, b in zip(values, over, strict=True) if a or b]
    middle = median(ratios) if ratios else math.inf
    return None if math.isinf(middle) else middle


def _repetition(counters: Mapping[str, Any], tokens: int) -> dict[str, float]:
    """late_ms: the link's copies ended later than at its stated rate, for each token."""
    return {
        "tpot_ms": 1e3 * counters["tpot_s"], "ttft_ms": 1e3 * counters["ttft_s"],
        **asdict(transfers(counters, tokens)),
        "late_ms": 1e3 * (counters["total_io_s"] - counters["link_s"]) / tokens,
        "same_tokens": counters["same_tokens"],
    }  # fmt: skip


def _share(part: float, whole: float, empty: float) -> float:
    return min(part / whole, 1.0) if whole else empty
