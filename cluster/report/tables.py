"""Small helpers of the tables: a two-column grid, bytes and seconds for people."""

from __future__ import annotations

from collections.abc import Iterable

from rich import box
from rich.table import Table
from rich.text import Text

_STEPS = ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"))


def facts(title: str, rows: Iterable[tuple[str, str]]) -> Table:
    """A table of names and values; values are plain text, never markup."""
    table = Table(title=title, title_justify="left", show_header=False, box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in rows:
        table.add_row(name, Text(value))
    return table


def size(nbytes: float) -> str:
    """Bytes with a binary unit, such as 1.50 MiB."""
    for step, unit in _STEPS:
        if nbytes >= step:
            return f"{nbytes / step:.2f} {unit}"
    return f"{nbytes:.0f} B"


def seconds(value: float | None) -> str:
    """Seconds in the unit that reads best; `none` where there is no measurement."""
    if value is None:
        return "none"
    if value < 1e-3:
        return f"{value * 1e6:.0f} us"
    return f"{value * 1e3:.1f} ms" if value < 1 else f"{value:.2f} s"
