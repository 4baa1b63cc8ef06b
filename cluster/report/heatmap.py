"""Residency as a picture of characters: a line for each layer, a cell for each expert or for several."""

from __future__ import annotations

from collections.abc import Sequence

from rich.text import Text

_ABSENT, _LOADING, RESIDENT = 0, 1, 2  # `actors.policies.residency.State`
_MARKS = {_ABSENT: "·", _LOADING: "~", RESIDENT: "█"}
_STYLES = {_ABSENT: "dim", _LOADING: "yellow", RESIDENT: ""}
_HOTNESS = ("blue", "cyan", "green", "yellow", "red")  # a resident's share of the most used expert's uses
_SHARES = "·▁▂▃▄▅▆▇█"  # of a cell's experts that are resident, where a cell is several


def residency_map(layers: Sequence[tuple[Sequence[int], Sequence[int]]], width: int) -> list[Text]:
    """One line per layer.

    Args:
        layers: states and uses of each layer's experts.
        width: columns of the terminal. Where the experts do not fit, neighbours share a cell, which then shows how many
            of them are resident (by height) and how much the most used of them is used (by colour).

    Returns:
        lines of the form `L0  ██·~·· 2/6`.
    """
    most = max((use for _, uses in layers for use in uses), default=0)
    label = len(f"L{max(len(layers) - 1, 0)}")
    experts = max((len(states) for states, _ in layers), default=0)
    room = max(1, width - label - 1 - len(f" {experts}/{experts}"))
    each = max(1, -(-experts // room))
    lines = []
    for number, (states, uses) in enumerate(layers):
        line = Text(f"L{number}".ljust(label + 1), no_wrap=True)
        for start in range(0, len(states), each):
            line.append(*_cell(states[start : start + each], uses[start : start + each], most))
        line.append(f" {sum(state == RESIDENT for state in states)}/{len(states)}")
        lines.append(line)
    return lines


def legend() -> Text:
    """What the characters and colours mean."""
    text = Text("█ resident, ~ loading, · absent; uses: ")
    for number, colour in enumerate(_HOTNESS):
        text.append("█", colour)
        text.append(" few " if number == 0 else " most" if number == len(_HOTNESS) - 1 else "")
    return text


def _cell(states: Sequence[int], uses: Sequence[int], most: int) -> tuple[str, str]:
    resident = sum(state == RESIDENT for state in states)
    if len(states) == 1 and not resident:
        return _MARKS[states[0]], _STYLES[states[0]]
    if not resident:
        state = _LOADING if _LOADING in states else _ABSENT
        return _MARKS[state], _STYLES[state]
    hot = max(use for state, use in zip(states, uses, strict=True) if state == RESIDENT)
    colour = _HOTNESS[min(len(_HOTNESS) - 1, hot * len(_HOTNESS) // (most + 1))]
    # rounded up: a cell with one resident of many is not empty
    return _SHARES[-(-resident * (len(_SHARES) - 1) // len(states))], colour
