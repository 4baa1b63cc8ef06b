"""Which replicas of experts to make."""

from __future__ import annotations

from dataclasses import dataclass
from typing import get_args

from ....actors.store.replicas import Group, Width
from ....errors import ConfigError
from .calibration import LEAST_TOKENS

CALIBRATION_TOKENS = 1 << 14


@dataclass(frozen=True)
class ReplicaOptions:
    """Replicas to make.

    Attributes:
        bits: widths, ascending.
        group: inputs that share a scale.
        tokens: of the calibration text, at most.

    Raises:
        ConfigError: an unknown width or group.
    """

    bits: tuple[int, ...]
    group: int = 64
    tokens: int = CALIBRATION_TOKENS

    def __post_init__(self) -> None:
        widths, groups = get_args(Width), get_args(Group)
        unknown = [b for b in self.bits if b not in widths]
        if unknown or not self.bits:
            what = f"there are no replicas of {unknown[0]} bits" if unknown else "no width is given"
            raise ConfigError(what, f"give --bits some of {','.join(map(str, widths))}")
        if self.group not in groups:
            raise ConfigError(f"group size {self.group} is unknown", f"give --group-size one of {groups}")
        if self.tokens < LEAST_TOKENS:
            raise ConfigError(f"{self.tokens} calibration tokens are too few", f"give at least {LEAST_TOKENS}")
        object.__setattr__(self, "bits", tuple(sorted(set(self.bits))))


def parse_bits(text: str) -> tuple[int, ...]:
    """The widths of `--bits 1,2,3,4`. Raises ConfigError: not numbers between commas."""
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError as error:
        raise ConfigError(f"--bits '{text}' is not a list of widths", "give, for example, --bits 1,2,3,4") from error
