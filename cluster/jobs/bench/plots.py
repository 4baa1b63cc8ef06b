"""Plots of comparisons, for pages. The same numbers give the same pixels."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ....errors import ConfigError
from .figures import Row, cells


def plot_runs(
    path: Path, rows: Sequence[Row], setting: str, measure: str, label: str, colour: Callable[[str], str]
) -> None:
    """Bars of one figure: a panel for each budget and link, a bar for each policy, its range over the repetitions.

    Args:
        measure: key of `spread`. label: with unit. colour: of a policy's bar.

    Raises:
        ConfigError: matplotlib is not installed, or the file cannot be written.
    """
    by_cell = cells(rows, setting)
    budgets, links = (list(dict.fromkeys(key[i] for key in by_cell)) for i in (0, 1))
    figure, save = new_figure(path, (3.1 * len(budgets), 2.9 * len(links)))
    panels = figure.subplots(len(links), len(budgets), squeeze=False, sharey="row")
    for (budget, gbps), of in by_cell.items():
        axes = panels[links.index(gbps)][budgets.index(budget)]
        spreads = [of[name]["spread"][measure] for name in of]
        middle = [s["median"] for s in spreads]
        ends = [[m - s["minimum"] for m, s in zip(middle, spreads, strict=True)],
                [s["maximum"] - m for m, s in zip(middle, spreads, strict=True)]]  # fmt: skip
        axes.barh(list(of), middle, xerr=ends, color=[colour(name) for name in of], error_kw={"linewidth": 0.8})
        axes.set_title(f"budget {budget}, {gbps:g} GB/s", fontsize=9)
        axes.set_xlabel(label, fontsize=8)
        axes.tick_params(labelsize=7)
        axes.invert_yaxis()
    save()


def new_figure(path: Path, size: tuple[float, float]) -> tuple[Any, Callable[[], None]]:
    """An empty figure (width, height in inches), and what writes it to a PNG file.

    Raises:
        ConfigError: matplotlib is not installed; of the second also: the file cannot be written.
    """
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
