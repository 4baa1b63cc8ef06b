"""How a profile is made."""

from __future__ import annotations

from dataclasses import dataclass

from ....errors import ConfigError

OUTPUT_TOKENS = 8192


@dataclass(frozen=True)
class ProfileOptions:
    """What is counted, and how much of it.

    Attributes:
        output_tokens: tokens, evenly spread over the text, on which every expert of every layer is run to see how
            alike their outputs are, at most. It is E / top-k times the experts' work on them.
        warmup_steps, warmup_weight: tokens before that place in their window or request count so much.

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
