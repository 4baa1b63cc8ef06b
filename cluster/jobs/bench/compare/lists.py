"""Lists that options of a comparison give, refused before anything is started or measured."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from .....errors import ConfigError
from ....config import parse_budget


def require_each_once(option: str, values: Sequence[Hashable]) -> None:
    """Raise ConfigError where an option names nothing, or something twice."""
    if not values:
        raise ConfigError(f"--{option} names nothing", "give at least one, separated by commas")
    if len(set(values)) < len(values):
        raise ConfigError(f"--{option} names one twice: {', '.join(map(str, values))}", "name each once")


def require_budgets(option: str, budgets: Sequence[str]) -> None:
    """Raise ConfigError as above, and BudgetError where one of them is no budget (`parse_budget`)."""
    require_each_once(option, budgets)
    for budget in budgets:
        parse_budget(budget)
