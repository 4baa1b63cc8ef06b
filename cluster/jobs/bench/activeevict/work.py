"""Sizes of `tiermoe bench activeevict`, and the presets that it compares."""

from __future__ import annotations

from dataclasses import dataclass

from .....errors import ConfigError
from ..compare.lists import require_each_once

OWN, LOSSY = "activeevict-lossless", "activeevict"
PREFETCHING = ("moe-offloading", "moe-apex")  # of the paper's baselines
PRESETS = ("on-demand", *PREFETCHING, OWN, LOSSY)
ABLATION = (OWN, "activeevict-prediction-only", "activeevict-hotness-only", "activeevict-lru")
PARTS = ("simulated", "emulated")
LATENCY_US = 10.0  # of each copy


@dataclass(frozen=True)
class Workload:
    """Sizes.

    contexts: tokens of the prompts, by name. learn, measure: prompts of each context that are served first, uncounted,
    and counted. max_tokens: generated after each. ratios: loading over computing of the links; figures are of the
    first. alphas: of Figure 9, at the first budget of `budgets`. parts: of `PARTS`. repeats, prompts_each: repetitions
    of the emulated part, and prompts that are new in each of them.

    Raises:
        ConfigError: a size is out of range or named twice, or a part is unknown.
    """

    contexts: tuple[tuple[str, int], ...] = (("short", 32), ("long", 256))
    learn: int = 4
    measure: int = 8
    max_tokens: int = 48
    budgets: tuple[float, ...] = (0.25, 0.5)
    capacities: tuple[float, ...] = (0.125, 0.25, 0.375, 0.5, 0.75)
    ratios: tuple[float, ...] = (1.0, 2.5)
    alphas: tuple[float, ...] = (0.0, 0.125, 0.25, 0.5, 0.75, 0.875, 1.0)
    parts: tuple[str, ...] = PARTS
    repeats: int = 5
    prompts_each: int = 1

    def __post_init__(self) -> None:
        lists = (self.contexts, self.budgets, self.capacities, self.ratios, self.alphas)
        sizes = (self.learn, self.measure, self.max_tokens, self.repeats, self.prompts_each)
        if not all(lists) or min(*sizes, *(n for _, n in self.contexts)) < 1:
            raise ConfigError("a size of the benchmark is zero", "give at least 1, and at least one of each")
        if not all(0 < b <= 1 for b in (*self.budgets, *self.capacities)):
            raise ConfigError("budgets are shares above 0 up to 1", "give others")
        if not all(0 < ratio < float("inf") for ratio in self.ratios):
            raise ConfigError("ratios are above 0, and finite", "give others")
        for option, values in (("budgets", self.budgets), ("ratios", self.ratios)):
            require_each_once(option, values)
        if not self.parts or not set(self.parts) <= set(PARTS):
            raise ConfigError(f"--parts is '{','.join(self.parts)}'", f"give some of {', '.join(PARTS)}")
