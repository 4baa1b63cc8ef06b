"""The page's plots. The same numbers give the same pixels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .....errors import ConfigError
from .findings import Row, cells


def plot_runs(path: Path, rows: Sequence[Row], measure: str, label: str) -> None:
    """Bars of one figure: a panel for each budget and link, a bar for each policy, its range over the repetitions.

    Args:
        measure: key of `spread`. label: with unit.

    Raises:
        ConfigError: matplotlib is not installed, or the file cannot be written.
    """
    by_cell = cells(rows, "7:3")
    budgets, links = (list(dict.fromkeys(key[i] for key in by_cell)) for i in (0, 1))
    figure, save = _figure(path, (3.1 * len(budgets), 2.9 * len(links)))
    panels = figure.subplots(len(links), len(budgets), squeeze=False, sharey="row")
    for (budget, gbps), of in by_cell.items():
        axes = panels[links.index(gbps)][budgets.index(budget)]
        spreads = [of[name]["spread"][measure] for name in of]
        middle = [s["median"] for s in spreads]
        ends = [[m - s["minimum"] for m, s in zip(middle, spreads, strict=True)],
                [s["maximum"] - m for m, s in zip(middle, spreads, strict=True)]]  # fmt: skip
        colours = ["#c0504d" if name == "fmoe" else "#e0a09e" if name.startswith("fmoe") else "#4878a8" for name in of]
        axes.barh(list(of), middle, xerr=ends, color=colours, error_kw={"linewidth": 0.8})
        axes.set_title(f"budget {budget}, {gbps:g} GB/s", fontsize=9)
        axes.set_xlabel(label, fontsize=8)
        axes.tick_params(labelsize=7)
        axes.invert_yaxis()
    save()


def plot_maps(path: Path, figures: Mapping[str, Any]) -> None:
    """Recall by source and distance, simulated hit rate by distance and by capacity. Raises as `plot_runs`."""
    figure, save = _figure(path, (10.5, 3.2))
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


def _figure(path: Path, size: tuple[float, float]) -> tuple[Any, Any]:
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError(f"cannot plot '{path}': {error}", "install it with `pip install 'tiermoe[plots]'`") from error
    figure = Figure(figsize=size, layout="constrained")
    FigureCanvasAgg(figure)

    def save() -> None:
        try:
            figure.savefig(path, format="png", dpi=100)
        except OSError as error:
            raise ConfigError(f"cannot write '{path}': {error}", "give a path that can be written") from error

    return figure, save
