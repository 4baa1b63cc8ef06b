"""How much is scored, and how: the same options give the same windows, items and resamples."""

from __future__ import annotations

from dataclasses import dataclass

from ....errors import ConfigError


@dataclass(frozen=True)
class EvaluationOptions:
    """Sizes of an evaluation.

    documents: how many held-out documents, taking their kinds in turn; None: all.
    windows, items: text windows and multiple-choice items of each document, at most.
    prefix, continuation: tokens of a window that are prefill, and tokens after them that are scored.
    rows: scored tokens of a window or choice in one forward at most; 1: as one request is served, which is what a
        policy that goes by what is on the device must be measured with. None: as many as fit, which is fastest.
    seed, resamples: of the bootstrap.

    Raises:
        ConfigError: a value is out of range; the message names its option.
    """

    documents: int | None = None
    windows: int = 1
    items: int = 1
    prefix: int = 128
    continuation: int = 128
    seed: int = 0
    resamples: int = 2000
    rows: int | None = None

    def __post_init__(self) -> None:
        documents, rows = (1 if value is None else value for value in (self.documents, self.rows))
        for option, value in (
            ("documents", documents), ("windows", self.windows), ("items", self.items), ("prefix", self.prefix),
            ("continuation", self.continuation), ("resamples", self.resamples), ("rows", rows),
        ):  # fmt: skip
            if value < 1:
                raise ConfigError(f"--{option} is {value}", "give a number of at least 1")
        if not 0 <= self.seed < 2**63:
            raise ConfigError(f"--seed is {self.seed}", "give a number from 0 to 2^63-1")
