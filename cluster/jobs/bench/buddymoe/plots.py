"""The page's plot: quality against speed. The same numbers give the same pixels."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ..figures import Row, cells
from ..plots import new_figure
from .findings import SETTING
from .methods import DROP, ORIGINAL, OWN


def plot_quality(path: Path, rows: Sequence[Row]) -> None:
    """A panel for each cache rate: mean KL over tokens per second, a point for each method.

    Raises:
        ConfigError: matplotlib is not installed, or the file cannot be written.
    """
    by_cell = cells(rows, SETTING)
    figure, save = new_figure(path, (4.2 * len(by_cell), 4.6))
    panels = figure.subplots(1, len(by_cell), squeeze=False, sharey=True)[0]
    for axes, ((rate, gbps), of) in zip(panels, by_cell.items(), strict=True):
        for name, row in of.items():
            colour, marker = _style(name)
            quality, per_s = row["quality"], [1 / value for value in row["spread"]["tpot_s"]["values"]]
            middle = 1e3 / row["tpot_ms"]
            axes.errorbar(
                [middle], [quality["kl_nats"]], color=colour, marker=marker, ms=5, lw=0.6, capsize=2, label=name,
                xerr=[[max(middle - min(per_s), 0.0)], [max(max(per_s) - middle, 0.0)]],
                yerr=[[max(quality["kl_nats"] - quality["kl_nats_low"], 0.0)],
                      [max(quality["kl_nats_high"] - quality["kl_nats"], 0.0)]],
            )  # fmt: skip
        axes.set_title(f"cache rate {rate}, {gbps:g} GB/s", fontsize=9)
        axes.set_xlabel("tokens per second", fontsize=8)
        axes.tick_params(labelsize=7)
        axes.set_ylim(bottom=0)
    panels[0].set_ylabel("mean KL from lossless (nats)", fontsize=8)
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, fontsize=6, ncols=4, loc="outside lower center")
    save()


def _style(name: str) -> tuple[str, str]:
    if name == OWN:
        return "#c0504d", "*"
    if name.startswith("cft"):
        return ("#4878a8", "o") if name.endswith("coactivation") else ("#6a9a5b", "s")
    return {ORIGINAL: "black", DROP: "#b08030"}.get(name, "#888888"), "D"
