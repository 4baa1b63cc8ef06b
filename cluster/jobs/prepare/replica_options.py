"""Which replicas to make."""

from __future__ import annotations

from dataclasses import dataclass
from typing import get_args

from ....actors.replica_format import Group, Width
from ....errors import ConfigError


@dataclass(frozen=True)
class ReplicaOptions:
    """What replicas to make.

    Attributes:
        bits: widths, ascending.
        group: inputs that share a scale.
        act_order: GPTQ's activation order.

    Raises:
        ConfigError: an unknown width or group.
    """

    bits: tuple[int, ...]
    group: int = 64
    act_order: bool = False

    def __post_init__(self) -> None:
        widths, groups = get_args(Width), get_args(Group)
        unknown = [b for b in self.bits if b not in widths]
        if unknown or not self.bits:
            what = f"there are no replicas of {unknown[0]} bits" if unknown else "no width is given"
            raise ConfigError(what, f"give --bits some of {','.join(map(str, widths))}")
        if self.group not in groups:
            raise ConfigError(f"group size {self.group} is unknown", f"give --group-size one of {groups}")
        object.__setattr__(self, "bits", tuple(sorted(set(self.bits))))
