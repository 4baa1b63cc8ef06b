"""The page's plots. The same numbers give the same pixels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..figures import Row
from ..plots import new_figure
from .findings import BASELINES, OWN


def colour(policy: str) -> str:
    """Of a policy's bars: moepic stands out, its variants beside it, baselines before the others."""
    if policy == OWN:
        return "#c0504d"
    if policy.startswith(OWN) or policy.startswith(("theta", "zeta")):
        return "#e0a09e"
    return "#4878a8" if policy in BASELINES else "#a9b8c8"


def plot_budgets(path: Path, rows: Sequence[Row]) -> None:
    """TTFT and TPOT against the budget, a column for each link, a line for each policy (figure 7).

    Raises:
        ConfigError: matplotlib is not installed, or the file cannot be written.
    """
    found = [row for row in rows if row["setting"] == "budgets"]
    links = list(dict.fromkeys(row["link_gbps"] for row in found))
    figure, save = new_figure(path, (5.0 * len(links), 6.4))
    panels = figure.subplots(2, len(links), squeeze=False, sharex=True)
    for column, gbps in enumerate(links):
        for line, (measure, label) in enumerate((("ttft_s", "TTFT (ms)"), ("tpot_s", "TPOT (ms)"))):
            axes = panels[line][column]
            for policy in dict.fromkeys(row["policy"] for row in found):
                mine = [row for row in found if (row["policy"], row["link_gbps"]) == (policy, gbps)]
                spreads = [row["spread"][measure] for row in mine]
                middle = [1e3 * s["median"] for s in spreads]
                ends = [[1e3 * (s["median"] - s["minimum"]) for s in spreads],
                        [1e3 * (s["maximum"] - s["median"]) for s in spreads]]  # fmt: skip
                axes.errorbar(
                    [float(row["budget"]) for row in mine], middle, yerr=ends, marker="o", ms=3, capsize=2,
                    label=policy, lw=2.2 if policy == OWN else 1.0, elinewidth=0.6,
                )  # fmt: skip
            axes.set_ylabel(label, fontsize=8)
            axes.set_ylim(bottom=0)
            axes.tick_params(labelsize=7)
        panels[0][column].set_title(f"{gbps:g} GB/s", fontsize=9)
        panels[1][column].set_xlabel("budget (share of all experts)", fontsize=8)
    panels[0][0].legend(fontsize=6)
    save()


def plot_hits(path: Path, hits: Mapping[str, Any], footprints: Sequence[Mapping[str, Any]]) -> None:
    """Hit rate by cache size (Table 1) and least memory by target (figure 8). Raises as `plot_budgets`."""
    figure, save = new_figure(path, (9.0, 3.4))
    rates, memory = figure.subplots(1, 2)
    for policy, found in hits["rates"].items():
        rates.plot(hits["sizes"], found, marker="o", ms=3, label=policy, lw=2.2 if policy == "lcp" else 1.0)
    rates.set_xlabel("cached experts of a layer", fontsize=8)
    rates.set_ylabel("hit rate (simulated)", fontsize=8)
    for policy in dict.fromkeys(row["policy"] for row in footprints):
        mine = [row for row in footprints if row["policy"] == policy and row["bytes"] is not None]
        memory.plot(
            [row["target_ms"] for row in mine], [row["bytes"] / 1e6 for row in mine], marker="o", ms=3, label=policy,
            lw=2.2 if policy == OWN else 1.0,
        )  # fmt: skip
    memory.set_xlabel("target TPOT (ms)", fontsize=8)
    memory.set_ylabel("expert memory (MB)", fontsize=8)
    for axes in (rates, memory):
        axes.legend(fontsize=6)
        axes.tick_params(labelsize=7)
    save()
