"""Results as files: JSON, timelines for chrome://tracing and ui.perfetto.dev, and figures."""

from __future__ import annotations

import contextlib
import json
import os
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ...errors import ConfigError, reason

_COLOURS = (
    "#1f77b4", "#d62728", "#2ca02c", "#ff7f0e", "#9467bd", "#17becf", "#8c564b", "#e377c2", "#7f7f7f", "#bcbd22",
    "#000080", "#006400", "#8b0000", "#daa520", "#4b0082", "#ff1493", "#2f4f4f",
)  # fmt: skip
_OWN_COLOURS = ("#000000", "#9400d3", "#a0522d")
_MARKERS = "osD^v<>P*Xph8"


@contextlib.contextmanager
def writing(path: Path, remedy: str = "give a path that you may write") -> Iterator[None]:
    """Inside the block a file or folder is written; an `OSError` of it is a `ConfigError` that names the path."""
    try:
        yield
    except OSError as error:
        raise ConfigError(f"'{path}' cannot be written: {reason(error)}", remedy) from error


def write_json(path: Path, record: Mapping[str, Any]) -> None:
    """Write one JSON object; the file is whole or not there, also when the process is killed meanwhile.

    Raises:
        ConfigError: the file cannot be written.
    """
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    with writing(path):
        try:
            draft.write_text(json.dumps(record) + "\n", encoding="utf-8")
            draft.replace(path)
        except OSError:
            draft.unlink(missing_ok=True)
            raise


def check_writable(path: Path, what: str = "trace path") -> None:
    """Refuse a path that cannot become a file, before the run.

    Args:
        what: what the message calls it.

    Raises:
        ConfigError: it is a directory, or it or its folder cannot be written.
    """
    folder = path.parent
    if path.is_dir():
        raise ConfigError(f"{what} '{path}' is a directory", "give a file name, such as out/trace.json")
    if not folder.is_dir():
        raise ConfigError(f"{what} '{path}': there is no directory '{folder}'", f"make it: mkdir -p {folder}")
    if not os.access(path if path.exists() else folder, os.W_OK):
        raise ConfigError(f"{what} '{path}' is not writable", "give a path that you may write")


def check_folder(folder: Path, what: str, *, empty: bool = False) -> None:
    """Refuse a path that cannot become, or is not, a folder to write to, before the run; nothing is made.

    Args:
        what: what the message calls it.
        empty: one that has files is refused, too.

    Raises:
        ConfigError: it is a file, it has files, or it or the folder above cannot be written.
    """
    try:
        there = next(place for place in (folder, *folder.absolute().parents) if os.path.lexists(place))
        if not there.is_dir():
            below = "" if there == folder else f": '{there}'"
            raise ConfigError(f"{what} '{folder}'{below} is a file", "name a folder")
        if not os.access(there, os.W_OK | os.X_OK):
            raise ConfigError(f"{what} '{folder}' cannot be written", "name a folder that you may write")
        if empty and there == folder and any(folder.iterdir()):
            raise ConfigError(f"'{folder}' is not empty", "name a new folder, or remove that one")
    except OSError as error:
        what = f"{what} '{folder}' cannot be used: {reason(error)}"
        raise ConfigError(what, "name a folder that you may write") from error


def write_timeline(path: Path, events: Sequence[dict[str, Any]]) -> None:
    """Write Chrome trace events (`ph`, `ts` in microseconds, ...) in the object form of the format.

    Raises:
        ConfigError: the file cannot be written.
    """
    with writing(path):
        path.write_text(json.dumps({"traceEvents": list(events), "displayTimeUnit": "ms"}), encoding="utf-8")


def new_figure(path: Path, size: tuple[float, float]) -> tuple[Any, Callable[..., None]]:
    """An empty figure (width, height in inches), and what writes it to a PNG file, with its caption as metadata.

    Raises:
        ConfigError: by the second: the file cannot be written.
    """
    figure = new_canvas(size)

    def save(caption: str = "") -> None:
        with writing(path):
            figure.savefig(path, format="png", dpi=100, metadata={"Description": caption} if caption else None)

    return figure, save


def new_canvas(size: tuple[float, float]) -> Any:
    """An empty figure (width, height in inches)."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # slow to import, and most commands draw nothing
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def series_style(number: int, own: bool = False) -> dict[str, Any]:
    """Colour and marker of a figure's series 0..; `own`: of those that are emphasized, counted apart.

    No two of the first two hundred are alike.
    """
    colours = _OWN_COLOURS if own else _COLOURS
    return {"color": colours[number % len(colours)], "marker": _MARKERS[number % len(_MARKERS)]}


def write_caption(figure: Any, text: str) -> None:
    """Write above a figure how and on what its numbers were measured: an image is seen without its page."""
    width = max(40, int(figure.get_figwidth() * 15))
    figure.suptitle("\n".join(textwrap.wrap(text, width)), fontsize=8, color="#404040")


def room_around(axes: Any, from_zero: bool) -> None:
    """Limits of the y axis that leave room for every point and its marker; `from_zero`: with zero in it."""
    axes.margins(x=0.06, y=0.1)
    axes.autoscale_view()
    if not from_zero:
        return
    low, high = axes.dataLim.y0, axes.dataLim.y1
    span = max(high, 0.0) - min(low, 0.0) or 1.0
    # a marker at zero is whole; bars stand on the axis
    axes.set_ylim(min(low, 0.0) - (0.04 * span if low <= 0.02 * span and not axes.patches else 0.0), high + 0.1 * span)
