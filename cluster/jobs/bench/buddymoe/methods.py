"""The rows of the tables: baselines, the paper's configurations by both rankings, and the recommended preset."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .....actors.policy_settings import PolicySettings
from ....config import load_policy
from ..moepic.variants import write_variant

ORIGINAL, RANDOM, DROP = "original", "random", "drop"
PAPER, OWN = "cft 0.95, 16 buddies, rho 3, by coactivation", "buddymoe-own-weight"
RANKINGS = ("coactivation", "output")


@dataclass(frozen=True)
class Method:
    """A preset, with other values.

    name: of the row. changes: nested as in the preset.
    """

    name: str
    preset: str
    changes: Mapping[str, Any] = field(default_factory=dict)

    @property
    def is_buddy(self) -> bool:
        """Whether it replaces experts by buddies."""
        return self.preset.startswith("buddymoe")


def methods(top_k: int) -> list[Method]:
    """All rows of a table, in its order.

    Args:
        top_k: experts of a token; as many replacements are no limit, so that the row without one is left out.
    """
    found = [
        Method(ORIGINAL, "original"), Method(RANDOM, "random-replacement"),
        Method(f"{RANDOM}, rho 3", "random-replacement", {"on_miss": {"rho": 3}}), Method(DROP, "drop"),
    ]  # fmt: skip
    for by in RANKINGS:
        by_output = {"on_miss": {"by": by}}
        found += [
            Method(f"cft 0.75, 4 buddies, by {by}", "buddymoe-cft75", by_output),
            Method(f"cft 0.95, 16 buddies, rho 3, by {by}", "buddymoe", by_output),
            Method(f"cft 0.95, 16 buddies, rho 4, by {by}", "buddymoe-rho4", by_output),
        ]
        without_limit = {"on_miss": {"by": by, "rho": None}}
        other = Method(f"cft 0.95, 16 buddies, by {by}", "buddymoe", without_limit)
        if top_k <= 4:  # the paper's other one, of its table 3
            shortest = {"on_miss": {"by": by, "alpha": 0.99, "max_buddies": 2, "rho": None}}
            other = Method(f"cft 0.99, 2 buddies, by {by}", "buddymoe", shortest)
        found.append(other)
    return [*found, Method(OWN, OWN)]


def write_methods(found: Sequence[Method], folder: Path) -> dict[str, str]:
    """YAML files of the methods that change a preset, or go by another name, for `Sweep.files`.

    Raises:
        ConfigError: a changed preset is refused.
    """
    folder.mkdir(parents=True, exist_ok=True)
    return {
        method.name: write_variant(folder, method.name, method.preset, method.changes)
        for method in found
        if method.name != method.preset
    }


def presets_of(found: Sequence[Method]) -> list[PolicySettings]:
    """Those that the methods are made from."""
    return [load_policy(name) for name in dict.fromkeys(method.preset for method in found)]
