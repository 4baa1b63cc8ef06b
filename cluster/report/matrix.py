"""Matrices and counts as pictures: the same numbers give the same pixels."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ...errors import ConfigError


def plot_matrix(path: Path, matrix: Any, title: str, label: str, limits: tuple[float, float]) -> None:
    """A heat map of [rows, columns]; NaN cells stay white.

    Args:
        label: of the colour bar. limits: values of its ends.

    Raises:
        ConfigError: matplotlib is not installed, or the file cannot be written.
    """
    figure = _figure(path, (5.2, 4.4))
    axes = figure.subplots()
    shown = axes.imshow(matrix, vmin=limits[0], vmax=limits[1], cmap="viridis", interpolation="nearest")
    axes.set_title(title, fontsize=10)
    axes.set_xlabel("expert j")
    axes.set_ylabel("expert i")
    figure.colorbar(shown, label=label)
    _save(figure, path)


def plot_counts(path: Path, counts: Any, title: str, label: str) -> None:
    """Bars of one count for each expert. Raises as `plot_matrix`."""
    figure = _figure(path, (6.4, 3.2))
    axes = figure.subplots()
    axes.bar(range(len(counts)), counts, color="#4878a8")
    axes.axhline(float(sum(counts)) / max(1, len(counts)), color="#c0504d", linewidth=0.8)  # the mean
    axes.set_title(title, fontsize=10)
    axes.set_xlabel("expert")
    axes.set_ylabel(label)
    _save(figure, path)


def _figure(path: Path, size: tuple[float, float]) -> Any:
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError(f"cannot plot '{path}': {error}", "install it with `pip install 'tiermoe[plots]'`") from error
    figure = Figure(figsize=size, layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def _save(figure: Any, path: Path) -> None:
    try:
        figure.savefig(path, format="png", dpi=100)
    except OSError as error:
        raise ConfigError(f"cannot write '{path}': {error}", "give a path that can be written") from error
