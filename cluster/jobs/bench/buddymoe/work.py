"""Sizes of `tiermoe bench buddymoe`."""

from __future__ import annotations

from dataclasses import dataclass

from .....errors import ConfigError
from ...evaluate.quality import EvaluationOptions
from ..compare.lists import require_budgets

QUALITY = EvaluationOptions(documents=36, items=1, prefix=32, continuation=40, rows=1)


@dataclass(frozen=True)
class Workload:
    """What is run.

    rates: shares of all experts that fit on the device (the paper's cache rate). ratio: of the emulated link, loading
    over computing; link: gigabytes (1e9) per second, in its place. prompt_tokens, max_tokens: of each prompt. warm:
    prompts that are served first and not counted; prompts: of each repetition. quality: what is scored.
    methods: rows of the tables by name; none: all.

    Raises:
        ConfigError: a size or a rate is out of range, or a rate is given twice.
    """

    rates: tuple[str, ...] = ("0.75", "0.5", "0.375")
    ratio: float = 2.5
    link: float | None = None
    prompt_tokens: int = 32
    max_tokens: int = 24
    warm: int = 2
    prompts: int = 1
    quality: EvaluationOptions = QUALITY
    methods: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for option in ("prompt_tokens", "warm", "prompts"):
            if getattr(self, option) < 1:
                raise ConfigError(f"--{option.replace('_', '-')} is {getattr(self, option)}", "give at least 1")
        if self.max_tokens < 3:
            raise ConfigError(f"--max-tokens is {self.max_tokens}", "give at least 3: decode steps are measured")
        if not 0 < self.ratio < float("inf"):
            raise ConfigError(f"--ratio is {self.ratio:g}", "give a number above 0")
        require_budgets("rates", self.rates)
