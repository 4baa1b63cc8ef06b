"""Options that experiments share, as typer reads them, and what their text means."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from typing import Annotated, Any

import typer

from ....actors.budget import Budget
from ....errors import ConfigError


def count(help: str, least: int = 1) -> Any:
    return typer.Option(min=least, help=help)


Policies = Annotated[str, typer.Option(help="Presets or YAML files, separated by commas.")]
Budgets = Annotated[str, typer.Option(help="Device memory for experts: shares or sizes, separated by commas.")]
Links = Annotated[str, typer.Option(help="Emulated links in 1e9 bytes per second, or none, separated by commas.")]
Repeats = Annotated[int, count("Counted repetitions of each cell.")]
Prompts = Annotated[int, count("Held-out prompts of a repetition, each served once.")]
Warm = Annotated[int, count("Prompts served first, uncounted.")]
PromptTokens = Annotated[int, count("Tokens of each prompt.")]
MaxTokens = Annotated[int, count("Tokens to generate for each prompt.")]
DecodeTokens = Annotated[
    int, count("Tokens to generate for each prompt, at least 3: decode steps are measured.", least=3)
]
TraceTokens = Annotated[int, count("Tokens of the text that are decoded after each prompt of the trace.")]
Documents = Annotated[int | None, count("Held-out documents on which quality is scored; default: all.")]


def parts(text: str) -> tuple[str, ...]:
    """Text split at its commas."""
    return tuple(part.strip() for part in text.split(",") if part.strip())


def require_each_once(option: str, values: Sequence[Hashable]) -> None:
    """Raise ConfigError for an empty option, or a value that it has twice."""
    if not values:
        raise ConfigError(f"--{option} names nothing", "give at least one, separated by commas")
    if len(set(values)) < len(values):
        raise ConfigError(f"--{option} names one twice: {', '.join(map(str, values))}", "name each once")


def budgets(text: str, option: str = "budgets") -> tuple[str, ...]:
    """The budgets of an option.

    Raises:
        ConfigError, BudgetError: there is none, one is given twice, or is malformed.
    """
    found = parts(text)
    require_each_once(option, found)
    for budget in found:
        Budget.parse(budget)
    return found


def numbers(text: str, option: str) -> tuple[float, ...]:
    """The positive numbers of an option. Raises ConfigError as `budgets`."""
    try:
        found = tuple(float(part) for part in parts(text))
    except ValueError as error:
        raise ConfigError(f"--{option} is {text}", "give numbers, separated by commas") from error
    require_each_once(option, found)
    if not all(0 < number < math.inf for number in found):
        raise ConfigError(f"--{option} must be above 0", "give numbers, or none for a link")
    return found


def links(text: str, option: str = "links") -> tuple[float | None, ...]:
    """The links of an option; None: no emulated link. Raises ConfigError as `budgets`."""
    found = tuple(None if part == "none" else numbers(part, option)[0] for part in parts(text))
    require_each_once(option, found)
    return found
