"""`tiermoe prepare --profile`: which experts of a layer stand in for each other."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ....actors.store.artifacts import ProfileSource
from ....errors import ConfigError

OUTPUT_TOKENS = 8192


@dataclass(frozen=True)
class ProfileOptions:
    """Sizes of a profile.

    output_tokens: tokens, evenly spread over the text, on which every expert runs to compare outputs, at most. They
        cost E / top-k times the experts' work.
    warmup_steps, warmup_weight: the first tokens of each window or request, and the weight of each of them.

    Raises:
        ConfigError: a value is out of range; the message names its option.
    """

    output_tokens: int = OUTPUT_TOKENS
    warmup_steps: int = 0
    warmup_weight: float = 0.0

    def __post_init__(self) -> None:
        if self.output_tokens < 1:
            raise ConfigError(f"--profile-outputs is {self.output_tokens}", "give a number of at least 1")
        if self.warmup_steps < 0:
            raise ConfigError(f"--profile-warmup is {self.warmup_steps}", "give a number of at least 0")
        if not 0 <= self.warmup_weight <= 1:
            raise ConfigError(f"the weight of warm-up tokens is {self.warmup_weight}", "give a number from 0 to 1")

    def source(self, kind: Literal["text", "trace"], sha256: str, tokens: int, output_tokens: int) -> ProfileSource:
        """The source of a profile with these options."""
        return ProfileSource(
            kind=kind, sha256=sha256, tokens=tokens, output_tokens=output_tokens,
            warmup_steps=self.warmup_steps, warmup_weight=self.warmup_weight,
        )  # fmt: skip
