"""The page's plots. The same numbers give the same pixels."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..plots import new_figure


def colour(policy: str) -> str:
    """Of a policy's bars: fmoe stands out, its ablations beside it."""
    return "#c0504d" if policy == "fmoe" else "#e0a09e" if policy.startswith("fmoe") else "#4878a8"


def plot_maps(path: Path, figures: Mapping[str, Any]) -> None:
    """Recall by source and distance, simulated hit rate by distance and by capacity. Raises as `new_figure`."""
    figure, save = new_figure(path, (10.5, 3.2))
    recall, distance, capacity = figure.subplots(1, 3)
    sources = dict.fromkeys(row["source"] for row in figures["recall"])
    for source in sources:
        found = [row for row in figures["recall"] if row["source"] == source]
        recall.plot([r["distance"] for r in found], [r["recall"] for r in found], marker="o", ms=3, label=source)
    recall.set_xlabel("layers ahead")
    recall.set_ylabel("recall of the true top-k")
    recall.legend(fontsize=6)
    for axes, varied, label in ((distance, "distance", "prefetch distance (layers)"), (capacity, "capacity", "maps")):
        found = [row for row in figures["hit_rates"] if row["varied"] == varied]
        axes.plot([r[varied] for r in found], [r["hit_rate"] for r in found], marker="o", color="#c0504d")
        axes.set_xlabel(label)
        axes.set_ylabel("hit rate (simulated)")
    capacity.set_xscale("log", base=2)
    save()
